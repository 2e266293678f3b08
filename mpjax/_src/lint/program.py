"""The program that the linter's rules check: its operations, and the flow of its values.

It is the graph that `autocast` plans on, of the program as it is written: inner jits are inlined;
loops, branches and other calls are separate blocks. This module adds the connections between the
blocks, so that a rule can follow a value into a loop and out of it.
"""

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._src.autocast.graph import CONSTANT_LIMIT, Block, Op, Value, build
from mpjax._src.base import _jax, rules
from mpjax._src.base.contexts import LINTED
from mpjax._src.base.higher_order import BRANCH, SCAN, turns_of
from mpjax._src.base.trees import is_array_or_shape
from mpjax._src.program.gradient import check_loss, differentiated, pull_back
from mpjax._src.program.modules import call_on_arrays, has_modules, on_arrays

# Operations that return the entries of their first operand, or a part of them, in its dtype.
MOVES = rules.having(rules.SAME_PARAMETER) - {"convert_element_type"} | {"pcast", "pad", "name"}
CASTS = frozenset({"convert_element_type"})

Ways = collections.defaultdict[Value, list[Value]]
Readers = collections.defaultdict[Value, list[Op]]


@dataclasses.dataclass(eq=False)
class Program:
    """A function as a program.

    Attributes:
        fun: The function.
        args: Its positional arguments, as given.
        kwargs: Its keyword arguments, as given.
        jaxpr: The closed jaxpr of its flat array arguments.
        arrays: These arguments: arrays, or `jax.ShapeDtypeStruct`.
        names: The name of each of them: "state.params['w']".
        results: The name of each result: "result[0].params['w']".
        in_tree: The structure of ``(args, kwargs)``, and which of its leaves are arrays.
        out_tree: The structure of the result, and which of its leaves are arrays.
        block: The graph.
        ops: All operations in program order, including those of inner programs.
        around: The loops, branches and calls around each operation, the outermost first.
        notes: A cache for rules.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    jaxpr: Any
    arrays: tuple[Any, ...]
    names: tuple[str, ...]
    results: tuple[str, ...]
    in_tree: tuple[Any, tuple[bool, ...]]
    out_tree: tuple[Any, tuple[bool, ...]]
    block: Block
    ops: tuple[Op, ...] = ()
    around: dict[Op, tuple[Op, ...]] = dataclasses.field(default_factory=dict)
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    _constants: dict[Value, Any] = dataclasses.field(default_factory=dict)
    _made: dict[Value, Op] = dataclasses.field(default_factory=dict)
    _from: Ways = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    _to: Ways = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    _read: Readers = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    _counters: dict[Value, Any] = dataclasses.field(default_factory=dict)
    _backward: set[Op] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self._enter(self.block, (), False)
        self.ops = tuple(self.around)

    def _enter(self, block: Block, around: tuple[Op, ...], backward: bool) -> None:
        self._constants |= dict(block.consts)
        for op in block.ops:
            self.around[op] = around
            behind = backward or "transpose" in _jax.transforms(op.stack)
            if behind:
                self._backward.add(op)
            for value in op.ins:
                self._read[value].append(op)
            for value in op.outs:
                self._made[value] = op
            for sub in op.subs:
                inner = sub.program
                for value, place in zip(inner.invars, sub.ins, strict=True):
                    self._same(op.ins[place], value)
                for value, out in zip(inner.outvars, sub.outs, strict=True):
                    if out is not None:
                        self._same(value, op.outs[out])
                for result, argument in sub.carry:
                    if op.inside.kind == SCAN:
                        self._counters[inner.invars[argument]] = op, sub, result
                    self._same(inner.outvars[result], inner.invars[argument])
                self._enter(inner, (*around, op), behind)

    def _same(self, source: Value, target: Value) -> None:
        self._from[target].append(source)
        self._to[source].append(target)

    # ---- queries of rules ----

    @functools.cached_property
    def place(self) -> str:
        """The "file:line" where the function is defined, or "" of one that has none."""
        code = getattr(inspect.unwrap(self.fun), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else ""

    @functools.cached_property
    def name(self) -> str:
        fun = inspect.unwrap(self.fun)
        return getattr(fun, "__qualname__", type(fun).__name__).replace("<locals>.", "")

    @property
    def is_abstract(self) -> bool:
        """Whether some argument is a shape alone, so that nothing can be run."""
        return any(
            isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((self.args, self.kwargs))
        )

    def named(self, *names: str) -> Iterator[Op]:
        """Yields the operations of some primitives."""
        return (op for op in self.ops if op.name in names)

    def is_backward(self, op: Op) -> bool:
        """Returns whether an operation belongs to the backward pass that JAX derived."""
        return op in self._backward

    def turns(self, op: Op) -> int:
        """Returns the number of times that an operation runs, as far as it is known."""
        return int(np.prod([turns_of(each.eqn) for each in self.around[op]], dtype=np.int64))

    def maker(self, value: Value) -> Op | None:
        """Returns the operation that makes a value, or None for a loop, branch or call."""
        op = self._made.get(value)
        return None if op is None or op.subs else op

    def branch(self, value: Value) -> Op | None:
        """Returns the conditional whose result a value is, or None."""
        op = self._made.get(value)
        return op if op is not None and op.inside.kind == BRANCH else None

    def chooses(self, value: Value) -> Iterator[Op]:
        """Yields the conditionals that a value is the predicate of."""
        return (op for op in self._read[value] if op.inside.kind == BRANCH and op.ins[0] is value)

    @functools.cached_property
    def live(self) -> set[Op]:
        """The operations that a result depends on, or that have effects."""
        ends = [*self.block.outvars, *(v for op in self.ops if op.eqn.effects for v in op.ins)]
        ends += [  # the predicates of loops
            value
            for op in self.ops
            for sub in op.subs
            for value, out in zip(sub.program.outvars, sub.outs, strict=True)
            if out is None
        ]
        values: set[Value] = set()
        for end in ends:
            values |= {*self._reached_back(end, values)}
        made = {op for value in values if (op := self._made.get(value))}
        return made | {op for op in self.ops if op.eqn.effects}

    def _reached_back(self, end: Value, known: set[Value]) -> list[Value]:
        def before(value: Value) -> Iterator[Value]:
            op = self._made.get(value)
            sources = self._from[value] if op is None or op.subs else op.ins
            # Predicates, and values that are only read inside of a branch or loop.
            decides = op.ins if op is not None and op.subs else ()
            return (v for v in (*sources, *decides) if v not in known)

        return [] if end in known else _reached(end, before)

    def sources(self, value: Value) -> Sequence[Value]:
        """Returns the values outside or inside of a program that a value stands for (`Inside`)."""
        return tuple(self._from.get(value, ()))

    def constant(self, value: Value) -> Any:
        """Returns the array of a literal or a captured constant, or None."""
        if value.literal:
            return np.asarray(value.const)
        array = self._constants.get(value)
        small = array is not None and not isinstance(array, jax.core.Tracer)
        return np.asarray(array) if small and value.size <= CONSTANT_LIMIT else None

    def counts(self, value: Value) -> tuple[float, float] | None:
        """Returns the first and last number of a counter that a scan carries, or None."""
        around = self._counters.get(value)
        if around is None:
            return None
        loop, inside, result = around
        op = self.maker(inside.program.outvars[result])
        start = self.constant(loop.ins[inside.ins[inside.program.invars.index(value)]])
        if op is None or op.name != "add" or value not in op.ins or start is None:
            return None
        (step,) = [self.constant(v) for v in op.ins if v is not value] or [None]
        if step is None or np.size(step) != 1 or np.size(start) != 1:
            return None
        ends = float(start), float(start) + float(step) * (turns_of(loop.eqn) - 1)
        return min(ends), max(ends)

    def readers(self, value: Value) -> list[Op]:
        """Returns the operations that read a value, directly or inside of inner programs."""
        same = self.forward(value, ())
        return [op for v in same for op in self._read[v] if not op.subs]

    def back(self, value: Value, through: Collection[str] | Callable[[Op], bool] = MOVES):
        """Returns a value and all values that it comes from, the nearest first.

        Args:
            value: The value.
            through: The primitives that are followed from their results to their operands, or a
                predicate of operations. The boundaries of loops, branches and calls are always
                followed; a loop's carry comes from its initial value and from the iteration.
        """
        goes = through if callable(through) else lambda op: op.name in through
        return _reached(value, lambda v: (*self._from[v], *self._operands(v, goes)))

    def forward(self, value: Value, through: Collection[str] | Callable[[Op], bool] = MOVES):
        """Returns a value and all values that are made from it; the reverse of `back`."""
        goes = through if callable(through) else lambda op: op.name in through

        def ahead(v: Value) -> Iterator[Value]:
            yield from self._to[v]
            for op in self._read[v]:
                if not op.subs and goes(op):
                    yield from op.outs

        return _reached(value, ahead)

    def _operands(self, value: Value, goes: Callable[[Op], bool]) -> Sequence[Value]:
        op = self.maker(value)
        if op is None or not goes(op):
            return ()
        return op.ins[1:] if op.name == "select_n" else op.ins

    def argument(self, value: Value) -> str:
        """Returns the name of the argument that a value was moved or cast from, or ""."""
        names = dict(zip(self.block.invars, self.names, strict=True))
        found = (names.get(v) for v in self.back(value, MOVES | CASTS))
        return next((name for name in found if name), "")


def _reached(start: Value, following: Callable[[Value], Any]) -> list[Value]:
    found = {start: None}
    waiting = collections.deque([start])
    while waiting:
        for value in following(waiting.popleft()):
            if value not in found:
                found[value] = None
                waiting.append(value)
    return [*found]


# ---- tracing ------------------------------------------------------------------------------------


def make_program(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
) -> Program:
    """Traces a function, with its gradients where ``argnums`` is given."""
    with LINTED(True):  # a cached trace would hold rounded numbers
        if not has_modules((args, kwargs)) or argnums is not None:
            return _traced(fun, fun, args, kwargs, (args, kwargs), argnums, has_aux)
        found: list[Program] = []

        def run(*states, **more):
            found.append(_traced(fun, on_arrays(fun), states, more, (args, kwargs), None, False))
            return None, None, None

        call_on_arrays(run, *jax.tree.map(_stands_for, (args, kwargs)))
        return found[0]


def _stands_for(x: Any) -> Any:
    """Returns an array without memory in place of a shape, because Flax needs arrays."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return np.broadcast_to(np.zeros((), x.dtype), x.shape)
    return x


def _traced(fun, run, args, kwargs, given_as, argnums, has_aux) -> Program:
    pairs, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    given = tuple(is_array_or_shape(x) for _, x in pairs)
    arrays = [x for (_, x), yes in zip(pairs, given, strict=True) if yes]
    outs: list[Any] = []

    def call(*values):
        made = iter(values)
        leaves = [next(made) if yes else x for (_, x), yes in zip(pairs, given, strict=True)]
        args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
        return run(*args, **kwargs)

    def derived(*values):
        if argnums is None:
            return call(*values)
        check_loss("lint", jax.eval_shape(call, *values), has_aux)
        active = differentiated("lint", args, kwargs, argnums)
        pulled = pull_back(call, active, values, has_aux)
        return {"loss": pulled.loss, "aux": pulled.aux, "gradients": pulled.gradients()}

    def flat(*values):
        leaves, out = jax.tree_util.tree_flatten_with_path(derived(*values))
        outs[:] = [leaves, out]
        return [x for _, x in leaves if is_array_or_shape(x)]

    with _jax.casts_of_numbers():
        jaxpr = _jax.trace(
            flat, [_jax.aval_of(x) for x in arrays], getattr(fun, "__name__", "lint")
        )
    leaves, out = outs
    returned = tuple(is_array_or_shape(x) for _, x in leaves)
    keys = [keys for (keys, _), yes in zip(pairs, given, strict=True) if yes]
    return Program(
        *(fun, given_as[0], given_as[1], jaxpr, tuple(arrays)),
        tuple(_names(fun, given_as[0], keys, len(args) - len(given_as[0]))),
        tuple(
            f"result{jax.tree_util.keystr(keys)}"
            for (keys, _), yes in zip(leaves, returned, strict=True)
            if yes
        ),
        *((tree, given), (out, returned)),
        build(*_jax.open_jaxpr(jaxpr)),
    )


def _names(
    fun: Callable[..., Any], args: tuple[Any, ...], keys: list[Any], before: int
) -> list[str]:
    """Returns the names of arguments: the parameter, and the path in it.

    ``before`` is the number of unnamed arguments in front of them, for a module's structure.
    """
    try:
        parameters = list(inspect.signature(fun).bind_partial(*args).arguments)
    except (TypeError, ValueError):  # some callables have no signature
        parameters = []

    def name(path):
        (kind, which), inside = path[:2], jax.tree_util.keystr(path[2:])
        if kind.idx == 1:
            return f"{which.key}{inside}"
        index = which.idx - before
        known = 0 <= index < len(parameters)
        return f"{parameters[index] if known else f'argument {index}'}{inside}"

    return [name(path) for path in keys]

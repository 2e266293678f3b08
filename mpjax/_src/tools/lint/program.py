"""The program that the linter's rules check: its operations, and the flow of its values.

It is the graph that `autocast` plans on, of the program as it is written: inner jits are inlined;
loops, branches and other calls are separate blocks. This module adds the connections between the
blocks, so that a rule can follow a value into a loop and out of it.
"""

import collections
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.contexts import LINTED
from mpjax._src.core.base.dtypes import is_float
from mpjax._src.core.base.higher_order import BRANCH, SCAN, turns_of
from mpjax._src.core.base.trees import is_key
from mpjax._src.core.program.derived import derived_in, key_of
from mpjax._src.core.program.gradient import check_loss, differentiated, pull_back
from mpjax._src.core.program.graph import CONSTANT_LIMIT, Block, Op, Value, build, walked, wires
from mpjax._src.core.program.modules import call_on_arrays, has_modules, on_arrays
from mpjax._src.core.program.trace import Flat, Traced, parameters_of, trace

# Operations that return the entries of their first operand, or a part of them, in its dtype.
CASTS = frozenset({"convert_element_type"})
MOVES = rules.having(rules.SAME_PARAMETER) - CASTS | rules.BARRIERS | {"pcast", "pad", "name"}
SAME = MOVES | CASTS  # the same entries, in another place or dtype
CHOSEN = SAME | {"select_n"}  # and those that are chosen from several arrays

T = TypeVar("T")
Through = Collection[str] | Callable[[Op], bool]

Ways = collections.defaultdict[Value, list[Value]]
Readers = collections.defaultdict[Value, list[Op]]


@dataclasses.dataclass(eq=False)
class Program:
    """A function as a program."""

    fun: Callable[..., Any]  # the function
    is_abstract: bool  # whether some argument is a shape alone, so that nothing can be run
    call: Flat  # the arguments that are traced, modules as their arrays
    traced: Traced  # the program of the arrays of ``call``
    names: tuple[str, ...]  # the name of each of them: "state.params['w']"
    results: tuple[str, ...]  # the name of each result: "result[0].params['w']"
    block: Block  # the graph
    ops: tuple[Op, ...] = ()  # all operations in program order, including those of inner programs
    # The loops, branches and calls around each operation, the outermost first.
    around: dict[Op, tuple[Op, ...]] = dataclasses.field(default_factory=dict)
    notes: dict[Any, Any] = dataclasses.field(default_factory=dict)  # a cache for rules
    _constants: dict[Value, Any] = dataclasses.field(default_factory=dict)
    _made: dict[Value, Op] = dataclasses.field(default_factory=dict)
    _from: Ways = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    _to: Ways = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    _read: Readers = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    # What a barrier of several values returns for each of them, and the reverse.
    _passed: dict[Value, Value] = dataclasses.field(default_factory=dict)
    _passing: dict[tuple[Op, Value], list[Value]] = dataclasses.field(default_factory=dict)
    _tests: list[Value] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._enter(self.block, ())
        self.ops = tuple(self.around)

    def _enter(self, block: Block, around: tuple[Op, ...]) -> None:
        self._constants |= dict(block.consts)
        for op in block.ops:
            self.around[op] = around
            for value in op.ins:
                self._read[value].append(op)
            for value in op.outs:
                self._made[value] = op
            if op.name in rules.BARRIERS and len(op.outs) > 1:
                for operand, value in zip(op.ins, op.outs, strict=True):
                    self._passed[value] = operand
                    self._passing.setdefault((op, operand), []).append(value)
            for pair in wires(op):
                self._connect(*pair)
            for sub in op.subs:
                # The condition of a loop returns its verdict to the loop itself.
                ends = zip(sub.program.outvars, sub.outs, strict=True)
                self._tests += [value for value, place in ends if place is None]
                self._enter(sub.program, (*around, op))

    def _connect(self, source: Value, target: Value) -> None:
        self._from[target].append(source)
        self._to[source].append(target)

    # ---- queries of rules ----

    @functools.cached_property
    def place(self) -> str:
        """The "file:line" where the user defined the function, or calls the tool; or ""."""
        code = getattr(inspect.unwrap(self.fun), "__code__", None)
        if code is not None and _jax.is_users_file(code.co_filename):
            return f"{code.co_filename}:{code.co_firstlineno}"
        return _jax.line_of_caller()

    @functools.cached_property
    def calls(self) -> dict[Any, str]:
        """The user's lines, by what JAX recorded of equations.

        Of a checkpoint, JAX puts the first run into the program without its call.
        """
        lines = ((_jax.line_key(op.eqn), op.source) for op in self.ops)
        return {key: line for key, line in lines if key and line and _jax.is_users_file(line)}

    @functools.cached_property
    def name(self) -> str:
        fun = inspect.unwrap(self.fun)
        return getattr(fun, "__qualname__", type(fun).__name__).replace("<locals>.", "")

    def named(self, *names: str) -> Iterator[Op]:
        """Yields the operations of some primitives."""
        return (op for op in self.ops if op.name in names)

    def is_backward(self, op: Op) -> bool:
        """Returns whether an operation belongs to the backward pass: it depends on a cotangent."""
        return op in self._backward

    def runs_backward(self, op: Op) -> bool:
        """Returns whether the backward pass runs an operation, which may only compute again."""
        return any("transpose" in _jax.transforms(o.stack) for o in (op, *self.around[op]))

    @functools.cached_property
    def _backward(self) -> set[Op]:
        derived = derived_in(self.traced.jaxpr)
        return {op for op in self.ops if derived and key_of(op.eqn, op.callers) in derived}

    def maker(self, value: Value) -> Op | None:
        """Returns the operation that produces a value, or None for a loop, branch or call."""
        op = self._made.get(value)
        return None if op is None or op.subs else op

    def operands(self, op: Op, value: Value) -> Sequence[Value]:
        """Returns the operands of which an operation makes one of its results."""
        passed = self._passed.get(value)
        return op.ins if passed is None else (passed,)

    def makers(self, value: Value, through: Through = MOVES) -> list[Op]:
        """Returns the operations that produce a value and those that it comes from, as `back`."""
        return [op for v in self.back(value, through) if (op := self.maker(v))]

    def number(self, value: Value) -> float | None:
        """Returns the number that a constant value equals, moved or cast at most, or None."""
        # A padding value, or an index, is no entry of what is moved.
        for array in map(self.constant, self.back(value, moves_one)):
            if array is not None and array.size == 1 and _is_real(array):
                return float(array.reshape(()))
        return None

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

        done: set[Op] = set()

        def before(value: Value) -> Iterator[Value]:
            yield from self._from[value]
            # Also the predicates of loops and branches, and what is only read inside of them.
            op = self._made.get(value)
            if op is not None and op not in done:
                done.add(op)
                yield from op.ins

        acting = {op for op in self.ops if op.eqn.effects}
        ends = [*self.block.outvars, *self._tests, *(v for op in acting for v in op.ins)]
        values = all_reached(ends, before)
        return acting | {op for value in values if (op := self._made.get(value))}

    def sources(self, value: Value) -> Sequence[Value]:
        """Returns the values outside or inside of a program that a value represents (`Inside`)."""
        return tuple(self._from.get(value, ()))

    def constant(self, value: Value) -> Any:
        """Returns the array of a literal or a captured constant, or None."""
        if value.literal:
            return np.asarray(value.const)
        array = self._constants.get(value)
        # A tracer belongs to a trace around this one, and a random key has no numbers.
        known = array is not None and not isinstance(array, jax.core.Tracer) and not is_key(array)
        return np.asarray(array) if known and value.size <= CONSTANT_LIMIT else None

    def counts(self, value: Value) -> tuple[float, float] | None:
        """Returns the first and last number of a counter that a scan carries, or None."""
        # fori_loop starts its counter at a constant, and adds a constant in each iteration.
        start, *results = self._from[value] or [value]
        op = self.maker(results[0]) if len(results) == 1 else None
        if op is None or op.name != "add" or value not in op.ins:
            return None
        numbers = [self.constant(v) for v in (start, *op.ins) if v is not value]
        loop = self.around[op][-1]
        if loop.inside.kind != SCAN or [np.size(n) for n in numbers if n is not None] != [1, 1]:
            return None
        first, step = map(float, numbers)
        ends = first, first + step * (turns_of(loop.eqn) - 1)
        return min(ends), max(ends)

    def readers(self, value: Value) -> list[Op]:
        """Returns the operations that read a value, directly or inside of inner programs."""
        same = self.forward(value, ())
        return [op for v in same for op in self._read[v] if not op.subs]

    def final_readers(self, value: Value, through: Collection[str] = MOVES) -> list[Op]:
        """Returns the operations that read a value, moved at most, and do more than move it."""
        moved = self.forward(value, through)
        return [op for v in moved for op in self.readers(v) if op.name not in through]

    def back(self, value: Value, through: Through = MOVES) -> list[Value]:
        """Returns a value and all values that it comes from, the nearest first.

        It is `behind` for one value.
        """
        return self.behind([value], through)

    def behind(self, values: Iterable[Value], through: Through = MOVES) -> list[Value]:
        """Returns some values and all values that they come from, the nearest first.

        Operations ``through`` which it came, some primitives or those of a predicate, are followed
        from their results to their operands. The boundaries of loops, branches and calls are always
        followed; a loop's carry comes from its initial value and from the iteration.
        """
        return all_reached(values, functools.partial(self.before, goes=_predicate(through)))

    def before(self, value: Value, goes: Callable[[Op], bool]) -> Iterator[Value]:
        """Yields what a value comes from in one step, through the operations of a predicate."""
        yield from self._from[value]
        op = self.maker(value)
        if op is not None and goes(op):
            # The predicate only chooses: no entry of the result comes from it.
            yield from cases(op) or self.operands(op, value)

    def forward(self, value: Value, through: Through = MOVES) -> list[Value]:
        """Returns a value and all values that are computed from it; the reverse of `back`."""
        return self.ahead([value], through)

    def ahead(self, values: Iterable[Value], through: Through = MOVES) -> list[Value]:
        """Returns some values and all values that are computed from them."""
        return all_reached(values, functools.partial(self.after, goes=_predicate(through)))

    def after(self, value: Value, goes: Callable[[Op], bool]) -> Iterator[Value]:
        """Yields what comes of a value in one step, through the operations of a predicate."""
        yield from self._to[value]
        for op in self._read[value]:
            if not op.subs and goes(op):
                yield from self._passing.get((op, value), op.outs)

    def is_from(self, value: Value, source: Value) -> bool:
        """Returns whether a value is another one, moved or cast at most."""
        return source in self.back(value, SAME)

    def argument(self, value: Value) -> str:
        """Returns the name of the argument that a value was moved or cast from, or ""."""
        origins = (self._names.get(v) for v in self.back(value, SAME))
        return next((name for name in origins if name), "")

    @functools.cached_property
    def _names(self) -> dict[Value, str]:
        return dict(zip(self.block.invars, self.names, strict=True))


def moves_one(op: Op) -> bool:
    """Returns whether an operation moves or casts its only operand."""
    return op.name in SAME and len(op.ins) == 1


def _is_real(x: Any) -> bool:
    """Returns whether an array is one of real numbers, not of complex ones or of tangents."""
    return is_float(x) or x.dtype.kind in "biu"


def _predicate(through: Through) -> Callable[[Op], bool]:
    return through if callable(through) else lambda op: op.name in through


def noted(fun: Callable[[Program], Any]) -> Callable[[Program], Any]:
    """Computes a function of a program once, and keeps its result with the program."""

    @functools.wraps(fun)
    def get(program: Program) -> Any:
        if fun not in program.notes:
            program.notes[fun] = fun(program)
        return program.notes[fun]

    return get


def cases(op: Op) -> tuple[Value, ...]:
    """Returns the arrays that a select chooses from; none of another operation."""
    return op.ins[1:] if op.name == "select_n" else ()


def anything(op: Op) -> bool:
    """Goes through every operation."""
    return True


def all_reached(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> list[T]:
    """Returns some nodes of a graph and all that follow, the nearest first."""
    return [*walked(starts, following)]


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
        parameters = parameters_of(fun, args)
        if argnums is not None or not has_modules((args, kwargs)):
            call = Flat.of((args, kwargs))
            flat = call.on(fun)
            if argnums is not None:
                active = differentiated("lint", args, kwargs, argnums)
                flat = _with_gradients(flat, active, call.names(parameters), has_aux)
            return _program(fun, (args, kwargs), call, flat, parameters)
        programs: list[Program] = []

        def run(*states, **more):
            call = Flat.of((states, more))
            flat = call.on(on_arrays(fun))
            programs.append(_program(fun, (args, kwargs), call, flat, ["graph", *parameters]))
            # Nothing ran, so `call_on_arrays` has no new values to write into the modules.
            return None, None, None

        call_on_arrays(run, *jax.tree.map(_stands_for, (args, kwargs)))
        return programs[0]


def _stands_for(x: Any) -> Any:
    """Returns an array without memory in place of a shape, because Flax needs arrays."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return np.broadcast_to(np.zeros((), x.dtype), x.shape)
    return x


def _with_gradients(flat, active, names, has_aux) -> Callable[..., Any]:
    def derived(*arrays):
        check_loss(jax.eval_shape(flat, *arrays), has_aux, "lint")
        pulled = pull_back(flat, active, arrays, has_aux)
        moving = itertools.compress(names, active)
        gradients = dict(zip(moving, pulled.gradients(), strict=True))
        return {"loss": pulled.loss, "aux": pulled.aux, "gradients": gradients}

    return derived


def _program(fun, arguments, call: Flat, flat, parameters) -> Program:
    leaves = jax.tree.leaves(arguments)
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    # JAX casts numbers while it traces, so the program would not show that a constant is lost.
    with _jax.casts_of_numbers():
        traced = trace(flat, call.avals, getattr(fun, "__name__", "lint"))
    return Program(
        *(fun, is_abstract, call, traced),
        call.names(parameters),
        tuple(f"result{jax.tree_util.keystr(keys)}" for keys in traced.out.keys),
        build(*_jax.open_jaxpr(traced.jaxpr)),
    )

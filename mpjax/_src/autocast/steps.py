"""The steps that run a block: an op, or one of these classes, of ops that run together.

Each step has ``ops``, and the values ``ins`` and ``outs`` that flow in and out. The operations of a
gelu or a layer norm are float32, and its derivative reads the values in between. Stored, they take
several times the memory of the 16-bit input. An `Island` keeps its inputs and the results of its
reductions, and recomputes the rest, or has a cheaper derivative.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax

from mpjax._src.autocast import derivatives
from mpjax._src.autocast.derivatives import KEPT, Softmax, Weighing, known
from mpjax._src.autocast.environment import Env
from mpjax._src.autocast.flow import Flow, free_producers
from mpjax._src.autocast.operations import at, evaluate, half_cotangent, run_step, run_steps
from mpjax._src.autocast.schedule import made_where_read, ops_of
from mpjax._src.base import _jax, rules
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.program.graph import Op, Value
from mpjax._src.program.views import is_view
from mpjax._src.replacements import fused, written
from mpjax._src.replacements.flow import Found
from mpjax._src.replacements.written import Written


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """Ops that run together, and the values that flow between them and others.

    Attributes:
        ops: The ops, in order.
        free: Ops that make constants, which it repeats at no cost, before the others.
        views: Ops that make views of its inputs, which it repeats too.
        ins: The values that flow in.
        outs: The values that flow out.
        sums: The results of reductions, which are kept.
        in_half: The results that only 16-bit operations read.
        half: The 16-bit dtype.
    """

    ops: tuple[Op, ...]
    free: tuple[Op, ...]
    views: tuple[Op, ...]
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    sums: tuple[Value, ...]
    in_half: frozenset[Value]
    half: Any

    @functools.cached_property
    def stack(self) -> Any:
        """The names around all of its ops."""
        return _jax.common_stack([op.stack for op in self.ops])

    def inside(self, env: Env, kept: dict[Value, Any] | None = None) -> Env:
        """Returns an environment for its ops; values in ``kept`` are not computed again."""
        return env.inside(len(self.stack.stack), kept)

    def start(
        self, env: Env, arrays: Iterable[tuple[Value, Any]], kept: dict[Value, Any] | None = None
    ) -> Env:
        """Returns an environment with the given arrays, and what free ops and views compute."""
        inner = self.inside(env, kept)
        for value, array in arrays:
            inner.write(value, array)
        for op in (*self.free, *self.views):
            evaluate(op, inner)
        return inner

    def outcome(self, inner: Env) -> tuple[list[Any], list[Any]]:
        """Returns the arrays that flow out, 16-bit if only 16-bit ops read them, and the sums."""
        arrays = [
            inner.read(v, self.half) if v in self.in_half else inner.best(v) for v in self.outs
        ]
        return arrays, [inner.read(v) for v in self.sums]


def body_of(ops: Iterable[Op], flow: Flow, views: Iterable[Op] = ()) -> Body:
    """Returns ops as a body, given the flow of values around them."""
    ops = tuple(sorted(ops, key=lambda op: op.index))
    views = tuple(sorted({*views}, key=lambda op: op.index))
    members, free = {*ops}, tuple(free_producers(ops, flow))
    run = (*free, *views, *ops)
    results = {v for op in run for v in op.outs}
    read = dict.fromkeys(v for op in run for v in op.ins if v not in results and not v.literal)
    reduced = (op for op in ops if rules.REDUCES in op.spec.traits)
    # What others read flows out. None among the readers means the results of the block.
    readers = {
        v: [r for r in flow.readers.get(v, ()) if r not in members] for op in ops for v in op.outs
    }
    outs = tuple(v for v, outside in readers.items() if outside)
    halves = (flow.rulings[op].half for op in ops)
    return Body(
        ops,
        free,
        views,
        tuple(read),
        outs,
        tuple(v for op in reduced for v in op.outs if v.is_f32),
        frozenset(v for v in outs if v.is_f32 and _only_half(readers[v], flow)),
        next((half for half in halves if half is not None), None),
    )


def in_place_of(found: Found, flow: Flow) -> Body:
    """Returns the body of what replaces some ops."""
    body = body_of([op for op in flow.ops if op in found.ops], flow)
    return dataclasses.replace(body, ins=tuple(found.ins), outs=found.result.outs, free=(), sums=())


def _only_half(readers: "Collection[Op | None]", flow: Flow) -> bool:
    return all(op is not None and flow.choices[op].compute in HALVES for op in readers)


# ---- islands ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Island:
    """Ops that run together, with their own derivative."""

    body: Body

    once = False  # whether they may not run again to find their derivative at codes

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.body.ops

    @property
    def ins(self) -> tuple[Value, ...]:
        return self.body.ins

    @property
    def outs(self) -> tuple[Value, ...]:
        return self.body.outs

    @property
    def needs(self) -> Iterator[Value]:
        """The values that its derivative reads."""
        raise NotImplementedError

    def run(self, env: Env) -> None:
        """Runs it."""
        body = self.body
        arrays = self.operands(env)
        with at(body.ops[-1], body.stack, env):
            results = self.results(env, arrays)
        for value, array in zip(body.outs, results, strict=True):
            if value in body.in_half:
                env.write(value, array, rounded=True)
            else:
                env.store(value, array)

    def operands(self, env: Env) -> list[Any]:
        """Returns the arrays that flow in."""
        return [env.read(v) for v in self.ins]

    def results(self, env: Env, arrays: Sequence[Any]) -> list[Any]:
        """Returns the arrays that flow out."""
        raise NotImplementedError

    def forward(
        self, env: Env, arrays: Sequence[Any], sums: Sequence[Any] = ()
    ) -> tuple[list[Any], list[Any]]:
        """Evaluates its ops; ``sums`` are the results of reductions, if they are known."""
        body = self.body
        kept = dict(zip(body.sums, sums, strict=False))
        inner = body.start(env, zip(body.ins, arrays, strict=True), kept)
        for op in body.ops:
            self.run_op(op, env, inner)
        return body.outcome(inner)

    def run_op(self, op: Op, env: Env, inner: Env) -> None:
        """Evaluates one of its ops in the environment of its body."""
        evaluate(op, inner)


@dataclasses.dataclass(frozen=True, eq=False)
class Elementwise(Island):
    """An island whose derivative is computed from its inputs.

    Attributes:
        barrier: Whether a barrier must keep XLA from saving the values inside.
        wide: 16-bit inputs with float32 cotangents: a mean outside of an island that normalizes by
            it adds to the cotangent before it is rounded.
    """

    barrier: bool = False
    wide: frozenset[Value] = frozenset()

    def operands(self, env: Env) -> list[Any]:
        return [env.read(v, FLOAT32 if v in self.wide else None) for v in self.ins]

    def prevents(self, env: Env) -> bool:
        """Returns whether the barrier is needed here."""
        return self.barrier and not env.in_loop and not env.codes_of(self.ins)


@dataclasses.dataclass(frozen=True, eq=False)
class Sloped(Elementwise):
    """An elementwise island that keeps its slope instead of its operand."""

    @property
    def needs(self) -> Iterator[Value]:
        yield from self.ins

    def results(self, env: Env, arrays: Sequence[Any]) -> list[Any]:
        forward = functools.partial(self.forward, env)
        return derivatives.elementwise(forward, arrays, self.prevents(env))


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputed(Elementwise):
    """An island that keeps its inputs and sums, and recomputes the rest.

    Attributes:
        rounded: The inputs that are kept in 16 bits.
        tail: The activation after a norm, whose cotangent is 16-bit.
        again: The ops of other islands that compute inputs which are not kept.
    """

    rounded: frozenset[Value] = frozenset()
    tail: tuple[Op, ...] = ()
    again: tuple[Op, ...] = ()

    @property
    def kept(self) -> tuple[Value, ...]:
        """The inputs that it does not recompute itself."""
        results = {v for op in self.again for v in op.outs}
        return tuple(v for v in self.ins if v not in results)

    @property
    def needs(self) -> Iterator[Value]:
        yield from (v for v in self.ins if v not in self.rounded)

    def results(self, env: Env, arrays: Sequence[Any]) -> list[Any]:
        narrow = [v in self.rounded or v in self.wide for v in self.ins]
        halves = {i: env.read(v) for i, v in enumerate(self.ins) if v in self.wide}
        forward, prevents = functools.partial(self.forward, env), self.prevents(env)
        return derivatives.recomputed(forward, arrays, narrow, self.body.half, prevents, halves)

    def forward(
        self, env: Env, arrays: Sequence[Any], sums: Sequence[Any] = ()
    ) -> tuple[list[Any], list[Any]]:
        return super().forward(env, self._made_again(env, arrays) if self.again else arrays, sums)

    def run_op(self, op: Op, env: Env, inner: Env) -> None:
        if op not in self.tail:
            evaluate(op, inner)
        elif op is self.tail[-1]:
            self._run_tail(env, inner)

    def _made_again(self, env: Env, arrays: Sequence[Any]) -> list[Any]:
        inner, inputs = self.body.inside(env), dict(zip(self.ins, arrays, strict=True))
        kept = self.kept
        for value in kept:
            # Without the barrier, XLA would recognize recomputed values and keep the earlier ones.
            inner.write(value, _jax.again_barrier(inputs[value]))
        for op in self.again:
            evaluate(op, inner)
        results = {v: inner.read(v) for v in inputs.keys() - {*kept}}
        return [known(array, results[v]) if v in results else array for v, array in inputs.items()]

    def _run_tail(self, env: Env, outer: Env) -> None:
        inside = {v for op in (*self.body.free, *self.tail) for v in op.outs}
        read = (v for op in self.tail for v in op.ins if not v.literal and v not in inside)
        (operand,), (result,) = {*read}, self.tail[-1].outs
        half = self.body.half if result in self.body.in_half else None

        def activate(x):
            inner = self.body.inside(env)
            inner.write(operand, x)
            for op in (*self.body.free, *self.tail):
                evaluate(op, inner)
            return inner.read(result, half)

        x = outer.read(operand, FLOAT32)
        outer.write(result, derivatives.activation(activate, x, self.body.half))


@dataclasses.dataclass(frozen=True, eq=False)
class SoftmaxIsland(Island):
    """A softmax, whose derivative reads its result.

    Attributes:
        form: Its properties. The differentiated inputs come first.
    """

    form: Softmax

    @property
    def needs(self) -> Iterator[Value]:
        yield from (*self.ins[1:], *self.outs)

    def forward(
        self, env: Env, arrays: Sequence[Any], sums: Sequence[Any] = ()
    ) -> tuple[list[Any], list[Any]]:
        body, there = self.body, env.known_of((*self.body.outs, *self.body.sums))
        if there and there.keys() >= {*body.outs, *body.sums}:  # its derivative reads nothing else
            return [there[v] for v in body.outs], [there[v] for v in body.sums]
        return super().forward(env, arrays, sums)

    def results(self, env: Env, arrays: Sequence[Any]) -> list[Any]:
        forward = functools.partial(self.forward, env)
        name = env.name(self.outs[0]) or KEPT
        return derivatives.softmax(forward, arrays, self.form, not env.in_loop, name)


@dataclasses.dataclass(frozen=True, eq=False)
class Attention(SoftmaxIsland):
    """A softmax with the matmul that multiplies it with values.

    Attributes:
        matmul: The matmul.
        weights: The dropouts and changes of layout before it.
        in_order: Whether the softmax is kept in the order in which the matmul reads it.
    """

    matmul: Op
    weights: tuple[Op, ...]
    in_order: bool = False

    def results(self, env: Env, arrays: Sequence[Any]) -> list[Any]:
        forward = functools.partial(self.forward, env)
        by = self.by(env)
        return derivatives.attention(forward, arrays, self.form, by, in_order=self.in_order)

    def by(self, env: Env) -> Weighing:
        """Returns its matmul with values, and the ops before that."""
        weighed = self.weights[-1].outs[0] if self.weights else self.body.sums[0]
        place = self.matmul.ins.index(weighed)
        views = [op.eqn for op in self.weights if is_view(op)]
        weigh = functools.partial(self._weigh, env) if self.weights else None
        return Weighing(self.matmul.eqn, place, views, weigh)

    def _weigh(self, env: Env, p: Any, more: Sequence[Any]) -> Any:
        values = [*self.body.sums, *self.ins[2 : self.form.moving]]
        inner = self.body.start(env, zip(values, [p, *more], strict=True))
        for op in self.weights:
            evaluate(op, inner)
        return inner.read(self.weights[-1].outs[0], FLOAT32)


@dataclasses.dataclass(frozen=True, eq=False)
class KeptAttention(Attention):
    """An attention whose weights may be kept as a code."""

    @property
    def outs(self) -> tuple[Value, ...]:
        return (*self.body.outs, *self.body.sums)

    @property
    def needs(self) -> Iterator[Value]:
        yield from (*self.ins[1:], *self.outs)

    def results(self, env: Env, arrays: Sequence[Any]) -> list[Any]:
        forward, (weights,) = functools.partial(self.forward, env), self.body.sums
        again = bool(env.known_of([weights]))
        codes = env.settings.analysis.codes
        names = ["" if v in codes else env.name(v) for v in self.outs]
        by = self.by(env)
        in_order = names[1] == KEPT
        out, p = derivatives.attention(forward, arrays, self.form, by, True, again, names, in_order)
        env.write(weights, p)
        return [out]


@dataclasses.dataclass(frozen=True, eq=False)
class FusedAttention(Island):
    """An attention in the fused kernel of the device.

    Attributes:
        fusion: How it runs.
    """

    fusion: fused.Fusion

    once = True

    @property
    def needs(self) -> Iterator[Value]:
        yield from (*self.ins, *self.outs)

    def operands(self, env: Env) -> list[Any]:
        half = [env.read(v, self.body.half) for v in self.ins[:3]]  # the operands of its matmuls
        return [*half, *(env.read(v) for v in self.ins[3:])]

    def results(self, env: Env, arrays: Sequence[Any]) -> list[Any]:
        return fused.run(self.fusion, arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkedLoss(Island):
    """A cross entropy that runs by blocks of its logits.

    Attributes:
        written: How it runs.
    """

    written: Written

    once = True

    @property
    def needs(self) -> Iterator[Value]:
        yield from self.ins

    def operands(self, env: Env) -> list[Any]:
        return [env.read(self.ins[0], self.written.dtype), *(env.read(v) for v in self.ins[1:])]

    def results(self, env: Env, arrays: Sequence[Any]) -> list[Any]:
        return written.run(self.written, arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class Recurrence(Island):
    """A linear recurrence, whose derivative is one in the other direction.

    Attributes:
        axis: The axis along which it runs.
    """

    axis: int

    @property
    def needs(self) -> Iterator[Value]:
        yield from (self.ins[0], *self.outs)

    def operands(self, env: Env) -> list[Any]:
        return [env.read(v, FLOAT32) for v in self.ins]

    def results(self, env: Env, arrays: Sequence[Any]) -> list[Any]:
        (result,) = self.outs
        in_half = result in self.body.in_half or env.stored[result].dtype in HALVES
        a, b = arrays
        half = self.body.half if in_half else None
        name, there = env.name(result) or KEPT, [*env.known_of([result]).values()]
        return [derivatives.recurrence(a, b, self.axis, half, name, there)]


# ---- other steps that run together --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """Steps that the backward pass repeats, except for their kept values.

    The kept values are those in `Analysis.kept`, and those that may not be computed twice.

    Attributes:
        steps: The steps, after the operations from elsewhere that compute operands where they are
            read.
        ins: The values that flow in.
        outs: The values that flow out.
    """

    steps: "tuple[Step, ...]"
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]

    whole, once, needs = False, False, ()

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(op for step in self.steps for op in ops_of(step))

    def run(self, env: Env) -> None:
        """Runs the steps under a checkpoint."""
        taken = [self._taken(value, env) for value in self.ins]
        stored, tree = jax.tree.flatten(taken)
        halves = self.half_cotangents(env)
        narrow = [
            halves.get(v)
            for v, record in zip(self.ins, taken, strict=True)
            for _ in jax.tree.leaves(record)
        ]
        inner = functools.partial(env.inside, env.depth)
        steps = functools.partial(run_steps, self.steps, self.outs)
        run, trees = as_function(self.ins, self.outs, tree, inner, Env.as_stored, steps)
        results = derivatives.kept_alone(
            lambda stored: run(*stored), stored, not env.in_loop, self.whole, narrow
        )
        hand_out(self.outs, jax.tree.unflatten(trees[0], results), self.steps, env)

    def half_cotangents(self, env: Env) -> dict[Value, Any]:
        """Returns the parameters that one matmul alone reads, with the dtypes of its cotangents."""
        readers: dict[Value, list[Any]] = {v: [None] for v in self.outs}
        for step in unwrapped(self.steps):
            for value in dict.fromkeys(step.ins):
                readers.setdefault(value, []).append(step)
        found = {}
        for value in self.ins:
            read, reads = value, readers.get(value, ())
            while len(reads) == 1 and isinstance(reads[0], Op) and is_view(reads[0]):
                read = reads[0].outs[0]
                reads = readers.get(read, ())
            if len(reads) == 1 and isinstance(reads[0], Op):
                found[value] = half_cotangent(reads[0], read, env)
        return found

    def _taken(self, value: Value, env: Env) -> tuple[list[Any], list[Any]]:
        """Returns the arrays of a value that flows in, for `Env.hold`.

        A 16-bit copy of a loop's constant is one of them: it is computed once, before the loop. If
        several operations read it, each makes its own, so that cotangents are summed in float32.
        """
        arrays, exact = env.as_stored(value)
        if value in env.settings.analysis.once and value.is_f32:
            reads = [env.choices[op].compute for op in self.ops if value in op.ins]
            copies = [env.read(value, dtype) for dtype in reads if dtype in HALVES]
            if len(reads) == 1 and arrays[0].dtype == FLOAT32:
                arrays = [*arrays, *copies]
        return arrays, exact


@dataclasses.dataclass(frozen=True, eq=False)
class WholeCheckpoint(Checkpoint):
    """A checkpoint that repeats matmuls too.

    Attributes:
        again: The values that the backward pass computes again.
        passing: What it keeps once it has computed them again.
    """

    again: frozenset[Value]
    passing: frozenset[Value]

    whole = True


@dataclasses.dataclass(frozen=True, eq=False)
class CodedCheckpoint(Checkpoint):
    """A checkpoint whose backward pass reads codes of the kept values (`coding`).

    Attributes:
        kept: The kept values that its steps compute.
    """

    kept: tuple[Value, ...]

    def run(self, env: Env) -> None:
        codes = [env.code(v) or self._rounded(v, env) for v in self.ins]
        # Read now: derivatives run the steps again, when this environment has changed.
        known, known_codes = env.known_of(self.kept), env.codes_of(self.kept)
        trees: list[Any] = []

        def run(arrays, kept=(), codes=()):
            inner = env.inside(env.depth, known | dict(zip(self.kept, kept, strict=False)))
            inner.hold_codes(known_codes | dict(zip((*self.ins, *self.kept), codes, strict=False)))
            for value, array in zip(self.ins, arrays, strict=True):
                inner.hold(value, ([array], []))
            run_steps(self.steps, (*self.outs, *self.kept), inner)
            results, tree = jax.tree.flatten([inner.as_stored(v) for v in self.outs])
            trees.append(tree)
            return results, [*map(inner.array, self.kept)], [*map(inner.code, self.kept)]

        arrays, prevent_cse = [*map(env.array, self.ins)], not env.in_loop
        halves = self.half_cotangents(env)
        narrow = [*map(halves.get, self.ins)]
        results, kept, made = derivatives.from_codes(run, arrays, codes, prevent_cse, narrow)
        env.hold_codes(dict(zip(self.kept, made, strict=True)))
        for value, array in zip(self.kept, kept, strict=True):
            env.hold(value, ([array], []))
        hand_out(self.outs, jax.tree.unflatten(trees[0], results), self.steps, env)

    def _rounded(self, value: Value, env: Env) -> Any:
        """Returns a copy in 16 bits of a float32 value, if derivatives inside read no more."""
        analysis = env.settings.analysis
        if not value.is_f32 or analysis.stored[value].dtype in HALVES or analysis.is_raw(value):
            return None
        dtypes = {
            env.choices[step].compute
            if isinstance(step, Op)
            else step.body.half
            if isinstance(step, Recomputed) and value in step.rounded
            else FLOAT32
            for step in unwrapped(self.steps)
            if value in step.ins
        }
        half = dtypes.pop() if len(dtypes) == 1 else None
        return env.read(value, half) if half in HALVES else None


Step = Op | Island | Checkpoint


def unwrapped(steps: Iterable[Step]) -> Iterator[Step]:
    """Yields the ops and islands among steps, those in checkpoints included."""
    for step in steps:
        if isinstance(step, Checkpoint):
            yield from unwrapped(step.steps)
        else:
            yield step


def as_function(
    ins: Sequence[Value],
    outs: Sequence[Value],
    tree: Any,
    inner: Callable[[], Env],
    read: Callable[[Env, Value], Any],
    run_inside: Callable[[Env], None],
) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Returns steps as a function of flat arrays, and a list for the trees of its results."""
    trees: list[Any] = []

    def run(*arrays):
        env = inner()
        for value, record in zip(ins, jax.tree.unflatten(tree, arrays), strict=True):
            env.hold(value, record)
        run_inside(env)
        leaves, out_tree = jax.tree.flatten([read(env, value) for value in outs])
        trees.append(out_tree)
        return leaves

    return run, trees


def hand_out(
    outs: Sequence[Value], results: Sequence[Any], steps: Sequence[Step], env: Env
) -> None:
    """Records the results of steps that ran together, and values computed where they are read."""
    for value, arrays in zip(outs, results, strict=True):
        env.hold(value, arrays)
    for step in steps:
        if made_where_read(env.settings.analysis, step):
            run_step(step, env)

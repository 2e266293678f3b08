"""A program in float32 whose operations round, or do not, by a mask that it is given when it runs.

A *place* is an operation whose result the program rounds to 16 bits. Its result is ``x + m d``: x
is the operation in float32, d its local rounding error (the operation in the program's dtypes,
less the same in float32, both on operands in these dtypes), and m the place's entry of the mask.
With 0 everywhere that is the float32 program, with 1 everywhere the given one. The derivative by m
at 0 is what each place contributes to first order (`contributions`).

Calls are written out. A scan has one entry of the mask for each place and iteration, a `while` one
for each place. What has no derivative (a `while`, a kernel) is not differentiated.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax.held import is_inexact
from mpjax._src.core.base._jax.rounded import as_reduced
from mpjax._src.core.base.coded import KINDS
from mpjax._src.core.base.dtypes import FLOAT32, HALVES, dtype_of, is_float
from mpjax._src.core.base.higher_order import BRANCH, CALL, MAP, SCAN, WHILE, higher_order
from mpjax._src.core.base.lines import where
from mpjax._src.core.base.rules import CAST, HALF, MOVE, rule_of
from mpjax._src.core.planner.rounding import EXACT
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.interpret import (
    BITS,
    NARROW,
    holds_program,
    is_precise,
    run,
    run_in,
    typed,
    widen,
)
from mpjax._src.core.program.site import Site, equations
from mpjax._src.core.program.unmapped import unmapped

# The error of what overflows: finite, because 0 times infinity is NaN, and beyond all that is not.
OVERFLOW = 1e36

# Of arrays with more numbers, the squares of one of 7 count, or of 11 and so on.
MANY, STEPS = 2**17, (7, 11, 13, 17)

KERNELS = NARROW - {BITS}  # take other operands in float32
CODES = {code.dtype for code in KINDS.values()}


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """An operation of a block."""

    eqn: Any
    site: Site
    ins: list[Any]  # the numbers of values, or constants
    outs: list[int]
    place: int | None = None  # the number of its entry in the mask of the block
    reading: int | None = None  # that of an entry for its operands
    blocks: Sequence["Block"] = ()  # the programs of a loop or a conditional
    opaque: bool = False  # has no derivative


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """An array that is part of the program, or a number written in it."""

    array: Any


@dataclasses.dataclass(eq=False)
class Block:
    """A program without calls. It keeps alive the jaxprs that it was made from."""

    args: list[int]
    turns: tuple[int, ...]  # the lengths of the scans around it
    steps: list[Step] = dataclasses.field(default_factory=list)
    results: list[Any] = dataclasses.field(default_factory=list)
    places: list[Step] = dataclasses.field(default_factory=list)
    values: int = 0
    number: int = 0  # its place in the order of the mask

    def value(self) -> int:
        self.values += 1
        return self.values - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """That of its entries of the mask."""
        return (*self.turns, len(self.places))

    def blocks(self) -> Iterator["Block"]:
        """Yields the block and those inside it, in the order of the mask."""
        yield self
        for step in self.steps:
            for inside in step.blocks:
                yield from inside.blocks()

    @functools.cached_property
    def size(self) -> int:
        """The number of entries of the mask."""
        return sum(math.prod(block.shape) for block in self.blocks())


def masked(jaxpr: Any, site: Site, operands: Collection[int] = ()) -> Block:
    """Returns a jaxpr as a block, with its places.

    What the ops ``operands``, by number, read in 16 bits has an entry of its own, which rounds it
    where what makes it does not.
    """
    block = _block(jaxpr, site, (), operands)
    for number, each in enumerate(block.blocks()):
        each.number = number
    return block


def _block(jaxpr: Any, site: Site, turns: tuple[int, ...], operands: Collection[int]) -> Block:
    inner, _ = _jax.open_jaxpr(jaxpr)
    block = Block([], turns)
    block.args = [block.value() for _ in inner.invars]
    block.results = _flatten(jaxpr, block.args, block, site, operands)
    return block


def _flatten(
    jaxpr: Any, args: Sequence[Any], block: Block, site: Site, operands: Collection[int]
) -> list[Any]:
    """Appends the operations of a jaxpr to a block, and returns its results."""
    inner, consts = _jax.open_jaxpr(jaxpr)
    env = dict(zip(inner.invars, args, strict=True))
    env |= {v: Constant(c) for v, c in zip(inner.constvars, consts, strict=True)}

    def read(atom):
        if not isinstance(atom, _jax.Literal):
            return env[atom]
        dtype = getattr(atom.aval, "dtype", None)
        return Constant(atom.val if dtype is None else np.asarray(atom.val, dtype))

    for eqn in inner.eqns:
        if not eqn.outvars:  # it only prints, or checks
            continue
        here, ins = site.at(eqn), [*map(read, eqn.invars)]
        called = _called(eqn)
        if called is not None:
            outs = _flatten(called, ins, block, here.inside(eqn), operands)
            env |= zip(eqn.outvars, outs, strict=True)
            continue
        step = Step(eqn, here, ins, [block.value() for _ in eqn.outvars])
        kind = higher_order(eqn.primitive.name)
        if kind.kind == SCAN:
            (inside,) = kind.wire(eqn)
            length, _, _ = kind.turns(eqn)
            step.blocks = [
                _block(inside.program, here.inside(eqn), (*block.turns, length), operands)
            ]
        elif kind.kind in (BRANCH, WHILE):
            programs = (inside.program for inside in kind.wire(eqn))
            step.blocks = [_block(p, here.inside(eqn), block.turns, operands) for p in programs]
            step.opaque = kind.kind == WHILE
        else:
            reads = any(is_float(v.aval) for v in eqn.invars)
            step.opaque = reads and (bool(eqn.effects) or not has_derivative(eqn))
            if rounds(eqn):
                step.place = len(block.places)
                block.places.append(step)
            if here.op in operands and reads_half(eqn):
                step.reading = len(block.places)
                block.places.append(step)
        block.steps.append(step)
        env |= zip(eqn.outvars, step.outs, strict=True)
    return [*map(read, inner.outvars)]


def _called(eqn: Any) -> Any:
    """Returns the program that an equation calls once on all of its operands, or None."""
    kind = higher_order(eqn.primitive.name)
    if kind.kind == MAP:
        return unmapped(eqn)
    if kind.kind != CALL:
        return None
    (inside,) = kind.wire(eqn)
    return inside.program


_REVERSED: dict[Any, bool] = {}  # by what equations of one kind have in common


def has_derivative(eqn: Any) -> bool:
    """Returns whether JAX differentiates an equation in reverse; of kernels it is not asked."""
    if eqn.primitive not in ad.primitive_jvps or eqn.primitive.name in NARROW:
        return False
    dims = tuple(np.ndim(v.aval) for v in eqn.invars)
    key = eqn.primitive, dims, repr([v for v in eqn.params.items() if not holds_program(v[1])])
    if key not in _REVERSED:
        _REVERSED[key] = _is_reversed(eqn)
    return _REVERSED[key]


def _is_reversed(eqn: Any) -> bool:
    """Returns whether JAX traces the reverse of an equation by all its operands.

    Some rules are not written yet, and those of other packages take some operands for constants.
    """
    avals = [jax.ShapeDtypeStruct(v.aval.shape, dtype_of(v.aval)) for v in eqn.invars]
    moving = [is_float(aval) for aval in avals]

    def reverse(*arrays):
        def compute(floats):
            rest = iter(floats)
            ins = [next(rest) if m else a for m, a in zip(moving, arrays, strict=True)]
            return [x for x in run_in(FLOAT32, eqn, ins) or () if is_float(x)]

        floats = [widen(a) for m, a in zip(moving, arrays, strict=True) if m]
        outs, back = jax.vjp(compute, floats)
        return back(outs)

    try:
        jax.eval_shape(reverse, *avals)
    except (TypeError, ValueError, KeyError):  # of abstract values that are no arrays: it is used
        return True
    except Exception:  # whatever a rule refuses with
        return False
    return True


def rounds(eqn: Any) -> bool:
    """Returns whether an equation may round its result to 16 bits."""
    name = eqn.primitive.name
    if higher_order(name).kind:  # its programs run as one operation
        programs = map(equations, _jax.inner_jaxprs(eqn))
        inside = (v for e, _, _ in itertools.chain(*programs) for v in e.outvars)
        return any(dtype_of(v.aval) in HALVES for v in (*eqn.outvars, *inside))
    if eqn.params.get("half") in HALVES:
        return True
    if not any(dtype_of(v.aval) in HALVES for v in eqn.outvars):
        return False
    if name == CAST:
        return dtype_of(eqn.invars[0].aval) != dtype_of(eqn.outvars[0].aval)
    return not _moves(eqn)


def reads_half(eqn: Any) -> bool:
    """Returns whether an equation computes with what it reads in 16 bits."""
    moves = eqn.primitive.name == CAST or _moves(eqn)
    return not moves and any(dtype_of(v.aval) in HALVES for v in eqn.invars)


def _moves(eqn: Any) -> bool:
    """Returns whether an equation makes 16-bit numbers of 16-bit numbers without rounding them."""
    name = eqn.primitive.name
    return rule_of(name).need == MOVE or name in EXACT or is_precise(eqn)


def readers(block: Block, ops: Collection[int]) -> dict[int, set[int]]:
    """Returns for each cast to 16 bits, by its id, which of some ops read its result.

    Casts that other operations compute with are left out: what these return may be compared with
    what they read, so that both have to be rounded, or none.
    """
    found: dict[int, set[int]] = {}
    for each in block.blocks():
        reads: dict[int, set[Any]] = {v: {None} for v in each.results if isinstance(v, int)}
        for step in reversed(each.steps):
            is_cast = step.eqn.primitive.name == CAST
            of = set[Any]().union(*(reads.get(v, ()) for v in step.outs))
            if is_cast and step.place is not None and of and None not in of:
                found[id(step)] = of
            if step.blocks or step.place is not None or reads_half(step.eqn):
                own = {step.site.op if step.site.op in ops and not step.blocks else None}
            else:
                own = set() if is_cast else of
            for v in step.ins:
                if isinstance(v, int):
                    reads.setdefault(v, set()).update(own)
    return found


def hidden(block: Block) -> np.ndarray:
    """Returns of each entry of the mask whether it leads into what has no derivative."""
    found: dict[int, bool] = {}
    _mark(block, [False] * len(block.results), found)
    parts = []
    for each in block.blocks():
        row = np.array([found.get(id(step), False) for step in each.places], bool)
        parts.append(np.broadcast_to(row, each.shape).ravel())
    return np.concatenate(parts)


def _mark(block: Block, ends: Sequence[bool], found: dict[int, bool]) -> set[int]:
    """Marks the places of a block that lead into what has no derivative, and returns the values
    that do.

    ``ends`` says which results do, outside of the block.
    """
    leads = {v for v, end in zip(block.results, ends, strict=True) if end and isinstance(v, int)}
    for step in reversed(block.steps):
        outs = [v in leads for v in step.outs]
        inside = step.blocks and any(_is_opaque(each) for each in step.blocks)
        if not (step.opaque or inside or any(outs)):
            continue
        leads |= {v for v in step.ins if isinstance(v, int)}
        if step.place is not None:
            found[id(step)] = any(outs)
        for each in step.blocks:  # a scan hands on what it carries: all that is in it counts
            _mark(each, [True] * len(each.results), found)
    return leads


def _is_opaque(block: Block) -> bool:
    return any(step.opaque for each in block.blocks() for step in each.steps)


def unfollowed(block: Block, policy: Policy) -> str:
    """Returns what a mask cannot follow, because it is no rounding of a result; or ""."""
    if policy.casting != "op":
        return f"casting={policy.casting}"
    for step in (step for each in block.blocks() for step in each.steps):
        name, ins, outs = step.eqn.primitive.name, step.eqn.invars, step.eqn.outvars
        if name in KERNELS and any(dtype_of(v.aval) in HALVES for v in (*ins, *outs)):
            return f"{name} at {where(*step.site.lines(step.eqn))}"
        codes = name == CAST and dtype_of(outs[0].aval) in CODES and is_float(ins[0].aval)
        # Without this setting codes are the function's own, which float32 has too.
        if codes and policy.storage not in ("fast", "lean"):
            return "the 8-bit codes of storage"
    return ""


# ---- segments -----------------------------------------------------------------------------------


class Segment(NamedTuple):
    """Operations of a block that reverse mode computes again together."""

    steps: Sequence[Step]
    reads: Sequence[int]
    writes: Sequence[int]


def segments(block: Block, counts: Sequence[int]) -> list[Segment]:
    """Returns the operations of a block in parts: about as many as one of ``counts`` says, by
    which reverse mode holds least.
    """
    last = {v: len(block.steps) for v in block.results if isinstance(v, int)}
    for i, step in reversed([*enumerate(block.steps)]):
        for v in step.ins:
            if isinstance(v, int):
                last.setdefault(v, i)
    _, cuts = min(_cuts(block, last, count) for count in counts)
    parts = []
    for start, end in itertools.pairwise(cuts):
        steps = block.steps[start:end]
        own = {v for step in steps for v in step.outs}
        reads = dict.fromkeys(v for s in steps for v in s.ins if isinstance(v, int))
        writes = [v for step in steps for v in step.outs if last.get(v, -1) >= end]
        parts.append(Segment(steps, [v for v in reads if v not in own], writes))
    return parts


def _cuts(block: Block, last: dict[int, int], count: int) -> tuple[float, list[int]]:
    """Returns about how many bytes reverse mode holds, and where the parts begin and end that hand
    on the fewest bytes.

    ``last`` is where each value is read last. A part makes at most its share of all bytes, unless
    it is one operation.
    """
    number = len(block.steps)
    values = [
        (i, last.get(v, i), _bytes(var))
        for i, step in enumerate(block.steps)
        for v, var in zip(step.outs, step.eqn.outvars, strict=True)
    ]
    made, read, size = np.array(values, int).reshape(-1, 3).T
    summed = np.cumsum(np.bincount(made + 1, size, number + 1))
    alive = np.cumsum(
        np.bincount(made + 1, size, number + 2) - np.bincount(read + 1, size, number + 2)
    )
    best, begun = np.full(number + 1, np.inf), np.zeros(number + 1, int)
    best[0] = 0
    for start in range(number):
        # What was made before this part has been handed on already.
        old = made < start
        crossing = np.cumsum(np.bincount(read[old], size[old], number + 1)[::-1])[::-1]
        end = int(np.searchsorted(summed, summed[start] + summed[-1] / count, "right"))
        ends = np.arange(start + 1, max(end, start + 2))
        kept = best[start] + alive[ends] - crossing[ends]
        less = kept < best[ends]
        best[ends[less]], begun[ends[less]] = kept[less], start
    cuts = [number]
    while cuts[-1]:
        cuts.append(int(begun[cuts[-1]]))
    # What is handed on is kept, beside its cotangents; a part is computed again.
    return 2 * best[-1] + np.diff(summed[cuts[::-1]]).max(initial=0), cuts[::-1]


def _bytes(v: Any) -> int:
    # In float32, whatever the program stores.
    return _jax.bytes_of(v.aval, FLOAT32 if is_float(v.aval) else None)


# ---- evaluation ---------------------------------------------------------------------------------

Masks = dict[int, Any]  # the entries of a mask for each block, by its number


def split(block: Block, flat: Any) -> Masks:
    """Returns the entries of a mask for each block."""
    parts, start = {}, 0
    for each in block.blocks():
        size = math.prod(each.shape)
        parts[each.number] = flat[start : start + size].reshape(*each.shape, *flat.shape[1:])
        start += size
    return parts


def evaluate(
    block: Block, masks: Masks, args: Sequence[Any], counts: Sequence[int] = ()
) -> list[Any]:
    """Returns the results of a block, floating ones in float32.

    Args:
        block: The program.
        masks: The entries of the mask for each block.
        args: The arguments.
        counts: The numbers of segments for reverse mode to choose from; none for no segments.
    """
    env = dict(zip(block.args, map(widen, args), strict=True))
    for part in segments(block, counts) if counts else [_whole(block)]:
        numbers = [b.number for step in part.steps for each in step.blocks for b in each.blocks()]
        given = {n: masks[n] for n in (block.number, *numbers)}
        read = {v: env[v] for v in part.reads}
        if counts:
            env |= _again(block, part, given, read)
        else:
            env |= _computed(block, part, given, read)
    return [_constant(x) if isinstance(x, Constant) else env[x] for x in block.results]


def _computed(block: Block, part: Segment, masks: Masks, read: dict[int, Any]) -> dict[int, Any]:
    """Returns what a segment writes."""
    env = dict(read)
    for step in part.steps:
        ins = [_constant(x) if isinstance(x, Constant) else env[x] for x in step.ins]
        own = masks[block.number]
        if step.reading is not None:
            ins = _read(step, ins, own[step.reading])
        entry = None if step.place is None else own[step.place]
        env |= zip(step.outs, _step(step, ins, masks, entry), strict=True)
    return {v: env[v] for v in part.writes}


def _again(block: Block, part: Segment, masks: Masks, read: dict[int, Any]) -> dict[int, Any]:
    """Returns what a segment writes; reverse mode keeps what it reads, and computes it again.

    `jax.checkpoint` would say so by barriers, which XLA drops on CPUs. Here it is a branch, taken
    if any cotangent is not 0: what a sum of results does not depend on is left out.
    """
    moving = {v: x for v, x in read.items() if is_inexact(x)}
    others = {v: x for v, x in read.items() if v not in moving}

    @jax.custom_vjp
    def run(masks, moving, others):
        return _computed(block, part, masks, moving | others)

    def forward(*args):
        return run(*args), args

    def backward(args, cotangents):
        *floating, others = args

        def floats(masks, moving):
            outs = _computed(block, part, masks, moving | others)
            return {v: x for v, x in outs.items() if is_inexact(x)}

        def pull(cotangents):
            return jax.vjp(floats, *floating)[1](cotangents)

        def nothing(cotangents):
            return jax.tree.map(jnp.zeros_like, (*floating,))

        known = {v: x for v, x in cotangents.items() if x.dtype != jax.dtypes.float0}
        needed = jnp.any(jnp.array([jnp.any(x != 0) for x in known.values()], bool))
        return *jax.lax.cond(needed, pull, nothing, known), None

    run.defvjp(forward, backward)
    return run(masks, moving, others)


def _read(step: Step, ins: list[Any], entry: Any) -> list[Any]:
    """Returns operands as a step reads them: in 16 bits, or as they are."""
    rounded = map(_kept, typed(ins, step.eqn.invars))
    return [jnp.where(entry > 0, r, x) for r, x in zip(rounded, ins, strict=True)]


def _kept(x: Any) -> Any:
    """Returns a 16-bit array in float32. XLA would leave out the rounding of two casts."""
    return as_reduced(widen(x), x.dtype) if dtype_of(x) in HALVES else widen(x)


def _constant(x: Constant) -> Any:
    return widen(jnp.asarray(x.array))


def _whole(block: Block) -> Segment:
    return Segment(block.steps, block.args, [v for v in block.results if isinstance(v, int)])


def _step(step: Step, ins: list[Any], masks: Masks, entry: Any) -> list[Any]:
    if step.opaque:
        ins, masks = jax.lax.stop_gradient((ins, masks))
    if step.blocks:
        return EVALUATE[higher_order(step.eqn.primitive.name).kind](step, ins, masks)
    if entry is None:
        return run_in(FLOAT32, step.eqn, ins) or [
            *map(widen, run(step.eqn, typed(ins, step.eqn.invars)))
        ]
    exact, got, local = _rounded(step, ins)
    if exact is None:
        exact = local = [*map(widen, got)]
    return [
        _moved(x, entry, _bounded(jax.lax.stop_gradient(_kept(rounded) - own)))
        if is_float(x)
        else x
        for x, rounded, own in zip(exact, got, local, strict=True)
    ]


def _moved(x: Any, entry: Any, error: Any) -> Any:
    """Returns a result with a part of its error."""
    return _squared(x, entry, error) if entry.ndim else x + entry * error


@jax.custom_vjp
def _squared(x: Any, entry: Any, error: Any) -> Any:
    """Returns the same by an entry that is a pair: by its first number.

    In place of a derivative by the second, reverse mode returns the sum of the squares of all that
    it adds up for the first.
    """
    return x + entry[0] * error


def _sum_of_squares(error: Any, cotangent: Any) -> Any:
    # Of many numbers a part says enough, in far less time: one of so many, of all columns.
    step = 1 if error.size <= MANY else next((n for n in STEPS if error.shape[-1] % n), 1)
    some = cotangent.ravel()[::step] * error.ravel()[::step]
    squares = (some**2).sum() * (error.size / max(some.size, 1))
    return cotangent, jnp.stack([(cotangent * error).sum(), squares]), jnp.zeros_like(error)


_squared.defvjp(lambda x, entry, error: (_squared(x, entry, error), error), _sum_of_squares)


def _bounded(error: Any) -> Any:
    """Returns an error as a finite number: 0 times what overflows would be NaN."""
    return jax.lax.select(jnp.abs(error) < OVERFLOW, error, jnp.full_like(error, OVERFLOW))


def _rounded(step: Step, ins: list[Any]) -> tuple[Any, list[Any], Any]:
    """Returns the results in float32; and, on operands in the program's dtypes, the program's own
    and those in float32."""
    eqn = step.eqn
    exact = run_in(FLOAT32, eqn, ins)
    # Products are added in float32, and the sum is rounded once.
    once = rule_of(eqn.primitive.name).need == HALF and dtype_of(eqn.outvars[0].aval) in HALVES
    if once and exact is not None:
        got = [x.astype(v.aval.dtype) for x, v in zip(exact, eqn.outvars, strict=True)]
        return exact, got, exact
    narrow = typed(jax.lax.stop_gradient(ins), eqn.invars)
    got = run(eqn, narrow)
    local = got if exact is None else run_in(FLOAT32, eqn, narrow)
    return exact, got, local


def _scan(step: Step, ins: list[Any], masks: Masks) -> list[Any]:
    row, (block,) = higher_order(step.eqn.primitive.name), step.blocks
    (inside,) = row.wire(step.eqn)
    first, last = inside.consts, inside.consts + len(inside.carry)
    length, reverse, unroll = row.turns(step.eqn)
    given = {b.number: masks[b.number] for b in block.blocks()}

    def body(carry, xs):
        masks, slices = xs
        outs = evaluate(block, masks, [*ins[:first], *carry, *slices])
        return outs[: last - first], outs[last - first :]

    body = jax.checkpoint(body, prevent_cse=False)
    carry, ys = jax.lax.scan(body, ins[first:last], (given, ins[last:]), length, reverse, unroll)
    return [*carry, *ys]


def _branch(step: Step, ins: list[Any], masks: Masks) -> list[Any]:
    index, *operands = ins
    given = {b.number: masks[b.number] for each in step.blocks for b in each.blocks()}
    branches = [jax.checkpoint(functools.partial(evaluate, block)) for block in step.blocks]
    return jax.lax.switch(index, branches, given, operands)


def _while(step: Step, ins: list[Any], masks: Masks) -> list[Any]:
    cond, body = higher_order(step.eqn.primitive.name).wire(step.eqn)

    def program(block: Block, consts: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        return lambda carry: evaluate(block, masks, [*consts, *carry])

    going, turn = (
        program(block, [ins[i] for i in inside.ins[: inside.consts]])
        for block, inside in zip(step.blocks, (cond, body), strict=True)
    )
    carry = ins[cond.consts + body.consts :]
    return jax.lax.while_loop(lambda carry: going(carry)[0], turn, carry)


EVALUATE = {SCAN: _scan, BRANCH: _branch, WHILE: _while}

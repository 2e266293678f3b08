"""Evaluates a program one operation at a time, for the tools that watch it.

The watcher defines the values that are passed between operations: they may contain more than an
array (a second array, where it came from). The operations inside jit, scan, while, cond, remat and
custom rules are run one by one, and so are those in shard_map (`unmapped`); kernels run as one
operation. A value is freed after its last use.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT32, FLOAT64, HALVES, dtype_of, is_float
from mpjax._src.core.base.higher_order import BRANCH, CALL, MAP, SCAN, WHILE, higher_order, turns_of
from mpjax._src.core.base.progress import advance
from mpjax._src.core.program.derived import derived_in
from mpjax._src.core.program.site import ROOT, Site
from mpjax._src.core.program.unmapped import unmapped

OPERATION = "operation"  # what progress counts


class Watcher(Protocol):
    """The interface of an instrument that evaluates the operations of a program."""

    def operation(self, eqn: Any, ins: list[Any], place: Site) -> list[Any]:
        """Runs one operation on values, and returns its results as values."""

    def entered(self, eqn: Any, ins: list[Any], place: Site) -> None:
        """Is called before the programs inside an equation run."""
        return None

    def whole(self, eqn: Any, ins: list[Any]) -> bool:
        """Returns whether an equation runs as one operation, whatever programs are inside."""
        return False

    def constant(self, array: Any) -> Any:
        """Returns the value of an array that is part of the program."""

    def decide(self, value: Any, eqn: Any, place: Site) -> int:
        """Returns the predicate or index of a branch or loop, as an integer."""
        return int(value.array)

    def slice(self, value: Any, index: int) -> Any:
        """Returns a slice along the first axis."""

    def stack(self, values: Sequence[Any]) -> Any:
        """Returns values stacked along a new first axis."""


class Plain(Watcher):
    """The watcher that watches nothing: its values are arrays."""

    operation = staticmethod(lambda eqn, ins, place: run(eqn, ins))
    constant = staticmethod(lambda array: array)
    decide = staticmethod(lambda value, eqn, place: int(value))
    slice = staticmethod(lambda value, index: take(value, index))
    stack = staticmethod(lambda values: jnp.stack(values))


def interpret(jaxpr: Any, args: list[Any], watcher: Watcher, place: Site = ROOT) -> list[Any]:
    """Evaluates a jaxpr, closed, or open without constants, under a watcher.

    The list of arguments is emptied, so that each value can be freed after its last use.
    """
    inner, consts = _jax.open_jaxpr(jaxpr)
    last_use: dict[Any, int] = {}
    for index, eqn in enumerate(inner.eqns):
        last_use |= {v: index for v in eqn.invars if not isinstance(v, _jax.Literal)}
    handed_out = {v for v in inner.outvars if not isinstance(v, _jax.Literal)}
    env = {
        v: value
        for v, value in zip(inner.invars, args, strict=True)
        if v in last_use or v in handed_out
    }
    args.clear()
    env |= {v: watcher.constant(c) for v, c in zip(inner.constvars, consts, strict=True)}

    def read(atom):
        if not isinstance(atom, _jax.Literal):
            return env[atom]
        # A literal may be a Python number, whose dtype only its type here says.
        dtype = getattr(atom.aval, "dtype", None)
        return watcher.constant(atom.val if dtype is None else np.asarray(atom.val, dtype))

    for index, eqn in enumerate(inner.eqns):
        ins = [read(atom) for atom in eqn.invars]
        for v in {v for v in eqn.invars if not isinstance(v, _jax.Literal)}:
            if last_use[v] == index and v not in handed_out:
                del env[v]
        here = place.at(eqn)
        if enters(eqn) and not watcher.whole(eqn, ins):
            watcher.entered(eqn, ins, here)
            outs = ENTER[higher_order(eqn.primitive.name).kind](eqn, ins, watcher, here.inside(eqn))
        else:
            outs = watcher.operation(eqn, ins, here)
            advance(OPERATION)
        for v, value in zip(eqn.outvars, outs, strict=True):
            if v in last_use or v in handed_out:
                env[v] = value
    return [read(atom) for atom in inner.outvars]


def root_of(jaxpr: Any) -> Site:
    """Returns the place of a whole program, which knows what depends on a cotangent there."""
    return Site(derived=derived_in(jaxpr, unmapped))


def operations_in(jaxpr: Any) -> int:
    """Returns how many operations `interpret` runs: one turn of each while loop is counted."""
    inner, _ = _jax.open_jaxpr(jaxpr)
    count = 0
    for eqn in inner.eqns:
        kind = higher_order(eqn.primitive.name)
        if not enters(eqn):
            count += 1
            continue
        # It is not known before which branch of a conditional runs, so the longest one counts.
        programs = [unmapped(eqn)] if kind.kind == MAP else [p.program for p in kind.wire(eqn)]
        inside = [operations_in(program) for program in programs]
        count += turns_of(eqn) * (max(inside, default=0) if kind.kind == BRANCH else sum(inside))
    return count


def run(eqn: Any, arrays: Sequence[Any], **params: Any) -> list[Any]:
    """Runs an equation on arrays, in the context that it was traced in.

    A shard_map that is not entered is compiled whole: JAX itself would compile each operation in
    it, for all devices.
    """

    def bind(arrays):
        return _jax.bind(eqn, arrays, **params)

    whole = higher_order(eqn.primitive.name).kind == MAP
    with _jax.location(eqn, eqn.source_info.name_stack):
        return jax.jit(bind)(arrays) if whole else bind(arrays)


# ---- programs inside ----------------------------------------------------------------------------


def _call(eqn: Any, ins: list[Any], watcher: Watcher, place: Site) -> list[Any]:
    (inside,) = higher_order(eqn.primitive.name).wire(eqn)
    return interpret(inside.program, ins, watcher, place)


def _scan(eqn: Any, ins: list[Any], watcher: Watcher, place: Site) -> list[Any]:
    row = higher_order(eqn.primitive.name)
    (inside,) = row.wire(eqn)
    num_consts, num_carry = inside.consts, len(inside.carry)
    length, reverse, _ = row.turns(eqn)
    consts, carry = ins[:num_consts], ins[num_consts : num_consts + num_carry]
    xs = ins[num_consts + num_carry :]
    ins.clear()
    avals = [v.aval for v in eqn.outvars[num_carry:]]
    ys: list[list[Any]] = [[None] * length for _ in avals]
    for i in reversed(range(length)) if reverse else range(length):
        args = [*consts, *carry, *(watcher.slice(x, i) for x in xs)]
        carry = []  # the arguments alone hold the last iteration's
        outs = interpret(inside.program, args, watcher, place.turn(SCAN, i))
        carry = outs[:num_carry]
        for stack, y in zip(ys, outs[num_carry:], strict=True):
            stack[i] = y
    stacked = []
    for aval, stack in zip(avals, ys, strict=True):
        nothing = jnp.zeros(aval.shape, aval.dtype) if not length else None
        stacked.append(watcher.stack(stack) if length else watcher.constant(nothing))
        stack.clear()
    return [*carry, *stacked]


def _while(eqn: Any, ins: list[Any], watcher: Watcher, place: Site) -> list[Any]:
    cond, body = higher_order(eqn.primitive.name).wire(eqn)
    cond_consts, body_consts = ([ins[i] for i in p.ins[: p.consts]] for p in (cond, body))
    carry = ins[cond.consts + body.consts :]
    ins.clear()
    i = 0
    while True:
        here = place.turn(WHILE, i)
        (going,) = interpret(cond.program, [*cond_consts, *carry], watcher, here)
        if not watcher.decide(going, eqn, here):
            return carry
        args = [*body_consts, *carry]
        carry = []
        carry = interpret(body.program, args, watcher, here)
        i += 1


def _cond(eqn: Any, ins: list[Any], watcher: Watcher, place: Site) -> list[Any]:
    branches = [inside.program for inside in higher_order(eqn.primitive.name).wire(eqn)]
    index = watcher.decide(ins.pop(0), eqn, place)
    # An index beyond the branches is the nearest one, as in JAX.
    return interpret(branches[min(max(index, 0), len(branches) - 1)], ins, watcher, place)


def _map(eqn: Any, ins: list[Any], watcher: Watcher, place: Site) -> list[Any]:
    return interpret(unmapped(eqn), ins, watcher, place)


# The equations whose programs are entered.
ENTER: dict[str, Callable[..., list[Any]]] = {
    CALL: _call,
    SCAN: _scan,
    WHILE: _while,
    BRANCH: _cond,
    MAP: _map,
}


def enters(eqn: Any) -> bool:
    """Returns whether `interpret` enters the programs of an equation."""
    kind = higher_order(eqn.primitive.name).kind
    return kind in ENTER and (kind != MAP or unmapped(eqn) is not None)


def take(array: jax.Array, index: int) -> jax.Array:
    """Returns a slice along the first axis; one compilation serves every index."""
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)


# Parameters that name the dtype of an operation's result.
DTYPES = ("preferred_element_type", "new_dtype", "dtype", "half")

# For each dtype that a reference may compute in: the dtypes that are narrower, and what they are
# in it.
WIDER: dict[Any, dict[Any, Any]] = {
    FLOAT32: dict.fromkeys(HALVES, FLOAT32),
    FLOAT64: {**dict.fromkeys((*HALVES, FLOAT32), FLOAT64), np.dtype("c8"): np.dtype("c16")},
}


def handling(wide: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which JAX computes with arrays of a dtype.

    That of float64 belongs to this thread, and JAX's caches depend on it, so nothing else of the
    process becomes float64. Only what a program says is run in it: its dtypes, and the bits of its
    random numbers, are those that it was traced with.
    """
    return jax.enable_x64(True) if wide == FLOAT64 else contextlib.nullcontext()


def run_in_float32(eqn: Any, arrays: Sequence[Any]) -> list[Any] | None:
    """Runs an equation with 16-bit arrays widened to float32, or returns None if it cannot."""
    return run_in(FLOAT32, eqn, arrays)


def run_in(wide: Any, eqn: Any, arrays: Sequence[Any]) -> list[Any] | None:
    """Runs an equation with narrower arrays widened to a dtype, or returns None if it cannot."""
    name, to = eqn.primitive.name, WIDER[wide]
    touched = any(dtype_of(v.aval) in to for v in (*eqn.invars, *eqn.outvars))
    if eqn.effects or (name in NARROW and (touched or wide == FLOAT64)):
        if name == BITS and not is_float(arrays[0]):  # a number from its bits, in any dtype
            return [widen(out, wide) for out in run(eqn, arrays)]
        return None  # effects must happen only once
    params = {k: to[eqn.params[k]] for k in DTYPES if eqn.params.get(k) in to}
    arrays = [widen(x, wide) for x in arrays]
    casts = name == "convert_element_type" and params
    if is_precise(eqn) or (casts and dtype_of(arrays[0]) == wide):
        return arrays  # no copy: parameters are cast, and large
    if wide == FLOAT64 and _jax.is_algorithm(eqn.params.get("precision")):
        params["precision"] = None
    programs = {k: p for k, p in eqn.params.items() if holds_program(p)}
    if not _decides(eqn):  # whose programs JAX does not check again
        with contextlib.suppress(*MISFITS):
            return run(eqn, arrays, **params)
    try:  # what sums or maps by a program written for narrower values
        inside = functools.partial(_widened, wide)
        return run(eqn, arrays, **params, **jax.tree.map(inside, programs, is_leaf=is_program))
    except MISFITS:
        return None


def is_precise(eqn: Any) -> bool:
    """Returns whether an equation rounds to the precision that its operand has anyway."""
    if eqn.primitive.name != "reduce_precision":
        return False
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)


def is_program(x: Any) -> bool:
    """Returns whether a parameter of an equation is a program, open or closed."""
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def holds_program(x: Any) -> bool:
    """Returns whether a parameter of an equation is a program, or several."""
    return is_program(x) or (isinstance(x, tuple) and any(map(is_program, x)))


# Equations that cannot be widened: kernels, the user's host code, and casts of bits.
BITS = "bitcast_convert_type"
NARROW = frozenset({BITS, "ffi_call", "pallas_call", "pure_callback"})

# The errors of JAX for dtypes that do not match. Others (out of memory) are raised.
MISFITS = (TypeError, ValueError, NotImplementedError)


class Wide(Plain):
    """The watcher that runs a program in a wider dtype, float32 or float64."""

    def __init__(self, wide: Any = FLOAT32):
        self.wide = wide

    def operation(self, eqn: Any, ins: list[Any], place: Site) -> list[Any]:
        with handling(self.wide):
            outs = run_in(self.wide, eqn, ins)
        if outs is None:
            raise NotImplementedError(f"{eqn.primitive} has no {self.wide} form.")
        return outs

    def whole(self, eqn: Any, ins: list[Any]) -> bool:
        # What a traced value decides cannot be decided here.
        return _decides(eqn) and any(isinstance(x, jax.core.Tracer) for x in ins)

    def constant(self, array: Any) -> Any:
        with handling(self.wide):
            return widen(array, self.wide)

    def slice(self, value: Any, index: int) -> Any:
        with handling(self.wide):
            return take(value, index)

    def stack(self, values: Sequence[Any]) -> Any:
        with handling(self.wide):
            return jnp.stack(values)


def _decides(eqn: Any) -> bool:
    """Returns whether an equation is a loop or a conditional."""
    return higher_order(eqn.primitive.name).kind in (SCAN, WHILE, BRANCH)


def _widened(wide: Any, program: Any) -> Any:
    """Returns a program with a wider dtype in place of narrower ones."""
    if not is_program(program):
        return program
    to = WIDER[wide]
    avals = [_jax.retyped(a, to[a.dtype]) if a.dtype in to else a for a in _jax.in_avals(program)]
    run = lambda *args: interpret(program, list(args), Wide(wide))  # noqa: E731
    wider = _jax.trace(run, avals, str(wide))
    if hasattr(program, "jaxpr"):
        return wider
    inner, consts = _jax.open_jaxpr(wider)
    if consts:
        raise NotImplementedError("A program with constants is not supported here.")
    return inner


def typed(arrays: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
    """Returns arrays, floating ones in the dtypes that a program has."""
    dtypes = [dtype_of(atom.aval) for atom in atoms]
    return [
        x if dtype_of(x) in (to, None) or not is_float(x) else x.astype(to)
        for x, to in zip(arrays, dtypes, strict=True)
    ]


def widen(x: Any, wide: Any = FLOAT32) -> Any:
    """Returns an array of a narrower dtype as one of a wide dtype, and anything else as it is."""
    to = WIDER[wide].get(dtype_of(x))
    return x if to is None else jax.lax.convert_element_type(x, to)

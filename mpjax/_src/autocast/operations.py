"""Evaluates planned operations: tracing them gives the mixed-precision program.

There is a rule per kind of operation. Primitives that hold
programs are rebuilt with the planned ones inside (`program.rebuild`); `evaluates` registers those
that have their own rules, which are in `custom_rules`. A value is cast when an op reads it in
another dtype, and the result is kept: within a block, a value is cast at most once to each dtype.
Arguments are an exception: each use casts them separately, so that their cotangents are summed in
float32.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._src.autocast.classify import override_of
from mpjax._src.autocast.derivatives import (
    known,
    matmul,
    maximum,
    maximum_and_sum,
    pick,
    sum_of_exponentials,
    wide_cotangent,
)
from mpjax._src.autocast.environment import Env, Settings
from mpjax._src.autocast.pools import keeps_positions, pool
from mpjax._src.base import _jax, rules
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.base.higher_order import Inside
from mpjax._src.program.graph import Block, Op, Value
from mpjax._src.program.rebuild import Body, rebuild
from mpjax._src.program.respellings import repeat
from mpjax._src.program.site import ROW
from mpjax._src.replacements.derivatives import cast
from mpjax._src.replacements.gathers import picks_one_per_row


def run_block(
    block: Block,
    args: Sequence[Any],
    out_dtypes: Sequence[Any],
    settings: Settings,
) -> list[Any]:
    """Evaluates a planned block."""
    env = Env(settings, block.in_loop)
    for value, const in block.consts:
        env.write(value, const)
    for value, arg in zip(block.invars, args, strict=True):
        # A derivative rule gets tangents and cotangents as its caller wrote them: some as numbers.
        number = isinstance(arg, int | float | complex)
        env.write(value, np.asarray(arg, value.aval.dtype) if number else arg)
    run_steps(settings.analysis.steps[block], block.outvars, env)
    return [
        _jax.typed_as(v.aval, env.result(v, dtype))
        for v, dtype in zip(block.outvars, out_dtypes, strict=True)
    ]


def run_steps(steps: Sequence[Any], results: Sequence[Value], env: Env) -> None:
    """Runs the steps of a block, repeated ones as few as possible."""
    settings = env.settings
    whole = settings.rows or settings.as_written
    for step in steps if whole else settings.fold(steps, results, settings):
        run_step(step, env)


def run_step(step: Any, env: Env) -> None:
    """Runs an op, or a step of `steps`."""
    if isinstance(step, Op):
        evaluate(step, env)
    else:
        step.run(env)


def evaluate(op: Op, env: Env) -> None:
    """Evaluates an op under its plan."""
    ruling = env.rulings[op]
    held = _jax.storing() if op in env.marks.held else contextlib.nullcontext()
    with at(op, op.stack, env), held:
        if env.settings.as_written and ruling.rule != "program":
            _run(op, env, FLOAT32)
        else:
            EVALUATE[ruling.in_force](op, env)


def at(op: Op, stack: Any, env: Env) -> contextlib.AbstractContextManager[Any]:
    """Traces in the place of an op, and in a scope with its row number if a report asks for it."""
    row = env.settings.rows.get(op)
    if row is None:
        return _location(op, stack, env)
    both = contextlib.ExitStack()
    both.enter_context(_location(op, stack, env))
    both.enter_context(jax.named_scope(f"{ROW}{row}"))
    return both


def _location(op: Op, stack: Any, env: Env) -> Any:
    return _jax.location(op.eqn, _jax.below(stack, env.depth), lambda: op.callers[::-1])


# ---- one op -------------------------------------------------------------------------------------


def _run(op: Op, env: Env, dtype: Any, **params: Any) -> None:
    if dtype in HALVES and op.spec.need == rules.FOLLOW:
        args = [_read_expanded(op, v, env, dtype) for v in op.ins]
    else:
        args = [env.read(v, dtype) for v in op.ins]
    if env.marks.is_steady(op):
        args = jax.lax.stop_gradient(args)
    for value, array in zip(op.outs, _bind(op, op.eqn, args, **params), strict=True):
        env.store(value, array)


def _bind(op: Op, eqn: Any, args: Sequence[Any], **params: Any) -> list[Any]:
    with _jax.marked() if op.spec.need == rules.HALF else contextlib.nullcontext():
        return _jax.bind(eqn, args, **params)


def _run_as_planned(op: Op, env: Env) -> None:
    compute = env.choices[op].compute
    if op.inside.as_one and compute != FLOAT32:  # elementwise, with its own derivative rule
        return _run_program(op, env)
    if not op.outs or not op.outs[0].is_f32:
        return _run(op, env, compute)
    out = op.outs[0]
    if op.name == "broadcast_in_dim" and out.const is not None:
        return env.make(out, functools.partial(_bind_in, op, env))
    if env.rulings[op].rule == "layout" and out.moved:
        return env.make(out, functools.partial(_send, op, env))
    if op in env.marks.online:
        return _run_online(op, env)
    cheaper = _cheaper(op, env, compute)
    return _run(op, env, compute) if cheaper is None else env.store(out, cheaper)


def _cheaper(op: Op, env: Env, compute: Any) -> Any:
    """Returns the result of an op whose derivative is cheaper than the one that JAX derives."""

    def args() -> list[Any]:
        return [env.read(v, compute) for v in op.ins]

    if op in env.marks.repeats:
        axis, times = env.marks.repeats[op]
        again = functools.partial(repeat, axis=axis, times=times)
        return wide_cotangent(again, [env.read(op.ins[0], compute)])
    if op.name == "gather" and picks_one_per_row(op.eqn):
        return pick(op.eqn, args())
    if op.name == "gather" and compute == FLOAT32 and _is_sent_in_half(op, env):
        return _look_up(op, env)
    if op.name in ("reduce_max", "reduce_min") and not env.marks.is_steady(op):
        return maximum(op.eqn, *args())
    if rules.SCATTERS_BACK in op.spec.traits and op.outs[0].is_f32 and keeps_positions(op.eqn):
        return pool(op.eqn, *args())
    if op in env.marks.centered:
        return matmul(op.eqn, args(), compute, env.marks.centered[op])
    if rules.SUMS_BACK in op.spec.traits and compute in HALVES and _enlarges(op.eqn):
        return wide_cotangent(lambda *xs: _jax.bind(op.eqn, xs)[0], args())
    return None


def _run_online(op: Op, env: Env) -> None:
    """Runs a maximum together with a sum of exponentials, in one pass."""
    args, exponential = [env.read(v, FLOAT32) for v in op.ins], env.marks.online[op]
    if env.marks.is_steady(op):
        args = jax.lax.stop_gradient(args)
    if op.name == "reduce_max":
        finish(op, env, maximum_and_sum(op.eqn, args[0], exponential))
    else:
        env.store(op.outs[0], sum_of_exponentials(op.eqn, args, exponential))


def _read_expanded(op: Op, value: Value, env: Env, dtype: Any) -> Any:
    """Reads an operand, broadcast first if the op does so: its cotangents add up in float32."""
    shape = op.outs[0].aval.shape
    if not value.is_f32 or value.const is not None or value.aval.shape == shape:
        return env.read(value, dtype)
    if env.stored[value].dtype == dtype:
        return wide_cotangent(lambda x: _expand(x, op.outs[0].aval), [env.read(value)])
    wide = cast(_expand(env.read(value, FLOAT32), op.outs[0].aval), dtype)
    if value.moved:
        return known(wide, _expand(env.read(value, dtype), op.outs[0].aval))
    return wide


def _expand(x: Any, aval: Any) -> Any:
    """Broadcasts an operand to the shape (and sharding) of an elementwise operation's result."""
    shape, rank = aval.shape, np.ndim(x)
    dims = tuple(range(len(shape) - rank, len(shape)))
    sharding = (
        None if aval.sharding.mesh.empty or aval.sharding.mesh.are_all_axes_auto else aval.sharding
    )
    if all(x.shape[i] == shape[d] for i, d in enumerate(dims)):
        return jax.lax.broadcast_in_dim(x, shape, dims, out_sharding=sharding)
    kept = [i for i, d in enumerate(dims) if x.shape[i] == shape[d]]
    x = jax.lax.squeeze(x, [i for i in range(rank) if i not in kept])
    return jax.lax.broadcast_in_dim(x, shape, [dims[i] for i in kept], out_sharding=sharding)


def _enlarges(eqn: Any) -> bool:
    """Returns whether a layout operation repeats entries, so that its transpose is a sum."""
    if eqn.primitive.name != "broadcast_in_dim":
        return True
    return _jax.size_of(eqn.outvars[0].aval.shape) > _jax.size_of(eqn.invars[0].aval.shape)


def _bind_in(op: Op, env: Env, dtype: Any) -> Any:
    with _location(op, op.stack, env):
        return _jax.bind(op.eqn, [env.read(v, dtype) for v in op.ins])[0]


def _send(op: Op, env: Env, dtype: Any) -> Any:
    sent = dtype if env.settings.policy.gather == "half" else FLOAT32
    with _location(op, op.stack, env):
        args = [env.read(v, sent) for v in op.ins]
        if op.name == "sharding_constraint" and sent in HALVES:
            args = [_jax.placed_freely(args[0], op.params["sharding"])]
        array = _jax.bind(op.eqn, args)[0]
        # Without the barrier, XLA would cast before it sends.
        return array if sent == dtype else cast(jax.lax.optimization_barrier(array), dtype)


def _look_up(op: Op, env: Env) -> Any:
    """Looks up entries of a parameter, which devices exchange in 16 bits."""
    table, indices = (env.read(v) for v in op.ins)
    if _jax.in_taylor_mode([table]):
        return _jax.bind(op.eqn, [table, indices])[0]
    if not op.ins[0].moved:
        return _jax.half_gather(table, indices, env.rulings[op].half, **op.params)
    full, half = (_bind_in(op, env, dtype) for dtype in (FLOAT32, env.rulings[op].half))
    return known(full, cast(half, FLOAT32))


def _is_sent_in_half(op: Op, env: Env) -> bool:
    """Returns whether devices may exchange a lookup in 16 bits, by the policy and its overrides."""
    policy = env.settings.policy
    if not env.choices[op].sent_half or policy.gather != "half":
        return False
    chosen = override_of(op, policy)
    return chosen is None or chosen[1] in HALVES


def _run_half(op: Op, env: Env) -> None:
    if op.spec.need != rules.HALF or "preferred_element_type" not in op.params:
        return _run_as_planned(op, env)
    half, centered = env.rulings[op].half, env.marks.centered.get(op)
    args = [env.read(v, half) for v in op.ins]
    # An operand may be stored in the other 16-bit dtype, by an override.
    args = [cast(a, half) if a.dtype in HALVES and a.dtype != half else a for a in args]
    out, wide = op.outs[0], _reduced_wide(op, env)
    eqn, dtype = _jax.at_default_precision(op.eqn), env.stored[out].dtype
    if centered or wide or (out.is_f32 and dtype == FLOAT32):
        array = matmul(eqn, args, dtype or out.aval.dtype, centered, wide)
    else:
        wanted = half if out.is_f32 else out.aval.dtype
        array = _bind(op, eqn, args, preferred_element_type=wanted)[0]
    env.store(out, array)


# The positions of the operands whose gradients devices sum, over their parts of the other one.
SUMMED_WIDE = {"dot_general": (0, 1), "conv_general_dilated": (1,)}


def _reduced_wide(op: Op, env: Env) -> dict[int, Any]:
    """Returns the parameters whose gradients devices sum in float32, by position."""
    places = SUMMED_WIDE.get(op.name, ())
    if env.settings.policy.reduce != FLOAT32.name:
        return {}
    parameters = {i: op.ins[i] for i in places if op.ins[i].is_f32 and op.ins[i].given}
    return {
        i: env.read(v, FLOAT32) if env.stored[v].dtype == FLOAT32 else None
        for i, v in parameters.items()
    }


def half_cotangent(op: Op, value: Value, env: Env) -> Any:
    """Returns the dtype of the cotangent of a parameter that a matmul reads, on one device."""
    places = SUMMED_WIDE.get(op.name, ())
    reads = [i for i, v in enumerate(op.ins) if v is value]
    fits = len(reads) == 1 and reads[0] in places and env.rulings[op].rule == "half"
    return env.rulings[op].half if fits and op not in env.marks.centered else None


def _run_cast(op: Op, env: Env) -> None:
    value, out = op.ins[0], op.outs[0]
    new = op.params["new_dtype"]
    if not out.is_f32 and not value.is_f32:
        return _run(op, env, None)
    if not out.is_f32:
        if new in HALVES and env.stored[value].dtype in HALVES:
            array = env.read(value, env.stored[value].dtype)
            env.write(out, cast(array, new))
        else:
            _run(op, env, FLOAT32)
    elif value.is_f32:
        env.make(out, functools.partial(env.read, value))
    elif value.aval.dtype in HALVES and env.stored[out].dtype == value.aval.dtype:
        env.write(out, env.read(value))
    elif value.aval.dtype == np.bool_:
        env.make(out, lambda dtype: _jax.bind(op.eqn, [env.read(value)], new_dtype=dtype)[0])
    else:
        _run(op, env, None)


# ---- programs inside ----------------------------------------------------------------------------


PROGRAMS: dict[str, Callable[[Op, Env], None]] = {}


def evaluates(name: str) -> Callable[[Callable[[Op, Env], None]], Callable[[Op, Env], None]]:
    """Registers the function that evaluates a primitive that is not rebuilt as it was."""

    def register(rule):
        PROGRAMS[name] = rule
        return rule

    return register


def _run_program(op: Op, env: Env) -> None:
    PROGRAMS.get(op.name, _run_rebuilt)(op, env)


def _run_rebuilt(op: Op, env: Env) -> None:
    bodies = [body_of(op, sub, env) for sub in op.subs]
    avals = [avals_of(sub, env) for sub in op.subs]
    finish(op, env, rebuild(op.eqn, bodies, avals, operands(op, env)))


def result_dtypes(op: Op, sub: Inside, env: Env) -> list[Any]:
    """Returns the dtypes in which a sub-program returns its results."""
    carried = dict(sub.carry)
    dtypes = []
    for position, index in enumerate(sub.outs):
        if position in carried:
            dtypes.append(env.stored[sub.program.invars[carried[position]]].dtype)
        else:
            dtypes.append(FLOAT32 if index is None else env.stored[op.outs[index]].dtype)
    return dtypes


def body_of(op: Op, sub: Inside, env: Env) -> Body:
    """Returns a sub-program, under its plan, as a function of its arguments."""
    outs = result_dtypes(op, sub, env)
    return lambda *args: run_block(sub.program, args, outs, env.settings)


def avals_of(sub: Inside, env: Env) -> list[Any]:
    """Returns the types of a sub-program's arguments under its plan."""
    return [
        _jax.retyped(v.aval, env.stored[v].dtype) if v.is_f32 else v.aval
        for v in sub.program.invars
    ]


def operands(op: Op, env: Env) -> list[Any]:
    """Returns an op's operands, in the dtypes in which its sub-programs take them."""
    taken = {
        index: env.stored[value].dtype
        for sub in op.subs
        for value, index in zip(sub.program.invars, sub.ins, strict=True)
    }
    return [env.read(value, taken.get(index)) for index, value in enumerate(op.ins)]


def finish(op: Op, env: Env, results: Sequence[Any]) -> None:
    for value, array in zip(op.outs, results, strict=True):
        env.store(value, array)


EVALUATE: dict[str, Callable[[Op, Env], None]] = {
    "half": _run_half,
    "full": _run_as_planned,
    "follow": _run_as_planned,
    "layout": _run_as_planned,
    "neutral": _run_as_planned,
    "cast": _run_cast,
    "program": _run_program,
    "leave": _run_as_planned,
    "written": _run_as_planned,
}

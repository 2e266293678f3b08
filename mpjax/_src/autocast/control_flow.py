"""Evaluates the programs inside control flow, jit, remat and shard_map under their plan."""

from typing import Any

from mpjax._src.autocast.environment import Env
from mpjax._src.autocast.graph import Op
from mpjax._src.autocast.rewrite import (
    evaluates,
    finish,
    operands,
    result_dtypes,
    run_block,
    trace_sub,
)
from mpjax._src.base import _jax


@evaluates("scan")
@evaluates("jit")
def _run_in_place(op: Op, env: Env) -> None:
    """Evaluates an equation with one program, which it replaces by the rewritten one."""
    (sub,) = op.subs
    new = {"jaxpr": trace_sub(op, sub, env)}
    finish(op, env, _jax.bind(op.eqn, operands(op, sub, env), **new))


@evaluates("while")
def _run_while(op: Op, env: Env) -> None:
    cond, body = op.subs
    args = [*operands(op, cond, env)[: cond.consts], *operands(op, body, env)]
    new = {
        "cond_jaxpr": trace_sub(op, cond, env),
        "body_jaxpr": trace_sub(op, body, env),
    }
    finish(op, env, _jax.bind(op.eqn, args, **new))


@evaluates("cond")
def _run_cond(op: Op, env: Env) -> None:
    branches = tuple(trace_sub(op, sub, env) for sub in op.subs)
    args = [env.read(op.ins[0]), *operands(op, op.subs[0], env)]
    finish(op, env, _jax.bind(op.eqn, args, branches=branches))


@evaluates("remat2")
def _run_remat(op: Op, env: Env) -> None:
    (sub,) = op.subs
    jaxpr, consts = _jax.hoisted(trace_sub(op, sub, env))
    new: dict[str, Any] = {"jaxpr": jaxpr}
    if isinstance(op.params["prevent_cse"], tuple):
        new["prevent_cse"] = (True,) * len(consts) + op.params["prevent_cse"]
    finish(op, env, _jax.bind(op.eqn, [*consts, *operands(op, sub, env)], **new))


@evaluates("shard_map")
def _run_shard_map(op: Op, env: Env) -> None:
    (sub,) = op.subs
    outs = result_dtypes(op, sub, env)
    mapped = _jax.shard_map(
        lambda *args: tuple(run_block(sub.program, args, outs, env.settings)), op.params
    )
    finish(op, env, mapped(*operands(op, sub, env)))

"""Custom derivative rules of a program's author, Taylor mode, zero tangents, and shard_map."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.jet import JetTracer
from jax.extend.linear_util import transformation2
from jax.interpreters import ad

from mpjax._src.core.base._jax.programs import close, open_jaxpr


def with_rule(params: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the parameters of a custom_jvp or custom_vjp whose rule's program is changed.

    That is the closed jaxpr of primals and tangents, or the forward one.
    """
    name = "fwd_jaxpr_thunk" if "fwd_jaxpr_thunk" in params else "jvp_jaxpr_fun"
    return {**params, name: _changed(params[name], change)}


@transformation2
def _changed(fun: Callable[..., Any], change: Callable[[Any], Any], *args: Any) -> Any:
    jaxpr, consts, *more = fun(*args)
    return (*open_jaxpr(change(close(jaxpr, consts))), *more)


def in_taylor_mode(args: Sequence[Any]) -> bool:
    """Returns whether `jax.experimental.jet`, which ignores custom derivatives, traces an array."""
    return any(_is_taylor(x) for x in args if isinstance(x, jax.core.Tracer))


def _is_taylor(x: Any) -> bool:
    """Searches the tracers of other transformations too."""
    while isinstance(x, jax.core.Tracer) and not isinstance(x, JetTracer):
        x = getattr(x, "val", getattr(x, "primal", None))
    return isinstance(x, JetTracer)


def zeros_of(aval: Any) -> Any:
    """Returns zeros of a type."""
    return ad.instantiate_zeros(ad.Zero(aval))


def zero_tangent(x: Any) -> Any:
    """Returns a zero tangent of ``x`` as an array."""
    return zeros_of(jax.typeof(x).to_tangent_aval())


def manual_axes(params: dict[str, Any]) -> frozenset[str]:
    """Returns the mesh axes that an equation of shard_map with these parameters maps."""
    return frozenset(params.get("newly_manual_axes") or params["manual_axes"])


def shard_map(fun: Callable[..., Any], params: dict[str, Any]) -> Callable[..., Any]:
    """Returns ``fun``, mapped like an equation of shard_map with these parameters."""
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=manual_axes(params),
        check_vma=params["check_vma"],
    )

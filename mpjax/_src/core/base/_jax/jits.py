"""Calls of jitted functions: reading their programs, and replacing them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core.primitives import jit_p

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base._jax.programs import close, hoisted, jit_params, open_jaxpr, unspecified


@dataclasses.dataclass(frozen=True)
class JitCall:
    """A call of a jitted function."""

    jaxpr: Any  # its program, the same object for each equal call
    params: dict[str, Any]  # the parameters of the jit: donated arguments, shardings and layouts
    leaves: list[Any]  # the array arguments
    out_tree: Any  # the structure of the results
    traced: Any  # JAX's own record of the call

    def with_places(self) -> dict[str, Any]:
        """Returns `params` with the result shardings that XLA chose for the original program.

        On several devices XLA might choose other shardings for another program. Results that are
        fed back to the original one would then cause it to be compiled again.
        """
        arrays = [x for x in self.leaves if isinstance(x, jax.Array)]
        if all(len(x.sharding.device_set) == 1 for x in arrays):
            return self.params
        compiled = self.traced.lower().compile()
        return {**self.params, "out_shardings": tuple(jax.tree.leaves(compiled.output_shardings))}

    def run(self, params: dict[str, Any]) -> list[Any]:
        """Calls a program with these parameters on the arrays."""
        return jit_p.bind(*self.leaves, **params)


def jit_call(fun: Callable[..., Any], args: Any, kwargs: Any) -> JitCall | None:
    """Returns the record of a call of a jitted function; None if some arguments are static."""
    traced = fun.trace(*args, **kwargs)  # type: ignore[attr-defined]
    leaves, tree = jax.tree.flatten((args, kwargs))
    if tree != traced.in_tree:
        return None
    params, consts = (slot.__get__(traced) for slot in (internals.params, internals.consts))
    return JitCall(params["jaxpr"], params, [*consts, *leaves], traced.out_tree, traced)


def jit_of(jaxpr: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a jit for a replaced program with more results."""
    more = len(open_jaxpr(jaxpr)[0].outvars) - len(params["out_shardings"])
    free = {"out_shardings": unspecified(), "out_layouts": None}
    longer = {name: (*params[name], *[value] * more) for name, value in free.items()}
    return {**params, "jaxpr": jaxpr, **longer}


def call_as_jit(jaxpr: Any, *args: Any) -> list[Any]:
    """Calls a closed jaxpr as one jit, which JAX differentiates, batches and lowers as a whole."""
    inner, consts = open_jaxpr(jaxpr)
    if any(isinstance(c, jax.core.Tracer) for c in consts):
        # A parameter of an equation may not contain tracers, so traced constants become arguments.
        inner, consts = hoisted(jaxpr)
        jaxpr, args = close(inner, ()), (*consts, *args)
    # JAX's versions differ in the parameters of a jit, so those of an empty one are completed.
    params = jit_params()
    for side, count in (("in", len(args)), ("out", len(inner.outvars))):
        params |= {
            f"{side}_shardings": (unspecified(),) * count,
            f"{side}_layouts": (None,) * count,
        }
    own = {"jaxpr": jaxpr, "name": inner.debug_info.func_name}
    return jit_p.bind(*args, **{**params, **own, "donated_invars": (False,) * len(args)})

"""Jitted functions as JAX calls them: their programs, and others in the place of these."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax._src.named_sharding import UNSPECIFIED
from jax.extend.core.primitives import jit_p

from mpjax._src._jax.programs import open_jaxpr


@dataclasses.dataclass(frozen=True)
class JitCall:
    """A call of a jitted function.

    Attributes:
        jaxpr: Its program; the same object each time that it is called alike.
        params: All that jit knows of it: what is donated, where arguments and results lie.
        leaves: The arrays that it is called with.
        out_tree: The structure of what it returns.
        traced: JAX's own record of it.
    """

    jaxpr: Any
    params: dict[str, Any]
    leaves: list[Any]
    out_tree: Any
    traced: Any

    def with_places(self) -> dict[str, Any]:
        """Returns `params` whose results lie where XLA lets those of the program lie.

        On several devices XLA chooses, perhaps another place for another program; what is fed back
        to the first one would have it compiled again.
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
    """Returns what a call of a jitted function is; None where some arguments are static."""
    traced = fun.trace(*args, **kwargs)  # type: ignore[attr-defined]
    leaves, tree = jax.tree.flatten((args, kwargs))
    if tree != traced.in_tree:
        return None
    params = traced._params
    return JitCall(params["jaxpr"], params, [*traced._consts, *leaves], traced.out_tree, traced)


def jit_of(jaxpr: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a jit whose program was replaced by one of more results."""
    more = len(open_jaxpr(jaxpr)[0].outvars) - len(params["out_shardings"])
    free = {"out_shardings": UNSPECIFIED, "out_layouts": None}
    longer = {name: (*params[name], *[value] * more) for name, value in free.items()}
    return {**params, "jaxpr": jaxpr, **longer}

"""JAX's own functions that differentiate, as the frames and closures of a process show them."""

import gc
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import jax

from mpjax._src.core.base._jax.sources import JAX

# The functions of JAX that call a rule of a custom_jvp or a custom_vjp.
RULES = ("_flatten_jvp", "_flatten_fwd", "_flatten_bwd", "call_with_accums")
THEIRS = inspect.unwrap(jax.custom_vjp.defvjp).__code__.co_filename
BACKWARD = "backward_pass"  # how the names of those begin that call rules of transposition


def in_custom_rule(frame: FrameType | None) -> bool:
    """Returns whether a frame is called by the rule of a custom derivative.

    Such a rule computes a derivative of what is around it, and so does one that transposes. The
    function itself is no rule.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name in RULES and code.co_filename == THEIRS:
            return True
        if code.co_name.startswith(BACKWARD) and code.co_filename.startswith(JAX):
            return True
        frame = frame.f_back
    return False


def gradients_of(transforms: Iterable[Any]) -> Iterator[Any]:
    """Yields the functions whose derivatives transformations of JAX have made in this process.

    Those whose derivatives are still alive: each is in the closure of what computes it.
    """
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in transforms]
    inner = [each for code in codes if code for each in code.co_consts]
    inner = [each for each in inner if isinstance(each, CodeType)]
    for made in gc.get_referrers(*inner) if inner else ():
        if isinstance(made, FunctionType):
            fun = inspect.getclosurevars(made).nonlocals.get("fun")
            if fun is not None:
                yield fun

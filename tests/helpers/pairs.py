"""Pairs of programs for the linter: one has a fault at a marked line, the other does not."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import mpjax

FAULT = "# fault"


class Pair(NamedTuple):
    """Two programs for the same arguments. The line of the fault ends in "# fault"."""

    rule: str
    faulty: Callable[..., Any]
    mended: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def f16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float16)


def marked_lines(fun):
    """Returns "file:line" for each line of a function that is marked as a fault."""
    lines, first = inspect.getsourcelines(inspect.unwrap(fun))
    marked = [number for number, line in enumerate(lines, first) if FAULT in line]
    return [f"{inspect.getsourcefile(inspect.unwrap(fun))}:{number}" for number in marked]


def check(pair):
    """Checks that a rule finds the marked lines, and that no rule finds the mended program."""
    lines = marked_lines(pair.faulty)
    assert lines, "no line of the faulty program is marked"
    found = mpjax.lint(pair.faulty, **pair.options)(*pair.args)
    assert [f.source for f in found.findings if f.rule == pair.rule] == lines, str(found)
    mended = mpjax.lint(pair.mended, **pair.options)(*pair.args)
    assert pair.rule in mended.ran and not mended.findings, str(mended)


# The parts of a training step: its optimizer, the shapes of its states, its loss.
OPTIMIZER = optax.adam(1e-3)
PARAMS = {"w": f32(4, 4), "b": f32(4)}
STATE = jax.eval_shape(OPTIMIZER.init, PARAMS)


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

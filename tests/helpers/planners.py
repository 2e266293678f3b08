"""What is asked of a planner: to be exact where nothing is rounded, and as accurate as by hand.

- **Exact mode** (`exact`): with float32 in the place of 16 bits, values and gradients are those of
  JAX, and no more is kept for the backward pass than JAX keeps.
- **Rounded in the lowering** (`sound`): the yardstick is the float32 program, differentiated by
  JAX, whose every matmul then rounds its operands and its result, forward and backward. A planned
  program may be four times as far from float64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import joint
import measure
import numpy as np
from evaluation import is_var

import mpjax


def in_exact_mode(fun: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Returns a function planned as for 16 bits, of which nothing is rounded."""
    return joint.planned(fun, joint.EXACT)


CLOSE = 1e-4  # of the norm: what another order of float32's sums may move


# ---- exact mode ---------------------------------------------------------------------------------


def kept(fun: Callable[..., Any], args: Sequence[Any], argnums: Any = 0) -> int:
    """Returns the bytes that the forward pass hands to the backward pass, beside arguments.

    Arrays that repeat one number are not kept: compilers make them again.
    """

    def residuals(*args):
        _, back = jax.vjp(_partial(fun, args, argnums), *_diff(args, argnums))
        return [x for x in jax.tree.leaves(back) if isinstance(x, jax.Array)]

    jaxpr = jax.make_jaxpr(residuals)(*args).jaxpr
    fills = {v for eqn in jaxpr.eqns if measure._fills(eqn) for v in eqn.outvars}
    made = {v for v in jaxpr.outvars if is_var(v)} - {*jaxpr.invars, *jaxpr.constvars} - fills
    return sum(v.aval.size * v.aval.dtype.itemsize for v in made)


def _numbers(argnums: Any) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _diff(args, argnums):
    return [args[i] for i in _numbers(argnums)]


def _partial(fun, args, argnums):
    """Returns a function of the differentiated arguments alone."""

    def run(*diff):
        changed = dict(zip(_numbers(argnums), diff, strict=True))
        return fun(*(changed.get(i, x) for i, x in enumerate(args)))

    return run


def exact(
    fun: Callable[..., Any],
    args: Sequence[Any],
    argnums: Any = 0,
    planned: Callable[..., Any] = in_exact_mode,
    more: float = 1.0,
    times: float = measure.TIMES,
) -> list[str]:
    """Returns in what a planned program is not JAX's own: results, gradients, bytes kept.

    Args:
        fun: A function of arrays of float32 in the arguments ``argnums``.
        args: Its arguments.
        argnums: The arguments to differentiate in.
        planned: The planner: ``planned(fun, policy)`` returns the planned function.
        more: How many times as much as JAX it may keep.
        times: How many times as far from float64 as JAX it may be.
    """
    args = jax.tree.map(jnp.asarray, tuple(args))
    auto = planned(fun, "float32")
    want, got = (
        jax.jit(measure._measured(f, args, argnums, 1.0), compiler_options=measure.options())(*args)
        for f in (fun, auto)
    )
    if jax.tree.structure(want) != jax.tree.structure(got):
        return [f"the structure is {jax.tree.structure(got)}, JAX's {jax.tree.structure(want)}"]
    wrong = []
    parts = zip(("result", "gradient"), want, got, strict=True)
    for i, (part, w, g) in enumerate(parts):
        lines = different(w, g)
        if lines:
            lines = different(w, g, measure.in_float64(fun, args, argnums)[i], times)
        wrong += [f"{part}{line}" for line in lines]
    mine, theirs = (kept(f, args, argnums) for f in (auto, fun))
    return [*wrong, *[f"keeps {mine} bytes, JAX {theirs}"] * (mine > more * theirs)]


def different(want: Any, got: Any, truth: Any = None, times: float = measure.TIMES) -> list[str]:
    """Returns the leaves of two trees that differ by more than `CLOSE`, or in shape or dtype.

    A leaf that vanishes beside the whole tree is judged by the norm of the tree. Where float32
    itself is further off than `CLOSE`, the order of sums decides: if the ``truth`` is given, a leaf
    may be ``times`` as far from it as the one that is wanted.
    """
    pairs = jax.tree_util.tree_flatten_with_path(want)[0]
    floats = [np.asarray(w, np.float64) for _, w in pairs if measure.is_f32(w)]
    whole = measure.norm(np.concatenate([w.ravel() for w in floats])) if floats else 0.0
    wrong = []
    exact = jax.tree.leaves(truth) or [w for _, w in pairs]
    for (path, w), g, t in zip(pairs, jax.tree.leaves(got), exact, strict=True):
        name = jax.tree_util.keystr(path)
        if (w.shape, w.dtype) != (g.shape, g.dtype):
            wrong.append(f"{name} is {g.dtype}{list(g.shape)}, not {w.dtype}{list(w.shape)}")
        elif not measure.is_f32(w):
            wrong += [f"{name} is another one"] * (not np.array_equal(w, g))
        elif not np.array_equal(np.isfinite(w), np.isfinite(g)):
            wrong.append(f"{name} has Infs or NaNs elsewhere")
        else:
            w, g, t = (np.where(np.isfinite(x), x, 0).astype(np.float64) for x in (w, g, t))
            size = measure.norm(w)
            size = size if size > measure.VANISHES * whole else whole
            off, most = measure.norm(g - w), max(CLOSE * size, times * measure.norm(w - t))
            off = off if truth is None else measure.norm(g - t)
            wrong += [f"{name} is {off / (size or 1):.2g} off"] * (off > most)
    return wrong


# ---- rounded in the lowering --------------------------------------------------------------------


def in_the_lowering(
    fun: Callable[..., Any], args: Sequence[Any], half: str, argnums: Any = 0
) -> tuple[Any, Any]:
    """Returns results and gradients of the float32 program whose matmuls round in the lowering."""
    args = jax.tree.map(jnp.asarray, tuple(args))
    return measure.in_the_lowering(fun, args, half, argnums)(args)


def sound(
    fun: Callable[..., Any],
    args: Any,
    half: str,
    argnums: Any = 0,
    *,
    planned: Callable[..., Any] = mpjax.autocast,
    times: float = measure.TIMES,
    confirm: bool = False,
    **options: Any,
) -> list[measure.Error]:
    """Returns the errors of a planned program that are too large, or not finite.

    Args:
        fun: The float32 program.
        args: Its arguments, or a function that returns those of a seed.
        half: "bfloat16" or "float16".
        argnums: The arguments to differentiate in.
        planned: The planner, as for `exact`.
        times: How many times the error of the yardstick is allowed.
        confirm: Whether further arguments must confirm what is found, as among many programs.
        options: Further options of `measure.errors`, such as ``storage``.
    """
    options |= {"planned": planned, "spared": False}
    wrong = []
    for seeds in (measure.FIRST, measure.CONFIRMING)[: 1 + confirm]:
        rows = measure.errors(fun, args, half, argnums, seeds=seeds, **options)
        bound = [times * max(row.yardstick, measure.FLOOR) for row in rows]
        pairs = zip(rows, bound, strict=True)
        wrong = [row for row, most in pairs if row.nonfinite or row.autocast > most]
        if not wrong:
            break
    return wrong

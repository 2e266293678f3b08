"""Applies a step or skips it: either all of the state is updated, or none of it.

The choice is a `select` or a conditional, depending on the platform. On a GPU and a TPU a `select`
costs nothing: XLA fuses it into the pass that updates parameters and moments together. A
conditional keeps its operands and results in separate buffers there, so the state is copied. On a
CPU each pass writes one array: with a `select` the new moments are computed once to be stored and
again for the parameters; a conditional computes them once or not at all.

Within shard_map and pmap each replica decides for itself. A collective in a branch that only some
replicas take would wait forever, so the choice is a `select` there on every platform.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT16
from mpjax._src.core.base.trees import all_finite, cast_like, is_array, select, stays_finite
from mpjax._src.core.training.judge import judged
from mpjax._src.core.training.loss_scale import adjust_shared

T = TypeVar("T")


class Verdict(NamedTuple):
    """What of a step is finite, on all replicas and shards: bools, which may be traced."""

    grads_finite: Any
    loss_finite: Any
    state_finite: Any

    @property
    def finite(self) -> jax.Array:
        """Whether the step is applied."""
        return self.grads_finite & self.loss_finite & self.state_finite


def by_select(finite: jax.Array, new: Callable[..., Any], before: T, *args: Any) -> Any:
    """Always computes the new state, and selects one of the two."""
    after, good = new(before, *args)
    return select(finite & good, after, before), good | ~finite


def by_cond(finite: jax.Array, new: Callable[..., Any], before: T, *args: Any) -> Any:
    """Computes the new state only if it may be used."""

    def applied(before, *args):
        after, good = new(before, *args)
        return select(good, after, before), good  # refuses what `select` refuses

    def skipped(before, *_):
        return before, jnp.ones((), bool)

    return jax.lax.cond(finite, applied, skipped, before, *args)


def gated(
    finite: jax.Array,
    new: Callable[..., T],
    before: T,
    *args: Any,
    agree: Callable[[jax.Array], jax.Array] = lambda good: good,
    wholly: bool = False,
) -> tuple[T, jax.Array]:
    """Returns ``new(before, *args)`` if ``finite`` and the result is finite, else ``before``.

    A leaf of the result may be non-finite if it was before. The second result is whether the new
    state was finite; true if it was not computed. ``agree`` makes a verdict the same on all shards.
    With ``wholly`` all of the result is judged, even if it seems to be plain arithmetic.

    Raises:
        ValueError: If the two differ in structure, or two leaves in shape or dtype.
    """
    if not _is_chosen(finite):
        new = jax.jit(new, inline=True)  # traced once for all that follows
    # Outside of jit, `gated_update` passes results instead of a function, so a trace of ``new``
    # shows no arithmetic that could be judged.
    wholly = wholly or not isinstance(finite, jax.core.Tracer)
    good, run = _with_verdict(new, before, args, agree, wholly)
    may = finite & good
    if _is_chosen(finite):
        after, fine = by_select(may, run, before, *args)
    else:
        after, fine = jax.lax.platform_dependent(
            may,
            before,
            *args,
            cpu=lambda may, *args: by_cond(may, run, *args),
            default=lambda may, *args: by_select(may, run, *args),
        )
    return after, (good & fine) | ~finite


def _with_verdict(new, before, args, agree, wholly: bool) -> tuple[jax.Array, Callable[..., Any]]:
    """Returns the verdict on the scalars of an update, and the update with one on the rest."""
    if not wholly and all(map(is_array, jax.tree.leaves((before, args)))):
        jaxpr, shapes = jax.make_jaxpr(new, return_shape=True)(before, *args)
        old = jax.tree.leaves(before)
        structures: list[Any] = [jax.tree.structure(tree) for tree in (before, shapes)]
        if structures[0] == structures[1] and (found := judged(jaxpr, len(old))):
            program, own, sets = found
            results = _jax.eval_closed(program, *old, *jax.tree.leaves(args))
            scalars = results[len(own) :]
            # Of each set one scalar has to differ from zero: else this is infinite.
            inverse = [1 / sum(jnp.abs(scalars[i]) for i in each) for each in sets]
            verdict = stays_finite(results[: len(own)], [old[i] for i in own])
            verdict &= all_finite([*scalars, *inverse])
            return agree(verdict), lambda *args: (new(*args), jnp.ones((), bool))

    def run(before, *args):
        after = new(before, *args)
        return after, agree(stays_finite(after, before))

    return jnp.ones((), bool), run


def gated_update(finite: jax.Array, update: Callable[..., Any], state: Any, *args, **options):
    """Returns ``update(state, *args)``, or (zeros, ``state``), and the verdict of `gated`."""

    def run(before, *args):
        updates, new = update(before[1], *args)
        return updates, cast_like(new, before[1])

    if isinstance(finite, jax.core.Tracer):
        run = run if _is_chosen(finite) else jax.jit(run, inline=True)
        shapes, _ = jax.eval_shape(run, (None, state), *args)
    else:
        # Outside of jit it runs once, for the shapes of the zeros and for the results.
        result = shapes, _ = run((None, state), *args)
        run = lambda *_: result  # noqa: E731
    # -0.0, because adding 0.0 would turn a parameter of -0.0 into 0.0.
    zeros = jax.tree.map(lambda u: jnp.full(u.shape, -0.0, u.dtype), shapes)
    return gated(finite, run, (zeros, state), *args, **options)


def may_overflow(state: Any) -> bool:
    """Returns whether a state of an optimizer has float16 arrays, such as moments."""
    return any(getattr(leaf, "dtype", None) == FLOAT16 for leaf in jax.tree.leaves(state))


def _is_chosen(finite: jax.Array) -> bool:
    """Returns whether every platform uses a `select`: in a replica, and outside of jit."""
    traced = isinstance(finite, jax.core.Tracer)
    return not traced or bool(jax.sharding.get_abstract_mesh().manual_axes)


def counted(before: Any, finite: Any) -> dict[str, jax.Array]:
    """Returns the skip counters after one more step, applied or skipped."""
    skipped = jnp.logical_not(finite).astype(jnp.int32)
    return {
        "skipped_steps": before.skipped_steps + skipped,
        "consecutive_skips": (before.consecutive_skips + 1) * skipped,
    }


def metrics_of(state: Any, verdict: Verdict) -> dict[str, jax.Array]:
    """Returns the metrics of a step: verdicts, the next loss scale, and the skips so far."""
    return {
        **verdict._asdict(),
        "loss_scale": jnp.asarray(state.loss_scale.loss_scale, jnp.float32),
        "skipped_steps": state.skipped_steps,
        "consecutive_skips": state.consecutive_skips,
    }


def adjusted(loss_scale: T, verdict: Verdict, used: Any = None) -> T:
    """Returns the next loss scale, after a gradient that was scaled by it, or by ``used``.

    No loss scale changes the forward pass, so the scale is adjusted only if the loss is finite. If
    gradients and model state both failed, it is unknown which failed first; the scale is lowered
    then, because it may be too high.
    """
    grads_finite, loss_finite, state_finite = verdict
    speaks = loss_finite & (state_finite | ~grads_finite)
    used = loss_scale if used is None else used
    return select(speaks, adjust_shared(loss_scale, grads_finite, used), loss_scale)

"""A training step in mixed precision, as two pure functions: `build_train_step`.

The order of a step is: cast, forward pass, scale, backward pass, unscale, average, check that
everything is finite, optimizer, apply or skip, adjust the loss scale.
"""

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from mpjax._src.core.base import errors, trees
from mpjax._src.core.base.absent import answering
from mpjax._src.core.base.outlines import outline
from mpjax._src.core.base.patterns import name_of, paths
from mpjax._src.core.base.public import public
from mpjax._src.core.policy.policy import Policy, PolicyLike
from mpjax._src.core.program.modules import has_modules
from mpjax._src.core.training import optimizers, replicas
from mpjax._src.core.training.frozen import Reader, Reads, joined
from mpjax._src.core.training.gradients import observed_value_and_grad, with_float32_loss
from mpjax._src.core.training.levels import training_policy, under_policy
from mpjax._src.core.training.loss_scale import SCALES, LossScale, get_loss_scale
from mpjax._src.core.training.masters import stored
from mpjax._src.core.training.placement import commit_like
from mpjax._src.core.training.serialization import known_to_flax
from mpjax._src.core.training.transaction import (
    Verdict,
    adjusted,
    counted,
    gated,
    may_overflow,
    metrics_of,
)

# The fields that a step changes together, or not at all.
CHANGED = ("step", "params", "opt_state", "model_state")

Metrics = dict[str, Any]
T = TypeVar("T")


@public("mpjax")
@trees.pytree_of(
    *("step", "params", "opt_state", "loss_scale", "model_state", "rng"),
    *("skipped_steps", "consecutive_skips"),
)
@answering
@dataclasses.dataclass(frozen=True, repr=False)
class TrainState:
    """The complete state of training: everything that a step may change. All leaves are arrays.

    Attributes:
        step: The number of applied steps, an int32 scalar. Skipped steps do not count.
        params: The parameters, in the dtypes that they are stored in.
        opt_state: The optimizer's state, float32 master weights included.
        loss_scale: The loss scale.
        model_state: The model's non-trained state, such as BatchNorm statistics, or None.
        rng: A PRNG key, or None.
        skipped_steps: The total number of skipped steps, an int32 scalar.
        consecutive_skips: The number of steps skipped in a row up to now, an int32 scalar.
    """

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    loss_scale: LossScale
    model_state: Any
    rng: jax.Array | None
    skipped_steps: jax.Array
    consecutive_skips: jax.Array

    __repr__ = outline


class TrainStep(NamedTuple):
    """The two pure functions that `build_train_step` returns.

    Attributes:
        init: ``init(params, model_state=None, rng=None)`` returns a `TrainState`.
        step: ``step(state, batch)`` returns ``(state, metrics)``.
    """

    init: Callable[..., TrainState]
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]


def build_train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    policy: "PolicyLike" = "mixed_bfloat16",
    *,
    loss_scale: LossScale | str | float | None = "auto",
    has_aux: bool = False,
    accumulate_steps: int = 1,
    axis_name: str | tuple[str, ...] | None = None,
    param_specs: Any = None,
    report_overflow: bool = False,
    report_underflow: bool = False,
    report_stalled: bool = False,
) -> tuple[Callable[..., TrainState], Callable[[TrainState, Any], tuple[TrainState, Metrics]]]:
    """Builds a training step in mixed precision from a loss, an optimizer and a policy.

    A step runs in this order: forward pass in the policy's precision; scale the loss in float32;
    backward pass; unscale the gradients in float32 by the same scale; average over micro-batches
    and replicas; check that the loss, the norm of the gradients and the new model state are finite;
    optimizer; apply or skip the step; adjust the loss scale. Gradient clipping in the optimizer's
    chain therefore sees unscaled gradients.

    In the forward pass, ``loss_fn`` runs under `autocast`: a policy with ``casting="op"`` (O1,
    which is mixed_float16 and mixed_bfloat16, and O2) chooses a dtype for every operation, any
    other policy casts the parameters and the floating leaves of the batch once. ``model_state`` is
    not cast, and the loss is float32.

    A step is applied as a whole or not at all. On a skipped step ``params``, ``opt_state``,
    ``model_state`` and ``step`` are unchanged, bit for bit; only the loss scale, the rng and the
    skip counters change. If the loss itself or only the new model state is non-finite, the loss
    scale is unchanged too, because it has no effect on the forward pass. Leaves of the model state
    that were non-finite before the step (a running maximum that starts at -Inf) are not checked;
    neither are integers and keys. Gradients whose sum of squares overflows float32 are
    skipped like infinite ones: clipping would turn them into zeros, and Adam's second moment would
    stay infinite.

    Parameters whose update is always zero are frozen: no gradient of theirs is computed, checked
    or counted in ``grad_norm``, they have no master, and they are never stored in a wider dtype
    than their own, which may be an integer one. Nor is a gradient computed that nothing reads.

    If the optimizer makes non-finite updates or states of finite gradients, because it divides by
    zero, evaluates a function itself (SAM, line searches) or has a learning rate of NaN, the step
    is skipped too, and counts as one of non-finite gradients. Of an optimizer of plain arithmetic,
    as most are, only the scalars are checked, because to check the rest would read the whole state
    once more. If such an update overflows (far too high a learning rate, a float16 weight beyond
    65504), the step is applied, and all later steps are skipped; `raise_if_diverged` reports that.

    Args:
        loss_fn: ``loss_fn(params, batch)``, called with the keywords ``model_state=`` and ``rng=``
            if the state carries them. It returns ``loss``; ``(loss, new_model_state)`` with a model
            state; ``(loss, aux)`` with ``has_aux``; ``(loss, (new_model_state, aux))`` with both.
            ``loss`` is a real floating scalar, preferably float32 (under `autocast` it always is).
        optimizer: Any optax optimizer. It sees float32 gradients and parameters.
        policy: A policy or its name, see `get_policy`.
        loss_scale: "auto" (dynamic for float16 compute, none otherwise), "dynamic", "none", a
            number, or a loss scale object of mpjax or jmp.
        has_aux: Whether ``loss_fn`` returns ``aux``. The step returns it as ``metrics["aux"]``.
        accumulate_steps: The number k of micro-batches that the leading axis of the batch is split
            into. Micro-batch i consists of the rows i, i + k, i + 2 k and so on, so that a sharded
            batch is not moved between devices. Gradients are accumulated in float32 and checked
            once; ``aux`` is stacked along a new first axis.
        axis_name: The mapped axis or axes (of shard_map or pmap) over which gradients, loss and
            model state are averaged. ``loss_fn`` then returns the mean over its own part of the
            batch, and each replica keeps its own ``aux``. Not needed under plain jit with sharded
            arrays.
        param_specs: The `jax.sharding.PartitionSpec` of the parameters, as in shard_map's
            ``in_specs``, or None. It is needed only in shard_map with ``check_vma=False`` if
            parameters are split over an axis (model parallelism): the finite check and
            ``grad_norm`` are then those of all shards. Otherwise shard_map itself knows the axes.
        report_overflow: Whether the metrics report which parameter's gradient overflowed first, as
            ``metrics["overflow"]``, an `Overflow`.
        report_underflow: Whether the metrics report how much of the gradients is too small for the
            policy's 16-bit dtype (float16 if it has none), as ``metrics["underflow"]``, an
            `Underflow`.
        report_stalled: Whether the metrics report how many of each parameter's updates were rounded
            away, as ``metrics["stalled"]``, a `Stalled`. See `warn_if_stalled`.

    Returns:
        A pair ``(init, step)``. ``init(params, model_state=None, rng=None)`` copies its arguments
        and returns a `TrainState`. ``step(state, batch)`` is meant to be jitted:
        ``jax.jit(step, donate_argnums=0)``. Its metrics are device scalars: ``loss`` and
        ``grad_norm`` (float32, unscaled), ``grads_finite``, ``loss_finite`` and ``state_finite``
        (bool), ``loss_scale`` (float32, for the next step), ``skipped_steps`` and
        ``consecutive_skips`` (int32), and ``aux`` and the reports if they were requested.

    Raises:
        TypeError: If ``loss_fn`` is not a function or ``optimizer`` is not an optax optimizer; from
            ``step``, if its update requires other arguments than ``value=``, as L-BFGS's does.
        ValueError: If another argument is invalid; from ``step``, if no axis ``axis_name`` is
            mapped where it is called, or if the state was created by a different optimizer.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax, optax
        >>> def loss_fn(params, batch):
        ...     x, y = batch
        ...     return jnp.mean((x @ params["w"] - y).astype(jnp.float32) ** 2)
        >>> init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "mixed_float16")
        >>> state = init({"w": jnp.zeros(3)})
        >>> step = jax.jit(step, donate_argnums=0)
        >>> state, metrics = step(state, (jnp.eye(3), jnp.ones(3)))
        >>> float(metrics["loss"]), float(metrics["loss_scale"]), int(state.step)
        (1.0, 65536.0, 1)

    The algorithm is that of Micikevicius et al. 2017, "Mixed Precision Training",
    https://arxiv.org/abs/1710.03740.
    """
    _check_functions(loss_fn, optimizer)  # before the policy, which may stand in their place
    policy = training_policy(policy)
    reports = Reports(policy, report_overflow, report_underflow, report_stalled)
    _check_arguments(has_aux, reports, accumulate_steps, param_specs)
    axes, first_scale = replicas.axes_of(axis_name), get_loss_scale(policy, loss_scale)
    optimizer = under_policy(policy, optimizer, "optimizer")
    forward, observe = _forward(loss_fn, policy, first_scale, has_aux), reports.observer()

    def init(params: Any, model_state: Any = None, rng: Any = None) -> TrainState:
        params = _stored_params(params, policy, optimizer.reads)
        count, *skips = (jnp.zeros((), jnp.int32) for _ in range(3))
        opt_state, carried = optimizer.init(params), _checked(model_state, rng)
        state = TrainState(count, params, opt_state, first_scale, *carried, *skips)
        # Once more over everything: optimizers may keep the parameters themselves in their state
        # (schedule-free does), and a buffer cannot be donated twice.
        return commit_like(_owned(state, "state"), params)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        _check_call(state, optimizer)
        reads = optimizer.reads(state.params)
        local, unread, next_rng = _local(state, axes, axis_name, reads)
        # grad_fn casts, runs the forward pass, scales, runs the backward pass and unscales.
        grad_fn = observed_value_and_grad(_around(forward, unread), state.loss_scale, observe)
        passes = _accumulate(grad_fn, accumulate_steps, local, batch)
        if axis_name is not None:
            passes = _averaged(passes, state, local.model_state, policy, axis_name)

        shards = replicas.shards_of(passes.grads, param_specs, state.skipped_steps, axis_name, axes)
        grad_norm, verdict = _verdict(passes, state, shards)

        # Without shards, an optimizer that clips by the norm computes it itself, as in plain optax.
        extra_args = {"value": passes.loss} | ({"grad_norm": grad_norm} if shards.all else {})
        replicas.check_reductions(optimizer.step, shards, passes.grads, state, extra_args)
        update = functools.partial(_updated, optimizer, reads, reports)
        before = {name: getattr(state, name) for name in CHANGED}
        # Frozen parameters stay out of the choice between old and new: nothing reads them.
        before["params"] = reads.trained(state.params, state.params)
        # The report is chosen with its state: in a skipped step no update has stalled.
        before["stalled"] = reports.none_stalled(state)
        args = state.params, passes.grads, passes.model_state, extra_args
        # Plain arithmetic is trusted up to float32's overflow, but float16 moments have 65504.
        run = functools.partial(gated, agree=shards.agreed, wholly=may_overflow(state.opt_state))
        after, good = run(verdict.finite, update, before, *args)
        verdict = verdict._replace(grads_finite=verdict.grads_finite & good)
        shares = after.pop("stalled")
        after["params"] = joined(after["params"], state.params)
        new = TrainState(
            **after,
            loss_scale=adjusted(state.loss_scale, verdict),
            rng=next_rng,
            **counted(state, verdict.finite),
        )
        metrics = {"loss": passes.loss, "grad_norm": grad_norm, **metrics_of(new, verdict)}
        metrics |= reports.of_step(state, passes, verdict, shares)
        return new, {**metrics, "aux": passes.aux} if has_aux else metrics

    return TrainStep(init, step)


class Passes(NamedTuple):
    """What the forward and the backward pass return.

    Attributes:
        loss: The mean loss over micro-batches, and over replicas once it is averaged.
        model_state: The last model state.
        aux: The loss function's aux, or None.
        grads: The mean gradients, unscaled, in float32.
        seen: What `Reports.observer` saw of the scaled gradients: a `Seen`, or None.
    """

    loss: jax.Array
    model_state: Any
    aux: Any
    grads: Any
    seen: Any


class Reports(NamedTuple):
    """Which reports a step makes, and the policy that they are about.

    What makes them is loaded if one is asked for.
    """

    policy: Policy
    overflow: bool
    underflow: bool
    stalled: bool

    def observer(self) -> Callable[..., Any]:
        """Returns what looks at the scaled gradients."""
        if self.overflow or self.underflow:
            from mpjax._src.tools.watching.overflows import observer

            return observer(self.policy.compute_dtype, ordered=self.overflow)
        return lambda grads, program: None

    def none_stalled(self, state: TrainState) -> jax.Array | None:
        """Returns the shares of stalled updates in a step that is skipped."""
        return jnp.zeros(len(jax.tree.leaves(state.params)), jnp.float32) if self.stalled else None

    def shares(self, new: Any, opt_state: Any, params: Any) -> jax.Array | None:
        """Returns the shares of stalled updates in a step that is applied."""
        if not self.stalled:
            return None
        from mpjax._src.tools.watching.stalled import stalled

        return stalled(new.updates, stored(opt_state, params), stored(new.state, new.params))

    def of_step(self, state: TrainState, passes: Passes, verdict: Verdict, shares) -> Metrics:
        """Returns the reports on a step from this state, by their names."""
        reports: Metrics = {}
        if self.overflow or self.underflow:
            from mpjax._src.tools.watching.overflows import first_overflow, underflow
        if self.overflow:
            facts = state.loss_scale.loss_scale, verdict.loss_finite, paths(passes.grads)
            reports["overflow"] = first_overflow(passes.grads, passes.seen, *facts)
        if self.underflow:
            sizes = [leaf.size for leaf in jax.tree.leaves(passes.grads)]
            reports["underflow"] = underflow(passes.seen, sizes, self.policy.compute_dtype)
        if self.stalled:
            from mpjax._src.tools.watching.stalled import Stalled

            by_lot = self.policy.rounding == "stochastic"
            reports["stalled"] = Stalled(shares, tuple(paths(state.params)), by_lot)
        return reports


def _stored_params(params: Any, policy: Policy, reader: Reader) -> Any:
    """Returns the parameters as they are stored: copied, checked and cast."""
    known_to_flax(TrainState, *SCALES)
    optimizers.check_params(params)
    _refuse_modules(params)
    params = _owned(params, "params")
    reads = reader(params)
    if not jax.tree.leaves(params):
        raise ValueError("params has no leaves: there is nothing to train.")
    optimizers.check_trained(params, reads.frozen, "to model_state or rng")
    if policy.casting != "op":  # else a pattern may mean a scope, which only the plan knows
        policy.check_overrides(params)
    return reads.stored(params, policy)


def _check_call(state: Any, optimizer: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state is a {type(state).__name__}, not a TrainState. The order is "
            "step(state, batch), with the state that init(params) returned."
        )
    optimizers.check_state(optimizer.init, state.opt_state, state.params, "state.opt_state")


def _local(state: TrainState, axes: tuple[str, ...], axis_name: Any, reads: Reads):
    """Returns the state as the loss of one step on one replica reads it, and the next step's key.

    Its key is of this step and replica alone. Its parameters are local, so that gradients are
    averaged where the step does it: in float32, and once. The second result has the parameters
    whose gradients nothing reads.
    """
    next_rng, rng = (None, None) if state.rng is None else jax.random.split(state.rng)
    params, model_state = replicas.local_to(axes, axis_name, (state.params, state.model_state))
    # Replicas that drew the same dropout masks would average correlated gradients.
    if axes and rng is not None:
        rng = jax.random.fold_in(rng, jax.lax.axis_index(axis_name))
    read, unread = reads.read(params, params), params if any(reads.unread) else None
    local = dataclasses.replace(state, params=read, model_state=model_state, rng=rng)
    return local, unread, next_rng


def _averaged(passes: Passes, state: TrainState, local, policy: Policy, axis_name) -> Passes:
    """Averages over replicas, whose model states were ``local``. Each keeps its own aux."""
    loss = replicas.averaged(passes.loss, axis_name)
    grads = replicas.average_gradients(passes.grads, axis_name, policy, state.loss_scale)
    model_state = replicas.averaged_state(passes.model_state, local, state.model_state, axis_name)
    seen = passes.seen
    if seen is not None:
        reduce = (jax.lax.pmax, jax.lax.pmean)
        seen = seen.over(*(functools.partial(f, axis_name=axis_name) for f in reduce))
    return Passes(loss, model_state, passes.aux, grads, seen)


def _verdict(passes: Passes, state: TrainState, shards: Any) -> tuple[jax.Array, Verdict]:
    # One pass over the gradients for both: a sum of squares is finite only if each of them is.
    grad_norm = shards.norm(passes.grads)
    finite = jnp.isfinite(grad_norm), jnp.isfinite(passes.loss)
    state_finite = trees.stays_finite(passes.model_state, state.model_state)
    return grad_norm, Verdict(*map(shards.agreed, (*finite, state_finite)))


def _updated(optimizer, reads, reports, before, params, grads, model_state, extra_args):
    """Returns all that a step changes, after the optimizer."""
    opt_state = before["opt_state"]
    new = optimizer.step(grads, opt_state, params, **extra_args)
    return {
        "step": before["step"] + 1,
        "params": reads.trained(new.params, params),
        # An optimizer may return moments in the dtype of its gradients, but a state keeps its
        # dtypes: else the next step would compile again.
        "opt_state": trees.cast_like(new.state, opt_state),
        "model_state": model_state,
        "stalled": reports.shares(new, opt_state, params),
    }


# After so many skipped steps any usual loss scale has come down to 1: from 2**24 by halves.
AT_FLOOR = 25
DERIVATIVE = (
    "an operation has an infinite derivative (sqrt or norm at 0, log near 0), or float16 is too "
    "narrow for this backward pass"
)
FIND = "mpjax.find_nonfinite names the operation."
FLOOR = (
    "if the gradient was scaled by another optimizer's loss scale (a GAN's generator and "
    "discriminator), pass the states of both to value_and_grad and to each update as scaled_by=. "
    f"Otherwise {DERIVATIVE}: try 'mixed_bfloat16'. {FIND}"
)
OF_LOSS = (
    "The loss itself was non-finite. No loss scale can prevent that. Usual causes: NaN or infinity "
    "in the data, an overflow in the float16 forward pass (attention scores, large activations), "
    "or weights that have diverged (float16 overflows above 65504). Check the batch, lower the "
    f"learning rate, or try 'mixed_bfloat16'. {FIND}"
)
OF_STATE = (
    "The loss was finite, but the new model_state was not. No loss scale can prevent that. Usual "
    "causes: an outlier in the data (the square of 2e19 overflows the variance of BatchNorm), an "
    "overflow in the 16-bit forward pass, or a statistic that is divided by 0. Check the batch, or "
    "compute the statistics in float32."
)
OF_GRADIENTS = (
    "The loss was finite, but its gradients were not, or the update that the optimizer made of "
    f"them (then grad_norm is finite). Usual causes: too high a learning rate, {DERIVATIVE}. Lower "
    "the learning rate, try 'mixed_bfloat16', or add a float32 override for the part that "
    f"overflows. {FIND}"
)


def raise_if_diverged(metrics: Metrics, limit: int) -> None:
    """Raises a `DivergenceError` if too many steps in a row were skipped.

    It warns before if steps are skipped although the loss scale is down to 1, because no loss scale
    will end that. Reading the counter waits for the device, so call this every few hundred steps.

    Args:
        metrics: The metrics of one step, as the step returned them.
        limit: The number of skipped steps in a row at which to raise.

    Raises:
        DivergenceError: If ``limit`` or more steps in a row were skipped. The message has their
            number, the loss scale and the usual causes.
        TypeError: If ``metrics`` does not come from a training step, or is traced.
        ValueError: If ``limit`` is not a positive integer, or ``metrics`` contains several steps.

    Example:
        >>> import mpjax
        >>> metrics = {"consecutive_skips": 3, "loss_scale": 1.0, "loss_finite": True}
        >>> mpjax.raise_if_diverged(metrics, limit=10)

    DeepSpeed and MindSpore stop a run in the same way.
    """
    most = errors.whole_number(limit)
    if most is None or most < 1:
        raise ValueError(
            f"limit={errors.brief(limit)} must be an integer >= 1, a number of steps."
            f"{errors.misplaced(limit)}"
        )
    _check_metrics(metrics)
    skips, scale = int(metrics["consecutive_skips"]), errors.as_float(metrics["loss_scale"])
    at_floor = skips >= AT_FLOOR and scale <= 1
    if skips < most and not at_floor:
        return
    cause = _cause(metrics, at_floor)
    message = f"{errors.brief(skips)} steps in a row were skipped, at loss scale {scale:g}. {cause}"
    if skips >= most:
        raise errors.DivergenceError(message)
    warnings.warn(message, errors.PrecisionWarning, stacklevel=2)


def _check_metrics(metrics: Any) -> None:
    """Raises an error if these are not the metrics of one step, outside of jit."""
    read = {"consecutive_skips", "loss_scale", "loss_finite"}
    if not (isinstance(metrics, dict) and read <= metrics.keys()):
        raise TypeError(
            f"metrics={errors.brief(metrics)} must be the metrics that a training step returned."
        )
    if isinstance(metrics["consecutive_skips"], jax.core.Tracer):
        raise TypeError(
            "metrics are traced, so it is unknown how many steps were skipped. Call "
            "raise_if_diverged outside of jit, with the metrics that the jitted step returned."
        )
    if jnp.ndim(metrics["consecutive_skips"]):
        raise ValueError(
            "metrics are those of several steps or ensemble members, of shape "
            f"{jnp.shape(metrics['consecutive_skips'])}. Pass those of one, such as "
            "jax.tree.map(lambda m: m[-1], metrics)."
        )


def _cause(metrics: Metrics, at_floor: bool) -> str:
    """Says what was non-finite first, and the usual causes."""
    if not bool(metrics["loss_finite"]):
        return OF_LOSS
    # Metrics saved by an older version have no state_finite.
    if not bool(metrics.get("state_finite", True)):
        return OF_STATE
    if at_floor:
        return f"The loss was finite, but its gradients were not, at any loss scale: {FLOOR}"
    return OF_GRADIENTS


def _forward(
    loss_fn: Callable[..., Any], policy: Policy, scale: LossScale, has_aux: bool
) -> Callable[..., Any]:
    """Returns ``loss_fn`` under the policy, as a function of the stored parameters.

    It always returns ``(loss, (new_model_state, aux))``.
    """
    run = with_float32_loss(loss_fn, policy, scale)

    @functools.wraps(loss_fn)
    def forward(params, batch, model_state, rng):
        carried = {"model_state": model_state, "rng": rng}
        kwargs = {name: value for name, value in carried.items() if value is not None}
        _check_signature(loss_fn, (params, batch), kwargs)
        # jit would convert the batch too: NumPy's float64 becomes float32 unless x64 is enabled.
        batch = jax.tree_util.tree_map_with_path(_converted, batch)
        with _without_rng(loss_fn, rng):
            out = run(params, batch, **kwargs)
        loss, new_state, aux = _unpack(out, model_state is not None, has_aux)
        if model_state is not None:
            new_state = _check_model_state(new_state, model_state)
        return loss, (new_state, aux)

    return forward


def _converted(keys: Any, leaf: Any) -> Any:
    """Returns a leaf of the batch as JAX reads it."""
    trees.check_fits("batch", keys, leaf)
    return jnp.asarray(leaf) if trees.is_array(leaf) else leaf


def _around(forward: Callable[..., Any], unread: Any) -> Callable[..., Any]:
    """Returns a function of the parameters that are differentiated."""

    @functools.wraps(forward)
    def run(params, *args):
        return forward(joined(params, unread), *args)

    return run


def _on_batch(grad_fn: Callable[..., Any], state: TrainState, batch: Any) -> Passes:
    out = grad_fn(state.params, batch, state.model_state, state.rng)
    (loss, (model_state, aux)), grads, seen = out
    return Passes(trees.widen(loss), model_state, aux, grads, seen)


def _accumulate(grad_fn: Callable[..., Any], steps: int, state: TrainState, batch: Any) -> Passes:
    """Runs both passes on each micro-batch, each with the model state of the one before it."""
    if steps == 1:
        return _on_batch(grad_fn, state, batch)

    split = _split_batch(batch, steps)  # refuses more steps than there are examples

    def micro_step(carry, index):
        grad_sum, model_state = carry
        # Indexed here, because moving the micro-batch axis to the front would copy the batch.
        micro_batch = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 1, keepdims=False), split
        )
        rng = None if state.rng is None else jax.random.fold_in(state.rng, index)
        here = dataclasses.replace(state, model_state=model_state, rng=rng)
        passes = _on_batch(grad_fn, here, micro_batch)
        grad_sum = jax.tree.map(jnp.add, grad_sum, passes.grads)
        return (grad_sum, passes.model_state), (passes.loss, passes.aux, passes.seen)

    # float32 sums, in which no small gradient of a later micro-batch is lost.
    zeros = jax.tree.map(jnp.zeros_like, trees.widen(state.params))
    (grad_sum, model_state), (losses, aux, seen) = jax.lax.scan(
        micro_step, (zeros, state.model_state), jnp.arange(steps)
    )
    if seen is not None:
        seen = seen.over(lambda x: jnp.max(x, axis=0), lambda x: jnp.mean(x, axis=0))
    grads = jax.tree.map(lambda g: g / steps, grad_sum)
    return Passes(jnp.mean(losses), model_state, aux, grads, seen)


def _split_batch(batch: Any, steps: int) -> Any:
    """Reshapes leading axes from ``n`` to ``(n // steps, steps)``.

    Each micro-batch takes every ``steps``-th row. In a sharded batch, where each device holds a
    block of rows, it takes a part of each block, so no rows move between devices.
    """

    def split(keys, leaf):
        shape = jnp.shape(leaf)
        if not shape or shape[0] % steps:
            size = f"has a leading axis of {shape[0]}" if shape else "is a scalar"
            raise ValueError(
                f"accumulate_steps={steps} must divide the leading axis of every array in the "
                f"batch, but {name_of('batch', keys)}, of shape {shape}, {size}."
            )
        return jnp.reshape(leaf, (shape[0] // steps, steps, *shape[1:]))

    return jax.tree_util.tree_map_with_path(split, batch)


def _owned(tree: Any, argument: str) -> Any:
    """Copies every leaf to a new array without a weak type.

    The copy protects the caller's arrays from donation. A weak type would make the step compile
    twice, because the step returns none.
    """

    def own(keys, leaf):
        if not (trees.is_array(leaf) or isinstance(leaf, (bool, int, float, complex))):
            raise TypeError(
                f"{name_of(argument, keys)} is {errors.brief(leaf)}, not an array. Keep functions "
                "and settings out of the state: for Equinox, eqx.partition(model, eqx.is_array) "
                "and eqx.combine inside loss_fn; for Flax NNX, nnx.split(model). For the shapes "
                "of a state, jax.eval_shape(init, ...)."
            )
        if trees.is_key(leaf):
            return jnp.copy(leaf)
        trees.check_fits(argument, keys, leaf)
        return jnp.array(leaf, dtype=jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))

    return jax.tree_util.tree_map_with_path(own, tree)


def _check_functions(loss_fn: Any, optimizer: Any) -> None:
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn={errors.brief(loss_fn)} must be a function loss_fn(params, batch) -> loss."
            f"{errors.misplaced(loss_fn)}"
        )
    optimizers.as_optimizer(optimizer, "optimizer")


def _check_arguments(has_aux: Any, reports: Reports, steps: Any, param_specs: Any) -> None:
    flags = {f"report_{name}": getattr(reports, name) for name in Reports._fields[1:]}
    for name, flag in {"has_aux": has_aux, **flags}.items():
        errors.check_flag(name, flag)
    errors.check_count("accumulate_steps", steps)
    replicas.check_specs(param_specs)


def _refuse_modules(params: Any) -> None:
    if has_modules(params):
        raise TypeError(
            "params contains a Flax NNX module, so its statistics and random keys would be trained "
            "too. Pass the state of its parameters: graph, params, rest = "
            "nnx.split(model, nnx.Param, ...), then init(params, model_state=rest), and in loss_fn "
            "nnx.merge(graph, params, model_state). Or keep your loop with mpjax.nnx.Optimizer and "
            "mpjax.nnx.value_and_grad."
        )


def _checked(model_state: Any, rng: Any) -> tuple[Any, Any]:
    """Returns what a state carries besides parameters, and refuses what is neither."""
    if trees.is_array(model_state) and trees.is_key(model_state):
        raise TypeError(f"model_state={errors.brief(model_state)} is a PRNG key. Pass it as rng=.")
    model_state = _owned(model_state, "model_state")
    typed = trees.is_array(rng) and rng.ndim == 0 and trees.is_key(rng)
    # The form of jax.random.PRNGKey.
    plain = trees.is_array(rng) and rng.ndim == 1 and rng.dtype == jnp.uint32
    if rng is None or typed or plain:
        return model_state, rng
    raise TypeError(f"rng={errors.brief(rng)} must be one PRNG key, such as jax.random.key(0).")


def _check_signature(loss_fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # some built-in and wrapped callables have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        call = ", ".join(["params", "batch", *(f"{name}=..." for name in kwargs)])
        raise TypeError(
            f"loss_fn is called as loss_fn({call}), with keywords for the model_state and rng that "
            f"init was given, but {getattr(loss_fn, '__name__', loss_fn)}{signature} does not "
            f"accept that call: {error}.{_remedy(signature, kwargs)}"
        ) from None


def _remedy(signature: inspect.Signature, passed: dict[str, Any]) -> str:
    """Says how required arguments of ``loss_fn`` beyond params and batch are passed."""
    names = [p.name for p in signature.parameters.values() if p.default is p.empty]
    carried = {"rng": "jax.random.key(0)", "model_state": "..."}
    missing = [name for name in names if name in carried.keys() - passed.keys()]
    if missing:
        arguments = ", ".join(f"{name}={carried[name]}" for name in missing)
        return f" Pass {'= and '.join(missing)}= to init: init(params, {arguments})."
    if len(names) > 2 + len(passed):
        return " It is passed no others: take a random key as rng, and other state as model_state."
    return ""


@contextlib.contextmanager
def _without_rng(loss_fn: Callable[..., Any], rng: Any) -> Iterator[None]:
    """Adds to an error of a function that may take an rng, but was given none, where it is from."""
    try:
        yield
    except Exception as error:
        if rng is None and "rng" in getattr(loss_fn, "__code__", _without_rng.__code__).co_varnames:
            error.add_note(
                "loss_fn was called without rng=, because init was. If it needs random bits, pass "
                "rng= to init: init(params, rng=jax.random.key(0))."
            )
        raise


# What the loss function returns, by whether there is a model state, and an aux.
FORMS = {
    (False, False): "loss",
    (True, False): "(loss, new_model_state)",
    (False, True): "(loss, aux)",
    (True, True): "(loss, (new_model_state, aux))",
}


def _unpack(out: Any, has_state: bool, has_aux: bool) -> tuple[Any, Any, Any]:
    """Splits what ``loss_fn`` returned into loss, new model state and aux."""
    form = FORMS[has_state, has_aux]

    def pair(value):
        if isinstance(value, (tuple, list)) and len(value) == 2:
            return value
        raise TypeError(
            f"loss_fn must return {form}, because the state carries "
            f"{'a' if has_state else 'no'} model_state and has_aux={has_aux}, but part of what it "
            f"returned is a {type(value).__name__} where a pair is expected."
        )

    # Without this check, a tuple would be reported as a loss of a wrong type.
    if not (has_state or has_aux):
        if isinstance(out, tuple):
            raise TypeError(
                f"loss_fn must return {form}, but it returned a tuple of {len(out)}. For "
                "(loss, aux) pass has_aux=True; for a model state pass one to init."
            )
        return out, None, None
    loss, rest = pair(out)
    if has_state and has_aux:
        return loss, *pair(rest)
    return (loss, rest, None) if has_state else (loss, None, rest)


def _check_model_state(new: Any, old: Any) -> Any:
    """Returns the new model state in the structure and dtypes of the old one.

    Statistics stay float32. A dict may replace a FrozenDict.
    """
    if paths(new) != paths(old):
        raise TypeError(
            "loss_fn must return a new model_state of the same structure as the one it was given, "
            f"but returned {jax.tree.structure(new)} instead of {jax.tree.structure(old)}."
        )

    def like(keys, new, old):
        new = trees.vary_like(jnp.asarray(new), old)
        if new.shape != old.shape:
            raise TypeError(
                f"loss_fn returned {name_of('model_state', keys)} with shape {new.shape}, but was "
                f"given shape {old.shape}. Shapes in a state must not change."
            )
        return new

    new = jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new))
    return trees.cast_like(jax.tree_util.tree_map_with_path(like, new, old), old)

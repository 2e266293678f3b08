"""Mixed precision for your own training loop: an optimizer with loss scale and masters."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._src.core.base import called, errors, trees
from mpjax._src.core.base.absent import answering
from mpjax._src.core.base.dtypes import FLOAT32, HALVES
from mpjax._src.core.base.patterns import name_of
from mpjax._src.core.base.public import public
from mpjax._src.core.base.wrapped import NoBlock
from mpjax._src.core.policy.policy import Policy, PolicyLike
from mpjax._src.core.training import optimizers
from mpjax._src.core.training.gradients import scaled_value_and_grad, with_float32_loss
from mpjax._src.core.training.levels import training_policy, under_policy
from mpjax._src.core.training.loss_scale import (
    SCALES,
    DynamicLossScale,
    LossScale,
    StaticLossScale,
    get_loss_scale,
    smallest,
)
from mpjax._src.core.training.replicas import agreed
from mpjax._src.core.training.serialization import known_to_flax
from mpjax._src.core.training.transaction import Verdict, adjusted, counted, metrics_of

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@public("mpjax.optim")
@optimizers.of_ours
class MixedPrecisionState(NamedTuple):
    """State of `mixed_precision`.

    Attributes:
        inner_state: The state of the inner optimizer in float32, with the master weights of 16-bit
            parameters.
        loss_scale: The loss scale.
        skipped_steps: The total number of skipped updates, an int32 scalar.
        consecutive_skips: The number of updates skipped in a row up to now, an int32 scalar.
        grads_finite: Whether the last gradients that the optimizer reads were finite, and what it
            made of them, a bool scalar.
        loss_finite: Whether the last loss was finite, a bool scalar; true if ``update`` was not
            given the loss.
        state_finite: The last ``finite`` argument of ``update``, a bool scalar; true if it was not
            given.
    """

    inner_state: optax.OptState
    loss_scale: Any
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    grads_finite: jax.Array
    loss_finite: jax.Array
    state_finite: jax.Array

    @property
    def finite(self) -> jax.Array:
        """Whether the last update was applied, a bool scalar."""
        return self.grads_finite & self.loss_finite & self.state_finite

    def metrics(self) -> dict[str, jax.Array]:
        """Returns the metrics of the last update, named as those of `build_train_step`."""
        return metrics_of(self, Verdict(self.grads_finite, self.loss_finite, self.state_finite))


@public("mpjax.optim")
@answering
class MixedPrecision(NoBlock, optax.GradientTransformationExtraArgs):
    """An optax optimizer that also computes gradients; `mixed_precision` returns it.

    ``optax.chain``, ``optax.MultiSteps``, ``optax.inject_hyperparams`` and their like return
    optimizers of optax, which have no ``value_and_grad``. Use that of the wrapped one, with the
    state of the outer one: ``inner.value_and_grad(loss_fn, outer_state)``.

    Attributes:
        init: ``init(params)``, as in every optax optimizer.
        update: ``update(grads, state, params)``, as in every optax optimizer. With ``value=loss``
            or ``loss_finite=bool`` the update is skipped too if the loss is non-finite; with
            ``finite=bool`` it is skipped if the caller's own check failed, for example of a new
            model state. ``scaled_by=states`` is for gradients that several optimizers share.
        policy: The `Policy` that functions run under.
    """

    @property
    def policy(self) -> Policy:
        return self._rules.policy

    @property
    def _rules(self) -> "Rules":
        # Of the functions, because what rebuilds a pytree or a tuple passes on nothing else.
        for function in (self.update, self.init):
            if isinstance(rules := getattr(function, "__self__", None), Rules):
                return rules
        raise AttributeError(
            f"init={errors.brief(self.init)} and update={errors.brief(self.update)} are no longer "
            "those of mpjax.mixed_precision, so this optimizer has no policy. Wrap the optimizer "
            "that it returned, and call value_and_grad of that one."
        )

    def __repr__(self) -> str:
        rules = self._rules
        name, policy = optimizers.shown(rules.optimizer.update), str(rules.policy)
        scale = rules.loss_scale
        return f"MixedPrecision(optimizer={name}, policy={policy!r}, loss_scale={scale!r})"

    if TYPE_CHECKING:  # optax's own types know no class of state

        def init(self, params: Any) -> MixedPrecisionState: ...  # type: ignore[override]

        def update(  # type: ignore[override]
            self, updates: T, state: MixedPrecisionState, params: Any = None, **extra_args: Any
        ) -> tuple[T, MixedPrecisionState]: ...

    def value_and_grad(
        self,
        fun: Callable[P, R],
        opt_state: optax.OptState,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: str | tuple[str, ...] | None = None,
    ) -> Callable[P, tuple[R, Any]]:
        """Returns ``jax.value_and_grad(fun)`` under the policy and the loss scale.

        Args:
            fun: A function that returns a real scalar loss, or ``(loss, aux)``.
            opt_state: The state of this optimizer, or of an optimizer that contains it. If several
                optimizers share the gradient (a GAN's generator and discriminator), a tuple of
                their states: the smallest of their loss scales is used. Pass the same tuple to
                each ``update`` as ``scaled_by=``, so that no loss scale grows beyond the reach of
                the one that was used.
            argnums: The arguments to differentiate, as for `scaled_value_and_grad`. They may be
                Equinox modules.
            has_aux: Whether ``fun`` returns ``(loss, aux)``.
            axis_name: The mapped axis or axes of replicas, as for `scaled_value_and_grad`.

        Returns:
            A function of the same arguments that returns ``(value, grads)``: ``value`` as ``fun``
            returned it, and the unscaled gradients in float32. Non-finite gradients are returned
            unchanged; ``update`` skips them.

        Raises:
            TypeError: As for `scaled_value_and_grad`.
            ValueError: If ``opt_state`` contains no state of `mixed_precision`.
        """
        errors.check_callable(fun, "fun")
        scale = smallest(_scales_in(opt_state))
        run = with_float32_loss(fun, self.policy, scale)
        gradient = scaled_value_and_grad(run, scale, argnums, has_aux, axis_name)
        return lambda *args, **kwargs: gradient(*args, **kwargs)[:2]

    def from_optax(self, opt_state: optax.OptState, params: Any) -> MixedPrecisionState:
        """Returns the state that continues a run of the wrapped optimizer itself, with its moments.

        Args:
            opt_state: The state of the optimizer that was passed to `mixed_precision`, of a run
                without mpjax. From a checkpoint, restore it in the form of that optimizer's
                ``init(params)``.
            params: The parameters of that run, in the dtypes that the policy stores. Master weights
                start at their values.

        Returns:
            The state, with the first loss scale and without skips.

        Raises:
            ValueError: If ``opt_state`` is not a state of that optimizer for ``params``, or as for
                ``init``.

        Example:
            >>> import jax.numpy as jnp, mpjax, optax
            >>> adam, params = optax.adam(1e-3), jnp.ones(2)
            >>> _, opt_state = adam.update(params, adam.init(params), params)
            >>> optimizer = mpjax.mixed_precision(adam, "mixed_float16")
            >>> state = optimizer.from_optax(opt_state, params)
            >>> back = optimizer.to_optax(state, params)
            >>> int(back[0].count), bool((back[0].mu == opt_state[0].mu).all())
            (1, True)
        """
        rules, first = self._rules, self._rules.optimizer.init
        optimizers.check_state(first, opt_state, trees.widen(params), "opt_state")

        def init(params):  # moments of 16-bit weights are 16-bit in optax, unlike those here
            like = jax.eval_shape(first, params)
            return jax.tree.map(lambda x, to: trees.cast_leaf(x, to.dtype), opt_state, like)

        # Masters, roundings and 8-bit moments call the `init` of what they wrap. This one returns
        # the state that is continued, so they store it in their own form.
        given = optax.GradientTransformationExtraArgs(init, rules.optimizer.update)
        return dataclasses.replace(rules, optimizer=given).init(params)

    def to_optax(self, state: MixedPrecisionState, params: Any) -> optax.OptState:
        """Returns the state with which the wrapped optimizer itself continues a run: in float32.

        Args:
            state: The state of this optimizer.
            params: The parameters, as they are stored. Go on with those of
                `mpjax.optim.master_params`, which are float32.

        Returns:
            The state of the optimizer that was passed to `mixed_precision`, with its moments.

        Raises:
            ValueError: If the state was created by a different optimizer.
        """
        rules, seen = self._rules, []
        reads = rules.inner.reads(params)

        def update(updates, opt_state, params=None):
            seen.append(opt_state)
            return reads.held(updates, updates), opt_state  # the same parameters are frozen

        optimizers.check_kind(state, MixedPrecisionState, "mixed_precision")
        reader = optax.GradientTransformation(rules.optimizer.init, update)
        reader = under_policy(rules.policy, reader, "optimizer")
        # An update passes the inner optimizer its state in float32, whatever form it is stored in.
        reader.update(jax.tree.map(jnp.zeros_like, params), state.inner_state, params)
        return seen[-1]  # the first ones are traced, to find what is frozen


def mixed_precision(
    optimizer: optax.GradientTransformation,
    policy: "PolicyLike" = "mixed_bfloat16",
    loss_scale: LossScale | str | float | None = "auto",
) -> MixedPrecision:
    """Wraps an optax optimizer so that your own training loop runs in mixed precision.

    The optimizer's state contains the loss scale, the float32 master weights of 16-bit parameters
    and the skip counters, so the loop needs no additional state. If a gradient is non-finite, or
    the update that the optimizer makes of it, as for `build_train_step`, the update is zero, the
    inner state is unchanged, bit for bit, and the loss scale is lowered.

    Extra arguments of ``update``, such as ``value=``, ``value_fn=`` or ``grad_fn=``, are passed to
    those parts of the optimizer that take them.

    Parameters whose update is always zero (``optax.set_to_zero`` by labels or masks) are frozen:
    they keep any dtype, also an integer one, they have no master, and nothing reads their
    gradients, so that XLA does not compute them.

    Args:
        optimizer: Any optax optimizer. It works in float32, on the master weights of 16-bit
            parameters.
        policy: A policy or its name, as for `build_train_step`. If it stores parameters in 16 bits,
            cast them with ``optimizer.policy.cast_to_param(params)`` before ``init``.
        loss_scale: The loss scale, as for `build_train_step`.

    Returns:
        An optax optimizer whose method `MixedPrecision.value_and_grad` replaces
        ``jax.value_and_grad``.

    Raises:
        TypeError: If ``optimizer`` is not an optax optimizer.
        ValueError: If another argument is invalid; from ``init``, if the policy stores parameters
            in 16 bits and ``params`` are not 16-bit; from ``update``, if ``params`` no longer have
            the policy's dtypes, ``finite`` or ``loss_finite`` is not a single bool, or the state
            was created by a different optimizer.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.mixed_precision(optax.sgd(0.1), "mixed_float16")
        >>> loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
        >>> @jax.jit
        ... def train_step(params, opt_state, x):
        ...     loss, grads = optimizer.value_and_grad(loss_fn, opt_state)(params, x)
        ...     updates, opt_state = optimizer.update(grads, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state
        >>> params = jnp.ones((3, 2))
        >>> opt_state = optimizer.init(params)
        >>> params, opt_state = train_step(params, opt_state, jnp.full((4, 3), jnp.nan))
        >>> metrics = opt_state.metrics()
        >>> float(params[0, 0]), int(metrics["skipped_steps"]), float(metrics["loss_scale"])
        (1.0, 1, 32768.0)

    Apex's ``amp.initialize`` and TensorFlow's ``LossScaleOptimizer`` wrap an optimizer in the same
    way. The algorithm is that of Micikevicius et al. 2017, "Mixed Precision Training".
    """
    # Before the policy, which may stand in its place.
    optimizers.as_optimizer(optimizer, "optimizer")
    return in_mixed_precision(optimizer, training_policy(policy), loss_scale, "optimizer")


def in_mixed_precision(
    optimizer: optax.GradientTransformation,
    policy: Policy,
    loss_scale: Any,
    argument: str,
    gradient: str = "optimizer.value_and_grad(loss_fn, opt_state)",
) -> MixedPrecision:
    """Does what `mixed_precision` does; errors call the optimizer ``argument``.

    ``gradient`` is the line that replaces ``jax.value_and_grad``, for the warning that it is
    missing.
    """
    rules = Rules(optimizer, policy, get_loss_scale(policy, loss_scale), argument, gradient)
    return MixedPrecision(rules.init, rules.update)


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
    """What the functions of a `MixedPrecision` share. They are its methods.

    Attributes:
        optimizer: The optimizer that was wrapped.
        policy: The policy.
        loss_scale: The initial loss scale.
        argument: What errors call the optimizer.
        gradient: The line that replaces ``jax.value_and_grad``.
        inner: The optimizer under the policy: in float32, with master weights.
    """

    optimizer: optax.GradientTransformation
    policy: Policy
    loss_scale: LossScale
    argument: str
    gradient: str
    inner: Any = dataclasses.field(init=False)

    def __post_init__(self):
        inner = under_policy(self.policy, self.optimizer, self.argument)
        object.__setattr__(self, "inner", inner)

    def __reduce__(self) -> Any:  # pickled without `inner`, whose functions are local
        return Rules, (self.optimizer, self.policy, self.loss_scale, self.argument, self.gradient)

    def init(self, params: Any) -> MixedPrecisionState:
        """Returns the initial state for parameters."""
        known_to_flax(*SCALES)
        optimizers.check_params(params)
        _check_stored(
            self.policy,
            self.inner.reads(params).trained(params, params),
            "Cast the parameters before init: params = optimizer.policy.cast_to_param(params).",
        )
        counters = (jnp.zeros((), jnp.int32) for _ in range(2))
        verdicts = (jnp.ones((), bool) for _ in range(3))
        first = jax.tree.map(jnp.array, self.loss_scale)  # a copy: no buffer is donated twice
        return MixedPrecisionState(self.inner.init(params), first, *counters, *verdicts)

    def stored(self, params: Any) -> Any:
        """Casts parameters to the dtypes that the policy stores; frozen ones never to wider."""
        return self.inner.reads(params).stored(params, self.policy)

    def update(
        self,
        updates: Any,
        state: MixedPrecisionState,
        params: Any = None,
        *,
        finite: Any = True,
        loss_finite: Any = True,
        scaled_by: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, MixedPrecisionState]:
        """Returns the updates of the parameters, and the new state."""
        for name, verdict in (("finite", finite), ("loss_finite", loss_finite)):
            if not trees.is_one_bool(verdict):
                raise ValueError(f"{name}={errors.brief(verdict)} must be a single bool.")
        optimizers.check_params(updates, "updates")
        optimizers.check_value(extra_args.get("value"))
        optimizers.check_kind(state, MixedPrecisionState, "mixed_precision")
        reads = self.inner.reads(updates if params is None else params)
        if params is not None:
            optimizers.check_params(params)
            _check_stored(
                self.policy,
                reads.trained(params, params),
                "optax.apply_updates keeps dtypes. Cast after eqx.apply_updates, which does not: "
                "model = optimizer.policy.cast_to_param(model).",
            )
        # A non-finite gradient that nothing reads changes no parameter, so it skips no step.
        read = optimizers.read_grads(reads, updates, params)
        warn_if_in_float32(self.policy, state.loss_scale, read, self.gradient)
        grads_finite = trees.all_finite(read)
        loss_finite = jnp.logical_and(loss_finite, trees.all_finite(extra_args.get("value")))
        # A device sees the gradients of its own shards, but all devices skip, or none does.
        agree = functools.partial(agreed, count=state.skipped_steps)
        verdict = Verdict(*map(agree, (grads_finite, loss_finite, jnp.asarray(finite))))
        given, finite = (updates, state, params, extra_args), verdict.finite
        updates, inner_state, good = optimizers.updated_if(finite, self.inner, reads, *given)
        # What the optimizer makes of gradients counts as theirs: they alone lower a loss scale.
        verdict = verdict._replace(grads_finite=verdict.grads_finite & good)
        finite = finite & good
        used = None if scaled_by is None else smallest(_scales_in(scaled_by, "scaled_by"))
        scale = adjusted(state.loss_scale, verdict, used)
        rest = counted(state, finite) | verdict._asdict()
        return updates, MixedPrecisionState(inner_state, scale, **rest)


def warn_if_in_float32(policy: Policy, loss_scale: LossScale, grads: Any, gradient: str) -> None:
    """Warns once at each line if nothing that the process called can have made these gradients.

    An update that is not traced is left alone: tests make its gradients by hand.
    """
    leaves = jax.tree.leaves(grads)
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    wide = all(x.dtype == FLOAT32 for x in leaves if trees.is_array(x))
    facts = {called.CASTS: f"nothing has run in {policy.compute_dtype.name}"}
    if isinstance(loss_scale, (StaticLossScale, DynamicLossScale)):
        facts[called.SCALES] = "no loss has been scaled"
    missing = [what for fact, what in facts.items() if fact not in called.CALLED]
    if policy.compute_dtype in HALVES and traced and wide and missing:
        errors.warn_user(
            f"policy={str(policy)!r}, but {' and '.join(missing)} in this process so far: these "
            f"gradients seem to come from jax.value_and_grad or jax.grad, in float32. Use "
            f"{gradient} instead. If the update is traced before any gradient, or the gradients "
            "come from another process or an exported program, ignore this warning: "
            'warnings.filterwarnings("ignore", category=mpjax.errors.PrecisionWarning).',
            errors.PrecisionWarning,
        )


def _scales_in(opt_state: Any, argument: str = "opt_state") -> list[LossScale]:
    """Returns the loss scales of all states of `mixed_precision` in a tree of optimizer states."""
    is_state = lambda node: isinstance(node, MixedPrecisionState)  # noqa: E731
    scales = [x.loss_scale for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)]
    if not scales:
        raise ValueError(
            f"{argument}={errors.brief(opt_state)} must contain a state of mpjax.mixed_precision, "
            "for its loss scale, but contains none. Pass the state that optimizer.init(params) or "
            f"the last optimizer.update returned.{errors.misplaced(opt_state)}"
        )
    return scales


def _check_stored(policy: Policy, params: Any, remedy: str) -> None:
    """Refuses parameters that the policy stores in another dtype, also numbers without one."""
    # The policy casts arrays alone, so a float stands here as the float32 that JAX makes of it.
    arrays = jax.tree.map(lambda x: np.float32(x) if type(x) is float else x, params)
    stored = jax.tree.leaves(policy.cast_to_param(arrays))
    for (keys, leaf), new in zip(jax.tree_util.tree_leaves_with_path(params), stored, strict=True):
        kind = getattr(leaf, "dtype", "a Python number (jnp.asarray makes an array)")
        if type(leaf) is float:
            wrong = new.dtype in HALVES
        else:
            wrong = trees.is_floating(leaf) and jax.dtypes.canonicalize_dtype(kind) != new.dtype
        if wrong:
            raise ValueError(
                f"{name_of('params', keys)} is {kind}, but policy={str(policy)!r} stores it in "
                f"{new.dtype}. {remedy}"
            )

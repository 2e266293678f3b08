"""Loss scaling: multiply the loss so that float16 gradients neither vanish nor overflow.

Three classes share the protocol of jmp: ``scale``, ``unscale``, ``adjust`` and ``loss_scale``. Code
that uses them need not know which one it has. All are pytrees: arrays are leaves, settings are
static. Micikevicius et al. 2017, "Mixed Precision Training", https://arxiv.org/abs/1710.03740.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mpjax._src.core.base import called, errors
from mpjax._src.core.base.absent import answering
from mpjax._src.core.base.outlines import outline
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import is_array, is_one_bool, pytree_of, widen
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import PolicyLike

T = TypeVar("T")
LossScale = Any  # one of the three classes below, one of jmp's, or any object with their protocol

_TINY = float(np.finfo(np.float32).tiny)
_UNSET: Any = None  # until __post_init__


def _times(tree: T, scale: jax.Array, divide: bool = False) -> T:
    """Multiplies floating and complex leaves in their own dtype, 16-bit ones in float32."""
    # The warning that no loss was scaled asks for this fact about the process.
    called.CALLED.add(called.SCALES)

    def apply(leaf):
        if isinstance(leaf, (float, complex)):
            leaf = jnp.asarray(leaf)
        if not (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)):
            return leaf
        # In the dtype of the leaf, which strict promotion asks for, and which the product then has.
        factor = jnp.asarray(scale, leaf.dtype)
        return leaf / factor if divide else leaf * factor

    return jax.tree.map(apply, widen(tree))


@public("mpjax")
@pytree_of()
@answering
@dataclasses.dataclass(frozen=True, repr=False)
class NoOpLossScale:
    """A loss scale of 1 that never changes, for policies that need no loss scaling.

    It has the methods of the other loss scales, so callers need no branch.

    Example:
        >>> import mpjax
        >>> float(mpjax.NoOpLossScale().scale(3.0))
        3.0
    """

    __repr__ = outline

    @property
    def loss_scale(self) -> jax.Array:
        """The scale: 1.0, a float32 scalar."""
        return jnp.ones((), jnp.float32)

    def scale(self, tree: T) -> T:
        """Returns the tree with 16-bit leaves widened to float32, as the other scales do."""
        return widen(tree)

    def unscale(self, tree: T) -> T:
        """Returns the tree with 16-bit leaves widened to float32, as the other scales do."""
        return widen(tree)

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Returns this loss scale unchanged."""
        return self


@public("mpjax")
@pytree_of("loss_scale")
@answering
@dataclasses.dataclass(frozen=True, repr=False)
class StaticLossScale:
    """A fixed loss scale.

    Args:
        loss_scale: The scale, such as 128.0. It is stored as a float32 scalar.

    Raises:
        ValueError: If ``loss_scale`` is not between 2**-126 and 2**126.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> mpjax.StaticLossScale(128.0).scale(jnp.float16(1000)).item()
        128000.0
    """

    loss_scale: jax.Array

    __repr__ = outline

    def __post_init__(self):
        if not errors.is_traced(self.loss_scale):
            _check_scale("loss_scale", self.loss_scale)
        object.__setattr__(self, "loss_scale", jnp.asarray(self.loss_scale, jnp.float32))

    def scale(self, tree: T) -> T:
        """Multiplies floating and complex leaves by the scale, 16-bit ones in float32."""
        return _times(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides floating and complex leaves by the scale, 16-bit ones in float32."""
        return _times(tree, self.loss_scale, divide=True)

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Returns this loss scale unchanged."""
        return self


@public("mpjax")
@pytree_of("loss_scale", "growth_tracker", "hysteresis_tracker")
@answering
@dataclasses.dataclass(frozen=True, repr=False)
class DynamicLossScale:
    """A loss scale that grows while gradients are finite, and backs off when they overflow.

    With ``hysteresis=1`` this is the algorithm of torch.amp.GradScaler; hysteresis works as in
    DeepSpeed and Megatron::

        finite:      growth_tracker += 1
                     if growth_tracker == growth_interval:
                         loss_scale = min(loss_scale * growth_factor, max_scale)
                         growth_tracker, hysteresis_tracker = 0, hysteresis
        non-finite:  growth_tracker = 0
                     hysteresis_tracker = max(hysteresis_tracker - 1, 0)
                     if hysteresis_tracker == 0:
                         loss_scale = max(loss_scale * backoff_factor, min_scale)

    Args:
        init_scale: The initial scale.
        growth_factor: The factor by which the scale grows; more than 1.
        backoff_factor: The factor by which the scale backs off after an overflow; between 0 and 1.
        growth_interval: The number of finite steps in a row after which the scale grows.
        hysteresis: The number of overflows since the last growth after which the scale backs off.
        min_scale: The least scale; may be less than 1.
        max_scale: The largest scale.
        loss_scale: The current scale, a float32 scalar; ``init_scale`` if None.
        growth_tracker: The number of finite steps in a row so far, an int32 scalar; 0 if None.
        hysteresis_tracker: The number of overflows left until the scale backs off, an int32 scalar;
            ``hysteresis`` if None.

    Raises:
        ValueError: If a setting is invalid; the message says why.

    Example:
        >>> import mpjax
        >>> scale = mpjax.DynamicLossScale(init_scale=2.0**10)
        >>> float(scale.adjust(False).loss_scale)
        512.0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    _: dataclasses.KW_ONLY
    loss_scale: jax.Array = _UNSET
    growth_tracker: jax.Array = _UNSET
    hysteresis_tracker: jax.Array = _UNSET

    __repr__ = outline

    def __post_init__(self):
        for name in ("init_scale", "min_scale", "max_scale"):
            object.__setattr__(self, name, _check_scale(name, getattr(self, name)))
        for name in ("growth_factor", "backoff_factor"):
            object.__setattr__(self, name, _check_number(name, getattr(self, name)))
        for name in ("growth_interval", "hysteresis"):
            object.__setattr__(self, name, errors.check_count(name, getattr(self, name)))
        self._check_settings()
        fresh = {
            "loss_scale": (self.init_scale, jnp.float32),
            "growth_tracker": (0, jnp.int32),
            "hysteresis_tracker": (self.hysteresis, jnp.int32),
        }
        for name, (value, dtype) in fresh.items():
            entry = getattr(self, name)
            if entry is not None and not errors.is_traced(entry):
                scale = dtype == jnp.float32
                _check_scale(name, entry) if scale else errors.check_count(name, entry, 0)
            # Without weak types, as a step returns them: else it would compile twice.
            object.__setattr__(self, name, jnp.asarray(value if entry is None else entry, dtype))

    def _check_settings(self) -> None:
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"init_scale={self.init_scale!r} must be between min_scale={self.min_scale!r} and "
                f"max_scale={self.max_scale!r}, or the first adjustment would jump."
            )
        # As the device sees it: 1 + 1e-9 is 1 in float32.
        if np.float32(self.growth_factor) <= 1:
            raise ValueError(
                f"growth_factor={self.growth_factor!r} must be more than 1, or the scale could "
                "never grow back after an overflow. 2.0 is usual; for a fixed scale use "
                "StaticLossScale."
            )
        if not 0 < np.float32(self.backoff_factor) < 1:
            raise ValueError(
                f"backoff_factor={self.backoff_factor!r} must be between 0 and 1 (both excluded), "
                "or overflows would not lower the scale. 0.5 is usual."
            )

    def scale(self, tree: T) -> T:
        """Multiplies floating and complex leaves by the scale; 16-bit leaves become float32 first.

        Args:
            tree: A loss, or any pytree.

        Returns:
            The scaled tree. Float16 and bfloat16 leaves have become float32.
        """
        return _times(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides floating and complex leaves by the scale; 16-bit leaves become float32 first.

        Call it before ``adjust``, so that gradients are divided by the scale that the loss was
        multiplied by.

        Args:
            tree: Gradients of the scaled loss.

        Returns:
            The unscaled tree. Float16 and bfloat16 leaves have become float32.
        """
        return _times(tree, self.loss_scale, divide=True)

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Returns the loss scale for the next step.

        Args:
            grads_finite: Whether all gradients of this step were finite, a bool scalar.

        Returns:
            A `DynamicLossScale` with the same settings.

        Raises:
            ValueError: If ``grads_finite`` is not a single bool.
        """
        if not is_one_bool(grads_finite):
            raise ValueError(
                f"grads_finite={errors.brief(grads_finite)} must be a single bool for all "
                "gradients, such as mpjax.all_finite(grads)."
            )
        counted = self.growth_tracker + 1
        grow = jnp.logical_and(grads_finite, counted >= self.growth_interval)
        spent = jnp.maximum(self.hysteresis_tracker - 1, 0)
        back_off = jnp.logical_and(jnp.logical_not(grads_finite), spent == 0)

        # A product beyond float32 is infinity, and its minimum with the limit is the limit.
        grown = jnp.minimum(self.loss_scale * self.growth_factor, self.max_scale)
        shrunk = jnp.maximum(self.loss_scale * self.backoff_factor, self.min_scale)
        left = jnp.where(grads_finite, self.hysteresis_tracker, spent)
        keep_counting = jnp.logical_and(grads_finite, jnp.logical_not(grow))
        leaves = (
            jnp.where(grow, grown, jnp.where(back_off, shrunk, self.loss_scale)),
            jnp.where(keep_counting, counted, 0),
            jnp.where(grow, self.hysteresis, left),
        )
        # Not by the class: its checks read values, which a jitted step does not have.
        return jax.tree.unflatten(jax.tree.structure(self), leaves)


SCALES = (NoOpLossScale, StaticLossScale, DynamicLossScale)


def smallest(scales: Sequence[LossScale]) -> LossScale:
    """Returns the loss scale of a gradient that several optimizers share: their smallest.

    Those of optimizers that need none have no say.
    """
    speak = [scale for scale in scales if not isinstance(scale, NoOpLossScale)] or scales[:1]
    if len(speak) == 1:
        return speak[0]
    return StaticLossScale(functools.reduce(jnp.minimum, [x.loss_scale for x in speak]))


def adjust_shared(scale: LossScale, grads_finite: Any, used: LossScale) -> LossScale:
    """Returns a loss scale for the next step, after a gradient was scaled by another one.

    An overflow at the scale that was used is one at every larger scale too, so a scale backs off
    from there. It grows at most one step beyond it, where it waits for the others.
    """
    if scale is used or not isinstance(scale, DynamicLossScale):
        return scale.adjust(grads_finite)

    def at(scale, value):
        # The scale is the first leaf, as `pytree_of` registered it.
        leaves = jnp.maximum(value, scale.min_scale), *jax.tree.leaves(scale)[1:]
        return jax.tree.unflatten(jax.tree.structure(scale), leaves)

    lowest = jnp.minimum(scale.loss_scale, used.loss_scale)
    begun = at(scale, jnp.where(grads_finite, scale.loss_scale, lowest))
    new = begun.adjust(grads_finite)
    return at(new, jnp.minimum(new.loss_scale, used.loss_scale * scale.growth_factor))


def get_loss_scale(
    policy: "PolicyLike", loss_scale: LossScale | str | float | None = "auto"
) -> LossScale:
    """Returns what `resolve_loss_scale` does; "auto" is dynamic if the policy needs it.

    It does if it computes in float16, whose range is narrow.
    """
    return resolve_loss_scale(loss_scale, get_policy(policy).needs_loss_scaling)


def _class_of_jmp(loss_scale: Any) -> type | None:
    """Returns the class of jmp that does what a loss scale does, or None."""
    cls: Any = type(loss_scale)
    cls = cls.__base__ if cls.__module__ == "mpjax.jmp" else cls
    # Not by isinstance: a subclass may adjust otherwise, and is used as it is.
    known = (jmp.NoOpLossScale, jmp.StaticLossScale, jmp.DynamicLossScale)
    return cls if cls in known else None


def _of_jmp(loss_scale: Any, cls: type) -> LossScale:
    """Returns the loss scale of ours that does what one of a class of jmp does."""
    if cls is jmp.NoOpLossScale:
        return NoOpLossScale()
    if cls is jmp.StaticLossScale:
        return StaticLossScale(loss_scale.loss_scale)
    scale = _check_scale("loss_scale", loss_scale.loss_scale)
    return DynamicLossScale(
        init_scale=scale,
        growth_factor=float(loss_scale.factor),
        backoff_factor=1 / float(loss_scale.factor),
        growth_interval=int(loss_scale.period),
        # jmp permits a scale below its minimum. Here the first scale has to be within the limits.
        min_scale=min(scale, float(loss_scale.min_loss_scale)),
        max_scale=2.0**126,  # jmp has no limit: the largest valid scale
        growth_tracker=loss_scale.counter,
    )


def _check_registered(loss_scale: Any) -> None:
    if jax.tree.leaves(loss_scale) == [loss_scale]:
        raise ValueError(
            f"loss_scale={errors.brief(loss_scale)} is not registered as a pytree, so it cannot be "
            "part of the state of a jitted step. Decorate its class with "
            "jax.tree_util.register_dataclass or register_pytree_node_class; a subclass of a "
            "registered class must be registered too."
        )


def resolve_loss_scale(loss_scale: LossScale, scaling_needed: bool) -> LossScale:
    """Returns the loss scale object for a user's ``loss_scale`` argument.

    Args:
        loss_scale: "auto", "dynamic", None or "none", a number (a static scale), an instance of one
            of the classes above or of jmp's, or a pytree with their protocol. Those of jmp are
            translated: its static scale cannot be a leaf of a jitted state, and its dynamic scale
            loses its minimum there.
        scaling_needed: Whether "auto" means a dynamic scale.

    Raises:
        ValueError: If ``loss_scale`` is none of these.
    """
    if isinstance(loss_scale, str) or loss_scale is None:
        name = str(loss_scale).lower()
        names = {
            "auto": DynamicLossScale if scaling_needed else NoOpLossScale,
            "dynamic": DynamicLossScale,
            "none": NoOpLossScale,
        }
        if name in names:
            return names[name]()
    elif cls := _class_of_jmp(loss_scale):
        return _of_jmp(loss_scale, cls)
    elif errors.is_number(loss_scale):
        return StaticLossScale(jnp.float32(_check_scale("loss_scale", loss_scale)))
    elif has_protocol(loss_scale):
        _check_registered(loss_scale)
        return loss_scale
    raise ValueError(
        f"Unknown loss_scale={errors.brief(loss_scale)}. Choose one of 'auto' (dynamic for float16 "
        "compute, none otherwise), 'dynamic', 'none', a number such as 128.0, or an object such as "
        "mpjax.DynamicLossScale()."
        f"{errors.did_you_mean(loss_scale, ['auto', 'dynamic', 'none'])}"
    )


def has_protocol(loss_scale: Any) -> bool:
    """Returns whether an object, not a class, has the methods of a loss scale.

    No property is run: this is asked of each node of a user's trees, as of a distribution's scale.
    """
    protocol = ("scale", "unscale", "adjust", "loss_scale")
    found = (inspect.getattr_static(loss_scale, name, None) is not None for name in protocol)
    return not isinstance(loss_scale, type) and all(found)


def _check_number(name: str, value: Any) -> float:
    """Returns a finite number as a float."""
    errors.refuse_traced(name, value)
    if not errors.is_number(value):
        raise ValueError(f"{name}={errors.brief(value)} must be one number.")
    number = errors.as_float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}={errors.brief(value)} must be finite when converted to a float.")
    return number


def _check_scale(name: str, value: Any) -> float:
    """Returns a valid scale as a float: positive, and a normal float32 like its reciprocal."""
    number = _check_number(name, value)
    if number <= 0:
        raise ValueError(
            f"{name}={errors.brief(value)} must be positive: a scale of 0 makes every gradient 0, "
            "and a negative scale reverses every gradient."
        )
    if min(number, 1 / number) < _TINY:
        raise ValueError(
            f"{name}={errors.brief(value)} must be between 2**-126 and 2**126, so that it and its "
            "reciprocal are normal float32 numbers. Outside of that range unscaling turns every "
            "gradient into 0 or infinity."
        )
    return number

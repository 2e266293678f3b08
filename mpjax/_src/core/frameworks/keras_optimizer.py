"""The optimizer of Keras models under `mixed_precision`: it skips steps and has a loss scale."""

import contextvars
import dataclasses
import operator
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads this once, when it is imported
try:
    import keras
except ImportError as error:
    raise ImportError("mpjax.keras needs Keras 3: pip install 'mpjax[keras]'.") from error

from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.errors import brief
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import all_finite
from mpjax._src.core.training.loss_scale import (
    SCALES,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    resolve_loss_scale,
)
from mpjax._src.core.training.transaction import adjusted, counted, gated

SCALE_IT = (
    "In the loss function, after the model, write: loss = optimizer.scale_loss(loss, "
    "optimizer_variables), with optimizer = mpjax.keras.LossScaleOptimizer(...)."
)


@dataclasses.dataclass
class Step:
    """A step of `fit`, `evaluate` or `predict`, while it runs or is traced."""

    done: set[str]  # what this step or an earlier one has done, as jitted parts are traced once
    optimizer: Any = None
    scale: LossScale = None  # None if it changes nothing
    inside: bool = False  # whether it is in a planned function that applies the scale


STEP: contextvars.ContextVar[Step | None] = contextvars.ContextVar("STEP", default=None)


@public("mpjax.keras")
@keras.saving.register_keras_serializable("mpjax")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Keras's ``LossScaleOptimizer`` with a loss scale of mpjax.

    A step with non-finite gradients changes only the loss scale and the counters
    ``skipped_steps`` and ``consecutive_skips``, which are Keras variables. In your own loop, call
    ``scale_loss``. In the steps of `mixed_precision` it changes nothing: their gradients are scaled
    inside the model only.

    Args:
        inner_optimizer: Any Keras optimizer.
        loss_scale: A loss scale object, a number, "dynamic", or "none", which only skips steps.
        name: The name of the optimizer, or None.

    Raises:
        ValueError: If ``loss_scale`` is invalid.

    Example:
        >>> import mpjax.keras, keras
        >>> optimizer = mpjax.keras.LossScaleOptimizer(keras.optimizers.Adam(1e-3), 1024.0)
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> optimizer.build(model.trainable_variables)
        >>> float(optimizer.scale_loss(2.0))
        2048.0
    """

    _losses = 0  # how many losses this process has scaled

    def __init__(
        self,
        inner_optimizer: Any,
        loss_scale: LossScale | str | float | None = "dynamic",
        name: str | None = None,
    ):
        super().__init__(inner_optimizer, name=name)
        self._first = jax.tree.map(jnp.asarray, resolve_loss_scale(loss_scale, True))
        self._read = False  # whether anyone has asked for the loss scale

    def build(self, var_list: Any) -> None:
        def variable(name, value):
            return self.add_variable(
                shape=(),
                dtype=str(value.dtype),
                initializer=lambda shape, dtype: jnp.array(value, dtype),  # donated
                name=name,
            )

        zero = jnp.zeros((), jnp.int32)
        leaves = enumerate(jax.tree.leaves(self._first))
        self._scale = tuple(variable(f"loss_scale_{i}", x) for i, x in leaves)
        self.skipped_steps = variable("skipped_steps", zero)
        self.consecutive_skips = variable("consecutive_skips", zero)
        self.inner_optimizer.build(var_list)
        # Not `super().build`, which would add the variables of Keras's own loss scale.
        keras.optimizers.Optimizer.build(self, var_list)

    @property
    def loss_scale(self) -> LossScale:
        self._read = True
        return self._now()

    def _now(self, optimizer_variables: Any = None) -> LossScale:
        if optimizer_variables is not None:
            with self._reading(optimizer_variables):
                return self._now()
        if not self.built:
            return self._first
        return jax.tree.unflatten(jax.tree.structure(self._first), [v.value for v in self._scale])

    @property
    def _step(self) -> "Step | None":
        """The step of `mixed_precision` around the call that updates by this optimizer."""
        step = STEP.get()
        return step if step is not None and step.optimizer is self else None

    def scale_loss(self, loss: Any, optimizer_variables: Any = None) -> Any:
        """Returns the loss multiplied by the scale, in float32.

        Args:
            loss: The loss.
            optimizer_variables: In a jitted step, the values of the optimizer's variables.

        Raises:
            ValueError: If a loss scale that changes would be a constant of a jitted step.
        """
        LossScaleOptimizer._losses += 1
        self._read = True
        loss = jnp.asarray(loss, FLOAT32)
        if self._step is not None:
            return loss
        scale = self._now(optimizer_variables)
        # A traced scale is an argument of the step, and a static one never changes.
        fixed = _traced(scale) or isinstance(scale, (NoOpLossScale, StaticLossScale))
        if not fixed and _traced(jnp.zeros(())):  # in jit, but not in an eager gradient
            raise ValueError(
                "scale_loss would read the loss scale once, while the step is traced, and miss its "
                f"later changes. {SCALE_IT}"
            )
        return scale.scale(loss)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        """Returns new trainable variables and new optimizer variables, as in Keras.

        Args:
            optimizer_variables: The values of the optimizer's variables.
            grads: The scaled gradients, one for each trainable variable.
            trainable_variables: The values of the trainable variables.

        Returns:
            A pair of lists: the new values of both. Both are unchanged in a skipped step, except
            for the loss scale and the skip counters.

        Raises:
            ValueError: If no loss has been multiplied by the loss scale, or the optimizer was built
                for other variables.
        """
        step, own = self._step, self._variables
        if len(trainable_variables) != len(self._trainable_variables):
            raise ValueError(
                f"trainable_variables has {len(trainable_variables)} variables, but {self.name} "
                f"was built for {len(self._trainable_variables)}. Call model.compile(...) after "
                "layers are frozen, unfrozen or added, or build a new optimizer for them."
            )
        scale = self._now(optimizer_variables)
        if step is not None:
            step.done.add("applied")
        elif not (self._read or isinstance(scale, NoOpLossScale)) and _traced(grads):
            raise ValueError(  # a test may scale its gradients by hand
                f"{self.name} would divide the gradients by its loss scale, but no loss has been "
                f"multiplied by it. {SCALE_IT}"
            )
        # Gradients of a step are unscaled already, also those that are new values of variables.
        change = scale.unscale if step is None else (step.scale or scale).scale
        grads = [
            g if g is None or v.overwrite_with_gradient is (step is None) else change(g)
            for g, v in zip(grads, self._trainable_variables, strict=True)
        ]
        finite = all_finite(grads)

        def applied(before):
            trained, inner = self.inner_optimizer.stateless_apply(before[1], grads, before[0])
            return list(trained), list(inner)

        inner = list(optimizer_variables[len(own) :])
        (trained, inner), good = gated(finite, applied, (list(trainable_variables), inner))
        finite = finite & good
        # Keras passes gradients alone, so whatever is non-finite counts as theirs.
        new = jax.tree.leaves(adjusted(scale, finite, True, True))
        with self._reading(optimizer_variables) as scope:
            for v, value in zip(self._scale, new, strict=True):
                v.assign(value)
            for name, value in counted(self, finite).items():
                getattr(self, name).assign(value)
        return trained, [scope.get_current_value(v) for v in own] + inner

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Updates the variables in place, outside of jit.

        Args:
            grads: The scaled gradients, one for each trainable variable.
            trainable_variables: The trainable variables; by default those of ``build``.
        """
        trained = list(trainable_variables or self._trainable_variables)
        if not self.built:
            self.build(trained)
        values = [[v.value for v in variables] for variables in (self.variables, trained)]
        new, state = self.stateless_apply(values[0], grads, values[1])
        for v, value in zip([*trained, *self.variables], [*new, *state], strict=True):
            v.assign(value)

    def _starts_at(self, scale: LossScale) -> bool:
        """Returns whether the loss scale had the same settings and value at first."""
        same = jax.tree.structure(scale) == jax.tree.structure(self._first)  # type: ignore[operator]
        return same and jax.tree.all(jax.tree.map(operator.eq, scale, self._first))

    def finite(self, optimizer_variables: Any, before: Any = None) -> jax.Array:
        """Returns whether the step that returned these optimizer variables was applied.

        Args:
            optimizer_variables: The values that the step returned.
            before: Those that it was given, if it may have updated several times, or not at all.
        """
        counter = self.consecutive_skips if before is None else self.skipped_steps
        # By identity: Keras variables compare by value.
        place = [v is counter for v in self.variables].index(True)
        return optimizer_variables[place] == (0 if before is None else before[place])

    def get_config(self) -> dict[str, Any]:
        """Returns the config that Keras saves: name, inner optimizer and initial loss scale."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, "loss_scale": self._saved_scale()}

    def _saved_scale(self) -> list[Any]:
        first = self._first
        if type(first) not in SCALES:
            raise ValueError(
                f"loss_scale={brief(first)} cannot be saved by Keras, because its class is not one "
                f"of mpjax's. Use one of {', '.join(scale.__name__ for scale in SCALES)}."
            )
        settings = {f.name: getattr(first, f.name) for f in dataclasses.fields(first)}
        return [type(first).__name__, {k: np.asarray(v).item() for k, v in settings.items()}]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns the optimizer for a config of ``get_config``."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects)
        return cls(inner, loaded_scale(*config["loss_scale"]), config["name"])

    def _reading(self, optimizer_variables: Any) -> Any:
        """Returns a scope in which the optimizer's variables have the given values."""
        mapping = list(zip(self.variables, optimizer_variables, strict=True))
        return keras.StatelessScope(state_mapping=mapping)


def _traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def loaded_scale(name: str, settings: dict[str, Any]) -> LossScale:
    kind: Any = {scale.__name__: scale for scale in SCALES}[name]
    leaves = {f.name for f in dataclasses.fields(kind) if f.metadata.get("leaf")}
    return kind(**{k: jnp.asarray(v) if k in leaves else v for k, v in settings.items()})

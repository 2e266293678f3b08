"""Keras 3 on JAX: `fit`, `evaluate` and `predict` in mixed precision, with mpjax's loss scales."""

import dataclasses
import os
import sys
import types
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

from mpjax._src.autocast.transform import autocast
from mpjax._src.base.dtypes import FLOAT32
from mpjax._src.base.errors import brief
from mpjax._src.base.public import public
from mpjax._src.base.trees import all_finite, select
from mpjax._src.policy.policy import Policy, PolicyLike
from mpjax._src.training.levels import training_policy
from mpjax._src.training.loss_scale import SCALES, LossScale, get_loss_scale, resolve_loss_scale
from mpjax._src.training.transaction import adjusted, counted, gated

COUNTERS = ("skipped_steps", "consecutive_skips")


@public("mpjax.keras")
@keras.saving.register_keras_serializable("mpjax")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Keras's ``LossScaleOptimizer`` with a loss scale of mpjax.

    A step with non-finite gradients changes only the loss scale and the counters
    ``skipped_steps`` and ``consecutive_skips``, which are Keras variables.

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

    def __init__(
        self,
        inner_optimizer: Any,
        loss_scale: LossScale | str | float | None = "dynamic",
        name: str | None = None,
    ):
        super().__init__(inner_optimizer, name=name)
        first = resolve_loss_scale(loss_scale, True)
        self._first = [jnp.asarray(leaf) for leaf in jax.tree.leaves(first)]
        self._structure = jax.tree.structure(first)

    def build(self, var_list: Any) -> None:
        def variable(name, value):
            return self.add_variable(
                shape=(),
                dtype=str(value.dtype),
                initializer=lambda shape, dtype: jnp.array(value, dtype),  # donated
                name=name,
            )

        zero = jnp.zeros((), jnp.int32)
        self._scale = tuple(variable(f"loss_scale_{i}", x) for i, x in enumerate(self._first))
        self.skipped_steps = variable("skipped_steps", zero)
        self.consecutive_skips = variable("consecutive_skips", zero)
        self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)

    @property
    def loss_scale(self) -> LossScale:
        leaves = [v.value for v in self._scale] if self.built else self._first
        return jax.tree.unflatten(self._structure, leaves)

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss multiplied by the scale, in float32."""
        return self.loss_scale.scale(jnp.asarray(loss, FLOAT32))

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
        """
        with self._reading(optimizer_variables):
            scale, own = self.loss_scale, self._variables
            grads = [
                g if g is None or v.overwrite_with_gradient else scale.unscale(g)
                for g, v in zip(grads, self._trainable_variables, strict=True)
            ]
            finite = all_finite(grads)
            counters = {name: getattr(self, name).value for name in COUNTERS}

        def applied(before):
            trained, inner = self.inner_optimizer.stateless_apply(before[1], grads, before[0])
            return list(trained), list(inner)

        inner = list(optimizer_variables[len(own) :])
        (trained, inner), good = gated(finite, applied, (list(trainable_variables), inner))
        finite = finite & good
        counts = counted(types.SimpleNamespace(**counters), finite)
        new = jax.tree.leaves(adjusted(scale, finite, True, True))
        with self._reading(optimizer_variables) as scope:
            for v, value in zip(self._scale, new, strict=True):
                v.assign(value)
            for name, value in counts.items():
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

    def finite(self, optimizer_variables: Any) -> jax.Array:
        """Returns whether the step that returned these optimizer variables was applied."""
        place = [v is self.consecutive_skips for v in self.variables].index(True)
        return optimizer_variables[place] == 0

    def get_config(self) -> dict[str, Any]:
        """Returns the config that Keras saves: name, inner optimizer and initial loss scale."""
        first = jax.tree.unflatten(self._structure, self._first)
        if not isinstance(first, SCALES):
            raise ValueError(
                f"loss_scale={brief(first)} cannot be saved by Keras, because its class is not one "
                f"of mpjax's. Use one of {', '.join(scale.__name__ for scale in SCALES)}."
            )
        settings = {f.name: getattr(first, f.name) for f in dataclasses.fields(first)}
        settings = {name: np.asarray(value).item() for name, value in settings.items()}
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        scale = [type(first).__name__, settings]
        return {"name": self.name, "inner_optimizer": inner, "loss_scale": scale}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns the optimizer for a config of ``get_config``."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects)
        name, settings = config["loss_scale"]
        kind = {scale.__name__: scale for scale in SCALES}[name]
        leaves = {f.name for f in dataclasses.fields(kind) if f.metadata.get("leaf")}
        settings = {k: jnp.asarray(v) if k in leaves else v for k, v in settings.items()}
        return cls(inner, kind(**settings), config["name"])

    def _reading(self, optimizer_variables: Any) -> Any:
        """Returns a scope in which the optimizer's variables have the given values."""
        mapping = list(zip(self.variables, optimizer_variables, strict=True))
        return keras.StatelessScope(state_mapping=mapping)


def mixed_precision(
    model: Any,
    policy: "PolicyLike" = "mixed_bfloat16",
    loss_scale: LossScale | str | float | None = "auto",
) -> Any:
    """Makes ``fit``, ``evaluate`` and ``predict`` of a Keras model run in mixed precision.

    Each step runs under `autocast`, which plans the whole step; variables stay float32. Steps with
    non-finite gradients are skipped. They leave non-trained variables (statistics, seeds)
    unchanged too.

    Args:
        model: A compiled Keras model on the JAX backend. The dtype policy of its layers must be
            float32.
        policy: A policy or its name that stores parameters in float32, such as "mixed_float16".
        loss_scale: The loss scale, as for `build_train_step`.

    Returns:
        The model. Its steps are changed in place, and its optimizer is replaced by a
        `LossScaleOptimizer`. Keras saves the optimizer with the model but not the steps, so call
        this function again after loading a model.

    Raises:
        TypeError: If ``model`` is not a Keras model.
        ValueError: If ``model`` is not compiled, has another dtype policy than float32, or does not
            run on JAX, or if another argument is invalid.

    Example:
        >>> import mpjax.keras, keras, numpy as np
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.Adam(1e-3), "mse")
        >>> model = mpjax.keras.mixed_precision(model, "mixed_float16", loss_scale=128.0)
        >>> history = model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
        >>> float(model.optimizer.loss_scale.loss_scale)
        128.0

    It replaces ``keras.config.set_dtype_policy("mixed_float16")``, which casts layer by layer.
    """
    policy = training_policy(policy)
    _check(model, policy)
    scale = get_loss_scale(policy, loss_scale)
    if not isinstance(model.optimizer, LossScaleOptimizer):
        model.optimizer = LossScaleOptimizer(model.optimizer, scale)
    # The functions that Keras differentiates, and uses to evaluate and predict.
    model.compute_loss_and_updates = autocast(model.compute_loss_and_updates, policy)
    model.predict_step = autocast(model.predict_step, policy)
    train_step = model.train_step

    def step(state, data):
        logs, new = train_step(state, data)
        trained, carried, variables, metrics = new
        finite = model.optimizer.finite(variables)
        carried = select(finite, list(carried), list(state[1]))
        return logs, (trained, carried, variables, metrics)

    compile_config = model.get_compile_config

    def config():  # otherwise Keras saves the optimizer that the model was compiled with
        return {
            **compile_config(),
            "optimizer": keras.saving.serialize_keras_object(model.optimizer),
        }

    model.train_step, model.get_compile_config = step, config
    model.train_function = model.test_function = model.predict_function = None
    return model


def _check(model: Any, policy: Policy) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"model={brief(model)} must be a Keras model. For a tree of parameters use "
            "mpjax.build_train_step."
        )
    if keras.config.backend() != "jax":
        raise ValueError(
            f"Keras runs on {keras.config.backend()!r}, but mpjax needs JAX. Set the environment "
            "variable KERAS_BACKEND=jax before keras is imported."
        )
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise ValueError(
            "model is not compiled. Call model.compile(optimizer, loss) before "
            "mpjax.keras.mixed_precision(model, ...)."
        )
    if policy.param_dtype != FLOAT32:
        raise ValueError(
            f"policy={str(policy)!r} stores parameters in {policy.param_dtype}, but the variables "
            "of a Keras model stay float32. Use a policy that stores float32, such as "
            "'mixed_float16'."
        )
    for layer in model._flatten_layers():
        own = layer.dtype_policy
        if own.compute_dtype != "float32" or own.variable_dtype != "float32":
            raise ValueError(
                f"layer {layer.name!r} has the dtype policy {own.name!r}, which casts the whole "
                "layer to 16 bits before autocast can choose a dtype for each operation. For "
                "autocast, call keras.config.set_dtype_policy('float32') before the model is "
                "built."
            )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) and not isinstance(
        model.optimizer, LossScaleOptimizer
    ):
        raise ValueError(
            "model.optimizer is Keras's LossScaleOptimizer, so the loss would be scaled twice. "
            "Compile the model with its inner optimizer."
        )

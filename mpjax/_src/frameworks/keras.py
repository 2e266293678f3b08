"""Keras 3 on JAX: `fit`, `evaluate` and `predict` in mixed precision, and a loss scale of ours."""

import dataclasses
import os
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # it reads this once, when it is imported
try:
    import keras
except ImportError as error:
    raise ImportError("mpjax.keras needs Keras 3: pip install 'mpjax[keras]'.") from error

from mpjax._src.autocast.transform import autocast
from mpjax._src.dtypes import FLOAT32
from mpjax._src.errors import brief
from mpjax._src.hardware.devices import warn_if_unfit
from mpjax._src.policy import Policy, get_policy
from mpjax._src.training.loss_scale import SCALES, LossScale, get_loss_scale, resolve_loss_scale
from mpjax._src.training.transaction import adjusted, counted, gated
from mpjax._src.trees import all_finite, select

COUNTERS = ("skipped_steps", "consecutive_skips")


@keras.saving.register_keras_serializable("mpjax")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Keras's optimizer of that name, with a loss scale of ours.

    Args:
        inner_optimizer: Any Keras optimizer.
        loss_scale: A loss scale, a number, "dynamic" or "none": then steps are skipped alone.
        name: Of the optimizer, or None.

    Example:
        >>> import mpjax.keras, keras
        >>> optimizer = mpjax.keras.LossScaleOptimizer(keras.optimizers.Adam(1e-3), 1024.0)
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> optimizer.build(model.trainable_variables)
        >>> float(optimizer.scale_loss(2.0))
        2048.0

    A step whose gradients are not finite changes nothing but the scale and the counters,
    ``skipped_steps`` and ``consecutive_skips``, which are Keras variables.
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
        """Returns the loss times the scale, in float32."""
        return self.loss_scale.scale(jnp.asarray(loss, FLOAT32))

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        """As Keras has it: new trainable variables, and new variables of the optimizer."""
        with self._reading(optimizer_variables):
            scale, own = self.loss_scale, self._variables
            grads = [
                g if g is None or v.overwrite_with_gradient else scale.unscale(g)
                for g, v in zip(grads, self._trainable_variables, strict=True)
            ]
            finite = all_finite(grads)
            counters = {name: getattr(self, name).value for name in COUNTERS}
            counts = counted(types.SimpleNamespace(**counters), finite)

        def applied(before):
            trained, inner = self.inner_optimizer.stateless_apply(before[1], grads, before[0])
            return list(trained), list(inner)

        inner = list(optimizer_variables[len(own) :])
        trained, inner = gated(finite, applied, (list(trainable_variables), inner))
        new = jax.tree.leaves(adjusted(scale, finite, True, True))
        with self._reading(optimizer_variables) as scope:
            for v, value in zip(self._scale, new, strict=True):
                v.assign(value)
            for name, value in counts.items():
                getattr(self, name).assign(value)
        return trained, [scope.get_current_value(v) for v in own] + inner

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Updates the variables themselves, outside of jit."""
        trained = list(trainable_variables or self._trainable_variables)
        if not self.built:
            self.build(trained)
        values = [[v.value for v in variables] for variables in (self.variables, trained)]
        new, state = self.stateless_apply(values[0], grads, values[1])
        for v, value in zip([*trained, *self.variables], [*new, *state], strict=True):
            v.assign(value)

    def finite(self, optimizer_variables: Any) -> jax.Array:
        """Tells whether the step that made these variables of the optimizer was applied."""
        place = [v is self.consecutive_skips for v in self.variables].index(True)
        return optimizer_variables[place] == 0

    def get_config(self) -> dict[str, Any]:
        """Returns what Keras saves: the name, the inner optimizer, and the first loss scale."""
        first = jax.tree.unflatten(self._structure, self._first)
        if not isinstance(first, SCALES):
            raise ValueError(
                f"loss_scale={brief(first)} cannot be saved by Keras: it is none of mpjax's."
            )
        settings = {f.name: getattr(first, f.name) for f in dataclasses.fields(first)}
        settings = {name: np.asarray(value).item() for name, value in settings.items()}
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        scale = [type(first).__name__, settings]
        return {"name": self.name, "inner_optimizer": inner, "loss_scale": scale}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns the optimizer that `get_config` describes."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects)
        name, settings = config["loss_scale"]
        kind = {scale.__name__: scale for scale in SCALES}[name]
        leaves = {f.name for f in dataclasses.fields(kind) if f.metadata.get("leaf")}
        settings = {k: jnp.asarray(v) if k in leaves else v for k, v in settings.items()}
        return cls(inner, kind(**settings), config["name"])

    def _reading(self, optimizer_variables: Any) -> Any:
        """Lets variables have the values of a step."""
        mapping = list(zip(self.variables, optimizer_variables, strict=True))
        return keras.StatelessScope(state_mapping=mapping)


def mixed_precision(
    model: Any,
    policy: str | jmp.Policy = "mixed_bfloat16",
    loss_scale: LossScale | str | float | None = "auto",
) -> Any:
    """Lets ``fit``, ``evaluate`` and ``predict`` of a Keras model run in mixed precision.

    Each step runs under `autocast`, which plans the whole of it; variables stay float32. A step
    whose gradients are not finite is skipped, and what the forward pass changed (statistics, seeds)
    is as before.

    Args:
        model: A compiled Keras model, on JAX, whose own dtype policy is float32.
        policy: As for `autocast`: one that stores parameters in float32, such as "mixed_float16".
        loss_scale: As for `build_train_step`.

    Returns:
        The model, changed in place: its steps, and its optimizer, a `LossScaleOptimizer`. Keras
        saves the optimizer with the model, not the steps: call this again on one that is loaded.

    Raises:
        TypeError: If ``model`` is no Keras model.
        ValueError: If it is not compiled, has a dtype policy of its own, or does not run on JAX, or
            an argument is not legal.

    Example:
        >>> import mpjax.keras, keras, numpy as np
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.Adam(1e-3), "mse")
        >>> model = mpjax.keras.mixed_precision(model, "mixed_float16", loss_scale=128.0)
        >>> history = model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
        >>> float(model.optimizer.loss_scale.loss_scale)
        128.0

    ``keras.config.set_dtype_policy("mixed_float16")``, which decides layer by layer, without it.
    """
    policy = get_policy(policy)
    warn_if_unfit(policy, stacklevel=2)
    _check(model, policy)
    scale = get_loss_scale(policy, loss_scale)
    if not isinstance(model.optimizer, LossScaleOptimizer):
        model.optimizer = LossScaleOptimizer(model.optimizer, scale)
    # What Keras differentiates, evaluates and predicts by.
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

    def config():  # else Keras saves the optimizer that the model was compiled with
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
            f"model={brief(model)} must be a Keras model. For trees of parameters there is "
            "mpjax.build_train_step."
        )
    if keras.config.backend() != "jax":
        raise ValueError(
            f"Keras runs on {keras.config.backend()!r}: set KERAS_BACKEND=jax before its import."
        )
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise ValueError(
            "model is not compiled: model.compile(optimizer, loss) comes before "
            "mpjax.keras.mixed_precision(model, ...)."
        )
    if policy.param_dtype != FLOAT32:
        raise ValueError(
            f"policy={str(policy)!r} stores parameters in {policy.param_dtype}, but Keras makes "
            "its own variables. Use one that stores float32, such as 'mixed_float16'."
        )
    for layer in model._flatten_layers():
        own = layer.dtype_policy
        if own.compute_dtype != "float32" or own.variable_dtype != "float32":
            raise ValueError(
                f"layer {layer.name!r} has the dtype policy {own.name!r}, and autocast is to "
                "decide what runs in half, operation by operation: with both, what the layer hands "
                "on is half before anything is decided. Use one of them. For autocast: "
                "keras.config.set_dtype_policy('float32') before the model is made."
            )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) and not isinstance(
        model.optimizer, LossScaleOptimizer
    ):
        raise ValueError(
            "model.optimizer is Keras's LossScaleOptimizer, so the loss would be scaled twice. "
            "Compile the model with the optimizer inside of it."
        )

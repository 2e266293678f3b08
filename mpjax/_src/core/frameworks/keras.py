"""Keras 3 on JAX: `fit`, `evaluate`, `predict` and your own steps in mixed precision."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._src.core.autocast.kernels import current_policy
from mpjax._src.core.autocast.transform import autocast
from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.errors import brief
from mpjax._src.core.base.trees import is_array, select
from mpjax._src.core.frameworks.keras_optimizer import (
    SCALE_IT,
    STEP,
    LossScaleOptimizer,
    Step,
    keras,
    loaded_scale,
)
from mpjax._src.core.policy.policy import Policy, PolicyLike
from mpjax._src.core.training.levels import training_policy
from mpjax._src.core.training.loss_scale import LossScale, NoOpLossScale, get_loss_scale

BY_HAND = (
    "leave out mixed_precision: wrap each optimizer in mpjax.keras.LossScaleOptimizer, "
    f"differentiate mpjax.autocast(loss_function, policy), and scale the loss. {SCALE_IT}"
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turned(change: Any, x: Any, scale: Any) -> Any:
    """Returns ``x``, whose cotangent becomes ``change(scale, cotangent)``."""
    return x


def _refuse(_: Any, grad: Any) -> Any:
    raise ValueError(
        "The train step differentiates a gradient of the model, such as a gradient penalty. Its "
        f"loss must be scaled as a whole. Use 'mixed_bfloat16', or {BY_HAND}"
    )


_turned.defvjp(
    lambda change, x, scale: (x, scale),
    # The derivative of a gradient would meet the scale once more, so its backward pass refuses.
    lambda change, scale, grad: (_turned(_refuse, change(scale, grad), ()), None),
)


def _turned_tree(change: Any, tree: Any, scale: Any) -> Any:
    def turned(x):
        # Integers, such as seeds, have no cotangent.
        inexact = is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
        return _turned(change, x, scale) if inexact else x

    return jax.tree.map(turned, tree)


class _Hooks:
    """What `mixed_precision` puts around the methods of a model.

    Functions of the model run under autocast. In a train step, the loss scale is applied where the
    backward pass enters such a function, and removed where it leaves it: all other code of the
    step, Keras's or the user's, sees unscaled gradients.
    """

    def __init__(self, model: Any, policy: Policy, loss_scale: LossScale | str | float | None):
        self.model, self.policy, self.loss_scale = model, policy, loss_scale
        self.needs_scale = not isinstance(get_loss_scale(policy, loss_scale), NoOpLossScale)

    def attach(self) -> None:
        model = self.model
        for layer in model._flatten_layers(include_self=False):
            # A model inside of this one to which mixed_precision was applied keeps its own policy.
            if getattr(vars(layer).get("stateless_call"), "model", None) is not layer:
                self.replace(layer, "stateless_call", self.planned)
        for name, make in (
            ("stateless_call", self.planned),
            ("compute_loss_and_updates", self.planned),
            ("train_step", self.train_step),
            ("test_step", self.step),
            ("predict_step", self.step),
            ("compile", self.compile),
            ("get_compile_config", self.config),
        ):
            self.replace(model, name, make)
        # Keras caches its compiled steps, which would run without the hooks.
        model.train_function = model.test_function = model.predict_function = None
        if getattr(model, "optimizer", None) is not None:
            self.wrap_optimizer()

    def replace(self, layer: Any, name: str, make: Any) -> None:
        plain = getattr(layer, name)
        # Applied a second time, mixed_precision replaces its first hooks instead of wrapping them.
        plain = getattr(plain, "plain", plain)
        hook: Any = functools.wraps(plain)(make(layer, plain))
        hook.plain, hook.model = plain, self.model
        setattr(layer, name, hook)

    def wrap_optimizer(self) -> None:
        """Keeps a loss scale that fits, with its state, so that training continues."""
        model, inner = self.model, self.model.optimizer
        scale = get_loss_scale(self.policy, self.loss_scale)
        if isinstance(inner, LossScaleOptimizer):
            has_one = not isinstance(inner._now(), NoOpLossScale)
            either = self.loss_scale == "auto" and (has_one or not self.needs_scale)
            if either or inner._starts_at(scale):
                return
            inner = inner.inner_optimizer
        model.optimizer = LossScaleOptimizer(inner, scale)
        if inner.built:
            model.optimizer.build(inner._trainable_variables)

    def planned(self, layer: Any, plain: Any) -> Any:
        run = autocast(plain, self.policy)

        def call(*args, **kwargs):
            step: Any = STEP.get()
            scale = None if step is None else step.scale
            if step is not None:
                step.done.add("planned")
            if current_policy() is not None:  # a part of another planned function
                if scale is not None and not step.inside:
                    raise ValueError(
                        "The train step calls mpjax.autocast, whose gradients have no loss scale "
                        f"there. Call self.stateless_call without it, or {BY_HAND}"
                    )
                return plain(*args, **kwargs)
            # A layer that is called by itself, outside of a step, runs as Keras runs it.
            if step is None and layer is not self.model:
                return plain(*args, **kwargs)
            if scale is None:
                out = run(*args, **kwargs)
                return _turned_tree(self.check(), out, ()) if self.needs_scale else out
            # The backward pass runs the other way: it enters at the results, where cotangents are
            # scaled, and leaves at the arguments, where they are unscaled.
            args, kwargs = _turned_tree(type(scale).unscale, (args, kwargs), scale)
            step.inside = True
            try:
                out = run(*args, **kwargs)
            finally:
                step.inside = False
            return _turned_tree(type(scale).scale, out, scale)

        return call

    def check(self) -> Any:
        """Returns a function of the backward pass that fails if no loss is scaled from now on."""
        # A loop may scale its loss after the model has run, but before the backward pass enters it.
        before = LossScaleOptimizer._losses

        def check(_, grad):
            if LossScaleOptimizer._losses == before:
                raise ValueError(
                    f"A gradient of model {self.model.name!r} is computed in "
                    f"{self.policy.compute_dtype.name} without a loss scale, so small values "
                    f"become 0. {SCALE_IT} Or pass loss_scale='none' to mixed_precision."
                )
            return grad

        return check

    def step(self, model: Any, plain: Any, done: set[str] | None = None) -> Any:
        done = set() if done is None else done

        def run(state, data, **options):
            token = STEP.set(Step(done, **options))
            try:
                results = plain(state, data)
            finally:
                STEP.reset(token)
            # A step that calls the model itself would train in float32, and nobody would notice.
            if "planned" not in done:
                name = f"{type(model).__name__}.{getattr(plain, '__name__', 'step')}"
                raise ValueError(
                    f"{name} calls no function that mpjax runs in "
                    f"{self.policy.compute_dtype.name}: neither stateless_call of the model or of "
                    "a layer, nor self.compute_loss_and_updates. Instead of self(x), write: "
                    "y, non_trainable_variables = self.stateless_call(trainable_variables, "
                    "non_trainable_variables, x)."
                )
            return results

        return run

    def train_step(self, model: Any, plain: Any) -> Any:
        done: set[str] = set()
        run = self.step(model, plain, done)

        def train_step(state, data):
            optimizer = model.optimizer
            self.check_optimizers(len(state[2]))
            scale = optimizer._now(state[2])
            scale = None if isinstance(scale, NoOpLossScale) else scale
            logs, new = run(state, data, optimizer=optimizer, scale=scale)
            self.check_optimizers(len(new[2]), "applied" in done)
            trained, carried, variables, metrics = new
            # The optimizer has restored what it trains. Statistics and seeds are the model's.
            finite = optimizer.finite(variables, state[2])
            carried = select(finite, list(carried), list(state[1]))
            return logs, (trained, carried, variables, metrics)

        return train_step

    def check_optimizers(self, count: int, applied: bool = True) -> None:
        model = self.model
        if not isinstance(model.optimizer, LossScaleOptimizer):
            raise ValueError(
                f"The optimizer of model {model.name!r} was replaced after mixed_precision. Call "
                "model.compile(optimizer, ...), or mpjax.keras.mixed_precision(model, ...) again."
            )
        others = [
            f"self.{name}"
            for name, value in vars(model).items()
            if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer
        ]
        if others or not applied or count != len(model.optimizer.variables):
            but = f", not by {', '.join(others)}" if others else ""
            raise ValueError(
                f"{type(model).__name__}.train_step must update by self.optimizer.stateless_apply"
                f"{but}. For several optimizers, {BY_HAND}"
            )

    def compile(self, model: Any, plain: Any) -> Any:
        def compile(*args, **kwargs):
            plain(*args, **kwargs)
            mixed_precision(model, self.policy, self.loss_scale)

        return compile

    def config(self, model: Any, plain: Any) -> Any:
        """Keras ignores what it does not know: without mpjax, the file is one of the model."""

        def config():
            config = plain()
            if model.compiled and isinstance(model.optimizer, LossScaleOptimizer):
                inner = model.optimizer.inner_optimizer
                saved = [str(self.policy), model.optimizer._saved_scale(), inner.name]
                optimizer = keras.saving.serialize_keras_object(inner)
                # Keras warns by this name where it cannot load the optimizer's state.
                optimizer = _renamed(optimizer, f"{inner.name}-import_mpjax.keras_before_loading")
                config = {**config, "optimizer": {**optimizer, "mpjax": saved}}
            return config

        return config


def mixed_precision(
    model: Any,
    policy: "PolicyLike" = "mixed_bfloat16",
    loss_scale: LossScale | str | float | None = "auto",
) -> Any:
    """Makes ``fit``, ``evaluate`` and ``predict`` of a Keras model run in mixed precision.

    ``compute_loss_and_updates`` and ``stateless_call`` of the model run under `autocast`, also
    where your own ``train_step``, ``test_step``, ``predict_step`` or loop calls them; in a step,
    ``stateless_call`` of its layers too. Variables stay float32. Steps with non-finite gradients
    are skipped. They leave non-trained variables (statistics, seeds) unchanged too. ``model(x)``
    by itself stays float32.

    Args:
        model: A Keras model on the JAX backend, compiled or not. The dtype policy of its layers
            must be float32.
        policy: A policy or its name that stores parameters in float32, such as "mixed_float16".
        loss_scale: The loss scale, as for `build_train_step`.

    Returns:
        The model, changed in place. Its optimizer is replaced by a `LossScaleOptimizer`, also when
        it is compiled again. Keras saves the policy with how the model is compiled, and restores
        both where ``mpjax.keras`` is imported. Copies that are not compiled (``from_config``,
        ``load_model(compile=False)``) have no policy.

    Raises:
        TypeError: If ``model`` is not a Keras model.
        ValueError: If ``model`` has another dtype policy than float32, or does not run on JAX, or
            if another argument is invalid. When it trains: if its own ``train_step`` calls no
            function that runs under autocast, or updates by another optimizer; or if your own loop
            differentiates it in float16 without a loss scale, or differentiates a gradient.

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
    _Hooks(model, policy, loss_scale).attach()
    return model


def _renamed(optimizer: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config of an optimizer with another name, which is in Keras's warnings."""
    config = optimizer["config"]
    return {**optimizer, "config": {**config, "name": name}} if "name" in config else optimizer


_compile_from_config = keras.Model.compile_from_config


@functools.wraps(_compile_from_config)
def _restore(self: Any, config: dict[str, Any]) -> None:
    optimizer: Any = config.get("optimizer")
    saved = optimizer.get("mpjax") if isinstance(optimizer, dict) else None
    if saved is None:
        _compile_from_config(self, config)
        return
    policy, scale, name = saved
    _compile_from_config(self, {**config, "optimizer": _renamed(optimizer, name)})
    mixed_precision(self, policy, loaded_scale(*scale))


# Keras has no other way to change a model of any class that it loads or clones.
keras.Model.compile_from_config = _restore


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
    if keras.config.is_nnx_enabled():
        raise ValueError(
            "Keras runs its models as Flax NNX modules, so it does not call the steps that mpjax "
            "changes. Unset the environment variable KERAS_NNX_ENABLED."
        )
    if policy.param_dtype != FLOAT32:
        raise ValueError(
            f"policy={str(policy)!r} stores parameters in {policy.param_dtype}, but the variables "
            "of a Keras model stay float32. Use a policy that stores float32, such as "
            "'mixed_float16'."
        )
    for layer in model._flatten_layers():
        own = layer.dtype_policy
        if {own.compute_dtype, own.variable_dtype} & {"float16", "bfloat16", "float64"}:
            raise ValueError(
                f"layer {layer.name!r} has the dtype policy {own.name!r}, which casts the whole "
                "layer before autocast can choose a dtype for each operation. For autocast, create "
                f"the layer with dtype='float32'. If {own.name!r} comes from "
                "keras.config.set_dtype_policy, set 'float32' there instead."
            )
    optimizer, theirs = getattr(model, "optimizer", None), keras.optimizers.LossScaleOptimizer
    if isinstance(optimizer, theirs) and not isinstance(optimizer, LossScaleOptimizer):
        raise ValueError(
            "model.optimizer is Keras's LossScaleOptimizer, so the loss would be scaled twice. "
            "Compile the model with its inner optimizer."
        )

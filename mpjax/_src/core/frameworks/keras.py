"""Keras 3 on JAX: `fit`, `evaluate`, `predict` and your own steps in mixed precision."""

import contextvars
import dataclasses
import functools
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

from mpjax._src.core.autocast.kernels import current_policy
from mpjax._src.core.autocast.transform import autocast
from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.errors import brief
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import all_finite, is_array, select
from mpjax._src.core.policy.policy import Policy, PolicyLike
from mpjax._src.core.training.levels import training_policy
from mpjax._src.core.training.loss_scale import (
    SCALES,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    get_loss_scale,
    resolve_loss_scale,
)
from mpjax._src.core.training.transaction import Verdict, adjusted, counted, gated

# ---- the optimizer: it skips steps and has a loss scale ------------------------------------------

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
        new = jax.tree.leaves(adjusted(scale, Verdict(finite, True, True)))
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


# ---- the model ----------------------------------------------------------------------------------

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

"""The rivals: ways to train the same model, with float32, casts by hand, other libraries or mpjax.

``RIVALS[name](make, half)`` returns ``(init, step)``. ``init(params, rest)`` returns the state that
``step(state, batch)`` trains. ``make(dtype=None)`` is a model of `models.MODELS` with its sizes
given, and ``half`` is the name of the half dtype.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale

import mpjax
from benchmarks import gates
from benchmarks.models import MODELS, strictly, training_step


class Program(NamedTuple):
    """The functions with which a rival trains a model, and the model's abstract arrays."""

    init: Any
    step: Any
    params: Any
    rest: Any
    batch: Any

    @property
    def state(self):
        """The abstract state of the step."""
        return jax.eval_shape(self.init, self.params, self.rest)


def program(model: str, rival: str, half: str, **sizes) -> Program:
    """Returns the `Program` of a rival for a model."""
    make = functools.partial(MODELS[model], **sizes)
    _, params, rest, batch, _ = make()
    return Program(*RIVALS[rival](make, half), params, rest, batch)


def lacks(rival: str) -> str | None:
    """Returns the reason why a rival cannot run here, or None if it can."""
    try:
        mpjax.get_policy(f"mixed_bfloat16{LADDER.get(rival, '')}")
    except ValueError as error:
        return str(error).splitlines()[0]
    module = NEEDS.get(rival)
    return f"{module} is not installed" if module and not importlib.util.find_spec(module) else None


# ---- the rivals ----------------------------------------------------------------------------------


def plainly(loss, optimizer):
    return lambda params, rest: (params, rest, optimizer.init(params)), training_step(
        loss, optimizer
    )


def float32(make, half):
    loss, *_, optimizer = make()
    return plainly(loss, optimizer)


def by_hand(make, half, **arguments):
    loss, *_, optimizer = make(dtype=jnp.dtype(half), **arguments)
    return plainly(loss, optimizer)


def by_hand_strictly(make, half):
    """Casts by hand with nothing in float32 but statistics, recurrences, and the loss."""
    loss, *_, optimizer = make(dtype=jnp.dtype(half))
    return plainly(strictly(loss), optimizer)


def with_jmp(make, half):
    """Casts parameters and inputs once, at the model's boundary."""
    loss, *_, optimizer = make()
    policy = jmp.get_policy(f"params=float32,compute={half},output=float32")

    def cast(params, rest, batch):
        return loss(policy.cast_to_compute(params), rest, policy.cast_to_compute(batch))

    return plainly(cast, optimizer)


def with_mixed_precision_for_jax(make, half):
    import mpx

    loss, *_, optimizer = make()

    def cast(params, rest, batch):
        call = mpx.cast_function(lambda p, b: loss(p, rest, b), jnp.dtype(half))
        value, new = call(params, batch)
        new = jax.tree.map(lambda new, old: new.astype(old.dtype), new, rest)
        return value.astype(jnp.float32), new

    return plainly(cast, optimizer)


def with_dynamic_scale(make, half):
    """Casts by hand with flax's loss scale; steps are gated as in flax's examples."""
    loss, *_, optimizer = make(dtype=jnp.dtype(half))

    def init(params, rest):
        scale = jax.tree.map(jnp.asarray, DynamicScale())
        return params, rest, optimizer.init(params), scale

    def step(state, batch):
        params, rest, opt, scale = state
        scale, finite, (value, new_rest), grads = scale.value_and_grad(loss, has_aux=True)(
            params, rest, batch
        )
        updates, new_opt = optimizer.update(grads, opt, params)
        new = optax.apply_updates(params, updates), new_rest, new_opt
        kept = jax.tree.map(functools.partial(jnp.where, finite), new, (params, rest, opt))
        return (*kept, scale), value

    return init, step


def autocast(make, half, suffix="", **arguments):
    """mpjax's autocast. ``suffix`` is appended to the half dtype's policy."""
    loss, *_, optimizer = make(**arguments)
    return plainly(mpjax.autocast(loss, f"mixed_{half}{suffix}"), optimizer)


def whole_step(make, half, suffix=""):
    """mpjax's training step, with its loss scale and its gate."""
    loss, _, rest, _, optimizer = make()
    policy = f"mixed_{half}{suffix}"
    if jax.tree.leaves(rest):
        init, step = mpjax.build_train_step(
            lambda params, batch, model_state: loss(params, model_state, batch),
            optimizer,
            policy,
        )
    else:
        init, step = mpjax.build_train_step(
            lambda params, batch: loss(params, rest, batch)[0], optimizer, policy
        )
        return lambda params, rest: init(params), step
    return init, step


def gated_step(make, half, gate):
    """mpjax's training step with one implementation of its gate, or without a gate."""
    init, step = whole_step(make, half)
    return init, gates.spelled(step, gate)


_CHUNKED, _FUSED = ",chunked_loss=true", ",fused_attention=true"
# What rungs of the ladder of settings add to the policy, and the losses of language models that
# are no setting.
LADDER = {
    "autocast": "",
    "autocast, lean": ",storage=lean",
    "autocast, chunked loss": _CHUNKED,
    "autocast, lean, chunked loss": f",storage=lean{_CHUNKED}",
    "autocast, lean, fused attention": f",storage=lean{_FUSED}",
    "autocast, lean, chunked loss, fused attention": f",storage=lean{_CHUNKED}{_FUSED}",
    "autocast, 8bit": ",storage=8bit",
    "autocast, 8bit, chunked loss, fused attention": f",storage=8bit{_CHUNKED}{_FUSED}",
    "autocast, 0.5": ",storage=0.5",
    "autocast, 0.25": ",storage=0.25",
    "autocast, 0": ",storage=0.0",
    "autocast, 0, chunked loss, fused attention": f",storage=0.0{_CHUNKED}{_FUSED}",
    "autocast, lean, linear_cross_entropy": ",storage=lean",
    "autocast, lean, jax-cce": ",storage=lean",
}
HEADS = {"autocast, lean, linear_cross_entropy": "mpjax", "autocast, lean, jax-cce": "jax-cce"}

RIVALS = {
    "float32": float32,
    "by hand": by_hand,
    "by hand, strict": by_hand_strictly,
    "by hand, half softmax": functools.partial(by_hand, wide_softmax=False),
    "jmp": with_jmp,
    "mixed-precision-for-JAX": with_mixed_precision_for_jax,
    "flax DynamicScale": with_dynamic_scale,
    **{
        rung: functools.partial(
            autocast, suffix=suffix, **({"head": HEADS[rung]} if rung in HEADS else {})
        )
        for rung, suffix in LADDER.items()
    },
    "autocast, fused attention": functools.partial(autocast, suffix=_FUSED),
    "autocast, chunked loss, fused attention": functools.partial(
        autocast, suffix=f"{_CHUNKED}{_FUSED}"
    ),
    "build_train_step": whole_step,
    "build_train_step, fused attention": functools.partial(whole_step, suffix=_FUSED),
    **{
        f"build_train_step, {gate}": functools.partial(gated_step, gate=gate)
        for gate in gates.GATES
    },
}
NEEDS = {"mixed-precision-for-JAX": "mpx", "autocast, lean, jax-cce": "jax_cce"}

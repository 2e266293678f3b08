"""Suite "tried": changes to small kernels and known bytes, one by one, compiled for an H100.

    python -m benchmarks --suite tried [joined_updates ...]

Each case is one change, on the model where it matters: its training step is compiled without the
change and with it. Those that were kept are undone for the first row, and the others applied for
the second. A row is one of the suite `padding`, without its odd axes. Figures do not change from
run to run. Needs mpjax[aot]; minutes.
"""

import functools
import math
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks import Options
from benchmarks.aot import SETTINGS, STRICT, on_the_cpu
from benchmarks.models import MODELS, SMALL, transformers
from benchmarks.padding import FUSED, compiled
from benchmarks.results import Results, Row
from benchmarks.rivals import RIVALS
from mpjax._src.core.base import trees
from mpjax._src.core.base._jax import convolutions, stacks
from mpjax._src.core.training import replicas

__all__ = ["SETTINGS"]

WITHOUT, WITH = "without", "with"
WHOLE = "build_train_step, fused attention"


class Change(NamedTuple):
    """A change that was tried: ``patches`` undo it if it was kept, else they apply it."""

    model: str
    way: str  # the rival that trains the model
    patches: tuple[AbstractContextManager, ...]
    kept: bool = False


# ---- changes that were not kept, applied ---------------------------------------------------------


def cast_before_the_loop(*args: Any, **sizes: Any) -> Any:
    """A scanned Llama that casts the matrices of all layers before the scan."""
    loss, *others = llama(*args, **sizes)

    def cast(x):
        return x.astype(jnp.bfloat16) if x.ndim > 2 else x

    def changed(params, rest, batch):
        return loss({**params, "layers": jax.tree.map(cast, params["layers"])}, rest, batch)

    return changed, *others


class Biased(nn.Module):
    """A bias and GELU, of which the backward pass reads the input before its bias."""

    @nn.compact
    def __call__(self, x):
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        return jax.checkpoint(lambda x, bias: nn.gelu(x + bias))(x, bias)


def expanded(x: Any, dtype: Any) -> Any:
    return Biased()(nn.Dense(4 * x.shape[-1], use_bias=False, dtype=dtype)(x))


def with_copy(make: Any, half: str) -> Any:
    """Trains with 16-bit weights that each update writes beside the float32 ones."""
    loss, *_, optimizer = make()
    loss = mpjax.autocast(loss, f"mixed_{half},fused_attention=true")

    def copied(params):
        return jax.tree.map(lambda x: x.astype(half) if x.ndim > 1 else x, params)

    def init(params, rest):
        return params, copied(params), rest, optimizer.init(params)

    def step(state, batch):
        params, copy, rest, opt = state
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(copy, rest, batch)
        grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        updates, opt = optimizer.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        return (params, copied(params), rest, opt), value

    return init, step


def rounded(logits: Any, labels: Any) -> Any:
    """A float32 cross entropy of logits that are rounded to 16 bits."""
    return cross_entropy(logits.astype(jnp.bfloat16).astype(jnp.float32), labels)


llama, cross_entropy = MODELS["llama"], optax.softmax_cross_entropy_with_integer_labels
patch, patched = mock.patch.object, mock.patch.dict
apart = functools.partial(map, lambda leaf: [leaf])
alone = tuple(patch(module, "reduced_together", apart) for module in (trees, replicas))
divided = patch(stacks, "may_be_partitioned", lambda ctx: True)
before = patched(MODELS, llama=cast_before_the_loop)
half_logits = patch(optax, cross_entropy.__name__, rounded)
CHANGES = {
    "joined_updates": Change("gpt2", WHOLE, (patch(trees, "SEVERAL", math.inf),), True),
    "joined_sums": Change("gpt2", WHOLE, alone, True),
    "gradients_of_convolutions": Change(
        "resnet50", "autocast", (patch(convolutions, "row_major", lambda x: x),), True
    ),
    "empty_stacks": Change("llama", FUSED, (divided,), True),
    "cast_before_the_loop": Change("llama", FUSED, (before,)),
    "cast_before_the_loop_by_hand": Change("llama", STRICT, (before,)),
    "gelu_before_its_bias": Change("gpt2", FUSED, (patch(transformers, "expanded", expanded),)),
    "copy_of_weights": Change("gpt2", FUSED, (patched(RIVALS, {FUSED: with_copy}),)),
    "half_logits": Change("llama", FUSED, (half_logits,)),
    "half_logits_odd": Change("gpt2", FUSED, (half_logits,)),
}
CASES = tuple(CHANGES)


def run(options: Options, results: Results) -> None:
    """Compiles the programs that have no row yet."""
    on_the_cpu()
    unchanged: dict[tuple[str, str], Row] = {}  # each program is compiled once
    for case in options.cases:
        change = CHANGES[case]
        sizes, key = SMALL[change.model] if options.smoke else {}, (change.model, change.way)
        for name in (WITHOUT, WITH):
            plain = (name == WITH) == change.kept
            row = results.get(case, name) or (unchanged.get(key) if plain else None)
            row = row or compiled(*key, sizes, *(() if plain else change.patches))[0]
            if plain:
                unchanged[key] = row
            if not results.get(case, name):
                results.put(case, name, row)

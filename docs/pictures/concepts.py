"""Draws the pictures of docs/concepts.md: `python docs/pictures/concepts.py` writes concepts_*.svg.

What they show is asked of JAX and mpjax: the limits of dtypes, what a training step holds, a plan,
a histogram of gradients, bytes per weight.
"""

import collections
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from svg import BLUE, GREEN, GREY, ORANGE, RED, WIDTH, box, legend, line, picture, power, text

import mpjax

FOLDER = Path(__file__).parent
FORMATS = ("float32", "bfloat16", "float16")
OF_BITS = {16: GREEN, 32: BLUE}  # 16-bit and float32, in every picture


def bits():
    """The bits of each format: sign, exponent, mantissa."""
    parts, cell = [], WIDTH / 32
    for row, name in enumerate(FORMATS):
        info, top = jnp.finfo(name), 26 + row * 72
        fills = [GREY] + [ORANGE] * info.nexp + [BLUE] * info.nmant
        parts.append(text(0, top - 8, name, 13, weight="bold"))
        parts += [box(i * cell, top, cell - 1.5, 20, fill) for i, fill in enumerate(fills)]
        counts = f"1 sign, {info.nexp} exponent, {info.nmant} mantissa bits"
        parts.append(text(0, top + 35, counts))
    parts += legend(236, [(GREY, "sign"), (ORANGE, "exponent"), (BLUE, "mantissa")], 90)
    return picture(244, parts)


def ranges():
    """Which magnitudes each format holds, and which it holds with fewer bits."""
    first, last = math.log2(jnp.finfo("float32").smallest_subnormal), 128
    at = lambda exponent: (exponent - first) / (last - first) * WIDTH  # noqa: E731
    parts = []
    for row, name in enumerate(FORMATS):
        info, top = jnp.finfo(name), 26 + row * 76
        least = round(math.log2(float(info.smallest_subnormal)))
        normal = round(math.log2(float(info.smallest_normal)))
        end = info.maxexp
        parts.append(text(0, top - 8, name, 13, weight="bold"))
        parts.append(line(0, top + 10, WIDTH, top + 10, dashed=True))
        parts.append(box(at(least), top, at(normal) - at(least), 20, ORANGE))
        parts.append(box(at(normal), top, at(end) - at(normal), 20, OF_BITS[info.bits]))
        largest = float(info.max)
        most = f"{largest:,.0f}" if largest < 1e6 else f"{largest:.2e}"
        figures = f"{power(least)} to {most}, full precision from {power(normal)}"
        parts.append(line(at(0), top - 4, at(0), top + 24))
        parts.append(text(0, top + 36, figures))
    parts.append(text(at(0), 18, "1", anchor="middle"))
    parts += legend(244, [(ORANGE, "fewer bits"), (GREEN, "16 bits"), (BLUE, "32 bits")], 100)
    return picture(252, parts)


def spacing():
    """The numbers between 1 and the fourth bfloat16 number after it."""
    end = 1 + 4 * float(jnp.finfo("bfloat16").eps)
    left, right = 4, WIDTH - 4
    parts = []
    for row, name in enumerate(FORMATS):
        eps, top = float(jnp.finfo(name).eps), 26 + row * 66
        number = round((end - 1) / eps)
        parts.append(text(0, top - 8, name, 13, weight="bold"))
        fill = OF_BITS[jnp.finfo(name).bits]
        if number > 200:  # closer than a screen can show
            parts.append(box(left, top, right - left, 18, fill))
        else:
            places = np.linspace(left, right, number + 1)
            parts += [line(x, top, x, top + 18, stroke=fill) for x in places]
        count = f"steps of {power(round(math.log2(eps)))}: {number:,} from 1 to {end:g}"
        parts.append(text(0, top + 33, count))
    return picture(200, parts)


def held(policy):
    """Asks a training step under a policy which dtype each thing has; None where there is none."""
    seen = {}

    def spy(updates, state, params=None):
        seen["gradients"] = updates["dense"].dtype
        return updates, state

    def loss_fn(params, batch, model_state):
        h = batch @ params["dense"]
        mean = h.mean(0)
        h = jax.nn.gelu((h - mean) * params["norm"])
        scores = jax.nn.log_softmax(h @ params["dense"])
        return -scores[:, 0].mean().astype(jnp.float32), {"mean": mean.astype(jnp.float32)}

    params, batch = {"dense": jnp.ones((32, 32)), "norm": jnp.ones(32)}, jnp.ones((64, 32))
    statistics = {"mean": jnp.zeros(32)}
    optimizer = optax.chain(optax.GradientTransformation(lambda _: (), spy), optax.adam(1e-3))
    policy = mpjax.get_policy(policy)
    init, step = mpjax.build_train_step(loss_fn, optimizer, policy)
    state = init(params, model_state=statistics)
    program = str(jax.make_jaxpr(step)(state, batch))
    # The dtype of the softmax's exponential, as JAX prints it: "y:f32[64,32] = exp x".
    exponential = program.split("= exp ")[0].rsplit(":", 1)[1].split("[")[0]

    def residuals(params, batch):
        run = mpjax.autocast(loss_fn, policy)
        if policy.casting == "boundary":
            run, params, batch = loss_fn, *policy.cast_to_compute((params, batch))
        return jax.vjp(lambda *args: run(*args, statistics)[0], params, batch)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, params, batch))
    floats = [x.dtype for x in kept if x.shape == (64, 32) and jnp.issubdtype(x.dtype, np.floating)]
    masters = getattr(state.opt_state, "masters", None) or {}
    scaled = not isinstance(state.loss_scale, mpjax.NoOpLossScale)
    dtypes = {
        "weights": state.params["dense"].dtype,
        "norm layers' weights": state.params["norm"].dtype,
        "matmuls read": policy.compute_dtype,
        "norm, softmax, loss": {"f32": "float32", "f16": "float16"}[exponential],
        "kept for backward": collections.Counter(floats).most_common(1)[0][0],
        "gradients": seen["gradients"],
        "master weights": masters["dense"].dtype if isinstance(masters, dict) and masters else None,
        "moments": optax.tree.get(state.opt_state, "mu")["dense"].dtype,
        "batch statistics": state.model_state["mean"].dtype,
        "loss scale": state.loss_scale.loss_scale.dtype if scaled else None,
    }
    return {name: None if dtype is None else jnp.dtype(dtype) for name, dtype in dtypes.items()}


def storage():
    """Who holds what in which dtype, under five policies."""
    policies = {
        "float32": "float32",
        "mixed\nO1": "mixed_float16",
        "O2": "O2:float16",
        "O3": "O3:float16",
        "as jmp": "p=f32,c=f16,o=f32",
    }
    parts, left, step = [], 132, 46
    for column, (name, policy) in enumerate(policies.items()):
        x = left + column * step
        for i, word in enumerate(name.split("\n")):
            parts.append(text(x + 21, 12 + i * 14, word, 10.5, "middle", weight="bold"))
        for row, (thing, dtype) in enumerate(held(policy).items()):
            y = 36 + row * 26
            if column == 0:
                parts.append(text(0, y + 15, thing, 11.5))
            if dtype is None:
                parts.append(text(x + 21, y + 15, "none", 11, "middle"))
            else:
                bits = jnp.finfo(dtype).bits
                parts.append(box(x, y, 42, 22, OF_BITS[bits], f"{bits} bits", 11))
    parts += legend(316, [(BLUE, "float32"), (GREEN, "float16 or bfloat16")], 90)
    return picture(324, parts)


def step():
    """The life of one step, from the loss to the commit or the skip."""
    scale = mpjax.DynamicLossScale()
    backoff, interval = float(scale.backoff_factor), int(scale.growth_interval)
    parts, middle = [], WIDTH / 2
    stages = (
        (GREEN, "forward pass: matmuls in 16 bits,\nthe loss in float32"),
        (BLUE, "multiply the loss by the loss scale"),
        (GREEN, "backward pass, in 16 bits"),
        (BLUE, "divide the gradients by it, in float32"),
        (BLUE, "mean over micro-batches and devices"),
        (ORANGE, "loss, gradients, new model state:\nall finite?"),
    )
    for i, (fill, words) in enumerate(stages):
        parts.append(box(50, 4 + i * 58, 260, 40, fill, words, 13))
        if i:
            parts.append(line(middle, i * 58 - 13, middle, i * 58 + 2, arrow=True))
    top = 4 + len(stages) * 58 + 18
    parts.append(line(110, top - 32, 88, top - 3, arrow=True))
    parts.append(line(250, top - 32, 272, top - 3, arrow=True))
    parts.append(text(72, top - 14, "yes", 13, "end"))
    parts.append(text(288, top - 14, "no", 13))
    commit = ("commit", "new parameters", "new optimizer state", "new model state", "step + 1")
    skip = ("skip", "parameters,", "optimizer state,", "model state and step", "stay as they were")
    for x, fill, (head, *words) in ((0, GREEN, commit), (185, RED, skip)):
        parts.append(box(x, top, 175, 112, fill))
        parts.append(text(x + 87, top + 22, head, 14, "middle", "#fff", "bold"))
        for i, word in enumerate(words):
            parts.append(text(x + 87, top + 44 + i * 18, word, 13, "middle", "#fff"))
    grows = f"loss scale times {float(scale.growth_factor):g} after"
    parts.append(text(87, top + 132, grows, 12, "middle"))
    parts.append(text(87, top + 148, f"{interval:,} good steps in a row", 12, "middle"))
    parts.append(text(272, top + 132, f"loss scale times {backoff:g} if gradients", 11, "middle"))
    parts.append(text(272, top + 148, "overflowed and the loss did not", 11, "middle"))
    return picture(top + 156, parts)


def activation_gradients():
    """Counts gradients of a hidden layer's activations, for a mean over a large batch."""
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (64, 64)) / 8
    down = jax.random.normal(keys[1], (64, 64)) / 8
    x = jax.random.normal(keys[2], (65536, 64))
    labels = (jax.nn.relu(x @ up) @ down).argmax(-1)

    def loss_fn(hidden):
        logits = 16 * (jax.nn.relu(hidden) @ down)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return mpjax.debug.gradient_histogram({"hidden": jax.grad(loss_fn)(x @ up)})


def scaling():
    """The same gradients without and with a loss scale, beside what float16 holds."""
    histogram, info = activation_gradients(), jnp.finfo("float16")
    scale = float(mpjax.DynamicLossScale().loss_scale)
    shift = round(math.log2(scale))
    least = round(math.log2(float(info.smallest_subnormal)))
    normal = round(math.log2(float(info.smallest_normal)))
    first, last = -48, 20
    at = lambda exponent: (exponent - first) / (last - first) * WIDTH  # noqa: E731
    counts = histogram.numbers()[0, 1:-1]  # without zeros, without Inf and NaN
    shares, exponents = counts / counts.max(), np.arange(-149, 128)
    parts = []
    for row, (name, moved) in enumerate((("no loss scale", 0), (f"times {power(shift)}", shift))):
        base = 118 + row * 150
        of_all = histogram.rows("float16", scale=2.0**moved)[-1]
        parts.append(text(0, base - 98, name, 13, weight="bold"))
        parts.append(
            text(WIDTH, base - 98, f"{of_all.flushed:.1%} become zero", 13, "end", weight="bold")
        )
        for exponent, share in zip(exponents + moved, shares, strict=True):
            if share > 0.002 and first <= exponent < last:
                fill = RED if exponent < least else ORANGE if exponent < normal else GREEN
                width = WIDTH / (last - first) - 0.8
                parts.append(box(at(exponent), base - 85 * share, width, 85 * share, fill))
        parts.append(line(0, base, WIDTH, base))
        for exponent, anchor in ((least, "middle"), (normal, "middle"), (info.maxexp, "middle")):
            parts.append(line(at(exponent), base - 88, at(exponent), base + 4, dashed=True))
            parts.append(text(at(exponent), base + 18, power(exponent), 12, anchor))
    fills = [(RED, "zero in float16"), (ORANGE, "fewer bits"), (GREEN, "full precision")]
    parts += legend(312, fills, 122)
    return picture(320, parts)


def plan():
    """What each part of a small network runs in under autocast, and what is kept of it."""

    def network(params, x, labels):
        with jax.named_scope("layer norm"):
            centred = x - x.mean(-1, keepdims=True)
            x = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        with jax.named_scope("matmul 1"):
            x = x @ params["up"]
        with jax.named_scope("relu"):
            x = jax.nn.relu(x)
        with jax.named_scope("matmul 2"):
            x = x @ params["down"]
        with jax.named_scope("softmax and loss"):
            return -jnp.mean(jnp.sum(jax.nn.log_softmax(x) * labels, -1))

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731
    params = {"up": shape(256, 1024), "down": shape(1024, 128)}
    arguments = params, shape(512, 256), shape(512, 128)
    report = mpjax.explain(network, "mixed_bfloat16", argnums=0)(*arguments)
    rows = [row for row in report.rows if row.scope]
    scopes = list(dict.fromkeys(row.scope for row in rows))
    parts = [text(100, 12, "computes in", 13, "middle", weight="bold")]
    parts.append(text(302, 12, "keeps", 13, "middle", weight="bold"))
    for i, scope in enumerate(scopes):
        own = [row for row in rows if row.scope == scope and not row.backward]
        kept = [array for array in report.kept if report.rows[array.row].scope == scope]
        half = all(row.computes_in != "f32" for row in own)
        reads, gives = (row.after.split("->")[end] for row, end in ((own[0], 0), (own[-1], 1)))
        top = 24 + i * 62
        words = f"{scope}\n{reads} → {gives}"
        parts.append(box(10, top, 180, 42, GREEN if half else BLUE, words, 13))
        if i:
            parts.append(line(100, top - 18, 100, top - 2, arrow=True))
        if kept:
            parts.append(line(192, top + 21, 242, top + 21, arrow=True, dashed=True))
        for place, array in enumerate(kept):
            words = f"{array.dtype}, {array.bytes / 2**10:,.0f} KiB"
            parts.append(text(248, top + 25 + 16 * (place - (len(kept) - 1) / 2), words))
    before, after = (f"{n / 2**20:.1f} MiB" for n in (report.stored_before, report.stored_after))
    bottom = 24 + len(scopes) * 62 + 4
    parts.append(text(10, bottom, f"kept in all: {after}; {before} by the float32 program", 12))
    parts += legend(bottom + 24, [(BLUE, "float32"), (GREEN, "bfloat16")], 90)
    return picture(bottom + 32, parts)


def weights():
    """Bytes that a weight takes under AdamW: itself, what its master adds, its moments."""
    policies = (
        "O2:bfloat16",
        "float32",
        "mixed_bfloat16",
        "O2:bfloat16,masters=split",
        "O3:bfloat16",
        "mixed_bfloat16,moments=8bit",
        "O2:bfloat16,masters=split,moments=8bit",
        "O3:bfloat16,rounding=stochastic,moments=8bit",
    )
    params = {"kernel": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 4096**2  # noqa: E731
    parts, unit = [], 22
    for row, policy in enumerate(policies):
        init, _ = mpjax.build_train_step(lambda params, batch: 0.0, optax.adamw(1e-3), policy)
        state, top = jax.eval_shape(init, params), 20 + row * 46
        own, masters = size(state.params), size(getattr(state.opt_state, "masters", ()))
        moments = size(state.opt_state) - masters
        parts.append(text(0, top - 6, policy, 12, weight="bold"))
        x = 0
        for fill, count in ((OF_BITS[round(own * 8)], own), (ORANGE, masters), (GREY, moments)):
            parts += [box(x, top, count * unit - 1.5, 18, fill)] if count >= 1 else []
            x += count * unit
        parts.append(text(x + 4, top + 14, f"{own + masters + moments:.3g}", 13))
    fills = [(BLUE, "float32"), (GREEN, "16-bit"), (ORANGE, "master"), (GREY, "moments")]
    parts += legend(20 + len(policies) * 46, fills, 84)
    return picture(28 + len(policies) * 46, parts)


PICTURES = (bits, ranges, spacing, storage, step, scaling, plan, weights)

if __name__ == "__main__":
    for draw in PICTURES:
        (FOLDER / f"concepts_{draw.__name__}.svg").write_text(draw())

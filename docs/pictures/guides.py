"""Draws the pictures of the front page and of the guides.

python docs/pictures/guides.py

What they show comes from the code, from benchmarks/results, or from what record.py recorded.
"""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from svg import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    WIDTH,
    arc,
    box,
    code,
    curve,
    legend,
    line,
    picture,
    power,
    text,
)

import mpjax

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "benchmarks" / "results"

STEPS = {
    "float32": ("float32", GREY),
    "by hand": ("flax's dtype=", ORANGE),
    "by hand, strict": ("strict casts by hand", ORANGE),
    "autocast": ("mpjax, mixed_bfloat16", BLUE),
    "autocast, 8bit": ("mpjax, mixed_bfloat16,storage=8bit", GREEN),
}


def memory():
    """The temporary memory of a training step of GPT-2, in GiB."""
    rows = json.loads((RESULTS / "aot.json").read_text())["cases"]["h100/gpt2"]
    most = rows["float32"]["temp_mib"]
    parts = [text(0, 14, "Temporary memory of a training step, GPT-2 124M, H100", 12)]
    for i, (row, (label, fill)) in enumerate(STEPS.items()):
        top, size = 40 + 42 * i, rows[row]["temp_mib"]
        width = (WIDTH - 70) * size / most
        parts += [text(0, top - 5, label, 12, weight="bold"), box(0, top, width, 18, fill)]
        parts.append(text(width + 6, top + 14, f"{size / 1024:.1f} GiB", 13))
    return picture(40 + 42 * len(STEPS) - 14, parts)


DEVICES = (
    ("TPU, or NVIDIA\nfrom A100 on", "mixed_bfloat16"),
    ("V100 or T4", "mixed_float16"),
    ("CPU", "mpjax.recommend_policy()"),
)
NEEDS = (
    ("activations do\nnot fit", "...,storage=lean or 8bit"),
    ("optimizer state\ndoes not fit", "...,moments=8bit"),
    ("weights in 16 bits", "O2:bfloat16,masters=split"),
)


def _arrows(top, pairs, fill):
    parts = []
    for i, (asked, answer) in enumerate(pairs):
        y = top + 46 * i
        parts += [box(0, y, 118, 36, GREY, asked, 11), line(120, y + 18, 142, y + 18, arrow=True)]
        parts.append(box(145, y, WIDTH - 145, 36, fill, answer, 11.5))
    return parts


def policy():
    """From the device, and what does not fit, to the policy string."""
    parts = [text(0, 14, "Which device?", 13, weight="bold"), *_arrows(24, DEVICES, BLUE)]
    below = 24 + 46 * len(DEVICES) + 14
    parts += [text(0, below, "Does it fit? Add to the string:", 13, weight="bold")]
    return picture(below + 10 + 46 * len(NEEDS), parts + _arrows(below + 10, NEEDS, GREEN))


SYMPTOMS = (
    ("the loss is NaN\nor Inf", "find_nonfinite: the line"),
    ("steps are skipped", "metrics, then find_nonfinite"),
    ("worse than\nfloat32", "compare, debug.tune"),
    ("no faster", "explain, mpjax doctor"),
    ("out of memory", "compile_for, hardware.fit_memory"),
    ("weights do not\nchange", "report_stalled=True"),
    ("a long run may\noverflow", "watch_precision"),
    ("before training", "lint"),
)


def debug():
    """From the symptom to the tool."""
    return picture(4 + 46 * len(SYMPTOMS), _arrows(2, SYMPTOMS, BLUE))


# ---- autocast ------------------------------------------------------------------------------------

OF_DTYPE = {"f32": BLUE, "bf16": GREEN}
ADDED = '+loss_fn = mpjax.autocast(loss_fn, "mixed_bfloat16")'
AS_BEFORE = " grads = jax.grad(loss_fn)(params, batch)"
# The last of two blocks, whose input is the result of the first.
BLOCK = 1
STEPS_OF_BLOCK = {
    "norm": "layer norm",
    "qkv": "query, key, value",
    "scores": "attention scores",
    "softmax": "softmax",
    "values": "attention values",
    "out": "output projection",
    "add": "residual add",
    "norm2": "layer norm",
    "up": "up projection",
    "gelu": "gelu",
    "down": "down projection",
    "add2": "residual add",
}


def transformer(params, batch):
    """The loss of a small language model, a scope for each step of its blocks."""

    def norm(x, scale):
        centered = x - x.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * scale

    x = params["embed"][batch["tokens"]]
    for number, layer in enumerate(params["layers"]):
        name = lambda step: jax.named_scope(f"{number}/{step}")  # noqa: B023, E731
        with name("norm"):
            h = norm(x, layer["scale"])
        with name("qkv"):
            heads = (h @ layer["qkv"]).reshape(*x.shape[:2], 12, 16)
            q, k, v = jnp.split(heads, 3, axis=2)
        with name("scores"):
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4
        with name("softmax"):
            weights = jax.nn.softmax(scores)
        with name("values"):
            h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        with name("out"):
            h = h @ layer["out"]
        with name("add"):
            x = x + h
        with name("norm2"):
            h = norm(x, layer["scale2"])
        with name("up"):
            h = h @ layer["up"]
        with name("gelu"):
            h = jax.nn.gelu(h)
        with name("down"):
            h = h @ layer["down"]
        with name("add2"):
            x = x + h
    logits = norm(x, params["scale"]) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()


def block():
    """The operations of a transformer block in the dtype that they compute in."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731
    layer = {"qkv": shape(64, 192), "out": shape(64, 64), "up": shape(64, 256)}
    layer |= {"down": shape(256, 64), "scale": shape(64), "scale2": shape(64)}
    params = {"embed": shape(256, 64), "layers": [layer] * 2, "scale": shape(64)}
    tokens = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    report = mpjax.explain(transformer, "mixed_bfloat16", argnums=0)(
        params, {"tokens": tokens, "next": tokens}
    )
    parts = [code(0, 12, ADDED, 11, GREEN), code(0, 28, AS_BEFORE, 11)]
    parts.append(text(0, 54, "The operations of a transformer block", 12, weight="bold"))
    left, unit = 116, 17
    for i, (step, words) in enumerate(STEPS_OF_BLOCK.items()):
        scope, top, x = f"{BLOCK}/{step}/", 64 + 23 * i, left
        parts.append(text(0, top + 14, words, 12))
        for row in report.rows:
            if row.backward or not f"{row.scope}/".startswith(scope):
                continue
            is_matmul = row.primitive == "dot_general"
            width, label = (4 * unit, "matmul") if is_matmul else (unit, "")
            fill = OF_DTYPE[row.after.split("->")[0]]
            parts.append(box(x, top, width - 1.5, 18, fill, label, 12))
            x += width
    bottom = 64 + 23 * len(STEPS_OF_BLOCK) + 16
    parts += legend(bottom, [(BLUE, "float32"), (GREEN, "bfloat16")], left)
    matmuls = [row for row in report.rows if row.backward and row.primitive == "dot_general"]
    lower = sum(row.after.startswith("bf16") for row in matmuls)
    before, after = (f"{n / 2**20:.1f}" for n in (report.stored_before, report.stored_after))
    words = f"Backward pass: {lower} of {len(matmuls)} matmuls in bfloat16"
    parts.append(text(0, bottom + 22, words))
    parts.append(text(0, bottom + 39, f"Stored for it, two blocks: {after} MiB, not {before} MiB"))
    return picture(bottom + 46, parts)


# ---- training ------------------------------------------------------------------------------------


def recorded(name):
    return json.loads((FOLDER / "recorded" / f"{name}.json").read_text())


def run():
    """Loss, loss scale and skipped steps of a float16 run, beside the loss in float32."""
    found = recorded("run")
    wide, narrow = found["cases"]["float32"], found["cases"]["mixed_float16"]
    scales, skipped, count = narrow["loss_scale_log2"], narrow["skipped"], len(narrow["loss"])
    left = 30
    at = lambda step: left + (WIDTH - left - 4) * step / count  # noqa: E731
    parts = [text(0, 13, "Loss of a small GPT", 13, weight="bold")]
    top, bottom, low, high = 24, 130, 1.5, 6.5
    height = lambda loss: bottom - (bottom - top) * (loss - low) / (high - low)  # noqa: E731
    for loss in (2, 4, 6):
        parts += [text(left - 8, height(loss) + 4, str(loss), 12, "end")]
    parts.append(line(left, bottom, WIDTH - 4, bottom))
    for case, stroke, width in ((wide, GREY, 4.5), (narrow, GREEN, 1.5)):
        points = [(at(i), height(loss)) for i, loss in enumerate(case["loss"])]
        parts.append(curve(points, stroke, width))
    parts += [box(150, 34, 18, 4, GREY), text(174, 41, "float32")]
    parts += [box(150, 52, 18, 2, GREEN), text(174, 57, "mixed_float16")]
    parts += [line(at(step), bottom - 8, at(step), bottom, stroke=RED) for step in skipped]
    parts += [line(159, 63, 159, 73, stroke=RED), text(174, 73, f"skipped: {len(skipped)} steps")]
    growth = f"Loss scale, growth_interval={found['growth_interval']}"
    parts.append(text(0, 160, growth, 13, weight="bold"))
    top, bottom = 176, 276
    low, high = min(scales), max(scales)
    height = lambda scale: bottom - (bottom - top) * (scale - low) / (high - low)  # noqa: E731
    for scale in range(low, high + 1):
        parts.append(text(left - 8, height(scale) + 4, power(scale), 12, "end"))
    points = []
    for step, scale in enumerate(scales):
        points += [(at(step), height(scale)), (at(step + 1), height(scale))]
    parts += [curve(points, GREEN, 2), line(left, bottom + 10, WIDTH - 4, bottom + 10)]
    for step in skipped:
        x, y = at(step + 1), height(scales[step])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{RED}"/>')
    shown = skipped[2]
    x, y = at(shown + 1), height(scales[shown])
    under = height(low + 1)
    parts.append(line(x, under - 18, x, y + 6, arrow=True))
    words = (f"step {shown}: a gradient overflows,", "the step is skipped, the scale halved")
    start = min(x - 72, WIDTH - 246)  # so that they fit
    parts += [text(start, under - 4 + 16 * i, w, 12) for i, w in enumerate(words)]
    parts += [
        text(at(step), bottom + 25, f"{step}", 12, "middle" if step < count else "end")
        for step in range(0, count + 1, 100)
    ]
    parts.append(text(at(50), bottom + 25, "steps", 12, "middle"))
    return picture(bottom + 32, parts)


# ---- scaling -------------------------------------------------------------------------------------

# How a state is sharded, the policies under which devices send this, and its row in the results.
RINGS = (
    ("data parallel", "float32 or mixed_bfloat16", "bfloat16"),
    ("FSDP", "float32", "float32"),
    ("FSDP", "mixed_bfloat16", "bfloat16"),
    ("FSDP", "mixed_bfloat16,reduce=half", None),
)
NODES = 8


def ring(left, top, sent):
    """Devices that send to the next one: gradients outside, parameters inside."""
    middle, step = (left + 66, top + 64), 2 * math.pi / NODES
    parts = []
    for what, radius in (("gradients", 56), ("parameters", 41)):
        # As wide as all bytes, in the dtype of most of them: the words below say the rest.
        width, most = sum(sent[what].values()) / 5, max(sent[what], key=sent[what].get, default="")
        for node in range(NODES if most else 0):
            first, last = (step * (node + share) for share in (0.18, 0.82))
            parts.append(arc(middle, radius, first, last, OF_DTYPE[most], width))
    for node in range(NODES):
        x, y = middle[0] + 48 * math.cos(node * step), middle[1] + 48 * math.sin(node * step)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{GREY}"/>')
    total = sum(sum(each.values()) for each in sent.values())
    parts.append(text(middle[0], middle[1] + 1, f"{total:.1f}", 14, "middle", weight="bold"))
    parts.append(text(middle[0], middle[1] + 15, "MiB", 12, "middle"))
    return parts


def wire():
    """What a device sends to the next in a step, by what it is and by dtype."""
    results = json.loads((RESULTS / "scaling.json").read_text())["cases"]["wire"]
    extra = recorded("wire")["cases"]
    parts = [text(0, 13, "Sent by each of eight H100s in a step", 12, weight="bold")]
    parts.append(text(0, 29, "outer arrows: gradients, inner arrows: parameters"))
    for number, (program, policy, row) in enumerate(RINGS):
        sent = results[program]["sent_mib"][row] if row else extra[program][policy]
        left, top = 183 * (number % 2), 42 + 212 * (number // 2)
        parts.append(text(left, top + 13, program, 12, weight="bold"))
        parts.append(text(left, top + 29, policy, 12))
        parts += ring(left, top + 32, sent)
        for i, (what, sizes) in enumerate((w, sizes) for w, sizes in sent.items() if sizes):
            ordered = sorted(sizes.items(), key=lambda pair: -pair[1])
            words = ", ".join(f"{mib:.1f} {dtype}" for dtype, mib in ordered)
            parts.append(text(left, top + 174 + 15 * i, f"{what} {words}", 11))
    parts += legend(474, [(BLUE, "float32, f32"), (GREEN, "bfloat16, bf16")], 110)
    return picture(482, parts)


# ---- memory --------------------------------------------------------------------------------------

FILLS = (GREY, BLUE, ORANGE, GREEN)
FORWARD = 1 / 3  # of the width


def timeline():
    """The temporary memory from the first to the last kernel of a step of GPT-2."""
    cases = recorded("timeline")["cases"]
    left, right, top, bottom, most = 26, WIDTH - 2, 28, 208, 17.5
    at = lambda share: left + (right - left) * share  # noqa: E731
    height = lambda gib: bottom - (bottom - top) * gib / most  # noqa: E731
    parts = [text(0, 13, "Temporary memory of GPT-2 124M on an H100", 12, weight="bold")]
    for gib in (0, 5, 10, 15):
        parts.append(text(left - 6, height(gib) + 4, str(gib), 12, "end"))
    parts.append(text(left + 4, height(15) + 4, "GiB"))
    parts.append(line(at(FORWARD), top, at(FORWARD), bottom, dashed=True))
    for case, fill in zip(cases.values(), FILLS, strict=True):
        points = [(at(0), bottom)]
        for name, first, share in (("forward", 0, FORWARD), ("backward", FORWARD, 1 - FORWARD)):
            values = case[name]
            points += [
                (at(first + share * (i + 0.5) / len(values)), height(mib / 2**10))
                for i, mib in enumerate(values)
            ]
        parts.append(curve([*points, (at(1), bottom)], fill, 2, bottom))
    parts.append(line(left, bottom, right, bottom))
    parts.append(text(at(FORWARD / 2), bottom + 16, "forward", 12, "middle"))
    parts.append(text(at((1 + FORWARD) / 2), bottom + 16, "backward, optimizer", 12, "middle"))
    y = bottom + 42
    for (policy, case), fill in zip(cases.items(), FILLS, strict=True):
        parts += [box(0, y - 10, 12, 12, fill)]
        parts.append(text(18, y, f"{case['temp_mib'] / 2**10:.1f} GiB", 12, weight="bold"))
        settings = policy.split(",")
        for first in range(0, len(settings), 2):
            words = ",".join(settings[first : first + 2])
            parts.append(text(84, y, words + "," * (first + 2 < len(settings)), 12))
            y += 18
    return picture(y - 10, parts)


PICTURES = {
    "memory": memory,
    "policy": policy,
    "debug": debug,
    "guide_block": block,
    "guide_run": run,
    "guide_wire": wire,
    "guide_timeline": timeline,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())

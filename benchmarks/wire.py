"""The bytes that eight H100s send each other in a training step, by how the state is sharded.

A small decoder and a small ResNet are compiled for each mesh, and not run. `measured` counts the
arrays by kind and by dtype.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import mpjax

WIDTH, HIDDEN, HEADS, WORDS, LENGTH, LAYERS, ROWS = 512, 2048, 8, 1024, 256, 2, 32
HALVES = ("bfloat16", "float16")
CARRIED = ("parameters", "gradients", "activations")
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def spec(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


# ---- models --------------------------------------------------------------------------------------


def norm(x, weight):
    full = x.astype(jnp.float32)
    return full * jax.lax.rsqrt(jnp.mean(full**2, -1, keepdims=True) + 1e-6) * weight


def block(params, h, keep, gather):
    p = jax.tree.map(gather, params)
    x = norm(h, p["before"])
    q, k, v = (jnp.einsum("bsd,dhe->bhse", x, p[name]) for name in ("q", "k", "v"))
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    scores = jnp.where(seen, q @ k.swapaxes(-1, -2) * (WIDTH // HEADS) ** -0.5, -1e30)
    h = keep(h + jnp.einsum("bhse,hed->bsd", jax.nn.softmax(scores) @ v, p["out"]))
    hidden = jax.nn.gelu(norm(h, p["between"]) @ p["up"] + p["bias"])
    return keep(h + hidden @ p["down"])


def decoder(params, batch, keep, gather, look_up, scans=False):
    h = keep(look_up(gather(params["words"]), batch["x"]) + gather(params["places"]))
    if scans:
        layer = jax.checkpoint(functools.partial(block, keep=keep, gather=gather))
        h = jax.lax.scan(lambda h, p: (layer(p, h), None), h, params["layers"])[0]
    else:
        for p in params["layers"]:
            h = block(p, h, keep, gather)
    head = gather(params["head"]) if "head" in params else gather(params["words"]).T
    logits = norm(h, gather(params["last"])) @ head
    wanted = jax.nn.one_hot(batch["y"], WORDS)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits.astype(jnp.float32)) * wanted, -1))


def decoder_params(scans=False, tied=False):
    heads = (WIDTH, HEADS, WIDTH // HEADS)
    layer = {
        "before": spec(WIDTH),
        "between": spec(WIDTH),
        "q": spec(*heads),
        "k": spec(*heads),
        "v": spec(*heads),
        "out": spec(*heads[1:], WIDTH),
        "up": spec(WIDTH, HIDDEN),
        "bias": spec(HIDDEN),
        "down": spec(HIDDEN, WIDTH),
    }
    if scans:
        layers: Any = jax.tree.map(lambda x: spec(LAYERS, *x.shape), layer)
    else:
        layers = [layer] * LAYERS
    rest = {} if tied else {"head": spec(WIDTH, WORDS)}
    words, places = spec(WORDS, WIDTH), spec(LENGTH, WIDTH)
    return {"words": words, "places": places, "last": spec(WIDTH), "layers": layers, **rest}


def convolve(x, weight, stride=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, weight, (stride, stride), "SAME", dimension_numbers=numbers
    )


def batch_norm(x, p):
    full = x.astype(jnp.float32)
    mean = jnp.mean(full, (0, 1, 2))
    var = jnp.mean(full**2, (0, 1, 2)) - mean**2
    return (full - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]


def resnet(params, batch, keep, gather, look_up):
    del gather, look_up
    h = jax.nn.relu(batch_norm(convolve(batch["x"], params["stem"], 2), params["norm"]))
    for p in params["blocks"]:
        inner = jax.nn.relu(batch_norm(convolve(h, p["first"]), p["norm"]))
        h = keep(jax.nn.relu(h + batch_norm(convolve(inner, p["second"]), p["norm"])))
    logits = jnp.mean(h, (1, 2)) @ params["head"] + params["bias"]
    wanted = jax.nn.one_hot(batch["y"], logits.shape[-1])
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits.astype(jnp.float32)) * wanted, -1))


def resnet_params():
    width, classes = 64, 1000
    bn = {"scale": spec(width), "bias": spec(width)}
    square = spec(3, 3, width, width)
    blocks = [{"first": square, "second": square, "norm": bn}] * LAYERS
    rest = {"head": spec(width, classes), "bias": spec(classes)}
    return {"stem": spec(7, 7, 3, width), "norm": bn, "blocks": blocks, **rest}


TOKENS = {k: spec(ROWS, LENGTH, dtype=jnp.int32) for k in "xy"}
IMAGES = {"x": spec(ROWS, 64, 64, 3), "y": spec(ROWS, dtype=jnp.int32)}


# ---- shardings -----------------------------------------------------------------------------------


class Program(NamedTuple):
    """A model, and how its state and its batch are sharded over eight devices.

    Attributes:
        axes: The axes of the mesh with their sizes.
        place: Returns the spec of a parameter, given its path and shape.
        rows: The axes over which the batch is sharded.
        model: The loss.
        params: The shapes of its parameters.
        batch: The shapes of its batch.
        kind: The type of the axes: with explicit axes, the types of arrays contain the sharding.
        states: Whether the program states its gathers by sharding constraints.
    """

    axes: dict[str, int]
    place: Callable[[str, tuple[int, ...]], P]
    rows: tuple[str, ...] = ("data",)
    model: Callable[..., Any] = decoder
    params: Callable[[], Any] = decoder_params
    batch: Any = TOKENS
    kind: AxisType = AxisType.Auto
    states: bool = False


def everywhere(path: str, shape: tuple[int, ...]) -> P:
    return P()


def longest(path: str, shape: tuple[int, ...], first: int = 0) -> P:
    """Shards the longest dimension. For stacked layers, the first dimension is left out."""
    dims: list[Any] = [None] * len(shape)
    place = max(range(first if "layers" in path else 0, len(shape)), key=lambda d: shape[d])
    dims[place] = "data"
    return P(*dims)


def megatron(path: str, shape: tuple[int, ...]) -> P:
    """Shards heads, hidden units and vocabulary over "model", the other parameters over "data"."""
    places = {
        **dict.fromkeys("qkv", P("data", "model", None)),
        "out": P("model", None, "data"),
        "up": P("data", "model"),
        "bias": P("model"),
        "down": P("model", "data"),
        "words": P("model", "data"),
        "head": P("data", "model"),
    }
    return places.get(path.split("/")[-1], P())


FLAT, TWO, MODEL = {"data": 8}, {"replica": 2, "data": 4}, {"data": 4, "model": 2}
STACKED = functools.partial(longest, first=1)
SCANNED = {
    "model": functools.partial(decoder, scans=True),
    "params": functools.partial(decoder_params, scans=True),
}
RESNET = {"model": resnet, "params": resnet_params, "batch": IMAGES}
PROGRAMS = {
    "data parallel": Program(FLAT, everywhere),
    "FSDP": Program(FLAT, longest),
    "FSDP, tied embedding": Program(
        FLAT, longest, params=functools.partial(decoder_params, tied=True)
    ),
    "FSDP, scan with remat": Program(FLAT, STACKED, **SCANNED),
    "FSDP, gathers stated": Program(FLAT, longest, states=True),
    "FSDP, explicit axes": Program(FLAT, longest, kind=AxisType.Explicit, states=True),
    "HSDP": Program(TWO, longest, rows=("replica", "data")),
    "FSDP and tensor parallel": Program(MODEL, megatron),
    "ResNet, data parallel": Program(FLAT, everywhere, **RESNET),
    "ResNet, FSDP": Program(FLAT, longest, **RESNET),
}


def compiled(program: Program, policy: Any, target: str = "h100") -> Any:
    """Compiles a training step for eight devices."""
    kinds = (program.kind,) * len(program.axes)
    mesh = AbstractMesh(tuple(program.axes.values()), tuple(program.axes), axis_types=kinds)
    explicit = program.kind == AxisType.Explicit

    def place(x, where):
        return x.update(sharding=NamedSharding(mesh, where))

    def move(x, where):
        sharding = NamedSharding(mesh, where)
        return (reshard if explicit else jax.lax.with_sharding_constraint)(x, sharding)

    def look_up(table, indices):
        if explicit:
            return table.at[indices].get(out_sharding=P(program.rows, None, None))
        return table[indices]

    loss = functools.partial(
        program.model,
        keep=lambda x: x if explicit else move(x, P(program.rows)),
        gather=(lambda w: move(w, P())) if program.states else lambda w: w,
        look_up=look_up,
    )
    params = jax.tree_util.tree_map_with_path(
        lambda keys, x: place(
            x, program.place(jax.tree_util.keystr(keys, simple=True, separator="/"), x.shape)
        ),
        program.params(),
    )
    batch = jax.tree.map(lambda x: place(x, P(program.rows)), program.batch)
    init, step = mpjax.build_train_step(loss, optax.adamw(1e-3), policy)
    with jax.sharding.use_abstract_mesh(mesh):
        shapes = jax.eval_shape(init, params)
        places = mpjax.optim.state_shardings(shapes, jax.tree.map(lambda x: x.sharding, params))
        state = jax.tree.map(lambda x, where: x.update(sharding=where), shapes, places)
        outs = places, NamedSharding(mesh, P())
        jitted = jax.jit(step, donate_argnums=0, out_shardings=outs)
        return mpjax.compile_for(f"{target} x 8", jitted, state, batch, timeout=3600)


def counted(report: Any, what: str) -> Counter[str]:
    """Returns the bytes of one kind that are sent, by dtype."""
    found: Counter[str] = Counter()
    for row in report.collectives:
        if row.carries == what:
            found[row.dtype] += row.wire_bytes * row.runs
    return found


def measured(program: Program) -> dict[str, Any]:
    """Returns the bytes that are sent in each half dtype and in float32."""
    try:
        wide = compiled(program, "float32")
        ways = {half: compiled(program, f"mixed_{half}") for half in HALVES}
    except ImportError as error:
        return {"skipped": str(error)}
    return {
        "sent_mib": {
            name: {
                what: {dtype: sent / 2**20 for dtype, sent in counted(report, what).items()}
                for what in CARRIED
            }
            for name, report in {"float32": wide, **ways}.items()
        },
        "ratios": {
            f"{half} / float32, bytes sent": report.wire_bytes / wide.wire_bytes
            for half, report in ways.items()
        },
    }

"""Random nests of loops, branches, checkpoints, custom rules, calls, vmap and shard_map.

A nest is a function of parameters and of an array ``float32[rows, WIDTH]`` that returns an array of
that shape; a program sums its squares. Branches are taken by arguments, or by sums that are far
from their thresholds, so that no rounding takes another branch. Custom rules are not the
derivatives of their functions, so that whoever leaves them out is off by far.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as Spec

ROWS, WIDTH, TURNS = 8, 8, 3
FAR = 1e4  # no sum of a nest comes near it
POLICIES = (
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.nothing_saveable,
    jax.checkpoint_policies.everything_saveable,
    jax.checkpoint_policies.save_only_these_names("kept"),
)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


@jax.custom_jvp
def bounded(x):
    return jnp.tanh(x)


@bounded.defjvp
def _bounded_jvp(primals, tangents):
    y = jnp.tanh(primals[0])
    return y, 3 * tangents[0] * (1 - y * y)


def normed(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1)


def attention(p, x):
    q, k = x @ p["w"], x @ p["v"]
    return jax.nn.softmax(q @ k.T) @ x + p["b"]


# Blocks without another one inside.
LEAVES = {
    "layer": lambda p, x: jnp.tanh(x @ p["w"] + p["b"]),
    "block": lambda p, x: x + jax.nn.gelu(normed(x) @ p["w"]) @ p["v"],
    "gate": lambda p, x: jax.nn.sigmoid(x @ p["v"]) * x,
    "attention": attention,
    "bell": lambda p, x: x * jnp.exp(-x * x) + p["b"],
    "norm": lambda p, x: normed(x) * p["b"],
    "sine": lambda p, x: sine(x @ p["v"]),
    "bounded": lambda p, x: bounded(x) * p["b"] + x,
}

# ---- blocks around another one: (generator, inner block, a second one) -> block -----------------


def scan(r, f, g):
    turns, back, unroll = r.choice((1, 2, TURNS)), r.random() < 0.3, r.choice((1, 1, 2))

    def run(p, x):
        step = lambda c, s: (f(p, c) * s, None)  # noqa: E731
        return lax.scan(step, x, p["s"][:turns], reverse=back, unroll=unroll)[0]

    return run


def scan_that_stacks(r, f, g):
    back = r.random() < 0.5

    def run(p, x):
        def step(c, s):
            c = f(p, c)
            return c, (jnp.cos(c) * s, c.sum())

        c, (ys, sums) = lax.scan(step, x, p["s"], reverse=back)
        return c + 0.1 * ys.sum(0) + jnp.tanh(ys[1]) + 0.1 * jnp.tanh(sums).sum()

    return run


def scan_of_layers(r, f, g):
    """Over stacked parameters, as models are."""
    some = r.choice((1.0, 0.5))

    def run(p, x):
        many = jax.tree.map(lambda a: jnp.stack([a, some * a]), p)
        return lax.scan(lambda c, p: (f(p, c), None), x, many)[0]

    return run


def scan_of_many_carries(r, f, g):
    def run(p, x):
        def step(c, s):
            a, b, count, even = c
            return (f(p, b), a * s, count + 1, ~even), jnp.where(even, a.mean(), s)

        (a, b, count, _), ys = lax.scan(step, (x, x / 2, 0, True), p["s"])
        return a + b * jnp.tanh(ys.sum()) / count

    return run


def fori(r, f, g):
    return lambda p, x: lax.fori_loop(0, 2, lambda i, c: f(p, c) + 0.1 * i, x)


def while_(r, f, g):
    """It has no derivative, so it stands beside what is differentiated."""

    def run(p, x):
        fixed, start = lax.stop_gradient((p, x))
        turn = lambda c: (c[0] + 1, f(fixed, c[1]))  # noqa: E731
        return x + lax.stop_gradient(lax.while_loop(lambda c: c[0] < 2, turn, (0, start))[1])

    return run


def map_(r, f, g):
    return lambda p, x: lax.map(lambda s: f(p, x * s), p["s"]).mean(0)


def cond(r, f, g):
    place, far = r.randrange(TURNS), r.choice((-FAR, FAR, None))

    def run(p, x):
        wanted = p["s"][place] > 0 if far is None else x.sum() > far
        return lax.cond(wanted, lambda y: f(p, y), lambda y: g(p, y / 2), x)

    return run


def switch(r, f, g):
    place = r.randrange(TURNS)

    def run(p, x):
        which = jnp.int32(jnp.abs(p["s"][place]) * 5) % 3
        return lax.switch(which, [lambda y: f(p, y), lambda y: g(p, y), lambda y: y], x)

    return run


def checkpoint(r, f, g):
    policy, once = r.choice(POLICIES), r.random() < 0.5
    named = lambda p, x: f(p, checkpoint_name(g(p, x), "kept"))  # noqa: E731
    return jax.checkpoint(r.choice((f, named)), policy=policy, prevent_cse=once)


def custom_vjp(r, f, g):
    again = r.random() < 0.5
    rule = jax.custom_vjp(f)

    def forward(p, x):
        return (f(p, x), (p, x)) if again else jax.vjp(f, p, x)

    def backward(kept, ct):
        back = jax.vjp(f, *kept)[1] if again else kept
        return jax.tree.map(lambda a: 2 * a, back(ct))

    rule.defvjp(forward, backward)
    return rule


def custom_jvp(r, f, g):
    rule = jax.custom_jvp(f)

    @rule.defjvp
    def _(primals, tangents):
        y, dy = jax.jvp(f, primals, tangents)
        return y, dy / 2

    return rule


def gradient(r, f, g):
    return lambda p, x: x - 0.1 * jax.grad(lambda y: jnp.sum(jnp.sin(f(p, y))))(x)


def jit(r, f, g):
    return jax.jit(f, inline=r.random() < 0.3)


def vmap(r, f, g):
    """Over rows, each repeated: a block may read them all."""
    return lambda p, x: jax.vmap(lambda y: f(p, jnp.stack([y, 0.5 * y]))[0])(x)


def vmap_of_parameters(r, f, g):
    def run(p, x):
        many = jax.tree.map(lambda a: jnp.stack([a, -0.5 * a]), p)
        return jax.vmap(f, (0, None), 1)(many, x).mean(1)

    return run


def vmap_that_sums(r, f, g):
    def run(p, x):
        mean = jax.vmap(lambda y: y - lax.pmean(f(p, y), "copies"), axis_name="copies")
        return mean(jnp.stack([x, 0.5 * x]))[0]

    return run


HOLDERS = {
    "sequence": lambda r, f, g: lambda p, x: g(p, checkpoint_name(f(p, x), "kept")),
    "skip": lambda r, f, g: lambda p, x: x + f(p, x),
    "both": lambda r, f, g: lambda p, x: f(p, x) * jnp.tanh(g(p, x)),
    "scan": scan,
    "scan that stacks": scan_that_stacks,
    "scan of layers": scan_of_layers,
    "scan of many carries": scan_of_many_carries,
    "fori": fori,
    "while": while_,
    "map": map_,
    "cond": cond,
    "switch": switch,
    "checkpoint": checkpoint,
    "custom_vjp": custom_vjp,
    "custom_jvp": custom_jvp,
    "gradient": gradient,
    "jit": jit,
    "vmap": vmap,
    "vmap of parameters": vmap_of_parameters,
    "vmap that sums": vmap_that_sums,
}

# ---- over eight devices -------------------------------------------------------------------------


def mesh():
    kind = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 4), ("rows", "columns"), axis_types=kind)


def sharded(r, f, g):
    """Each device runs its rows; what it makes may depend on the others'."""
    summed = r.random() < 0.5

    def local(p, x):
        y = f(p, x)
        return y - 0.5 * lax.pmean(y, "rows") if summed else y

    rows = Spec("rows")
    return lambda p, x: jax.shard_map(local, mesh=mesh(), in_specs=(Spec(), rows), out_specs=rows)(
        p, x
    )


def megatron(r, f, g):
    """Columns of one kernel and rows of the next on each device, whose results are added."""

    def run(p, x):
        def local(w, v, x):
            return lax.psum(jax.nn.gelu(x @ w) @ v, "columns")

        specs = Spec(None, "columns"), Spec("columns"), Spec("rows")
        pair = jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=Spec("rows"))
        return f(p, x) + pair(p["w"], p["v"], x)

    return run


SHARDED = {"shard_map": sharded, "megatron": megatron}

# ---- drawn --------------------------------------------------------------------------------------


def drawn(seed: int, sharding: bool = False):
    """Returns a program (a function of parameters and an array) and the names of its blocks.

    Args:
        seed: The seed.
        sharding: Whether the program runs a block on eight devices.
    """
    r, names = random.Random(seed), []
    # JAX has no vmap with a named axis inside of a shard_map, and none of a shard_map.
    holders = [name for name in HOLDERS if not (sharding and name.startswith("vmap"))]

    def block(depth):
        name = r.choice(holders if depth else [*LEAVES])
        names.append(name)
        if not depth:
            return LEAVES[name]
        return HOLDERS[name](r, block(depth - 1), block(r.randrange(depth)))

    def outer(depth):
        """A block around one that runs on the devices, ``depth`` blocks further inside."""
        name = r.choice(holders if depth else [*SHARDED])
        names.append(name)
        if not depth:
            return SHARDED[name](r, block(r.randrange(3)), block(0))
        return HOLDERS[name](r, outer(depth - 1), block(0))

    nest = outer(r.randrange(3)) if sharding else block(r.choice((2, 2, 3)))
    return lambda p, x: jnp.mean(nest(p, x) ** 2), names


def arguments(seed: int):
    rng = np.random.default_rng(seed)
    normal = lambda *s, scale=1.0: np.float32(scale * rng.standard_normal(s))  # noqa: E731
    p = {
        "w": normal(WIDTH, WIDTH, scale=WIDTH**-0.5),
        "v": normal(WIDTH, WIDTH, scale=WIDTH**-0.5),
        "b": 1 + normal(WIDTH, scale=0.3),
        "s": 0.5 + normal(TURNS, scale=0.7),
    }
    return p, normal(ROWS, WIDTH)


def is_refused(fun, args) -> bool:
    """Returns whether JAX itself cannot differentiate a program: forward mode of a custom_vjp."""
    try:
        jax.make_jaxpr(jax.grad(fun, (0, 1)))(*args)
    except TypeError as error:
        return "custom_vjp" in str(error)
    return False

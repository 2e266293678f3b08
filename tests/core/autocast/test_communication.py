"""Devices exchange parameters in 16 bits, and gradients of parameters in float32.

What a compiler sends is seen in tests/tools/hardware/test_wire.py; here, what it is given.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import run
from support import HALVES, assert_near, cast, equations, normal, thorough_but

import mpjax

SHORT = {"bfloat16": "bf16", "float16": "f16"}
DOT = re.compile(r"stablehlo.dot_general.*x(\w+)>, tensor<.*x(\w+)>\) -> tensor<([\dx]*)x(\w+)>")
# Of matrices: a bias, which no matmul reads, is sent as it is.
GATHERED = re.compile(r" = (\w+)\[\d+,\d+\]\S* all-gather\(")
WIDTH, ROWS = 32, 64


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def spread(tree, spec, kind=AxisType.Auto):
    return jax.device_put(tree, NamedSharding(mesh(kind), spec))


def inputs(seed=0):
    params = {
        "up": normal(seed, WIDTH, 3 * WIDTH, scale=0.3),
        "bias": normal(seed + 1, 3 * WIDTH, scale=0.3),
        "down": normal(seed + 2, WIDTH, 3 * WIDTH, scale=0.3),
    }
    return params, normal(seed + 3, ROWS, WIDTH)


def layer(params, x):
    return x + jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"].T


def plain(params, x):
    return jnp.mean(layer(params, x) ** 2)


def scanned(params, x):
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), params)
    return jnp.mean(jax.lax.scan(lambda h, p: (layer(p, h), None), x, stacked)[0] ** 2)


def checkpointed(params, x):
    return jnp.mean(jax.checkpoint(layer)(params, x) ** 2)


def mapped(params, x):
    return jnp.mean(jax.vmap(layer, (None, 0))(params, x) ** 2)


def heads(params, x):
    up = params["up"].reshape(WIDTH, 3, WIDTH)
    h = jnp.einsum("bd,dhe->bhe", x, up) + params["bias"].reshape(3, WIDTH)
    down = params["down"].reshape(WIDTH, 3, WIDTH)
    return jnp.mean(jnp.einsum("bhe,dhe->bd", jnp.tanh(h), down) ** 2)


FUNCTIONS = {f.__name__: f for f in (plain, scanned, checkpointed, mapped, heads)}


def lowered(fun, *args):
    """Returns the program for GPUs. A CPU is asked for matmuls in another form."""
    return jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def dots(text, *sizes):
    """Returns (operands, result) of the matmuls of a lowered program that give a shape."""
    found = [(a, b, c) for a, b, shape, c in DOT.findall(text) if shape in sizes]
    assert found
    return found


PAIRS = [(name, half) for name in FUNCTIONS for half in HALVES]
GRADIENTS = (f"{WIDTH}x{3 * WIDTH}", f"{3 * WIDTH}x{WIDTH}", f"{WIDTH}x3x{WIDTH}")


@pytest.mark.parametrize(("name", "half"), thorough_but(PAIRS, 0, 3, 4, 7, 8))
def test_gradients_of_parameters_are_summed_in_float32(name, half):
    gradient, short = jax.grad(cast(FUNCTIONS[name], half)), SHORT[half]
    params, x = inputs()
    several = lowered(gradient, spread(params, P()), spread(x, P("data")))
    assert set(dots(several, *GRADIENTS)) == {(short, short, "f32")}
    alone = lowered(gradient, params, x)
    assert set(dots(alone, *GRADIENTS)) == {(short, short, "f32")}
    by_half = f"mixed_{half},reduce=half"
    several = lowered(
        jax.grad(mpjax.autocast(FUNCTIONS[name], by_half)),
        spread(params, P()),
        spread(x, P("data")),
    )
    assert set(dots(several, *GRADIENTS)) == {(short, short, short)}


@pytest.mark.parametrize("half", thorough_but(HALVES, "float16"))
def test_gradients_of_half_parameters_are_rounded_after_they_are_summed(half):
    params, x = inputs()
    params = jax.tree.map(lambda w: w.astype(half), params)
    gradient = jax.grad(mpjax.autocast(plain, f"O2:{half}"))
    several = lowered(gradient, spread(params, P()), spread(x, P("data")))
    short = SHORT[half]
    assert set(dots(several, *GRADIENTS)) == {(short, short, "f32")}
    shapes = jax.eval_shape(gradient, params, x)
    assert {g.dtype.name for g in jax.tree.leaves(shapes)} == {half}


def test_gradient_of_a_scan_carry_is_not_summed_in_float32():
    def fun(w, x):
        return jnp.mean(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0] ** 2)

    w, x = normal(0, 32, 32, scale=0.3), normal(1, ROWS, 32)
    several = lowered(jax.grad(cast(fun), 1), spread(w, P()), spread(x, P()))
    assert {*dots(several, f"{ROWS}x32")} == {("bf16", "bf16", "bf16")}


@pytest.mark.parametrize(("name", "half"), thorough_but(PAIRS, 2, 9))
def test_gradients_on_several_devices_are_those_of_float32(name, half):
    params, x = inputs(5)
    fun = FUNCTIONS[name]
    got = jax.jit(jax.grad(cast(fun, half)))(spread(params, P()), spread(x, P("data")))
    assert_near(got, run(jax.grad(fun), params, x), 0.02)


def sums_of_shards(policy):
    """Returns the gradient of a sum in which the parts of devices cancel but for little."""
    x = np.zeros((ROWS, 1), np.float32)
    x[:: ROWS // 8, 0] = [1, 2**-9, -1, 2**-9, 1, 2**-9, -1, 2**-9]  # one of each device
    fun = mpjax.autocast(lambda w, x: jnp.sum(x @ w), policy)
    return jax.jit(jax.grad(fun))(spread(jnp.ones((1, 1)), P()), spread(x, P("data")))


def test_sum_over_shards_is_not_rounded():
    assert sums_of_shards("mixed_bfloat16") == 2**-7


@pytest.mark.parametrize("name", thorough_but(FUNCTIONS, "checkpointed"))
def test_second_derivatives_on_several_devices_match_float32(name):
    params, x = inputs(9)
    fun = FUNCTIONS[name]

    def product(fun, params, x):
        return jax.jvp(lambda p: jax.grad(fun)(p, x), (params,), (params,))[1]

    def of_norm(fun, params, x):
        return jax.grad(lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(fun)(p, x))))(
            params
        )

    def both(fun, params, x):
        return product(fun, params, x), of_norm(fun, params, x)

    got = jax.jit(functools.partial(both, cast(fun)))(spread(params, P()), spread(x, P("data")))
    assert_near(got, run(functools.partial(both, fun), params, x), 0.06)


def test_vmapped_gradients_and_jacfwd_match_float32():
    params, x = inputs(2)
    each = functools.partial(jax.vmap, in_axes=(None, 0))
    got = jax.jit(each(jax.grad(cast(plain))))(spread(params, P()), spread(x[:, None], P("data")))
    assert_near(got, run(each(jax.grad(plain)), params, x[:, None]), 0.03)
    got = jax.jit(jax.jacfwd(cast(plain)))(params, x)
    assert_near(got, run(jax.grad(plain), params, x), 0.02)


def test_a_checkpoint_that_keeps_matmuls_keeps_them():
    policy = jax.checkpoint_policies.dots_saveable
    params, x = inputs()

    fun = cast(lambda p, x: layer(p, x).sum())
    gradient = jax.value_and_grad(lambda p: jnp.mean(jax.checkpoint(fun, policy=policy)(p, x)))
    text = jax.jit(gradient).lower(params).compile().as_text()
    # Two of the forward pass, two gradients, one cotangent; one more if one is computed again.
    assert len(re.findall(r" (?:dot|custom-call)\(", text)) == 5


def test_shard_map_sums_in_float32():
    params, x = inputs(3)
    where = mesh()
    # Each device's own mean: what is summed over devices is the gradient of their mean.
    fun = jax.shard_map(
        lambda p, x: jax.lax.pmean(cast(plain)(p, x), "data"),
        mesh=where,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    jaxpr = jax.make_jaxpr(jax.grad(fun))(params, x)
    summed = [
        v.aval
        for e in equations(jaxpr)
        if "psum" in e.primitive.name
        for v in e.invars
        if v.aval.ndim
    ]
    assert len(summed) >= 3 and {str(aval.dtype) for aval in summed} == {"float32"}
    assert_near(jax.jit(jax.grad(fun))(params, x), run(jax.grad(plain), params, x), 0.02)


# ---- parameters ----------------------------------------------------------------------------------


def moving(params, x, move):
    params = jax.tree.map(move, params)
    rows = params["down"][:8].T @ jnp.ones((8, 2), x.dtype)  # a view of what was moved
    found = params["up"].at[jnp.arange(4)[::-1]].get() @ params["up"].T
    return plain(params, x) + jnp.mean(rows**2) + jnp.mean(found**2)


def reshards(w):
    return jax.sharding.reshard(w, P())


def constrains(w):
    return jax.lax.with_sharding_constraint(w, NamedSharding(mesh(), P()))


@pytest.mark.parametrize(
    ("move", "half"),
    thorough_but([(move, half) for move in (reshards, constrains) for half in HALVES], 0, 3),
)
def test_a_parameter_is_cast_before_it_is_gathered(move, half):
    kind = AxisType.Explicit if move is reshards else AxisType.Auto
    params, x = inputs()
    args = spread(params, P(None), kind), spread(x, P("data"), kind)
    args[0]["up"] = spread(params["up"], P("data"), kind)
    args[0]["down"] = spread(params["down"], P(None, "data"), kind)
    args[0]["bias"] = spread(params["bias"], P("data"), kind)

    def gathered(policy):
        fun = mpjax.autocast(functools.partial(moving, move=move), policy)
        with jax.set_mesh(mesh(kind)):
            text = jax.jit(fun).lower(*args).compile().as_text()
        return {*GATHERED.findall(text)}

    if half == "float16":  # XLA:CPU sends no bfloat16
        assert gathered(f"mixed_{half}") == {SHORT[half]}
    assert gathered(f"mixed_{half},gather=float32") == {"f32"}
    with jax.set_mesh(mesh(kind)):
        got = jax.jit(jax.grad(cast(functools.partial(moving, move=move), half)))(*args)
    want = run(jax.grad(functools.partial(moving, move=lambda w: w)), params, x)
    assert_near(jax.device_get(got), jax.device_get(want), 0.03)


def test_a_cast_is_kept_apart_from_a_constraint():
    """XLA puts a constraint on a cast itself otherwise, and gathers what is cast."""
    params, x = inputs()
    fun = functools.partial(moving, move=constrains)
    text = lowered(cast(fun), spread(params, P("data")), spread(x, P("data")))
    sizes = f"{WIDTH}x{3 * WIDTH}xbf16"
    places = [line for line in text.splitlines() if "sharding_constraint" in line and sizes in line]
    assert [("{?}, {?}" in line) for line in places[:2]] == [True, False]
    wide = lowered(mpjax.autocast(fun, "mixed_bfloat16,gather=float32"), params, x)
    # What is gathered in float32 is not cast before; matmuls have barriers of their own on a CPU.
    assert wide.count("optimization_barrier") > text.count("optimization_barrier")


@pytest.mark.parametrize("half", thorough_but(HALVES, "float16"))
def test_shard_map_gathers_half_and_scatters_float32_sums(half):
    params, x = inputs(6)

    def loss(params, x):
        whole = {k: jax.lax.all_gather(w, "data", tiled=True) for k, w in params.items()}
        return jax.lax.pmean(plain(whole, x), "data")

    mapped = jax.shard_map(
        lambda p, x: mpjax.autocast(loss, f"mixed_{half}")(p, x),
        mesh=mesh(),
        in_specs=(P("data"), P("data")),
        out_specs=P(),
    )
    jaxpr = jax.make_jaxpr(jax.grad(mapped))(params, x)
    compiled = jax.jit(jax.grad(mapped)).lower(params, x).compile()
    if half == "float16":  # XLA:CPU sends no bfloat16
        assert {*GATHERED.findall(compiled.as_text())} == {"f16"}
    summed = [e for e in equations(jaxpr) if e.primitive.name == "reduce_scatter"]
    assert len(summed) == 3 and {str(e.invars[0].aval.dtype) for e in summed} == {"float32"}
    assert_near(compiled(params, x), run(jax.grad(plain), params, x), 0.02)


def looked_up(params, batch):
    rows = params["table"][batch] + params["places"]
    return jnp.mean(jnp.tanh(rows @ params["head"]) ** 2)


def read_exactly(params, batch):
    return jnp.mean(jnp.sin(params["table"][batch]) @ params["head"])


def tables(seed=0):
    params = {
        "table": normal(seed, 128, WIDTH),
        "places": normal(seed + 1, 4, WIDTH),
        "head": normal(seed + 2, WIDTH, 8, scale=0.5),
    }
    return params, jnp.asarray(np.random.default_rng(seed).integers(128, size=(ROWS, 4)))


GATHER = re.compile(r'"stablehlo.gather".*tensor<128x\d+x(\w+)>, tensor')
SCATTER = re.compile(r"\) : \(tensor<128x\d+x(\w+)>, tensor<.*-> tensor<128x")


@pytest.mark.parametrize("half", thorough_but(HALVES, "bfloat16"))
def test_rows_of_a_table_are_sent_in_half_and_their_gradient_summed_in_float32(half):
    params, batch = tables()
    args = spread(params, P(None, "data")), spread(batch, P("data"))
    several = lowered(jax.grad(cast(looked_up, half)), *args)
    assert GATHER.findall(several) == [SHORT[half]]
    assert SCATTER.findall(several) == ["f32"]
    alone = lowered(jax.grad(cast(looked_up, half)), params, batch)
    assert GATHER.findall(alone) == ["f32"] and SCATTER.findall(alone) == ["f32"]
    wide = lowered(jax.grad(mpjax.autocast(looked_up, f"mixed_{half},gather=float32")), *args)
    assert GATHER.findall(wide) == ["f32"]
    got = jax.jit(jax.grad(cast(looked_up, half)))(*args)
    assert_near(got, run(jax.grad(looked_up), params, batch), 0.05)


def test_rows_that_are_read_exactly_are_sent_in_float32():
    params, batch = tables()
    args = spread(params, P()), spread(batch, P("data"))
    assert GATHER.findall(lowered(cast(read_exactly), *args)) == ["f32"]
    kept = mpjax.get_policy("mixed_bfloat16").override({"table": "float32"})
    assert GATHER.findall(lowered(mpjax.autocast(looked_up, kept), *args)) == ["f32"]


def test_table_lookup_under_vmap_matches_float32():
    params, batch = tables(4)
    each = functools.partial(jax.vmap, in_axes=(None, 0))
    got = jax.jit(each(cast(looked_up)))(spread(params, P()), spread(batch, P("data")))
    assert_near(got, run(each(looked_up), params, batch), 0.02)
    tables_too = jax.tree.map(lambda w: np.stack([w, -w]), params)
    ways = [jax.vmap(jax.grad(f), (0, None)) for f in (cast(looked_up), looked_up)]
    assert_near(*run(lambda *args: [way(*args) for way in ways], tables_too, batch), 0.02)

"""Contracts with JAX: each test checks an assumption and names what broke."""

import functools
import inspect
import operator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental.jet import jet
from jax.sharding import AxisType, PartitionSpec

import mpjax
from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import aot, internals

X = jnp.ones(3)


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


@with_jvp.defjvp
def _(primals, tangents):
    return with_jvp(*primals), tangents[0] * jnp.cos(primals[0])


@jax.custom_vjp
def with_vjp(x, y):
    return jnp.sin(x) * y


with_vjp.defvjp(
    lambda x, y: (with_vjp(x, y), (x, jnp.cos(x) * y)),
    lambda res, ct: (ct * res[1], None),
)


@custom_vmap
def with_vmap(x):
    return jnp.sin(x)


with_vmap.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))


def mapped(x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


PROGRAMS = {
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "custom_jvp_call": with_jvp,
    "custom_vjp_call": lambda x: with_vjp(x, x),
    "custom_vmap_call": with_vmap,
    "jit": jax.jit(jnp.sin, donate_argnums=0),
    "linear_call": lambda x: linear_call(operator.mul, operator.mul, 2.0, x),
    "remat2": jax.checkpoint(jnp.sin),
    "scan": lambda x: lax.scan(lambda c, y: (c * x[0], c + y), 0.0, x)[1],
    "shard_map": mapped,
    "while": lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: c + x, x),
}
PARAMS = {
    "cond": {"branches"},
    "custom_jvp_call": {"call_jaxpr", "jvp_jaxpr_fun", "num_consts", "symbolic_zeros"},
    "custom_vjp_call": {
        *("call_jaxpr", "fwd_jaxpr_thunk", "bwd", "num_consts", "out_trees", "symbolic_zeros")
    },
    "custom_vmap_call": {"call", "rule"},
    "jit": {
        *("jaxpr", "donated_invars", "in_shardings", "out_shardings"),
        *("in_layouts", "out_layouts"),
    },
    "linear_call": {"callee", "transpose_thunk"},
    "remat2": {"jaxpr", "prevent_cse"},
    "scan": {"jaxpr", "length"},
    "shard_map": {"jaxpr", "mesh", "in_specs", "out_specs", "check_vma"},
    "while": {"cond_jaxpr", "cond_nconsts", "body_jaxpr", "body_nconsts"},
}


def equation(fun, *args, name=None):
    """Returns the last equation of a function's program, or the first with a name."""
    eqns = _jax.open_jaxpr(jax.make_jaxpr(fun)(*(args or (X,))))[0].eqns
    return next((eqn for eqn in eqns if eqn.primitive.name == name), eqns[-1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_primitives_have_the_params_that_mpjax_reads(name):
    eqn = equation(PROGRAMS[name], name=name)
    assert eqn.primitive.name == name
    assert set(eqn.params) >= PARAMS[name]
    # 0.10.0 has the second name, later versions have the first.
    assert name != "shard_map" or {"newly_manual_axes", "manual_axes"} & set(eqn.params)


@pytest.mark.parametrize("name", PROGRAMS)
def test_bind_runs_an_equation_with_its_own_parameters(name):
    eqn = equation(PROGRAMS[name], name=name)
    args = [
        v.val if isinstance(v, _jax.Literal) else jnp.ones(v.aval.shape, v.aval.dtype)
        for v in eqn.invars
    ]
    program = _jax.trace(lambda *xs: _jax.bind(eqn, xs), [v.aval for v in eqn.invars], "again")
    again = _jax.open_jaxpr(program)[0].eqns[-1]
    assert again.primitive.name == name
    assert [v.aval for v in again.outvars] == [v.aval for v in eqn.outvars]
    assert all(np.isfinite(x).all() for x in _jax.eval_closed(program, *args))


# ---- programs -----------------------------------------------------------------------------------


def test_primitive_names_are_those_of_lowerings_and_derivatives():
    names = {"sin", "dot_general", "scan", "while", "custom_jvp_call", "remat2", "cpu_barrier"}
    assert names <= _jax.primitive_names()


def test_a_ref_is_no_array():
    eqn = equation(lambda x: jax.new_ref(x)[...], name="new_ref")
    assert _jax.is_array(eqn.invars[0].aval)
    assert not _jax.is_array(eqn.outvars[0].aval)


def test_open_jaxpr_takes_closed_and_open_programs():
    closed = jax.make_jaxpr(lambda x: x + np.arange(3.0))(X)
    inner, consts = _jax.open_jaxpr(closed)
    assert len(inner.constvars) == len(consts)
    inner, consts = _jax.open_jaxpr(equation(PROGRAMS["remat2"], name="remat2").params["jaxpr"])
    assert (inner.eqns[0].primitive.name, len(consts)) == ("sin", 0)


def test_inner_jaxprs_are_those_in_the_parameters():
    inner = _jax.inner_jaxprs(equation(PROGRAMS["cond"], name="cond"))
    assert [jaxpr.eqns[0].primitive.name for jaxpr in inner] == ["cos", "sin"]


@pytest.mark.parametrize(("options", "plain"), [({}, True), ({"donate_argnums": 0}, False)])
def test_inlined_opens_a_jit_without_options_alone(options, plain):
    assert (_jax.inlined(equation(jax.jit(jnp.sin, **options))) is not None) == plain


def test_inlined_opens_no_jit_with_shardings():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert _jax.inlined(equation(jax.jit(jnp.sin, in_shardings=here))) is None


def test_scan_has_num_consts_or_ft_in():
    assert _jax.scan_counts(equation(PROGRAMS["scan"], name="scan").params) == (1, 1)


def test_size_of_evaluates_symbolic_dimensions():
    a, b = export.symbolic_shape("a, b")
    large = _jax.size_of([a])
    assert large > 1e5
    assert _jax.size_of((3, 2 * a, b)) == 6 * large**2
    assert _jax.size_of((a + b, a // 2)) == large**2
    assert _jax.size_of(()) == 1
    shape = jax.ShapeDtypeStruct((3, a), np.int8)
    assert _jax.bytes_of(shape) == 3 * large and _jax.bytes_of(shape, np.dtype("f4")) == 12 * large
    assert _jax.bytes_of(None) == 0


def test_a_retyped_aval_keeps_all_but_its_dtype():
    aval = jax.typeof(X)
    new = _jax.retyped(aval, jnp.bfloat16)
    assert (new.shape, new.dtype, new.sharding) == (aval.shape, jnp.bfloat16, aval.sharding)


@pytest.mark.parametrize("weak", [True, False])
@pytest.mark.parametrize("x", [2.0, np.ones(3, np.float32), X, jnp.ones(3, jnp.bfloat16)], ids=str)
def test_an_array_is_made_as_weak_as_an_aval(weak, x):
    aval = jax.core.ShapedArray(np.shape(x), jnp.float32, weak_type=weak)
    made = _jax.typed_as(aval, x)
    assert jax.typeof(made).weak_type == weak
    assert made.dtype == getattr(x, "dtype", jnp.float32)


def test_inner_jaxprs_are_the_programs_in_parameters():
    assert len(_jax.inner_jaxprs(equation(PROGRAMS["cond"], name="cond"))) == 2


def test_shard_shape_is_the_shape_that_one_device_holds():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("data", None))
    split = jax.typeof(jax.device_put(jnp.ones((4, 3)), sharding))
    assert _jax.shard_shape(split) == (2, 3)
    assert _jax.shard_shape(jax.typeof(X)) == X.shape


def test_aval_of_takes_numpy_arrays_and_shapes():
    assert _jax.aval_of(np.ones(3, np.float32)) == jax.typeof(X)
    assert _jax.aval_of(jax.ShapeDtypeStruct((3,), jnp.float32)) == jax.typeof(X)


def test_a_traced_program_closes_over_its_constants():
    big = jnp.arange(3.0)
    program = _jax.trace(lambda x: [x + big], [jax.typeof(X)], "name")
    np.testing.assert_array_equal(_jax.eval_closed(program, X)[0], X + big)
    inner, consts = _jax.hoisted(program)
    assert not inner.constvars
    np.testing.assert_array_equal(jax.core.eval_jaxpr(inner, (), *consts, X)[0], X + big)
    assert _jax.in_avals(program) == [jax.typeof(X)]


def test_the_tracing_key_tells_settings_apart():
    plain = _jax.tracing_key()
    with jax.default_matmul_precision("highest"):
        assert _jax.tracing_key() != plain
    assert _jax.tracing_key() == plain


# ---- sources ------------------------------------------------------------------------------------


def nested(x):
    with jax.named_scope("outer"), jax.named_scope("inner"):
        return jnp.sin(x)


def test_a_name_stack_holds_scopes_and_transforms():
    eqn = equation(lambda x: jax.vjp(nested, x)[1](x), name="mul")
    stack = eqn.source_info.name_stack
    assert _jax.scope_names(stack) == ("outer", "inner")
    assert _jax.transforms(stack) == ("transpose", "jvp")


def test_an_equation_knows_the_line_of_the_user():
    lines, start = inspect.getsourcelines(nested)
    line = start + next(i for i, text in enumerate(lines) if "jnp.sin" in text)
    assert _jax.source_line(equation(nested)) == f"{Path(__file__)}:{line}"


def test_a_derivative_keeps_the_line_of_its_equation():
    program = jax.make_jaxpr(nested)(X)
    again = lambda x: _jax.eval_closed(program, x)  # noqa: E731
    backward = equation(lambda x: jax.jvp(again, (x,), (x,)), name="cos")
    assert _jax.line_key(backward) == _jax.line_key(program.eqns[0])


def test_a_location_gives_place_and_context():
    def precise(x):
        with jax.default_matmul_precision("highest"), jax.named_scope("here"):
            return x @ x

    eqn = equation(precise, jnp.ones((2, 2)))

    def elsewhere(x):
        with _jax.location(eqn, eqn.source_info.name_stack):
            return x + x

    moved = equation(elsewhere)
    assert _jax.scope_names(moved.source_info.name_stack) == ("here",)
    assert _jax.source_line(moved) == _jax.source_line(eqn)


# ---- rules --------------------------------------------------------------------------------------


def test_taylor_mode_is_seen_through_other_tracers():
    seen = []

    def look(x):
        seen.append(_jax.in_taylor_mode([1.0, X, x]))
        return jnp.sin(x).sum()

    taylor = lambda fun: lambda x: jet(fun, (x,), ((X,),))  # noqa: E731
    for fun in (
        taylor(look),
        jax.jit(taylor(look)),
        jax.vmap(taylor(look)),
        taylor(jax.vmap(look)),
    ):
        fun(X[None] if fun is not taylor else X)
    taylor(jax.grad(look))(X)
    assert seen == [True] * 5
    for fun in (look, jax.jit(look), jax.vmap(look), jax.grad(look)):
        fun(X)
    assert seen[5:] == [False] * 4


def test_a_zero_tangent_of_an_integer_is_a_float0():
    assert _jax.zero_tangent(X).dtype == jnp.float32
    assert _jax.zero_tangent(jnp.arange(3)).dtype == jax.dtypes.float0


def test_a_shard_map_is_mapped_again_as_it_was():
    eqn = equation(mapped, name="shard_map")
    np.testing.assert_allclose(
        _jax.shard_map(lambda x: (jnp.sin(x),), eqn.params)(X)[0], jnp.sin(X), rtol=1e-6
    )


# ---- compilers and caches ----------------------------------------------------------------------


def test_jaxlib_compiles_and_counts():
    assert internals.mlir_module_to_xla_computation and internals.hlo_module_cost_analysis
    assert internals.DeviceList
    aot.get_compile_options(
        num_replicas=1, num_partitions=1, device_assignment=np.zeros((1, 1), int)
    )


def test_a_cache_is_cleared_with_those_of_jax():
    @functools.lru_cache(4)
    def cached(x):
        return object()

    _jax.cleared_with_jax(cached)
    first = cached(1)
    assert cached(1) is first
    jax.clear_caches()
    assert cached(1) is not first


def test_as_if_on_gpu_answers_what_attention_asks_of_a_gpu():
    """`jax.nn.dot_product_attention` is traced for cuDNN by their answers, and so it is refused."""
    x, y = (jax.ShapeDtypeStruct((1, n, 2, 192), jnp.bfloat16) for n in (8, 16))
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    with _jax.as_if_on_gpu("9.0"):
        assert jax.eval_shape(attend, x, x, x).shape == x.shape
    with pytest.raises(NotImplementedError, match="head dim"), _jax.as_if_on_gpu("8.0"):
        jax.eval_shape(attend, y, y, y)


def test_a_context_of_a_user_is_known_to_the_caches_of_jit():
    context, seen = jax.make_user_context(default_value=None), []

    @jax.jit
    def fun(x):
        seen.append(context.value)
        return x

    for value in (None, 1, 1, None):
        with context(value):
            jax.make_jaxpr(lambda x: fun(x))(X)
    assert seen == [None, 1]


def test_a_literal_beyond_float16_is_infinite_without_a_warning():
    masked = lambda x: jnp.where(x > 0, x, -1e30)  # noqa: E731
    x = jnp.array([1.0, -1.0], jnp.float16)
    assert mpjax.autocast(masked, "mixed_float16")(x).tolist() == [1.0, -np.inf]


def test_structures_with_arrays_are_compared_outside_of_a_trace():
    class Tag(tuple):
        __slots__ = ()

    jax.tree_util.register_pytree_node(Tag, lambda t: ((), t[0]), lambda tag, _: Tag((tag,)))
    key = lambda tag: _jax.Structure(jax.tree.structure(Tag((tag,))))  # noqa: E731
    two, again, three = key(np.float32(2)), key(jnp.float32(2)), key(jnp.float32(3))

    def look(x):
        assert two == again != three and key(x) != two and two != key(x)
        assert key(np.arange(2)) != key(np.arange(2)) and {two: 1}[again]
        return x

    assert not jax.make_jaxpr(look)(jnp.float32(2)).eqns
    assert two != two.tree

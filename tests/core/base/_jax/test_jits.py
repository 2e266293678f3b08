"""Contract: what `_jax.jit_call` and `jit_of` assume about JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax


def fun(x, y):
    return x + y, x * 2


def test_jit_call_has_the_program_arrays_and_params_of_a_jit():
    jitted = jax.jit(fun, donate_argnums=0)
    one, two = (_jax.jit_call(jitted, (jnp.ones(3) * i, 2.0), {}) for i in (1, 2))
    assert one.jaxpr is two.jaxpr and one.params["donated_invars"] == (True, False)
    assert one.out_tree == jax.tree.structure((0, 0))
    np.testing.assert_array_equal(one.run(one.with_places())[0], jnp.full(3, 3.0))
    assert one.leaves[0].is_deleted() and not two.leaves[0].is_deleted()


def test_jit_of_runs_a_program_of_more_results_in_its_place():
    call = _jax.jit_call(jax.jit(fun), (jnp.ones(3), jnp.ones(3)), {})

    def more(*args):
        outs = _jax.eval_closed(call.jaxpr, *args)
        return [*outs, outs[0].sum(), outs[1].sum()]

    program = _jax.trace(more, _jax.in_avals(call.jaxpr), "more")
    outs = call.run(_jax.jit_of(program, call.with_places()))
    assert [float(x.sum()) for x in outs] == [6, 6, 6, 6]


def test_jit_call_is_none_for_static_arguments():
    jitted = jax.jit(lambda x, flag: x, static_argnames="flag")
    assert _jax.jit_call(jitted, (jnp.ones(3),), {"flag": True}) is None


def test_jit_call_keeps_the_shardings_of_results():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 2)), jax.NamedSharding(mesh, jax.P("x")))
    jitted = jax.jit(fun)
    call = _jax.jit_call(jitted, (x, x), {})
    places = call.with_places()["out_shardings"]
    for place, out in zip(places, jitted(x, x), strict=True):
        assert place.is_equivalent_to(out.sharding, out.ndim)

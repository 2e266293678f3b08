"""Contract: what partitioning in another process assumes about JAX."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import custom_partitioning as of_jax
from jax._src import xla_bridge
from jax._src.lib import xla_client
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import partitioning


def test_ask_elsewhere_registers_one_partitioner_callback(monkeypatch):
    """A compiler that is loaded later gets ours, in place of JAX's."""
    name = of_jax._CUSTOM_PARTITIONING_CALL_NAME
    seen = []
    monkeypatch.setattr(
        xla_client, "register_custom_call_partitioner", lambda **given: seen.append(given)
    )
    callbacks = [lambda c_api: None]
    monkeypatch.setattr(xla_bridge, "_plugin_callbacks", callbacks)
    for _ in range(2):
        _jax.ask_elsewhere(lambda question: {"error": "no"})
    assert len(callbacks) == 2
    for callback in callbacks:
        callback(c_api=None)
    (given,) = seen
    assert given["name"] == name
    shape = xla_client.Shape.array_shape(np.dtype("float32"), (4,))
    with pytest.raises(RuntimeError, match="^no$"):
        given["partition"]([], [], shape, xla_client.HloSharding.replicate(), b"1")


def asked(*question):
    """Asks as the process that compiles does, by JSON."""

    def ask(question):
        return json.loads(json.dumps(_jax.answer_partitioning(json.loads(json.dumps(question)))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla_bridge, "_plugin_callbacks", callbacks := [])
        _jax.ask_elsewhere(ask)
    return callbacks[0].keywords["partition"](*question)


def test_answer_partitioning_answers_where_the_program_was_traced():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    @custom_partitioning
    def kernel(x):
        return jnp.sin(x), x[0]

    def partition(mesh, args, results):
        place = NamedSharding(mesh, P(None, "x"))
        return mesh, lambda x: (jnp.sin(x), x[0]), (place, NamedSharding(mesh, P("x"))), (place,)

    kernel.def_partition(partition, sharding_rule="i j -> i j, j")
    x = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    lowered = jax.jit(kernel).lower(x)
    (info,) = of_jax._sharding_callbacks.values()
    whole = xla_client.HloSharding.replicate()
    parts = [((8, 64), "bfloat16"), ((64,), "bfloat16")]
    parts = [xla_client.Shape.array_shape(jnp.dtype(dtype), dims) for dims, dtype in parts]
    both = xla_client.Shape.tuple_shape(parts)
    result = xla_client.HloSharding.tuple_sharding(both, [whole, whole])
    question = parts[:1], [whole], both, result
    program, (given,), answered = asked(*question, str(id(info)).encode())
    assert given.tile_assignment_dimensions() == [1, 8]
    assert answered.tuple_elements()[0] == given
    assert program and lowered  # which the question is about
    with pytest.raises(RuntimeError, match="^KeyError"):
        asked(*question, b"0")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "bool", "int8", "float8_e4m3fn"])
def test_shapes_and_shardings_arrive_as_they_were(dtype):
    shape = xla_client.Shape.array_shape(jnp.dtype(dtype), (8, 4))
    both = xla_client.Shape.tuple_shape([shape, xla_client.Shape.array_shape(jnp.dtype(dtype), ())])
    whole = xla_client.HloSharding.replicate()
    for x in (shape, both, whole, xla_client.HloSharding.tuple_sharding(both, [whole, whole])):
        assert partitioning._of_text(partitioning._to_text(x)) == x

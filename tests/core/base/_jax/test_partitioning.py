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
    tuple_of = partitioning._shape_of(
        [{"dtype": "bfloat16", "dims": [8, 64]}, {"dtype": "bfloat16", "dims": [64]}]
    )
    question = {
        "arguments": [{"dtype": "bfloat16", "dims": [8, 64]}],
        "shardings": [partitioning._sharding_to_data(whole)],
        "result": partitioning._shape_to_data(tuple_of),
        "sharding": partitioning._sharding_to_data(
            xla_client.HloSharding.tuple_sharding(tuple_of, [whole, whole])
        ),
        "key": str(id(info)),
    }
    answer = json.loads(json.dumps(_jax.answer_partitioning(json.loads(json.dumps(question)))))
    (given,) = (partitioning._sharding_of(data) for data in answer["shardings"])
    assert given.tile_assignment_dimensions() == [1, 8]
    assert partitioning._sharding_of(answer["sharding"]).tuple_elements()[0] == given
    assert answer["program"] and lowered  # which the question is about
    wrong = _jax.answer_partitioning({**question, "key": "0"})
    assert wrong["error"].startswith("KeyError")

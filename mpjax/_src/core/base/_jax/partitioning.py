"""Compiles functions with `custom_partitioning` in another process.

XLA asks JAX how to partition such a function, by the id of a Python object. The object lives in the
process that traced the program, so the process that compiles passes the question on to it.
"""

import base64
import copyreg
import functools
import pickle
from collections.abc import Callable
from typing import Any

from mpjax._src.core.base._jax import internals

Ask = Callable[[dict[str, Any]], dict[str, Any]]


def ask_elsewhere(ask: Ask) -> None:
    """Makes compilers that are loaded afterwards ask another process how to partition."""

    def partition(*question):
        answer = ask({"pickled": _to_text(question)})
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return _of_text(answer["pickled"])

    name = internals.CUSTOM_PARTITIONING_CALL_NAME
    ours = functools.partial(
        internals.register_custom_call_partitioner,
        name=name,
        prop_user_sharding=internals.custom_partitioning_propagate_user_sharding,
        partition=partition,
        infer_sharding_from_operands=internals.custom_partitioning_infer_sharding_from_operands,
        can_side_effecting_have_replicated_sharding=True,
    )
    callbacks = getattr(*internals.home_of("plugin_callbacks"))  # the first to register counts
    callbacks[:] = [c for c in callbacks if getattr(c, "keywords", {}).get("name") != name] + [ours]


def answer_partitioning(question: dict[str, Any]) -> dict[str, Any]:
    """Answers the questions of `ask_elsewhere`, in the process that traced the program."""
    try:
        answer = internals.custom_partitioning_partition(*_of_text(question["pickled"]))
    except Exception as error:
        # The process that compiles waits for an answer, and raises this one there.
        return {"error": f"{type(error).__name__}: {error}"}
    return {"pickled": _to_text(answer)}


def _to_text(x: Any) -> str:
    """Returns what a question or an answer consists of as text, which JSON can contain."""
    # How what XLA hands over is pickled.
    copyreg.pickle(internals.Shape, _pickle_shape)
    copyreg.pickle(internals.HloSharding, _pickle_sharding)
    return base64.b64encode(pickle.dumps(x)).decode()


def _of_text(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def _sharding_of(proto: bytes) -> Any:
    message = internals.OpSharding()
    message.ParseFromString(proto)
    return internals.HloSharding.from_proto(message)


def _pickle_shape(shape: Any) -> Any:
    return type(shape), (str(shape),)


def _pickle_sharding(sharding: Any) -> Any:
    return _sharding_of, (sharding.to_proto().SerializeToString(),)

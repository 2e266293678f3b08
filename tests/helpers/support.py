"""Helpers of many tests: short forms of autocast, queries of jaxprs, comparisons of trees."""

import collections
import functools
import importlib.util
import os
import secrets
import struct
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

import mpjax

HALVES = ("bfloat16", "float16")
BOTH = functools.partial(jax.grad, argnums=(0, 1))


def python_of(framework: str) -> str | None:
    """Returns a Python that has a framework: that of `make test-FRAMEWORK`, this one, or None."""
    own = Path(__file__).parents[2] / f".venv-{framework}" / "bin" / "python"
    if own.exists():
        return str(own)
    return sys.executable if importlib.util.find_spec(framework) else None


def thorough_but(cases, *quick):
    """Returns the cases of a parametrization. All but the ``quick`` ones are thorough.

    A quick case is named by itself, or by its position if it has no name: an int is a position. A
    tuple holds the values of several parameters.
    """
    cases = [*cases]
    places = {case if isinstance(case, int) else cases.index(case) for case in quick}
    assert places <= {*range(len(cases))}, f"no such cases: {quick}"
    return [x if i in places else _thorough(x) for i, x in enumerate(cases)]


def _thorough(case):
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.thorough], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)


def cast(fun, half="bfloat16"):
    return mpjax.autocast(fun, f"mixed_{half}")


class Compilations:
    """Counts what XLA compiles."""

    def __enter__(self):
        self.names = []
        jax.monitoring.register_event_duration_secs_listener(self.hear)
        return self

    def hear(self, event, _, **about):
        if event.endswith("backend_compile_duration"):
            self.names.append(about.get("fun_name"))

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self.hear)


def equations(jaxpr):
    """Yields every equation of a jaxpr, including those of inner programs."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, JAXPRS)):
                if isinstance(inner, JAXPRS):
                    yield from equations(inner)


JAXPRS = (jex.Jaxpr, jex.ClosedJaxpr)
MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def found(fun, *args, names=MATMULS):
    """Returns (primitive, dtypes of float operands, dtype of the result) for some operations."""
    rows = []
    for eqn in equations(jax.make_jaxpr(fun)(*args)):
        if eqn.primitive.name in names:
            dtypes = [
                str(v.aval.dtype) for v in eqn.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)
            ]
            rows.append((eqn.primitive.name, tuple(dtypes), str(eqn.outvars[0].aval.dtype)))
    return rows


def matmul_dtypes(fun, *args):
    """Returns the operand dtypes of every matmul and convolution of a function."""
    return [dtypes for _, dtypes, _ in found(fun, *args)]


def full_matmuls(fun, *args):
    """Returns the matmuls and convolutions with a float32 operand."""
    return [row for row in found(fun, *args) if "float32" in row[1]]


def calls_of(fun, *args, within=""):
    """Counts the calls of Python and C functions, which no other load on the machine changes.

    With ``within``, only those of and by functions of files whose names contain it.
    """
    counts = collections.Counter()

    def count(frame, event, arg):
        counts[event] += within in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        fun(*args)
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]


def calls_to_trace(fun, *args, within=""):
    """Counts the calls that tracing makes."""
    jax.clear_caches()
    return calls_of(jax.make_jaxpr(fun), *args, within=within)


def chosen_seed(quick):
    """Returns the seed of all random inputs of a run: SEED, if it is set.

    The quick tier draws the same numbers in every run, so that a failure comes from the change. The
    thorough tier draws others each time.
    """
    return int(os.environ.get("SEED") or (0 if quick else secrets.randbelow(2**32)))


def seed_of_run():
    return int(os.environ.get("SEED", 0))


def fresh_rng(stream=0):
    """Returns a generator for the run's seed. Two with one stream have the same numbers."""
    return np.random.default_rng([seed_of_run(), stream])


def normal(seed, *shape, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def assert_near(got, want, rtol=0.03):
    """Compares trees of arrays by the norm of their difference."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype, (g.shape, w.shape, g.dtype, w.dtype)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.linalg.norm(g - w) <= rtol * np.linalg.norm(w) + 1e-5, (g, w)


def events_of(folder):
    """Yields the events in TensorBoard's files. A record is length, checksum, data, checksum."""
    from tensorboardX.proto import event_pb2

    for path in folder.glob("events*"):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]

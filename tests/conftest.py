"""Fixtures for all tests, and the devices on which tests run."""

import os

# Several CPU devices for shard_map and pmap, each with one thread, so that parallel test workers do
# not compete for the cores. Compilation is fast rather than its code, because tests compile more.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_backend_optimization_level=0",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))

import jax
import numpy as np
import pytest
from hypothesis import settings

from mpjax._src import rules

# Tracing and compiling make the time of a single example meaningless.
# Under CI, inputs are the same every time, so that a failure comes from the change.
CI = bool(os.environ.get("CI"))
settings.register_profile("mpjax", deadline=None, max_examples=50, derandomize=CI)
settings.load_profile("mpjax")


@pytest.fixture
def strict_promotion():
    """Strict dtype promotion: none of our operations may mix dtypes by accident."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng():
    """A generator whose numbers differ from run to run. The seed is printed if a test fails."""
    seed = int(np.random.SeedSequence(0 if CI else None).generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def table():
    """The table of rules, which is restored after a test that adds to it."""
    before = dict(rules.RULES)
    yield rules.RULES
    rules.RULES.clear()
    rules.RULES.update(before)

"""Fixtures for all tests, and the devices they run on."""

import os

# Two CPU devices for shard_map and pmap; one thread each, or parallel workers fight for the cores;
# and machine code compiled fast, for the tests compile far more than they run.
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

# Tracing and compiling make the time of one example meaningless.
# Under CI the same inputs every time: a red run there means that the change is at fault.
CI = bool(os.environ.get("CI"))
settings.register_profile("mpjax", deadline=None, max_examples=50, derandomize=CI)
settings.load_profile("mpjax")


@pytest.fixture
def strict_promotion():
    """Strict dtype promotion: no operation of ours may mix dtypes by accident."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng():
    """Random numbers that differ from run to run; the seed is printed when a test fails."""
    seed = int(np.random.SeedSequence(0 if CI else None).generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def table():
    """Restores the table after a test that adds to it."""
    before = dict(rules.RULES)
    yield rules.RULES
    rules.RULES.clear()
    rules.RULES.update(before)

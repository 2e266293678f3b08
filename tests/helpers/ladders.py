"""Settings of `fit_memory` whose programs take given memory and time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from absent import report

import mpjax
from mpjax._src.tools.hardware import fit, ladder, trials
from mpjax._src.tools.hardware.targets import find_target

H100 = find_target("h100")
BASE = mpjax.get_policy("mixed_bfloat16")
NAMES = ("first", "second", "third", "fourth", "fifth")
LADDER = [ladder.Setting(name, BASE) for name in NAMES]
FALLING = {name: (100 - 10 * i, 10.0 + i) for i, name in enumerate(NAMES)}  # 100 to 60 MiB
MIB = 2**20
# A ladder of two settings, for tests that say which one is found.
SHORT = {"fused_attention": True}, {"storage": "lean"}


def loss_fn(params, batch):
    h = batch
    for w in params:
        h = h + jax.nn.gelu(h @ w) @ w.T
    return jnp.mean(h**2)


STEP = functools.partial(mpjax.build_train_step, loss_fn, optax.sgd(0.1))


def program(mib, ms):
    """A report of a program that takes so much memory and time."""
    found = report("h100")
    other = found.total_bytes - found.temp_bytes
    times = {"memory_ms": ms, "compute_ms": 0.0, "bytes_accessed": ms}
    return dataclasses.replace(found, temp_bytes=int(mib * MIB) - other, **times)


def fitted(figures, available, every=False, beside=()):
    """Searches settings of given (MiB, ms); returns the result and the names of the compiled."""
    compiled = []

    def compile_setting(setting):
        compiled.append(setting.name)
        found = figures[setting.name]
        if isinstance(found, Exception):
            raise found
        return found and program(*found)

    tried = trials.Trials(compile_setting, available * MIB)
    every = every or not tried.climb(LADDER)
    if every:
        tried.measure_all([*LADDER, *beside])
    assert len(set(compiled)) == len(compiled)
    return fit.fit_of(tried, H100, 0.25, every), compiled

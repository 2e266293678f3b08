"""SECURITY.md: reading a checkpoint or a safetensors file runs nothing that is in it."""

import fractions
import pickle
import sys

import jax.numpy as jnp
import pytest

import mpjax

# Audit events of unpickling, and of starting a process.
RUNS = {"pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"}
STATE = {"kernel": jnp.ones((2, 3), jnp.bfloat16), "step": jnp.zeros((), jnp.int32)}
WATCHED = []  # lists that events are written to; a hook itself cannot be removed


def write_down(event, args):
    if WATCHED and event in RUNS:
        WATCHED[-1].append(event)


sys.addaudithook(write_down)


@pytest.fixture
def seen():
    WATCHED.append([])
    yield WATCHED[-1]
    WATCHED.pop()


def test_reading_a_checkpoint_runs_nothing(tmp_path, seen):
    mpjax.checkpoint.save(tmp_path / "state", STATE)
    seen.clear()
    mpjax.checkpoint.describe(tmp_path / "state")
    mpjax.checkpoint.restore(tmp_path / "state", STATE)
    assert not seen


def test_reading_safetensors_runs_nothing(tmp_path, seen):
    mpjax.checkpoint.save_safetensors(tmp_path / "state", STATE)
    seen.clear()
    mpjax.checkpoint.load_safetensors(tmp_path / "state")
    assert not seen


def test_unpickling_is_seen_by_the_audit_hook(seen):
    pickle.loads(pickle.dumps(fractions.Fraction(1, 2)))
    assert "pickle.find_class" in seen

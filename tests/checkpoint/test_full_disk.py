"""A checkpoint that cannot be written: one error that says why, and nothing half-written."""

import contextlib
import resource
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from problems import bits

import mpjax
from mpjax import checkpoint

SMALL = {"w": np.arange(3.0, dtype=np.float32)}
LARGE = {"w": np.random.default_rng(0).normal(size=200_000).astype(np.float32)}  # 800 kB


@contextlib.contextmanager
def full(size=100_000):
    """Lets no file become larger; the system's error differs from a full disk's in its number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_save_to_a_full_disk_is_one_short_error(tmp_path, caplog):
    with full(), pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.save(tmp_path / "c", LARGE)
    message = str(caught.value)
    assert ": the checkpoint could not be written: File too large. Nothing of it" in message
    assert str(tmp_path / "c") in message and "\n" not in message and len(message) < 300
    assert caught.value.__suppress_context__  # a hundred lines of orbax
    assert not [*tmp_path.iterdir()]
    assert not caplog.records  # orbax logs every error with its traceback, several times
    checkpoint.save(tmp_path / "c", LARGE)
    assert bits(checkpoint.restore(tmp_path / "c", LARGE)) == bits(LARGE)


def test_background_save_to_a_full_disk_is_one_short_error(tmp_path, caplog):
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, SMALL)
        manager.wait()
        with full():
            manager.save(2, LARGE)
            with pytest.raises(checkpoint.CheckpointError) as caught:
                manager.wait()
        assert "the checkpoint could not be written: File too large" in str(caught.value)
        assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "1"]
        assert manager.steps() == [1]
        with full():
            manager.save(2, LARGE)
            with pytest.raises(checkpoint.CheckpointError, match="File too large"):
                while True:
                    manager.save(3, SMALL)  # raises what the one before could not
        manager.save(3, LARGE)
        assert manager.steps() == [1, 3]
        assert bits(manager.restore(LARGE)) == bits(LARGE)
    assert not caplog.records


def test_error_of_a_background_save_is_raised_by_close(tmp_path):
    with full():
        manager = checkpoint.Manager(tmp_path)
        manager.save(1, LARGE)
        with pytest.raises(checkpoint.CheckpointError, match="File too large"):
            manager.close()
    assert not [*tmp_path.iterdir()]
    with checkpoint.Manager(tmp_path) as manager:
        assert manager.steps() == []


def test_a_safetensors_file_that_cannot_be_written_leaves_the_one_before(tmp_path):
    file = tmp_path / "model.safetensors"
    mpjax.checkpoint.save_safetensors(file, SMALL)
    with full(), pytest.raises(checkpoint.CheckpointError) as caught:
        mpjax.checkpoint.save_safetensors(file, LARGE)
    assert f"file={str(file)!r} could not be written: File too large." in str(caught.value)
    assert [*tmp_path.iterdir()] == [file]
    assert bits(mpjax.checkpoint.load_safetensors(file)) == bits(SMALL)


@pytest.mark.parametrize("nothing", [None, {}, {"params": None}, ()], ids=str)
def test_a_state_without_arrays_is_refused(nothing, tmp_path):
    with pytest.raises(TypeError, match=r"state=.* contains no arrays, so nothing could be"):
        checkpoint.save(tmp_path / "c", nothing)
    with checkpoint.Manager(tmp_path / "run") as manager:
        with pytest.raises(TypeError, match="contains no arrays"):
            manager.save(1, nothing)
        assert manager.steps() == []
    assert not (tmp_path / "c").exists()
    checkpoint.save(tmp_path / "c", {"empty": jnp.zeros(0)})  # an array, if an empty one

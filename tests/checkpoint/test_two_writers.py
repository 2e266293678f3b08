"""Two at once: one Manager for a directory, one save of a new directory, and nothing lost."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import filelock
import jax
import numpy as np
import pytest
from problems import bits

import mpjax
from mpjax import checkpoint
from mpjax._src.checkpoint import store

STATE = {"params": {"w": np.arange(3.0, dtype=np.float32)}}
ROOT = Path(__file__).parent.parent.parent
# Holds a lock as mpjax does, without importing JAX.
HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("process 77 on host 'far'")
file.flush()
print("held", flush=True)
time.sleep(600)
"""


def started(code, *arguments):
    """Starts Python in a process of its own, and returns it when it has printed a line."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    process.said = process.stdout.readline()
    return process


@pytest.fixture
def holder():
    """Starts processes that hold a lock, and kills them."""
    processes = []

    def hold(file):
        processes.append(started(HOLD, file))
        return processes[-1]

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def test_a_second_manager_is_refused_and_the_first_loses_nothing(tmp_path):
    with checkpoint.Manager(tmp_path) as first:
        first.save(1, STATE)
        who = f"process {os.getpid()} on host {socket.gethostname()!r}, this process"
        with pytest.raises(checkpoint.CheckpointError, match=f"a Manager already, of {who}"):
            checkpoint.Manager(tmp_path)
        link = tmp_path / "link"  # another name of the same directory
        link.symlink_to(tmp_path)
        with pytest.raises(checkpoint.CheckpointError, match="a Manager already"):
            checkpoint.Manager(link)
        first.save(2, STATE)
        assert first.steps() == [1, 2]
    link.unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    with checkpoint.Manager(tmp_path) as again:
        assert bits(again.restore(STATE)) == bits(STATE)
    again.close()  # twice does no harm
    with checkpoint.Manager(tmp_path):
        again.close()
        with pytest.raises(checkpoint.CheckpointError, match="a Manager already"):
            checkpoint.Manager(tmp_path)


def test_a_manager_that_is_garbage_has_written_everything_and_holds_no_lock(tmp_path):
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, STATE)
    manager.itself = manager
    del manager
    with checkpoint.Manager(tmp_path) as manager:
        assert manager.steps() == [1]


def test_a_manager_that_could_not_be_made_holds_no_lock(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(store.orbax(), "CheckpointManager", broken)
        with pytest.raises(checkpoint.CheckpointError, match="cannot be listed: Input/output"):
            checkpoint.Manager(tmp_path)
    with checkpoint.Manager(tmp_path) as manager:
        assert manager.steps() == []


def test_manager_names_process_and_host_of_its_lock_and_replaces_a_dead_one(tmp_path, holder):
    process = holder(tmp_path / ".lock")
    with pytest.raises(checkpoint.CheckpointError, match="already, of process 77 on host 'far'"):
        checkpoint.Manager(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / ".lock").exists()
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, STATE)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_read_only_manager_needs_no_lock(tmp_path):
    (tmp_path / "file").touch()
    for name in ("c", "file"):
        with pytest.raises(FileNotFoundError, match="is not a directory"):
            checkpoint.Manager(tmp_path / name, read_only=True)
    (tmp_path / "file").unlink()
    with checkpoint.Manager(tmp_path, best="loss") as writer:
        writer.save(1, STATE, metrics={"loss": 2.0})
        writer.wait()
        with checkpoint.Manager(tmp_path, best="loss", read_only=True) as reader:
            assert reader.latest() == reader.best() == 1
            unfinished = tmp_path / "9.orbax-checkpoint-tmp"
            unfinished.mkdir()
            with checkpoint.Manager(tmp_path, read_only=True) as other:
                assert bits(other.restore(STATE)) == bits(STATE) and unfinished.exists()
            writer.save(2, STATE, metrics={"loss": 1.0})
            writer.wait()
            assert reader.steps() == [1, 2] and reader.best() == 2
            with pytest.raises(checkpoint.CheckpointError, match="created with read_only=True"):
                reader.save(3, STATE, metrics={"loss": 1.0})
        with pytest.raises(checkpoint.CheckpointError, match="a Manager already"):
            checkpoint.Manager(tmp_path)  # the reader's end is not the writer's


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_written_without(number, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(number, "no locks")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with checkpoint.Manager(tmp_path / "run") as manager:
        manager.save(1, STATE)
    checkpoint.save(tmp_path / "c", STATE)
    assert bits(checkpoint.restore(tmp_path / "c", STATE)) == bits(STATE)


def test_any_other_error_of_the_lock_is_raised(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.raises(checkpoint.CheckpointError, match="it cannot be locked: Permission denied"):
        checkpoint.Manager(tmp_path)


def test_buckets_have_no_locks():
    with contextlib.ExitStack() as stack:
        assert store.claim("gs://bucket/run", ".lock", stack, inside=True) is None


def test_only_the_first_process_of_a_program_locks(tmp_path, monkeypatch):
    """The others learn from it; what they hear is heard in tests/test_multihost.py."""
    with checkpoint.Manager(tmp_path):
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        with contextlib.ExitStack() as stack:
            assert store.claim(tmp_path, ".lock", stack, inside=True) is None
        monkeypatch.undo()
        with pytest.raises(checkpoint.CheckpointError, match="a Manager already"):
            checkpoint.Manager(tmp_path)


def numbered(i):
    return {"w": np.full(100_000, i, np.float32), "n": np.int32(i)}


def test_of_three_threads_that_save_to_one_directory_one_wins(tmp_path):
    barrier, ends = threading.Barrier(3), [None] * 3

    def save(i):
        barrier.wait()
        try:
            checkpoint.save(tmp_path / "c", numbered(i))
        except Exception as error:
            ends[i] = error

    threads = [threading.Thread(target=save, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [i for i, error in enumerate(ends) if error is None]
    for error in filter(None, ends):
        assert isinstance(error, FileExistsError)
        assert f"is being written by process {os.getpid()}" in str(error) or "exists" in str(error)
    assert bits(checkpoint.restore(tmp_path / "c", numbered(9))) == bits(numbered(winner))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_save_that_is_going_on_elsewhere_is_named(tmp_path, holder):
    process = holder(tmp_path / ".c.lock")
    with pytest.raises(FileExistsError, match="c' is being written by process 77 on host 'far'"):
        checkpoint.save(tmp_path / "c", STATE)
    process.kill()
    process.wait()
    checkpoint.save(tmp_path / "c", STATE)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_of_two_writers_of_a_safetensors_file_each_writes_its_own(tmp_path, monkeypatch):
    """The second one begins when the first has written half, and ends before it."""
    import safetensors.numpy

    file, written = tmp_path / "model", safetensors.numpy.save_file

    def interrupted(arrays, name, metadata):
        monkeypatch.undo()
        Path(name).write_bytes(b"half")
        mpjax.checkpoint.save_safetensors(file, {"w": np.ones(2, np.float32)})
        assert Path(name).read_bytes() == b"half"
        written(arrays, name, metadata)

    monkeypatch.setattr(safetensors.numpy, "save_file", interrupted)
    mpjax.checkpoint.save_safetensors(file, {"w": np.zeros(3, np.float32)})
    assert [*tmp_path.iterdir()] == [file]
    assert mpjax.checkpoint.load_safetensors(file)["w"].shape == (3,)


SAVE = """
import sys
import numpy as np
from mpjax import checkpoint
checkpoint.save(sys.argv[1] + "/first", {"w": np.ones(1)})  # everything is imported
print("ready", flush=True)
sys.stdin.readline()
number = int(sys.argv[2])
try:
    checkpoint.save(sys.argv[1] + "/../c", {"w": np.full(100_000, number, np.float32)})
except FileExistsError:
    print("exists")
else:
    print("saved")
"""


@pytest.mark.thorough
def test_of_three_processes_that_save_to_one_directory_one_wins(tmp_path):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAVE, str(tmp_path / str(i)), str(i)], env=env, **pipes
        )
        for i in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert sorted(ends) == ["exists", "exists", "saved"]
    back = checkpoint.restore(tmp_path / "c", {"w": np.zeros(100_000, np.float32)})
    assert np.unique(back["w"]).tolist() == [ends.index("saved")]


MANAGE = """
import sys, time
import numpy as np
from mpjax import checkpoint
manager = checkpoint.Manager(sys.argv[1])
manager.save(1, {"params": {"w": np.arange(3.0, dtype=np.float32)}})
manager.wait()
print("saved", flush=True)
time.sleep(600)
"""


@pytest.mark.thorough
def test_manager_of_a_restarted_job_is_refused_until_its_first_process_ends(tmp_path):
    process = started(MANAGE, tmp_path)
    try:
        assert process.said == "saved\n"
        with pytest.raises(checkpoint.CheckpointError, match=f"of process {process.pid} on host"):
            checkpoint.Manager(tmp_path)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with checkpoint.Manager(tmp_path) as manager:
        assert bits(manager.restore(STATE)) == bits(STATE)

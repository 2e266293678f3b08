"""JsonLines: a file of whole lines, whatever the disk and other writers do."""

import errno
import json
import os
import resource

import pytest

import mpjax
from mpjax._src.tools.instruments import logs

RECORD = {"loss": 0.5}


@pytest.fixture
def room(tmp_path):
    """Sets how many bytes a file may have: as on a full disk, the write that passes it is cut."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def steps(path):
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_a_full_disk_leaves_whole_lines_and_says_which_is_lost(tmp_path, room):
    path = tmp_path / "run.jsonl"
    log = mpjax.debug.JsonLines(path)
    mpjax.debug.log_metrics(log, 0, RECORD)
    size = path.stat().st_size
    room(2 * size + 7)
    mpjax.debug.log_metrics(log, 1, RECORD)
    for step in (2, 3):
        with pytest.raises(OSError, match=f"record of step {step} was lost.*run.jsonl") as caught:
            mpjax.debug.log_metrics(log, step, RECORD)
        assert caught.value.errno == errno.EFBIG
        assert steps(path) == [0, 1]
    room(100 * size)
    mpjax.debug.log_metrics(log, 4, RECORD)
    assert steps(path) == [0, 1, 4]


def test_records_that_wait_behind_a_lost_one_are_written(tmp_path, room, monkeypatch):
    path = tmp_path / "run.jsonl"
    log = mpjax.debug.JsonLines(path)
    with monkeypatch.context() as patched:
        patched.setattr(logs, "_is_ready", lambda leaf: False)
        for step in range(3):
            mpjax.debug.log_metrics(log, step, RECORD)
    room(0)
    with pytest.raises(OSError, match="record of step 0 was lost"):
        mpjax.debug.flush_metrics(log)
    room(1 << 20)
    mpjax.debug.flush_metrics(log)
    assert steps(path) == [1, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux alone has it")
def test_json_lines_names_the_record_lost_on_a_full_device():
    with pytest.raises(OSError, match="record of step 1 was lost.*/dev/full"):
        mpjax.debug.log_metrics(mpjax.debug.JsonLines("/dev/full"), 1, RECORD)


def test_a_line_that_another_run_left_unfinished_is_ended(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "lo')
    for step in (2, 3):
        mpjax.debug.log_metrics(mpjax.debug.JsonLines(path), step, RECORD)
    first, torn, *rest = path.read_text().splitlines()
    assert json.loads(first) == {"step": 0} and torn == '{"step": 1, "lo'
    assert [json.loads(line)["step"] for line in rest] == [2, 3]


def test_json_lines_writes_to_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    mpjax.debug.log_metrics(mpjax.debug.JsonLines(path), 1, RECORD)
    assert json.loads(os.read(pipe, 1000)) == {"step": 1, **RECORD}
    os.close(pipe)


@pytest.mark.parametrize("name", ["", ".", "folder"])
def test_json_lines_refuses_a_directory(tmp_path, monkeypatch, name):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=f"path='{name}' is a directory, but must be a file"):
        mpjax.debug.JsonLines(name)


@pytest.mark.parametrize("path", [3, None, ["run.jsonl"], b"run.jsonl"])
def test_json_lines_refuses_what_is_no_path(path):
    with pytest.raises(TypeError, match="path=.* must be the path of a file"):
        mpjax.debug.JsonLines(path)


def test_json_lines_refuses_a_file_that_may_not_be_written(tmp_path):
    path = tmp_path / "run.jsonl"
    path.touch(mode=0o400)
    # Root may write to every file but those of the kernel.
    with pytest.raises(PermissionError):
        mpjax.debug.JsonLines(path if os.geteuid() else "/sys/kernel/uevent_seqnum")

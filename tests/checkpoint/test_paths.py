"""Directories of every name: what is saved there is found again, or the save is refused."""

import contextlib
import shutil
from pathlib import Path, PurePosixPath

import jax
import numpy as np
import pytest
import tensorstore
from problems import bits
from support import thorough_but

import mpjax
from mpjax import checkpoint
from mpjax._src.checkpoint import arrays, paths

STATE = {"params": {"w": np.arange(3.0, dtype=np.float32)}}

NAMES = ["lr=[0.1]", "a*", "q?", "[", "[!x]", "**", "~", "a b", "ü\n%2F#", "{a,b}", "$x...", "-x"]


@pytest.mark.parametrize("name", thorough_but(NAMES, 0, 1))
def test_any_name_is_written_and_read(name, tmp_path):
    """The writer below lists files by a pattern: a name must not be one, nor fit another's."""
    for other in ("lr=0", "lr=[0.1]0", "ab", "qq", "x", "aa"):
        (tmp_path / f"{other}.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    checkpoint.save(tmp_path / name / "c", STATE)
    assert bits(checkpoint.restore(tmp_path / name / "c", STATE)) == bits(STATE)
    checkpoint.save(tmp_path / name / name, STATE)
    assert bits(checkpoint.restore(tmp_path / name / name, STATE)) == bits(STATE)
    with checkpoint.Manager(str(tmp_path / name / "run"), keep=1) as manager:
        for number in (1, 2):
            manager.save(number, STATE)
        assert manager.steps() == [2] and bits(manager.restore(STATE)) == bits(STATE)
    with checkpoint.Manager(tmp_path / name / "run", read_only=True) as manager:
        assert bits(manager.restore(STATE)) == bits(STATE)
    assert [p.name for p in (tmp_path / name / "run").iterdir()] == ["2"]
    file = tmp_path / name / name / ("p" * 250)
    mpjax.checkpoint.save_safetensors(file, STATE)
    assert {*mpjax.checkpoint.load_safetensors(file)} == {"params.w"}
    with pytest.raises(checkpoint.CheckpointError, match="File name too long"):
        mpjax.checkpoint.save_safetensors(f"{file}{file.name}", STATE)


def test_relative_links_and_other_path_objects_are_directories(tmp_path, monkeypatch):
    (tmp_path / "far" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/real")
    monkeypatch.chdir(tmp_path)
    for name in ("link/[1]", "./[2]", PurePosixPath("link/../[3]"), "far/../[4]"):
        checkpoint.save(name, STATE)
        assert bits(checkpoint.restore(name, STATE)) == bits(STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["[2]", "[4]", "far", "link"]
    assert sorted(p.name for p in (tmp_path / "far").iterdir()) == ["[3]", "real"]


WRONG = [
    (3.0, TypeError, r"=3.0 must be a path.*Manager\(directory\).save\(number, state\)"),
    (None, TypeError, "=None must be a path"),
    (True, TypeError, "=True must be a path"),
    (b"x", TypeError, "=b'x' must be a path"),
    (["x"], TypeError, r"=\['x'\] must be a path"),
    ("", ValueError, "='' is empty"),
    ("x\udc80", ValueError, "not valid Unicode"),
    ("x\0y", ValueError, r"contains '\\0'"),
    ("x\\y", ValueError, r"contains .*'\\\\'"),
    ("file:///x", ValueError, "='file:///x' is not an address.*gs://, s3://"),
    ("memory://x", ValueError, "not an address"),
    ("x/gs://y", ValueError, "not an address"),
    (Path("runs/gs://bucket/run"), ValueError, r"lost a '/'.*as a string"),
    (Path("gs://bucket/run"), ValueError, r"gs:/bucket/run'\) lost a '/'.*as a string"),
    ("/s3/run", ValueError, "='/s3/run' would be taken for the address of a storage bucket"),
]


@pytest.mark.parametrize("wrong, kind, message", WRONG, ids=str)
def test_what_is_no_path_is_refused_by_every_function(wrong, kind, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = [
        lambda: checkpoint.save(wrong, STATE),
        lambda: checkpoint.restore(wrong, STATE),
        lambda: checkpoint.describe(wrong),
        lambda: checkpoint.Manager(wrong),
        lambda: checkpoint.Manager(wrong, read_only=True),
    ]
    for call in calls:
        with pytest.raises(kind, match=f"directory.*{message}"):
            call()
    if kind is TypeError or not wrong:
        for call in (
            checkpoint.load_safetensors,
            lambda file: checkpoint.save_safetensors(file, {}),
        ):
            with pytest.raises(kind, match="file="):
                call(wrong)
    assert not [*tmp_path.iterdir()]


@contextlib.contextmanager
def nothing_found(monkeypatch):
    """The writer below does not find what it wrote, which it logs as a warning."""
    with monkeypatch.context() as patched:
        patched.setattr(paths._local(), "glob", lambda self, pattern: iter(()))
        yield


def test_a_save_that_stores_nothing_is_refused(tmp_path, monkeypatch):
    with nothing_found(monkeypatch), pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.save(tmp_path / "c", STATE)
    assert "cannot be found" in str(caught.value) and "'params/w'" in str(caught.value)
    assert str(tmp_path / "c") in str(caught.value)
    assert not [*tmp_path.iterdir()]
    checkpoint.save(tmp_path / "c", STATE)


def test_a_background_save_that_stores_nothing_is_refused(tmp_path, monkeypatch):
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, STATE)
        manager.wait()
        with (
            nothing_found(monkeypatch),
            pytest.raises(checkpoint.CheckpointError, match="params/w"),
        ):
            manager.save(2, STATE)
            manager.wait()
        assert manager.steps() == [1]
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "1"]
        manager.save(3, STATE)
        assert manager.steps() == [1, 3]


def test_a_save_whose_description_is_cut_off_is_refused(tmp_path, monkeypatch):
    local, write = paths._local(), paths._local().write_text
    cut = lambda self, text, *args: write(self, text[: len(text) // 2])  # noqa: E731
    monkeypatch.setattr(local, "write_text", cut)
    with pytest.raises(checkpoint.CheckpointError, match="cannot be found: .*metadata"):
        checkpoint.save(tmp_path / "c", STATE)
    assert not [*tmp_path.iterdir()]


def test_every_shard_of_an_array_has_to_be_stored(tmp_path):
    rows = jax.NamedSharding(jax.make_mesh((4,), ("x",)), jax.P("x"))
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    state = {"w": jax.device_put(values, rows), "": np.float32(2), "a": {"": values}}
    checkpoint.save(tmp_path / "c", state)
    assert bits(checkpoint.restore(tmp_path / "c", state)) == bits(state)
    where, sizes = tmp_path / "c" / "state", {"w": [8, 4], "": [], "a/": [8, 4]}
    table = {name: {"dtype": "float32", "shape": shape} for name, shape in sizes.items()}
    arrays.check_stored(where, table)
    base = {"driver": "file", "path": f"{where}/"}
    files = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    files.write(b"w/2.0", None).result()
    with pytest.raises(checkpoint.CheckpointError, match="'w' .*3 of its 4 shards were stored"):
        arrays.check_stored(where, table)
    files.delete_range(tensorstore.KvStore.KeyRange(b"a/", b"a0")).result()
    with pytest.raises(checkpoint.CheckpointError, match="'a/' cannot be read"):
        arrays.check_stored(where, {"a/": table["a/"]})


def half_removed(path, *args, **kwargs):
    (path := Path(path)) and (path / "about" / "metadata").unlink()
    raise OSError(5, "no more of it")


def test_a_checkpoint_is_removed_under_another_name(tmp_path, monkeypatch):
    """However far the removal gets, no one finds half of a checkpoint, and the next one ends it."""
    with checkpoint.Manager(tmp_path, keep=2) as manager:
        with monkeypatch.context() as patched, pytest.warns(UserWarning) as caught:
            patched.setattr(shutil, "rmtree", half_removed)
            for number in (1, 2, 3):
                manager.save(number, STATE)
            assert manager.steps() == [2, 3]
        assert "/1 could not be removed: Input/output error" in str(caught[0].message)
        rest = "1.removed.orbax-checkpoint-tmp"
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", rest, "2", "3"]
        with checkpoint.Manager(tmp_path, read_only=True) as reader:
            assert reader.steps() == [2, 3]
    with checkpoint.Manager(tmp_path, keep=2) as manager:
        assert manager.steps() == [2, 3] and bits(manager.restore(STATE, 2)) == bits(STATE)
        manager.save(4, STATE)
        assert manager.steps() == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4"]

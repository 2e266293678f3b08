"""Files that are truncated, foreign or hostile: an error that names them, and no code of theirs."""

import contextlib
import json
import pickle
import shutil
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from problems import bits

from mpjax import checkpoint
from mpjax._src.checkpoint import store

STATE = {"params": {"w": jnp.arange(5000.0), "b": jnp.ones(3, jnp.bfloat16)}, "step": jnp.int32(4)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "c"
    checkpoint.save(directory, STATE)
    return directory


def files(directory):
    return sorted(p.relative_to(directory) for p in directory.rglob("*") if p.is_file())


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def edit(directory, change):
    file = directory / "about" / "metadata"
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


DAMAGES = {
    "gone": lambda path, data: path.unlink(),
    "empty": lambda path, data: path.write_bytes(b""),
    "half": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "noise": lambda path, data: path.write_bytes(bytes(len(data))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_or_does_no_harm(damage, whole, tmp_path):
    refused = set()
    for file in files(whole):
        directory = Path(shutil.copytree(whole, tmp_path / file.name / "c"))
        DAMAGES[damage](directory / file, (directory / file).read_bytes())
        try:
            assert bits(checkpoint.restore(directory, STATE)) == bits(STATE), file
        except checkpoint.CheckpointError as error:
            assert str(directory) in str(error)
            refused.add(file.parts[0] + "/" + file.parts[1] if file.parts[1:] else file.name)
        shutil.rmtree(tmp_path / file.name)
    assert {"about/metadata", "state/manifest.ocdbt", "state/d"} <= refused


def test_restore_refuses_a_directory_that_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        checkpoint.restore(tmp_path / "nowhere", STATE)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"not a checkpoint of mpjax.*contains \[\]"
    ):
        checkpoint.restore(tmp_path, STATE)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", STATE)
    with pytest.raises(checkpoint.CheckpointError, match=r"not a checkpoint of mpjax.*manifest"):
        checkpoint.describe(tmp_path / "orbax")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda about: about.clear(), "not written by mpjax"),
        (lambda about: about.update(format="other"), "not written by mpjax"),
        (
            lambda about: about.update(format_version=9),
            "version 9 of the format, written by mpjax '",
        ),
        (lambda about: about.update(leaves=[1]), "entry 'leaves' is damaged"),
        (lambda about: about.pop("kinds"), "entry 'kinds' is damaged"),
        (lambda about: about["leaves"].update(step=3), "leaf 'step' is damaged"),
        (lambda about: about["leaves"]["step"].pop("means"), "leaf 'step' is damaged"),
        (lambda about: about["leaves"]["step"].update(shape=["x"]), "leaf 'step' is damaged"),
        (lambda about: about["leaves"]["step"].update(shape=[-1]), "leaf 'step' is damaged"),
        (lambda about: about["leaves"]["step"].update(dtype="no"), "leaf 'step' is damaged"),
        (lambda about: about["leaves"]["step"].update(key="no"), "leaf 'step' is damaged"),
    ],
)
def test_restore_refuses_wrong_metadata(change, message, copy):
    edit(copy, change)
    with pytest.raises(checkpoint.CheckpointError, match=f"about/metadata: .*{message}"):
        checkpoint.restore(copy, STATE)


def test_restore_refuses_arrays_that_differ_from_the_metadata(copy):
    """orbax pads and truncates where it is let, and casts in silence."""
    edit(copy, lambda about: about["leaves"]["params/w"].update(shape=[4999]))
    like = {**STATE, "params": {**STATE["params"], "w": jnp.ones(4999)}}
    with pytest.raises(checkpoint.CheckpointError, match="metadata: its checksum does not match"):
        checkpoint.restore(copy, like)
    with pytest.raises(checkpoint.CheckpointError, match=r"'params/w' is float32\(5000,\), but"):
        checkpoint.restore(copy, like, verify=False)
    edit(copy, lambda about: about["leaves"]["params/w"].update(shape=[5000], dtype="float16"))
    like = {**STATE, "params": {**STATE["params"], "w": jnp.ones(5000, jnp.float16)}}
    with pytest.raises(
        checkpoint.CheckpointError, match=r"float32\(5000,\), but should be float16"
    ):
        checkpoint.restore(copy, like, verify=False)


class Bomb:
    def __reduce__(self):
        return print, ("the bomb went off",)


def test_restore_runs_no_code_of_the_files(copy, capfd):
    """A pickle in the place of any file, and a NumPy array of objects: errors, not calls."""
    np.save(copy / "object.npy", np.array([Bomb()]), allow_pickle=True)
    for file in files(copy):
        kept = (copy / file).read_bytes()
        (copy / file).write_bytes(pickle.dumps(Bomb()))
        with contextlib.suppress(checkpoint.CheckpointError):
            assert bits(checkpoint.restore(copy, STATE)) == bits(STATE)
        (copy / file).write_bytes(kept)
    assert "bomb" not in "".join(capfd.readouterr())
    for module in (checkpoint.restore, store.read_about):
        assert "pickle" not in Path(sys.modules[module.__module__].__file__).read_text()


def test_half_removed_checkpoint_does_not_block_the_manager(tmp_path):
    """What a process leaves that is killed while it removes an old one, or writes a new one."""
    options = {"keep": 2, "best": "loss"}
    with checkpoint.Manager(tmp_path, **options) as manager:
        for number in (1, 2):
            manager.save(number, STATE, metrics={"loss": number})
    shutil.rmtree(tmp_path / "1" / "state")
    shutil.rmtree(tmp_path / "1" / "metrics")
    shutil.copytree(tmp_path / "2", tmp_path / "9.orbax-checkpoint-tmp")
    with checkpoint.Manager(tmp_path, **options) as manager:
        assert manager.latest() == manager.best() == 2
        assert bits(manager.restore(STATE)) == bits(STATE)
        with pytest.raises(checkpoint.CheckpointError, match="/1/state"):
            manager.restore(STATE, 1)
        for number in (3, 4):
            manager.save(number, STATE, metrics={"loss": number})
        assert manager.steps() == [2, 3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3", "4"]


def test_manager_leaves_alone_what_has_a_number_but_is_no_checkpoint(tmp_path):
    """A folder of the user's, another library's checkpoint, or what an older removal left."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "plot.png").write_text("plot")
    (tmp_path / "1" / "state").mkdir(parents=True)
    (tmp_path / "5").touch()
    (tmp_path / "²").mkdir()
    with pytest.warns(UserWarning, match="'[157]', '[157]', '[157]'.*leaves it alone") as caught:
        manager = checkpoint.Manager(tmp_path, keep=1)
    assert caught[0].filename == __file__
    with checkpoint.Manager(tmp_path, read_only=True) as reader:  # the writer has said it
        assert reader.steps() == []
    with manager:
        assert manager.steps() == [] and manager.latest() is None
        for number in (2, 3, 4):
            manager.save(number, STATE)
        assert manager.steps() == [4] and bits(manager.restore(STATE)) == bits(STATE)
        for number in (5, 7):
            with pytest.raises(checkpoint.CheckpointError, match=f"/{number} exists, but"):
                manager.save(number, STATE)
        manager.save(8, STATE)
        assert manager.steps() == [8]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "5", "7", "8", "²"]
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="leaves it alone"):
        warnings.simplefilter("error")
        checkpoint.Manager(tmp_path)
    assert (tmp_path / "7" / "plot.png").read_text() == "plot"


def test_error_without_orbax_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'mpjax\[checkpoint\]'"):
        checkpoint.save(tmp_path / "x", {})

"""Bytes that flip on a disk: the numbers that were saved, or an error that says where."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import bits
from support import thorough_but

from mpjax import checkpoint
from mpjax._src.checkpoint import arrays, checksums, store

# Not compressed, so that a flipped bit is one of the numbers, and not a part of the btree of names.
DRAWN = np.random.default_rng(0).integers(2**31, size=(64, 64), dtype=np.int32)
STATE = {
    "params": {"w": jnp.asarray(DRAWN), "b": jnp.ones(3, jnp.bfloat16)},
    "step": jnp.int32(4),
    "rng": jax.random.key(1),
    "none": jnp.zeros((0, 3)),
}
DATA = {"batch": 17}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "c"
    checkpoint.save(directory, STATE, data=DATA)
    return directory


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def flip(file, position, bit=3):
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def flip_in_arrays(directory):
    """Flips a bit in the middle of the largest file, which is in the middle of an array."""
    file = max(files(directory), key=lambda path: path.stat().st_size)
    assert file.parent.name == "d"
    flip(file, file.stat().st_size // 2)


def edit(directory, change):
    file = directory / "about" / "metadata"
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


@pytest.mark.parametrize("positions", thorough_but([2, 20], 0))
def test_a_flipped_byte_in_any_file_is_found_or_does_no_harm(positions, copy):
    named = set()
    for file in files(copy):
        data = file.read_bytes()
        for position in np.linspace(0, len(data) - 1, positions + 2).astype(int)[1:-1]:
            for bit in (0, 7)[: 1 + (positions > 2)]:
                flip(file, position, bit)
                try:
                    assert bits(checkpoint.restore(copy, STATE)) == bits(STATE), (file, position)
                    assert checkpoint.describe(copy).data == DATA
                except checkpoint.CheckpointError as error:
                    assert str(copy) in str(error)
                    where = "about/metadata" if "about" in file.parts else "the array '"
                    assert where in str(error), error
                    named.add(where)
                file.write_bytes(data)
    assert len(named) == 2


def test_error_names_the_damaged_array_and_verify_false_restores_it(copy):
    flip_in_arrays(copy)
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"'params/w' has a different checksum .* \[\[0, 64\], \[0, 64",
    ):
        checkpoint.restore(copy, STATE)
    rest = {"rng": STATE["rng"]}
    assert bits(checkpoint.restore(copy, rest)) == bits(rest)
    back = checkpoint.restore(copy, STATE, verify=False)
    assert np.sum(np.asarray(back["params"]["w"]) != DRAWN) == 1


def test_manager_restore_verifies_checksums_too(tmp_path):
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, STATE)
        manager.wait()
        flip_in_arrays(tmp_path / "1")
        with pytest.raises(checkpoint.CheckpointError, match="'params/w' has a different checksum"):
            manager.restore(STATE)
        assert manager.restore(STATE, verify=False)["step"] == 4


@pytest.mark.parametrize("loss", [1.5, float("nan")])
def test_manager_refuses_damaged_metrics(loss, tmp_path):
    with checkpoint.Manager(tmp_path, best="loss") as manager:
        for number in (1, 2):
            manager.save(number, STATE, metrics={"loss": loss})
    file = tmp_path / "1" / "metrics" / "metrics"
    text = file.read_text()
    for other in ("", '{"loss": 1.25}', "\xff", text[1:]):
        file.write_text(other, "latin-1")
        with pytest.raises(checkpoint.CheckpointError, match="1/metrics/metrics is damaged"):
            checkpoint.Manager(tmp_path, best="loss")
    file.write_text(text)
    with checkpoint.Manager(tmp_path, best="loss") as manager:
        assert manager.steps() == [1, 2]


def test_damaged_description_is_refused_by_its_checksum(copy):
    edit(copy, lambda about: about["data"].update(batch=18))
    for read in (checkpoint.describe, lambda copy: checkpoint.restore(copy, STATE)):
        with pytest.raises(checkpoint.CheckpointError, match="about/metadata: its checksum"):
            read(copy)
    assert bits(checkpoint.restore(copy, STATE, verify=False)) == bits(STATE)


@pytest.mark.parametrize("name", [checksums.ARRAYS, checksums.ABOUT])
def test_missing_checksums_of_arrays_or_description_are_refused(name, copy):
    edit(copy, lambda about: about.pop(name))
    with pytest.raises(checkpoint.CheckpointError, match="about/metadata: its checksum"):
        checkpoint.restore(copy, STATE)


def test_old_checkpoint_without_checksums_is_restored(copy):
    def before(about):
        del about[checksums.ARRAYS], about[checksums.ABOUT]

    edit(copy, before)
    assert bits(checkpoint.restore(copy, STATE)) == bits(STATE)
    flip_in_arrays(copy)
    assert bits(checkpoint.restore(copy, STATE)) != bits(STATE)


def placed(shape, names, spec):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return NamedSharding(jax.sharding.Mesh(devices, tuple(names)), P(*spec))


SAVED = {"rows": ((8,), "x", "x"), "both": ((2, 4), "xy", "xy"), "copies": ((4, 2), "xy", "x")}
RESTORED = {
    "rows": ((4,), "x", "x"),
    "columns": ((8,), "x", (None, "x")),
    "both": ((4, 2), "xy", "yx"),
    "one": ((1,), "x", ()),
    "copies": ((2, 4), "xy", "x"),
    "none": None,
}
MESHES = [(a, b) for a in SAVED for b in RESTORED]


@pytest.mark.parametrize(
    "before, after", thorough_but(MESHES, ("both", "columns"), ("rows", "none"))
)
def test_each_shard_has_a_checksum_which_other_meshes_verify(before, after, tmp_path):
    saved = {"w": jax.device_put(DRAWN, placed(*SAVED[before])), "n": np.int32(1)}
    checkpoint.save(tmp_path / "c", saved)
    sums = store.read_about(tmp_path / "c")[checksums.ARRAYS]
    assert len(sums["w"]) == {"rows": 8, "both": 8, "copies": 4}[before]
    assert len({number for _, number in sums["w"]}) == len(sums["w"]) and len(sums["n"]) == 1
    like = dict(saved)
    if RESTORED[after] is None:
        like["w"] = np.zeros_like(DRAWN)
    else:
        place = placed(*RESTORED[after])
        like["w"] = jax.ShapeDtypeStruct(DRAWN.shape, DRAWN.dtype, sharding=place)
    back = checkpoint.restore(tmp_path / "c", like)
    np.testing.assert_array_equal(back["w"], DRAWN)
    assert RESTORED[after] is None or back["w"].sharding == place
    flip_in_arrays(tmp_path)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"array 'w' has a different checksum .* \[\["
    ):
        checkpoint.restore(tmp_path / "c", like)
    assert np.sum(checkpoint.restore(tmp_path / "c", like, verify=False)["w"] != DRAWN) == 1


class Second:
    """The sharding of a process whose devices hold rows 20 to 28 alone."""

    def addressable_devices_indices_map(self, shape):
        return {"a device": (slice(20, 28), slice(None))}


def test_a_process_reads_only_the_shards_that_it_needs(tmp_path, monkeypatch):
    state = {"w": jax.device_put(DRAWN, placed((2, 4), "xy", "yx"))}  # shards of 16 x 32
    checkpoint.save(tmp_path / "c", state)
    seen = []
    of = checksums.of
    monkeypatch.setattr(checksums, "of", lambda piece: seen.append(piece.shape) or of(piece))
    part_of_second = lambda shape, sharding, part_of: part_of((slice(20, 28), slice(None)))  # noqa: E731
    monkeypatch.setattr(jax, "make_array_from_callback", part_of_second)
    about = store.read_about(tmp_path / "c")
    monkeypatch.setattr(arrays, "held", lambda part: part)
    part = arrays.read(tmp_path / "c" / "state", about, {"w": Second()}, True)["w"]
    assert seen == [(16, 32)] * 2
    np.testing.assert_array_equal(part, DRAWN[20:28])


def test_checksums_of_other_arrays_are_refused(whole):
    about = store.read_about(whole)
    about[checksums.ARRAYS]["params/w"][0][0][0] = [0, 8]
    with pytest.raises(
        checkpoint.CheckpointError, match="'params/w' cannot be read.*the whole arr"
    ):
        arrays.read(whole / "state", about, {"params/w": None}, True)

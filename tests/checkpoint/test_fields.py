"""Descriptions and headers in which any value has another type, is missing, or is cut off."""

import itertools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from problems import bits
from support import thorough_but

import mpjax
from mpjax import checkpoint
from mpjax._src.checkpoint import checksums, fields

OTHERS = [None, True, -1, 10**30, 1.5, "", "x", "float64", [], [[]], ["x", "x", 3], {}, {"a": 1}]
MISSING = object()
# The fields that a restore reads.
JUDGED = "format", "format_version", "leaves", "kinds", "loss_scale", "loss_scales"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state of masters, 8-bit moments, their scales, a loss scale, empty arrays and keys."""
    optimizer = mpjax.optim.with_8bit_moments(optax.adam(1e-2))
    params = {"w": np.full((64, 128), 0.1, np.float32), "none": np.zeros((0, 3), np.float32)}
    init, _ = mpjax.build_train_step(lambda p, b: p["w"].sum(), optimizer, "O2:float16")
    shapes = jax.eval_shape(init, params)
    state = {
        "state": jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes),
        "rng": jax.random.key(3),
        "rngs": jax.random.split(jax.random.key(0), 0),
    }
    directory = tmp_path_factory.mktemp("saved") / "c"
    checkpoint.save(directory, state, data={"batch": [1]})
    return directory, state


def places(value, path=()):
    """Yields the path of every value inside JSON."""
    items = {dict: dict.items, list: enumerate}.get(type(value), lambda value: ())(value)
    for key, child in items:
        yield (*path, key)
        yield from places(child, (*path, key))


def replaced(about, path, other):
    copy = json.loads(json.dumps(about))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if other is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = other
    return copy


@pytest.mark.parametrize("every", thorough_but([1, 199], 1))
def test_any_change_of_a_description_is_refused_or_means_the_same(every, saved, tmp_path):
    """With the checksum of what was changed, so that each field has to be judged by itself."""
    directory, state = Path(shutil.copytree(saved[0], tmp_path / "c")), saved[1]
    file = directory / "about" / "metadata"
    about = json.loads(file.read_text())
    whole, changes = bits(state), [*itertools.product(places(about), (*OTHERS, MISSING))]
    wrong = []
    for path, other in changes[::every]:
        changed = replaced(about, path, other)
        if path[0] != checksums.ABOUT and checksums.ABOUT in changed:
            changed[checksums.ABOUT] = checksums.of_about(changed)
        file.write_text(json.dumps(changed))
        for verify in (True, False):
            try:
                checkpoint.describe(directory)
                restored = checkpoint.restore(directory, state, verify=verify)
                right = path[0] not in JUDGED or bits(restored) == whole
            except checkpoint.CheckpointError as error:
                right = str(directory) in str(error)
            except ValueError as error:  # the file is right, but like has other leaves
                right = str(error).startswith("like: ")
            except Exception:
                right = False
            if not right:
                wrong.append((path, other, verify))
    assert not wrong, (len(wrong), wrong[:20])


@pytest.fixture
def file(saved, tmp_path):
    return Path(shutil.copytree(saved[0], tmp_path / "c")) / "about" / "metadata"


@pytest.mark.parametrize("name", [*fields.REQUIRED, *fields.OPTIONAL])
def test_a_field_of_another_type_is_named(name, file, saved):
    about = json.loads(file.read_text())
    values = [MISSING] * (name in fields.REQUIRED) + [3] * (name != "data")
    for value in values:
        file.write_text(json.dumps(replaced(about, (name,), value)))
        for call in (checkpoint.describe, lambda c: checkpoint.restore(c, saved[1], verify=False)):
            with pytest.raises(checkpoint.CheckpointError) as caught:
                call(file.parent.parent)
            assert f"{file}: its entry {name!r} is damaged" in str(caught.value)


CONTENTS = ["", "null", "[]", "3", '"x"', "{}", '{"format": 1}', "{" * 9, "[" * 10**5, "\0", "NaN"]


@pytest.mark.parametrize("text", CONTENTS, ids=lambda text: text[:9])
def test_a_file_that_is_no_description_is_named(text, file, saved):
    file.write_text(text)
    for call in (checkpoint.describe, lambda directory: checkpoint.restore(directory, saved[1])):
        with pytest.raises(checkpoint.CheckpointError) as caught:
            call(file.parent.parent)
        assert str(file) in str(caught.value)


def test_codes_without_their_scales_are_refused(file, saved):
    about = json.loads(file.read_text())
    (path,) = [path for path in about["leaves"] if path.endswith("scales/0/mu/w")]
    file.write_text(json.dumps(replaced(about, ("leaves", path), MISSING)))
    with pytest.raises(ValueError, match=f"like: .*It lacks '{path}'"):
        checkpoint.restore(file.parent.parent, saved[1], verify=False)

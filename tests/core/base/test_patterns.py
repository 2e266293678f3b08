import jax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from mpjax._src.core.base.patterns import matches, nearest_paths, paths


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("Dense_0/kernel", "Dense_0/kernel", True),
        ("dense_0/KERNEL", "Dense_0/kernel", True),
        ("kernel", "Dense_0/kernel", False),
        ("*/kernel", "Dense_0/kernel", True),
        ("*/kernel", "kernel", True),
        ("*/head/*", "head/kernel", True),
        ("*/head/*", "model/head/kernel", True),
        ("*/head/*", "overhead/kernel", False),
        ("*norm*", "block/LayerNorm_0/scale", True),
        ("*", "anything/at/all", True),
        ("*/kernel", "Dense_0/kernel/value", True),
        ("layers/[01]/w", "layers/1/w", True),
        ("layers/?/w", "layers/10/w", False),
    ],
)
def test_matches_compares_patterns_with_paths(pattern, path, expected):
    assert matches(pattern, path) is expected


def test_paths_start_at_the_root_and_join_every_kind_of_key():
    tree = {"a": [1, {"b": 2}], "c": (3,)}
    assert paths(tree) == ["a/0", "a/1/b", "c/0"]


def test_paths_of_nnx_match_without_the_value_of_their_boxes():
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert any(matches("kernel", path) for path in paths(state))


@given(st.dictionaries(st.text("abc_", min_size=1), st.integers(), min_size=1))
def test_every_path_matches_itself_and_everything(tree):
    for path in paths(jax.tree.map(lambda x: x, {"root": tree})):
        assert matches(path, path) and matches("*", path) and matches("*/" + path, path)


def test_nearest_paths_come_best_first():
    known = ["Dense_0/kernel", "Dense_0/bias", "LayerNorm_0/scale"]
    assert nearest_paths("*/LayerNrm_0/*", known)[0] == "LayerNorm_0/scale"
    assert nearest_paths("dense_0/krnel", known)[0] == "Dense_0/kernel"
    assert nearest_paths("x", []) == []

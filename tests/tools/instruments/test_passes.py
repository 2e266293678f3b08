"""A plan pass by pass: each listing has the operations of its pass, and what it found out."""

import jax
import jax.numpy as jnp
import pytest
from support import normal

import mpjax
from mpjax._src.core.planner import rounding
from mpjax._src.tools.instruments.passes import passes

W, X = normal(0, 32, 32), normal(1, 4, 32)
PARTS = ("forward", "backward")
LISTINGS = ["classify", *PARTS, "cut", "rounded", *(f"written {part}" for part in PARTS)]


def loss(w, x):
    h = jax.nn.gelu(x @ w)
    with mpjax.precision("float32"):
        h = h @ w
    h = h + jnp.tanh(h @ w) @ w
    h = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=2)[0]
    return jnp.mean(jax.nn.softmax(h[:, :3] @ w[:3]))


@pytest.fixture(scope="module")
def texts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "SMALL", 1)  # streams are rounded for several readers
        return passes(loss)(W, X)


def rows(text, *names):
    return [line.split() for line in text.splitlines() if all(name in line for name in names)]


def test_there_is_a_listing_of_each_pass(texts):
    assert [*texts] == LISTINGS
    assert all(rows(text, "operation", "result", "where") for text in texts.values())


def test_classify_lists_the_function_as_it_is_written_and_its_regions(texts):
    dots = rows(texts["classify"], "dot_general")
    assert len(dots) == 6 and rows(texts["classify"], "scan")  # one of them in the loop
    assert [row for row in dots if row[-1] == "float32"] == [dots[1]]
    assert "test_passes.py:20" in dots[1][2] and "bfloat16" not in texts["classify"]
    counts = passes(lambda x, w: x @ w, "float32")(X, W)["classify"]
    assert rows(counts, "dot_general", 'float32 "the policy computes in float32"')


def test_forward_and_backward_are_in_float32_and_name_what_runs_again(texts):
    assert "bfloat16" not in texts["forward"] + texts["backward"]
    assert not rows(texts["forward"], "again") and rows(texts["backward"], "tanh", "again")
    assert not rows(texts["backward"], "dot_general", "again")
    dots = [sum(row[0] == "dot_general" for row in rows(texts[part], "") if row) for part in PARTS]
    assert dots == [6, 12]


def test_cut_lists_what_is_kept_and_its_price(texts):
    kept = rows(texts["cut"], "dot_general", "bfloat16[4,32]", "price=768")
    assert kept and kept[0][2].endswith("test_passes.py:18")
    assert rows(texts["cut"], "bfloat16[2,4,32]")  # of both turns of the loop


def test_rounded_lists_the_casts_of_both_parts(texts):
    lists = [rows(texts[name], "rounded ", "test_passes") for name in ("rounded", *PARTS)]
    assert lists[0] == lists[1] + lists[2] and lists[1] and lists[2]


def test_written_programs_have_casts_in_the_place_of_what_is_rounded(texts):
    for part in PARTS:
        assert not rows(texts[f"written {part}"], "rounded ")
        assert rows(texts[f"written {part}"], "convert_element_type", "bfloat16[4,32]")
    assert rows(texts["written forward"], "dot_general", "float32[4,32]", "py:20")


def test_passes_take_shapes_alone():
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (X, W)]
    assert passes(lambda x, w: x @ w)(*shapes) == passes(lambda x, w: x @ w)(X, W)

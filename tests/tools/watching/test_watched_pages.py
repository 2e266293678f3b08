"""Watched tensors as a picture and as a map."""

import json
import math
import re

import jax
import jax.numpy as jnp
import pytest

import mpjax

# Of each name of a room the powers of two that it stands for.
LIMITS = {
    "less than 1": (-math.inf, 1),
    "1 to 4": (1, 4),
    "4 to 8": (4, 8),
    "8 or more": (8, math.inf),
}


def model(x):
    with jax.named_scope("<script>alert(1)</script>"):
        y = x.astype(jnp.float16)
    with jax.named_scope("second"):
        return (y * 1e3 @ y.T).sum(), (x * 1e-9).astype(jnp.float16), jnp.zeros(3).astype("f2")


@pytest.fixture(scope="module")
def reports():
    step = mpjax.watch_precision(jax.jit(model), every=1)
    return [(step(jnp.full((4, 8), 1.5**i)), step.latest)[1] for i in range(6)]


def test_each_watched_tensor_is_on_the_map_with_its_colors(reports):
    report = reports[-1]
    document = report.document()
    page = document.drawing()
    assert {dict(op.facts)["name"] for op in page.operations} == {row.name for row in report.rows}
    assert page.things == "tensors"
    for op, tensor in zip(page.operations, report.tensors, strict=True):
        assert op.scope == tensor.scope
        assert {color.name for color in page.colors} == {*op.colors}
    kinds = {op.colors["risk"] for op in page.operations}
    assert {"none", "too small for its dtype"} <= kinds
    assert f"{len(report.risks)} at risk" in document.sentence
    assert [row[1] for row in document.tables[0].rows] == report.risks


def test_map_colors_follow_the_rows_of_watched_tensors(reports):
    for report in reports:
        rows = {row.name: row for row in report.rows}
        for op in report.document().drawing().operations:
            row = rows[dict(op.facts)["name"]]
            assert op.large == (row.op == "dot_general")
            assert op.colors["too small"] == row.subnormal + (row.flushed or 0)
            if row.headroom is None:
                assert op.colors["room"] is None
            else:
                low, high = LIMITS[op.colors["room"]]
                assert low <= row.headroom < high


def test_watched_page_is_whole_and_escapes_names_of_users(reports):
    text = reports[-1].to_html()
    assert "<script>alert(1)" not in text and "16-bit tensors" in text
    assert re.search(r"second", text)
    json.dumps(reports[-1].to_dict())


def test_watched_picture_marks_what_is_at_risk(reports, tmp_path):
    pytest.importorskip("matplotlib")
    figure = reports[-1].plot(tmp_path / "room.png", reports[:-1])
    assert (tmp_path / "room.png").read_bytes()[:4] == b"\x89PNG"
    (axes,) = figure.axes
    assert len(axes.lines) == 1 + sum(row.headroom is not None for row in reports[0].rows)
    assert len(axes.collections) == len({row.name for r in reports for row in r.rows if row.risk})
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    steps = {f"step {report.steps[-1]}" for report in reports}
    assert labels and {label.partition(":")[0] for label in labels} <= steps
    with pytest.raises(TypeError, match="earlier="):
        reports[-1].plot(earlier=[3])

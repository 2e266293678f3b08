"""Every example with a table runs in a tiny size, and, slowly, gives the figures of its table."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import events_of

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import common  # noqa: E402
import expected  # noqa: E402

SPREADS = 3  # the range over three seeds is a low guess: two of many differ by more than it
NAMES = sorted(p.stem for p in EXAMPLES.glob("*.py") if "functools.partial(common" in p.read_text())
# Plain JAX; the test of TensorBoard runs one in NNX. They cost least of their kind.
QUICK = {"recommender"}


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.thorough) for n in NAMES],
)
def test_example_runs_in_a_tiny_size(name, tmp_path, capsys):
    row = list(expected.rows(name))[-1]
    out = tmp_path / "result.json"
    result = expected.run(name, row, "smoke", 3, out)
    assert json.loads(out.read_text()) == result
    assert result["figures"].keys() == expected.rows(name)[row].keys()
    assert np.isfinite([*result["figures"].values()]).all()
    assert result["skipped"] < result["steps"]
    for name, curve in result["curves"].items():
        assert len(curve) and all(isinstance(point, float) for point in curve), name
    assert row.split()[0] in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "row"), [(n, row) for n in NAMES for row in expected.rows(n)])
def test_example_gives_the_figures_of_its_table(name, row, tmp_path):
    """As a script, warnings being errors; curves are written to the folder EXAMPLES_OUT."""
    folder = Path(os.environ.get("EXAMPLES_OUT", tmp_path))
    out = folder / name / f"{re.sub(r'[^a-z0-9]+', '_', row.lower())}.json"
    argv = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), "--size", "small"]
    done = subprocess.run(
        [*argv, "--policy", *shlex.split(row), "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table = common.expected(importlib.import_module(name).__doc__)
    found = json.loads(out.read_text())["figures"]
    for figure, wanted in table[row].items():
        # A seed differs from another by its spread, and on another machine it is another. What has
        # no spread (a size) may differ by half a percent, an order of magnitude by half of itself.
        least = abs(wanted) * (0.5 if figure.startswith("~") else 0.005)
        assert abs(found[figure] - wanted) <= max(least, SPREADS * table[common.SPREAD][figure]), (
            figure
        )


@pytest.mark.parametrize("name", NAMES)
def test_table_at_the_top_of_an_example_was_measured(name):
    runs = json.loads((expected.RESULTS / f"{name}.json").read_text())
    assert expected.table(runs) in (EXAMPLES / f"{name}.py").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_example_figures_in_16_bits_lie_within_the_spread_of_float32(name):
    table = common.expected(importlib.import_module(name).__doc__)
    spread, base = table.pop(common.SPREAD), next(iter(table.values()))
    for row, figures in table.items():
        for figure in figures.keys() - {"weights KiB"}:
            if "loss-scale none" not in row and not figure.startswith("~"):
                least = 0.005 * abs(base[figure])
                assert abs(figures[figure] - base[figure]) <= max(
                    least, SPREADS * spread[figure]
                ), row


def test_examples_page_says_what_was_measured():
    page = (ROOT / "docs" / "examples.md").read_text()
    for name in NAMES:
        assert f"[`{name}.py`](../examples/{name}.py)" in page
        assert expected.summary(name) in page


def test_pages_say_in_how_many_runs_mixed_precision_ends_as_well():
    said, _, missed = expected.count().partition(". Not:\n")
    assert missed.split() == ["gan,", "mixed_bfloat16"]
    pages = [ROOT / "README.md", ROOT / "docs" / "examples.md"]
    readme, page = (" ".join(path.read_text().replace("\n> ", " ").split()) for path in pages)
    assert f"In {len(NAMES)} small [examples](docs/examples.md), {said}." in readme
    assert said in page


def test_float16_keeps_rollout_and_training_together():
    """As published: at most a sixth of bfloat16's difference per token."""
    table = expected.rows("grpo")
    found = {row: figures["~|log ratio|"] for row, figures in table.items()}
    assert 0 < found["float32"] < found["mixed_float16"] <= found["mixed_bfloat16"] / 6


def test_an_lstm_in_float16_leaves_the_curve_unless_its_loss_is_scaled():
    table = expected.rows("lstm")
    losses = {row: figures["training"] for row, figures in table.items()}
    assert abs(losses["mixed_float16"] - losses["float32"]) < 0.05
    assert losses["mixed_float16 --loss-scale none"] > losses["float32"] + 3


def test_an_example_reads_images_of_its_users(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("grain")
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for index in range(10):
            pixels = np.full((20, 30, 3), 200 if label == "dog" else index, np.uint8)
            image.fromarray(pixels).save(tmp_path / label / f"{index}.png")
    data, (held_out, labels) = common.read_images(tmp_path, 8)
    assert held_out.shape == (2, 8, 8, 3) and len(data) == 18
    images, labels = next(common.batches(data, 16, 0))
    assert images.shape == (16, 8, 8, 3) and images.dtype == np.float32
    assert ((images.mean((1, 2, 3)) > 0.5) == (labels == 1)).all()


def test_an_example_reads_text_of_its_users(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 5)
    first, last = common.read_text(tmp_path)
    assert bytes(first) + bytes(last) == b"0123456789" * 5 and len(last) == 5
    (rows,) = next(common.batches([common.windows(first, 4)], 8, 0))
    assert rows.shape == (8, 4) and (np.diff(rows.astype(int)) % 10 == 1).all()


def test_example_names_a_missing_library():
    with pytest.raises(SystemExit, match="pip install no_such_library"):
        common.optional("no_such_library")


@pytest.mark.thorough
def test_tensorboard_has_loss_scale_back_offs_and_the_distribution_of_gradients(tmp_path):
    custom_lists = importlib.import_module("custom_lists")
    argv = f"--size smoke --steps 21 --policy mixed_float16 --logdir {tmp_path}".split()
    custom_lists.main([*argv, "--loss-scale", "dynamic"])
    scalars, histograms = {}, {}
    for event in events_of(tmp_path):
        for value in event.summary.value:
            if value.HasField("histo"):
                histograms[event.step] = value.histo
            else:
                scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    for tag in ("loss", "loss_scale", "back-offs", "gradients/float16/flushed"):
        assert [step for step, _ in scalars[tag]] == list(range(21)), tag
    assert 0 < scalars["loss"][-1][1] < 10 and scalars["loss_scale"][0][1] == 2.0**16
    assert histograms.keys() == {0, 20}
    entries = sum(histograms[20].bucket)
    assert entries == histograms[20].num > 100
    assert -149 <= histograms[20].min < histograms[20].max <= 10

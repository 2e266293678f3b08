"""Old names work, and say what to write instead; none goes before its time."""

import datetime
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import surface

import mpjax
from mpjax._src.base.deprecations import DEPRECATED, MOVED, Deprecated

# JAX promises three months too: https://docs.jax.dev/en/latest/api_compatibility.html
MONTHS = 3
TODAY = datetime.date(2026, 11, 23)
GONE_NAMES = {
    "full_precision": 'mpjax.precision("float32")',
    "plot_compare": "report.plot(path)",
    "plot_precision": "reports[-1].plot(path, earlier=reports[:-1])",
    "TrainStep": "init, step = mpjax.build_train_step(...)",
}
ROW = Deprecated("cast", TODAY, datetime.date(2027, 2, 23))


def months_after(date, months):
    """Returns the same day some months later, or the first of the next one if there is none."""
    years, month = divmod(date.month - 1 + months, 12)
    try:
        return date.replace(date.year + years, month + 1)
    except ValueError:
        years, month = divmod(date.month + months, 12)
        return datetime.date(date.year + years, month + 1, 1)


def too_early(rows):
    """Returns the names that may be removed less than three months after they first warned."""
    return [name for name, row in rows.items() if row.removal < months_after(row.since, MONTHS)]


def test_an_old_name_works_and_names_the_new_one(monkeypatch):
    monkeypatch.setitem(DEPRECATED, "to_dtype", ROW)
    message = r"mpjax.to_dtype is deprecated.* from 2027-02-23 on. Use mpjax.cast instead"
    with pytest.warns(DeprecationWarning, match=message) as seen:
        assert mpjax.to_dtype is mpjax.cast
    assert seen[0].filename == __file__
    assert "to_dtype" not in dir(mpjax) and "to_dtype" not in mpjax.__all__


def test_a_name_that_was_never_there_is_missing():
    with pytest.raises(AttributeError, match="to_dtype"):
        mpjax.to_dtype  # noqa: B018


def test_every_old_name_has_three_months_and_a_place_in_the_table():
    assert not too_early(DEPRECATED)
    page = (Path(__file__).parents[2] / "docs" / "release.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for name, row in DEPRECATED.items():
        (line,) = [line for line in rows if f"`{name}`" in line.split("|")[1]]
        new = line.split("|")[2].replace("`", "").strip()
        assert (row.advice or f"the same in mpjax.{row.instead.partition('.')[0]}").startswith(new)


@pytest.mark.parametrize("name", DEPRECATED)
def test_an_old_name_warns_once_and_is_what_its_new_name_is(name):
    row = DEPRECATED[name]
    with pytest.warns(DeprecationWarning) as seen:
        exec(f"from mpjax import {name} as old", found := {})
    (warning,) = seen
    place = f"mpjax.{row.instead}"
    assert warning.filename == "<string>" and (row.advice or place) in str(warning.message)
    assert found["old"] is surface.PUBLIC.get(place, pkgutil.resolve_name(place))
    assert name not in dir(mpjax) and (row.advice or place in surface.PUBLIC)


@pytest.mark.parametrize(("name", "advice"), GONE_NAMES.items())
def test_deprecated_name_without_a_new_one_says_what_to_write(name, advice):
    assert DEPRECATED[name].advice == advice


def test_deprecated_functions_still_work():
    def inner(x):
        return x @ x.T

    with pytest.warns(DeprecationWarning):
        region = mpjax.full_precision(inner)
        scale = mpjax.get_loss_scale("mixed_float16")
        assert isinstance(mpjax.build_train_step(inner, optax.sgd(0.1)), mpjax.TrainStep)
    program = jax.make_jaxpr(mpjax.autocast(region, "mixed_bfloat16"))(np.ones((2, 3), np.float32))
    assert "bf16" not in str(program) and isinstance(scale, mpjax.DynamicLossScale)


def test_deprecated_plot_functions_still_plot():
    pytest.importorskip("matplotlib")
    histogram = mpjax.debug.gradient_histogram({"w": np.ones(3, np.float32)})
    with pytest.warns(DeprecationWarning, match=r"histogram\.plot\(path\)"):
        figure = mpjax.plot_gradient_histogram(histogram, None, "bfloat16", scale=2.0)
    assert "2^1" in figure.axes[0].get_title()
    with (
        pytest.warns(DeprecationWarning, match=r"reports\[-1\]\.plot"),
        pytest.raises(ValueError, match="at least one"),
    ):
        mpjax.plot_precision([])


@pytest.mark.parametrize(
    ("since", "removal", "early"),
    [
        ("2026-11-23", "2027-02-23", False),
        ("2026-11-23", "2027-02-22", True),
        ("2026-11-30", "2027-03-01", False),
        ("2026-11-30", "2027-02-28", True),
        ("2026-12-31", "2027-03-31", False),
    ],
)
def test_a_row_that_ends_too_early_is_found(since, removal, early):
    row = Deprecated("cast", *map(datetime.date.fromisoformat, (since, removal)))
    assert bool(too_early({"old": row})) == early


def test_python_shows_the_warning_at_the_users_line():
    """Python shows a DeprecationWarning of `__main__` by default: users see it."""
    code = (
        "import datetime, mpjax; from mpjax._src.base import deprecations as d;"
        "d.DEPRECATED['old'] = d.Deprecated('cast', datetime.date.min, datetime.date.max);"
        "mpjax.old"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "DeprecationWarning: mpjax.old is deprecated" in done.stderr


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_module_is_found_at_its_old_place(old, new):
    module = importlib.import_module(old)
    assert module is importlib.import_module(new) is sys.modules[old]
    assert module.__name__ == module.__spec__.name == new

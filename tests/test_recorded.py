"""Reports say what they said: as text, as pages and as JSON."""

import difflib

import jax
import pytest
import recorded

import mpjax
from mpjax._src.tools.document.report import Report

# These run a program in several ways, which takes seconds to compile.
SLOW = ("compare", "find_nonfinite", "precision")
CASES = [
    pytest.param(name, marks=[pytest.mark.thorough] * name.startswith(SLOW))
    for name in recorded.REPORTS
]


@pytest.mark.skipif(
    jax.__version__ != recorded.RECORDED_WITH,
    reason=f"reports were recorded with JAX {recorded.RECORDED_WITH}",
)
@pytest.mark.parametrize("name", CASES)
def test_a_report_is_as_recorded(name):
    want = (recorded.FOLDER / f"{name}.txt").read_text().splitlines()
    got = recorded.written(recorded.REPORTS[name]()).splitlines()
    changed = [*difflib.unified_diff(want, got, "recorded", "now", lineterm="", n=1)]
    assert not changed, "\n".join(changed[:100])


def test_every_report_is_recorded():
    for name in mpjax.reports.__all__:
        getattr(mpjax.reports, name)  # imports the module of each class
    paths = [*recorded.FOLDER.iterdir()]
    assert {path.stem for path in paths} == {*recorded.REPORTS}
    classes = {path.read_text().splitlines()[1] for path in paths}
    assert classes == {each.__name__ for each in Report.__subclasses__()}

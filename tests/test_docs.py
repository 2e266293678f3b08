"""The examples in docstrings and the Python blocks of README and docs run as written."""

import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import tempfile

import jax
import numpy as np
import pages
import pytest

import mpjax

README = pages.ROOT / "README.md"
MODULES = [module.name for module in pkgutil.walk_packages(mpjax.__path__, "mpjax.")]
# What runs in the quick tier: the blocks of pages that cost little, and the examples of all modules
# but these, each of which takes more than two seconds.
QUICK_PAGES = ("README.md", *(f"docs/{name}.md" for name in ("autocast", "concepts", "policies")))
COSTLY_MODULES = {
    f"mpjax._src.{name}"
    for name in (
        *("tools.instruments.compare", "tools.instruments.tune", "tools.instruments.calibrate"),
        *("optim.moments", "optim.rounding"),
    )
}


def name_of(page):
    return page.relative_to(pages.ROOT).as_posix()


def thorough_where(condition, cases):
    return [pytest.param(x, marks=pytest.mark.thorough) if condition(x) else x for x in cases]


def costs(page):
    return pages.kinds(page) and name_of(page) not in QUICK_PAGES


each_page = pytest.mark.parametrize("page", pages.PAGES, ids=name_of)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """What pages and examples write into temporary folders is removed with those of the tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Finder(doctest.DocTestFinder):
    """Finds the classes that a module's source has: their `__module__` is the public one."""

    def _from_module(self, module, thing):
        if not isinstance(thing, type):
            return super()._from_module(module, thing)
        return bool(re.search(rf"^ *class {thing.__name__}\b", inspect.getsource(module), re.M))


@pytest.mark.parametrize("name", thorough_where(COSTLY_MODULES.__contains__, MODULES))
def test_docstring_examples_run(name, table, temporary):
    runner = doctest.DocTestRunner()
    for test in Finder().find(importlib.import_module(name)):
        runner.run(test)
    assert not runner.failures


def test_docstring_examples_of_a_class_are_found():
    found = Finder().find(importlib.import_module("mpjax._src.core.training.loss_scale"))
    assert "mpjax._src.core.training.loss_scale.DynamicLossScale" in {
        t.name for t in found if t.examples
    }


@pytest.mark.parametrize("page", thorough_where(costs, pages.PAGES), ids=name_of)
def test_blocks_of_a_page_run_one_after_the_other(page, table, temporary):
    readme() if page == README else pages.run(page)
    jax.clear_caches()  # the programs of all pages would take gigabytes


@functools.cache
def readme():
    """Returns what the blocks of the README define. They run once."""
    return pages.run(README)


@each_page
def test_links_of_pages_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in pages.headings(target), link


def test_quick_pages_and_costly_modules_exist():
    assert {*QUICK_PAGES} <= {name_of(page) for page in pages.PAGES}
    assert {*MODULES} >= COSTLY_MODULES


def test_printed_as_compares_shown_output_with_ellipses():
    assert pages.printed_as("a\n...\nd\n", "a  \nb\nc\nd\n")
    assert not pages.printed_as("a\nd\n", "a\nb\nd\n")
    assert not pages.printed_as("d\n...\na\n", "a\nd\n")


def test_the_readme_is_at_most_120_lines():
    assert len(README.read_text().splitlines()) <= 120


def test_the_three_lines_of_the_readme_train_in_float16():
    """The README's diff applies to a float32 loop: both run, and learn the same."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    lines = diff.splitlines()
    assert [line[0] for line in lines if line and line[0] in "+-"].count("+") == 3
    shown, losses, programs = readme(), [], []  # its loss, parameters and batch
    for left_out in "+-":
        code = "\n".join(line[1:] for line in lines if not line.startswith(left_out))
        names = {**shown}
        exec(code, names)
        step, batch, params = names["step"], names["batch"], names["params"]
        opt_state = names["optimizer"].init(params)
        programs.append(str(step.trace(params, opt_state, batch).jaxpr))
        losses.append([])
        for _ in range(40):
            params, opt_state, loss = step(params, opt_state, batch)
            losses[-1].append(float(loss))
    assert "f16" not in programs[0] and "f16" in programs[1]
    skipped = int(opt_state.metrics()["skipped_steps"])  # the first ones, until the scale fits
    np.testing.assert_allclose(losses[0][: 40 - skipped], losses[1][skipped:], rtol=0.01)
    assert skipped < 5 and losses[0][-1] < 0.5 * losses[0][0]

"""The examples in docstrings and the Python blocks of README and docs run as written."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import mpjax

ROOT = Path(mpjax.__file__).parent.parent
MODULES = [module.name for module in pkgutil.walk_packages(mpjax.__path__, "mpjax.")]
PAGES = sorted(path.relative_to(ROOT) for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, table):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_blocks_of_a_page_run_one_after_the_other(page, table):
    namespace = {"__name__": "__main__"}
    text = (ROOT / page).read_text()
    for match in BLOCK.finditer(text):
        # Padded so that a traceback names the line of the page.
        padding = "\n" * text[: match.start(1)].count("\n")
        exec(compile(padding + match[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page.parent / link).exists(), link

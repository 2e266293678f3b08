"""The examples in docstrings and the Python blocks of README and docs run as written."""

import doctest
import importlib
import pkgutil
import re

import pages
import pytest

import mpjax

MODULES = [module.name for module in pkgutil.walk_packages(mpjax.__path__, "mpjax.")]
each_page = pytest.mark.parametrize(
    "page", pages.PAGES, ids=lambda page: str(page.relative_to(pages.ROOT))
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, table):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@each_page
def test_blocks_of_a_page_run_one_after_the_other(page, table):
    pages.run(page)


@each_page
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def headings(page):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_what_a_page_shows_is_what_was_printed():
    assert pages.printed_as("a\n...\nd\n", "a  \nb\nc\nd\n")
    assert not pages.printed_as("a\nd\n", "a\nb\nd\n")
    assert not pages.printed_as("d\n...\na\n", "a\nd\n")

"""Old addresses of the site lead to pages and headings that are there."""

import json
import re

import pages
import pytest

DOCS = pages.ROOT / "docs"
MOVED = json.loads((DOCS / "redirects.json").read_text())


def anchors(name):
    """Returns the anchors of a page's headings, as MyST and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", (DOCS / f"{name}.md").read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("old", MOVED)
def test_old_addresses_lead_to_a_page_and_its_heading(old):
    page, _, anchor = MOVED[old].partition("#")
    assert (DOCS / f"{page}.md").exists()
    assert not anchor or anchor in anchors(page)


def test_removed_pages_have_an_address_and_others_have_none():
    assert not [old for old in MOVED if "#" not in old and (DOCS / f"{old}.md").exists()]
    gone = {old.partition("#")[0] for old in MOVED}
    assert not [page for page in gone if not (DOCS / f"{page}.md").exists() and page not in MOVED]


def test_headings_that_are_still_there_are_not_redirected():
    parts = [old.partition("#") for old in MOVED if "#" in old]
    here = [(page, a) for page, _, a in parts if (DOCS / f"{page}.md").exists()]
    assert not [(page, a) for page, a in here if a in anchors(page)]

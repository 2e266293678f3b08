"""Old addresses of the site lead to pages and headings that are there."""

import functools
import json

import pages

DOCS = pages.ROOT / "docs"
MOVED = json.loads((DOCS / "redirects.json").read_text())


@functools.cache
def anchors(name):
    return pages.headings(DOCS / f"{name}.md")


def test_old_addresses_lead_to_a_page_and_its_heading():
    for old, new in MOVED.items():
        page, _, anchor = new.partition("#")
        assert (DOCS / f"{page}.md").exists(), old
        assert not anchor or anchor in anchors(page), old


def test_removed_pages_have_an_address_and_others_have_none():
    assert not [old for old in MOVED if "#" not in old and (DOCS / f"{old}.md").exists()]
    gone = {old.partition("#")[0] for old in MOVED}
    assert not [page for page in gone if not (DOCS / f"{page}.md").exists() and page not in MOVED]


def test_headings_that_are_still_there_are_not_redirected():
    parts = [old.partition("#") for old in MOVED if "#" in old]
    here = [(page, a) for page, _, a in parts if (DOCS / f"{page}.md").exists()]
    assert not [(page, a) for page, a in here if a in anchors(page)]

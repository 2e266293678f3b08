"""The sources of the site: every name is in the reference, and every page is found."""

import itertools
import re
from collections import Counter
from posixpath import normpath

import pages
import pytest
from surface import PUBLIC

DOCS = pages.ROOT / "docs"
SITE = {page.relative_to(DOCS).with_suffix("").as_posix(): page for page in pages.PAGES[1:]}
FENCE = re.compile(r"^(`{3,}|:{3,})(.*?)\n(.*?)^\1", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^\.\. (\w+):: ([\w.]+)", re.MULTILINE)
ROOT_PAGES = [pages.ROOT / name for name in ("CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")]
written = [*pages.PAGES, *(page for page in ROOT_PAGES if page.exists())]
each_page = pytest.mark.parametrize(
    "page", written, ids=lambda page: str(page.relative_to(pages.ROOT))
)


def test_every_public_name_is_described_on_one_page():
    found = []
    for page in DOCS.glob("api/*.md"):
        module = ""
        for directive, name in re.findall(
            r"^\.\. (\w+):: ([\w.]+)", page.read_text(), re.MULTILINE
        ):
            if directive == "currentmodule":
                module = name
            elif directive.startswith("auto"):
                found.append(name if name.startswith("mpjax.") else f"{module}.{name}")
    assert sorted(found) == sorted(PUBLIC)


def test_every_public_name_is_on_the_overview():
    found = re.findall(r"^   ([\w.]+)$", (DOCS / "api" / "index.md").read_text(), re.MULTILINE)
    assert sorted(f"mpjax.{name}" for name in found) == sorted(PUBLIC)


def test_every_page_is_in_one_table_of_contents():
    found = Counter()
    for name, page in SITE.items():
        for _, opening, text in FENCE.findall(page.read_text()):
            if opening == "{toctree}":
                for line in filter(
                    None, re.sub(r"^:.*$", "", text, flags=re.MULTILINE).split("\n")
                ):
                    target = re.sub(r"^.*<(.*)>$", r"\1", line)
                    found[normpath(f"{name}/../{target}")] += 1
    found = Counter({name: n for name, n in found.items() if not name.startswith("gallery/")})
    assert found == Counter({*SITE} - {"index"})


@each_page
def test_headings_are_an_outline(page):
    text = FENCE.sub("", page.read_text())
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    if page.name in ("changelog.md", "security.md", "contributing.md"):
        assert not levels  # they are files of the root, included
        return
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels))


def test_the_front_page_shows_a_part_of_the_readme():
    readme = (pages.ROOT / "README.md").read_text()
    index = SITE["index"].read_text()
    marks = re.findall(r'^:(?:start-after|end-before): "(.*)"$', index, re.MULTILINE)
    title, first, install, end = (readme.index(mark.replace('\\"', '"')) for mark in marks)
    assert 0 <= title < install < first < readme.index("Status") < end


@each_page
def test_no_conflict_of_a_merge_is_left(page):
    assert not re.search("^(<{7}|={7}|>{7})( |$)", page.read_text(), re.MULTILINE)


@each_page
def test_pictures_are_described_in_words(page):
    text = page.read_text()
    described = re.findall(r"!\[([^\]]*)\]\(", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    for _, opening, options in FENCE.findall(text):
        if re.match(r"\{(image|figure)\}", opening):
            described.append(" ".join(re.findall(r"^:alt: (.*)", options, re.MULTILINE)))
    assert all(len(words) > 10 for words in described)
    assert len(re.findall("<img ", text)) == len(re.findall(r'<img [^>]*alt="[^"]{10}', text))


def test_inventories_of_other_projects_have_names_and_places():
    for file in DOCS.glob("inventories/*.inv"):
        kind, project, version, *names = file.read_text().splitlines()
        assert kind == "# Sphinx inventory version 1", file
        assert project.startswith("# Project: ") and version.startswith("# Version: ")
        assert names == sorted(names)
        assert all(re.fullmatch(r"[\w.]+ (class|function) [\w./-]+\.html", name) for name in names)


# performance_tables.md is generated, the overview is a list of all names, and of the frameworks'
# tabs one is shown at a time.
LONG = {"performance_tables", "api/index", "frameworks"}
LONGEST = 200


def by_hand(page):
    """Returns the lines of a page that are no rows of a table."""
    return [line for line in page.read_text().splitlines() if not line.startswith("|")]


@pytest.mark.parametrize("name", sorted({*SITE} - LONG))
def test_pages_are_short(name):
    assert len(by_hand(SITE[name])) <= LONGEST


def test_no_paragraph_stands_on_two_pages():
    found = Counter()
    for page in {*written} - {SITE["performance_tables"]}:
        text = FENCE.sub("", page.read_text())
        paragraphs = {re.sub(r"\s+", " ", part).strip() for part in text.split("\n\n")}
        found.update(part for part in paragraphs if len(part) > 120 and "|" not in part)
    assert not [part for part, times in found.items() if times > 1]

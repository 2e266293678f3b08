"""The built site in a browser: `make docs` runs this, and says by SITE where the site lies."""

import functools
import json
import os
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

QUESTIONS = Path(__file__).parents[2] / "docs" / "questions.json"
SITE = Path(os.environ.get("SITE", ""))
pytestmark = pytest.mark.elsewhere("docs", "SITE" not in os.environ)
FOUND = (path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
PAGES = sorted(page for page in FOUND if not page.startswith("_static/"))
SAMPLE = (
    *("index", "quickstart", "lint", "examples", "gallery/lstm"),
    *("api/index", "api/loss_scales", "api/command_line"),
)
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
AXE = {"resultTypes": ["violations"], "preload": False}  # which asks for files that are not there
OVERFLOW = """() => {
  const page = document.documentElement;
  return page.scrollWidth > page.clientWidth;
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address():
    """Serves the site as a host does: search fetches the pages that it found."""
    with ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def opened(chromium, address):
    """Opens pages in one tab; the test fails for an error, or for a request to elsewhere."""
    wrong, contexts = [], []

    def saw(message, url):
        if message.type == "error":
            wrong.append(f"{url}: {message.text} {message.location['url']}")

    def open_tab(**options):
        contexts.append(chromium.new_context(**options))
        tab = contexts[-1].new_page()
        tab.on("pageerror", lambda error: wrong.append(f"{tab.url}: {error}"))
        tab.on("console", lambda message: saw(message, tab.url))
        tab.on("request", lambda asked: is_here(asked.url) or wrong.append(asked.url))
        return tab

    def is_here(url):
        return url.startswith((address, "data:"))

    yield open_tab
    for context in contexts:
        context.close()
    assert not wrong


@pytest.mark.parametrize("viewport", [NARROW, WIDE], ids=["narrow", "wide"])
def test_no_page_is_wider_than_the_screen(opened, address, viewport):
    tab = opened(viewport=viewport)
    wide = []
    for page in PAGES if viewport is NARROW else [f"{page}.html" for page in SAMPLE]:
        tab.goto(f"{address}/{page}", wait_until="load")
        if tab.evaluate(OVERFLOW):
            wide.append(page)
    assert not wide


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_have_no_serious_accessibility_violation(opened, address, scheme):
    from axe_playwright_python.sync_playwright import Axe

    tab = opened(viewport=WIDE, color_scheme=scheme, reduced_motion="reduce")
    found = []
    for page in SAMPLE:
        tab.goto(f"{address}/{page}.html")
        assert tab.evaluate("document.documentElement.dataset.theme") == scheme
        for violation in Axe().run(tab, options=AXE).response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                where = [node["target"] for node in violation["nodes"][:3]]
                found.append(f"{page}: {violation['id']} {where}")
    assert not found, "\n".join(found)


def test_search_finds_a_function_and_a_guide(opened, address):
    tab = opened(viewport=WIDE)
    tab.goto(f"{address}/search.html?q=find_nonfinite")
    for page in ("api/instruments.html", "nan.html"):  # results come one after the other
        tab.wait_for_selector(f'#search-results li a[href^="{page}"]')


@pytest.mark.parametrize(
    ("words", "page"),
    [
        *(("bf16", "policies"), ("fp16", "policies"), ("nan", "nan"), ("speedup", "will_it_help")),
        *(("oom", "memory"), ("slow", "slow"), ("checkpoint", "checkpoints"), ("lint", "lint")),
    ],
)
def test_words_that_users_type_find_the_page_first(opened, address, words, page):
    tab = opened(viewport=WIDE)
    tab.goto(f"{address}/search.html?q={words}")
    tab.wait_for_selector("#search-results li a")
    tab.wait_for_timeout(500)  # results come one after the other, the best first
    assert tab.get_attribute("#search-results li a", "href").startswith(f"{page}.html")


def test_the_words_of_each_question_find_the_page_that_answers_it(opened, address):
    tab, wrong = opened(viewport=WIDE), []
    for one in json.loads(QUESTIONS.read_text()):
        tab.goto(f"{address}/search.html?q={one['words']}")
        tab.wait_for_selector("#search-results li a")
        tab.wait_for_timeout(300)
        found = tab.get_attribute("#search-results li a", "href")
        page, _, anchor = one["page"].partition("#")
        if not found.startswith(f"{page}.html"):
            wrong.append(f"{one['words']}: {found}, not {page}")
        answer = tab.goto(f"{address}/{page}.html")
        if not answer.ok or (anchor and not tab.locator(f'[id="{anchor}"]').count()):
            wrong.append(f"{one['question']}: no {one['page']}")
    assert not wrong, "\n".join(wrong)


def test_old_addresses_lead_on(opened, address):
    tab = opened(viewport=WIDE)
    tab.goto(f"{address}/howto/debug_a_nan.html")
    tab.wait_for_url(f"{address}/nan.html*")
    tab.goto(f"{address}/training.html#flax-nnx")
    tab.wait_for_url(f"{address}/frameworks.html#*")


def test_pictures_of_executed_pages_are_described_in_words():
    bare = [
        (page, tag)
        for page in PAGES
        for tag in re.findall(r"<img [^>]*>", (SITE / page).read_text())
        if not re.search(r'alt="[^"]*[a-z] [a-z]', tag)
    ]
    assert not bare

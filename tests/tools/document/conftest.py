"""A real browser, without a window, for tests of pages."""

import browsers
import pytest

chromium = browsers.chromium


@pytest.fixture
def opened(chromium, tmp_path):
    """Opens a page of HTML; the test fails if the page fetches something, or its script fails."""
    wrong, contexts = [], []

    def open_page(text, **options):
        file = tmp_path / f"page{len(contexts)}.html"
        file.write_text(text, "utf-8")
        contexts.append(chromium.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("request", lambda asked: wrong.append(asked.url))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.goto(file.as_uri())
        assert wrong.pop(0) == file.as_uri()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong

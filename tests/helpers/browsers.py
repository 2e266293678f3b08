"""Finds and starts the browser in which pages are tested."""

import os
import shutil

import pytest

NAMES = "chromium", "chromium-browser"
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


def find_browser():
    """Returns the path of Chromium. If it is missing, the test is skipped; under CI it fails."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no chromium: apt install chromium")
    return path


@pytest.fixture(scope="session")
def chromium():
    """The installed Chromium, such as Debian's package."""
    path = find_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()

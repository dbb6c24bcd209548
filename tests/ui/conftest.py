"""The browser of the tests of the web page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
_NO_BROWSER = (
    "no Chromium is installed, so nothing of the web page was tested. On Debian: apt-get install chromium; "
    "or name one: OCTAVO_TEST_BROWSER=/path/to/chromium"
)


def _browser_path() -> str | None:
    named = os.environ.get("OCTAVO_TEST_BROWSER")
    return named or next(filter(None, map(shutil.which, _BROWSERS)), None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if any("/ui/" in report.nodeid and _NO_BROWSER in str(report.longrepr) for report in _skipped(terminalreporter)):
        terminalreporter.write_line(f"\nThe tests of the web page were skipped: {_NO_BROWSER}", yellow=True)


def _skipped(terminalreporter: Any) -> list[Any]:
    return list(terminalreporter.stats.get("skipped", []))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ends with its module: Playwright keeps an event loop running in this thread, beside which no other can be."""
    path = _browser_path()
    if path is None:
        if os.environ.get("OCTAVO_REQUIRE_BROWSER"):
            pytest.fail(_NO_BROWSER)
        pytest.skip(_NO_BROWSER)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS.split())
        yield browser
        browser.close()

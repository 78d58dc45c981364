"""A headless browser for tests of the pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
PAGES = Path(__file__).parents[2] / "page" / "dist"


_running: list[Any] = []


@contextmanager
def _playwright() -> Iterator[Any]:
    """Run Playwright, of which a thread has one at a time, and no longer than it is needed."""
    if _running:
        yield _running[0]
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        _running.append(started)
        try:
            yield started
        finally:
            _running.clear()


@contextmanager
def browsing(built: str, program: Path | None = None) -> Iterator[Callable[..., Any]]:
    """Yield a function that opens a URL as a page; errors on pages fail the test.

    Skips where there is no browser, or the file ``built`` is missing among what npm made. A
    ``program`` starts Chromium elsewhere.
    """
    pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no browser: apt-get install chromium")
    if not (PAGES / built).exists():
        pytest.skip("the page is not built: make build, with Node.js")
    with _playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program or CHROMIUM, args=["--no-sandbox"]
        )
        wrong: list[str] = []

        def opened(url: str, **context: Any) -> Any:
            page = browser.new_context(**context).new_page()
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on(
                "console", lambda told: wrong.append(told.text) if told.type == "error" else None
            )
            page.set_default_timeout(60_000)
            page.goto(url)
            return page

        yield opened
        browser.close()
        assert wrong == []

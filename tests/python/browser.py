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


@contextmanager
def browsing(built: str, program: Path | None = None) -> Iterator[Callable[..., Any]]:
    """Yield a function that opens a URL as a page; errors on pages fail the test.

    Skips where there is no browser, or the file ``built`` is missing among what npm made. A
    ``program`` starts Chromium elsewhere.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no browser: apt-get install chromium")
    if not (PAGES / built).exists():
        pytest.skip("the page is not built: make build, with Node.js")
    with sync_api.sync_playwright() as playwright:
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

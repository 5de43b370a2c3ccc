"""Chromium, worked by Playwright: the system's, as no test downloads one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

CHROMIUM = shutil.which("chromium")


def lacking(*packages: str) -> str:
    """What is missing to open a page, in a sentence; nothing where all is there.

    ``packages``: those needed beside Playwright.
    """
    missing = [name for name in ("playwright", *packages) if not importlib.util.find_spec(name)]
    if CHROMIUM is None:
        missing.append("chromium")
    return f"make browser, with chromium installed: {', '.join(missing)} missing" * bool(missing)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window, closed behind it."""
    sync_playwright = importlib.import_module("playwright.sync_api").sync_playwright

    with sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()

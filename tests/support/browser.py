"""A real browser for the tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def missing(what: str) -> NoReturn:
    """Skip, or fail where the browser was asked for."""
    (pytest.fail if "VTX_REQUIRE_BROWSER" in os.environ else pytest.skip)(f"needs {what}: make test-browser")


@contextmanager
def launched() -> Iterator[Any]:
    """Chromium with a camera that is none; the test is skipped where there is none."""
    try:
        from playwright import sync_api as playwright
    except ModuleNotFoundError:
        missing("the playwright package")
    if BROWSER is None:
        missing("Chromium")
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        browser = started.chromium.launch(executable_path=BROWSER, args=arguments)
        yield browser
        browser.close()

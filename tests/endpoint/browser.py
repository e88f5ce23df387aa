"""A real browser for tests of pages: Chromium over the DevTools protocol, by playwright.

The browser is the system's own; nothing is downloaded. Every line that a page writes to its console
and every error of its scripts is kept, violations of its content security policy among them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.report.test_pages import BROWSER

WITHIN_MS = 90_000
"""Time within which a page must do what is expected of it. Two busy cores take seconds."""


@dataclass(slots=True)
class Browser:
    """A running browser. ``said`` has the lines and errors of all pages."""

    chromium: Any
    said: list[str] = field(default_factory=list)

    async def open(self, url: str, *, width: int = 1280, **context: Any) -> Any:
        """Return a page at ``url`` in a context of its own, which shares nothing with others."""
        viewport = {"width": width, "height": 844}
        contained = await self.chromium.new_context(viewport=viewport, **context)
        contained.set_default_timeout(WITHIN_MS)
        page = await contained.new_page()
        page.on("console", lambda line: self.said.append(f"{line.type}: {line.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        await page.goto(url)
        return page


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Start a browser, and close it with all its pages. Skips the test where there is none."""
    if BROWSER is None:
        pytest.skip("no Chromium on the path to look at pages with")
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    async with playwright.async_playwright() as driver:
        chromium = await driver.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield Browser(chromium)
        finally:
            await chromium.close()


async def send(page: Any, text: str) -> None:
    """Write a message and press Enter, once the chat is ready."""
    await page.wait_for_selector("html[data-ready]", state="attached")
    await page.fill("#prompt", text)
    await page.keyboard.press("Enter")


async def shows(page: Any, selector: str, text: str | re.Pattern[str], count: int = 1) -> None:
    """Return once ``count`` elements of a page have this text."""
    await page.locator(selector, has_text=text).nth(count - 1).wait_for(state="attached")


async def is_idle(page: Any) -> None:
    """Return once an answer has come and no other is being written."""
    await page.wait_for_selector(".message.assistant .actions button", state="attached")
    await page.wait_for_selector("html[data-state=idle]", state="attached")

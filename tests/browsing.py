"""A real browser for tests: Debian's chromium, driven by Playwright, which brings none of its own here."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)

WAIT_MS = 60_000
"""The longest that anything may take to appear."""

expect.set_options(timeout=WAIT_MS)

PICTURES = os.environ.get("CKPT_ENGINE_PICTURES")
"""A directory to keep screenshots in, to look at."""


@contextlib.asynccontextmanager
async def chromium(*flags: str) -> AsyncIterator[Browser]:
    """Skips the test where none is installed."""
    if CHROMIUM is None:
        pytest.skip("no chromium is installed here (apt-get install chromium)")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, *flags])
        try:
            yield browser
        finally:
            await browser.close()


class Seen:
    """What a page did that its user would not see. wrong: errors, console messages, dialogs, requests to others."""

    def __init__(self, page: Page, url: str) -> None:
        self.wrong: list[str] = []
        self.asked: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        page.on("request", lambda request: self._requested(request.url, url))
        page.on("dialog", self._dialog)

    def _requested(self, asked: str, url: str) -> None:
        self.asked.append(asked.removeprefix(url))
        if not asked.startswith(url):
            self.wrong.append(f"asked {asked}")

    async def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        await dialog.dismiss()


@contextlib.asynccontextmanager
async def looking(browser: Browser, url: str, silent: bool = True, **context: Any) -> AsyncIterator[Page]:
    """The page at this URL. silent: when it is left, nothing may have gone wrong in it (see Seen)."""
    made = await browser.new_context(locale="en-GB", **context)
    page = await made.new_page()
    page.set_default_timeout(WAIT_MS)
    seen = Seen(page, url)
    await page.goto(url)
    yield page
    await made.close()
    assert seen.wrong == [] or not silent


async def picture(page: Page, name: str) -> None:
    """Keeps a screenshot, if they are wanted."""
    if PICTURES:
        await page.wait_for_timeout(400)
        await page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


async def says(page: Page, selector: str, words: str) -> None:
    """Returns once an element has these words."""
    await page.locator(selector).filter(has_text=words).first.wait_for()

"""The demo that is kept open for its page, looked at with a real browser."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal

import pytest
from playwright.async_api import expect

from tests.browsing import PICTURES, chromium, looking, picture, says
from tests.demo.demo_run import Run


def address_of(run: Run) -> str:
    """Once all updates were made; fails if the demo ends before."""
    assert run.process.stderr is not None
    seen = []
    for line in run.process.stderr:
        seen.append(line)
        if found := re.match(r"the manager's page: (http://127\.0\.0\.1:\d+/)", line):
            return found[1]
    pytest.fail("".join(seen))


@pytest.mark.slow
async def test_its_page_shows_what_was_done_until_it_is_interrupted(runs: list[Run]) -> None:
    async with chromium() as browser:
        runs.append(run := Run("--page", "--updates", "2" if PICTURES is None else "6"))
        url = await asyncio.to_thread(address_of, run)
        async with looking(browser, url, viewport={"width": 1200, "height": 900}) as page:
            await expect(page.locator(".replicas .badge.serving")).to_have_count(2)
            await says(page, "#lineages", "2\u202franks, published")
            await says(page, "button.update .badge", "verified")
            await picture(page, "demo")
            await page.locator("button.update").first.click()
            await expect(page.locator(".one .edges .row")).to_have_count(4)  # of two ranks, in two replicas
            await says(page, ".one .edges", "trainer and worker share host")
            await says(page, ".one .stages", "transfer")
            await picture(page, "demo-opened")
            await page.get_by_role("button", name="Act on replica-1").click()
            await page.get_by_role("button", name="Evict…").last.click()
            await page.locator("#evict").click()
            await expect(page.locator(".replicas .entry")).to_have_count(1)
        os.kill(run.process.pid, signal.SIGINT)
        out, err = await asyncio.to_thread(run.finish, 120)
    assert run.process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["verified"] is True
    assert run.left() == ({}, [])

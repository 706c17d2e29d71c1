"""An install is over when its engine has answered and all workers that were given orders have reported."""

from __future__ import annotations

import asyncio

from ckpt_engine.agent.reports import Reports

FIRST, SECOND = (0, b"first"), (1, b"second")


async def test_it_waits_for_all_that_are_due() -> None:
    reports = Reports()
    reports.expect(*FIRST)
    reports.expect(*SECOND)
    waiting = asyncio.ensure_future(reports.wait_all(60))
    reports.arrived(*FIRST)
    reports.arrived(*FIRST)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    reports.arrived(*SECOND)
    await waiting


async def test_it_waits_for_nothing_that_has_come_already_or_was_never_due() -> None:
    reports = Reports()
    await reports.wait_all(60)
    for _ in range(2):
        reports.expect(*FIRST)
        reports.arrived(*FIRST)
        await reports.wait_all(60)
    reports.arrived(*SECOND)
    await reports.wait_all(60)


async def test_what_never_comes_is_waited_for_once() -> None:
    reports = Reports()
    reports.expect(*FIRST)
    await reports.wait_all(0.01)
    await reports.wait_all(60)
    reports.expect(*SECOND)
    waiting = asyncio.ensure_future(reports.wait_all(60))
    reports.arrived(*SECOND)
    await waiting

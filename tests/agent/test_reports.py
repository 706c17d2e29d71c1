"""An install is over when its engine has answered and all workers that were given orders have reported."""

from __future__ import annotations

import asyncio

from ckpt_engine.agent.reports import Reports

FIRST, SECOND = (0, b"first"), (1, b"second")


async def test_it_waits_for_all_that_are_due() -> None:
    reports = Reports()
    reports.due(*FIRST)
    reports.due(*SECOND)
    waiting = asyncio.ensure_future(reports.all_came(60))
    reports.came(*FIRST)
    reports.came(*FIRST)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    reports.came(*SECOND)
    await waiting


async def test_it_waits_for_nothing_that_has_come_already_or_was_never_due() -> None:
    reports = Reports()
    await reports.all_came(60)
    for _ in range(2):
        reports.due(*FIRST)
        reports.came(*FIRST)
        await reports.all_came(60)
    reports.came(*SECOND)
    await reports.all_came(60)


async def test_what_never_comes_is_waited_for_once() -> None:
    reports = Reports()
    reports.due(*FIRST)
    await reports.all_came(0.01)
    await reports.all_came(60)
    reports.due(*SECOND)
    waiting = asyncio.ensure_future(reports.all_came(60))
    reports.came(*SECOND)
    await waiting

"""A good world for each story, and what was read in it."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.story import Story


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.fixture
def sources(story: Story) -> set[str]:
    """The ids of what is read by all that the manager has installed."""
    assert story.cluster.manager is not None
    manager, found = story.cluster.manager, set[str]()
    watch = manager.watch

    def look(shell: Any, command: Any) -> None:
        body = getattr(command, "body", None)
        for worker in body.workers if isinstance(body, manager_pb2.Install) else ():
            for digest in manager.blobs.get_json(worker.plan).values():
                table = story.truth.sources[bytes.fromhex(digest)].table()
                found.add(weights_pb2.SourceTable.FromString(table).id)
        watch(shell, command)

    manager.watch = look
    return found

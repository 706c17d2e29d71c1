"""Memory that arrives while it is digested: no part is looked at before it is there, and threads end when told to."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ckpt_engine.digest import arriving
from ckpt_engine.digest.arriving import Arrival, ArrivingDigests
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.digest.factors import Words

SHAPES = [(700, 512), (128,), (7, 5), (), (0, 4), (1200, 1024), (3, 40, 100)]


def wait_for(arrival: Arrival, first: int, end: int) -> Words:
    while (found := arrival.values(first, end)) is None:
        time.sleep(1e-4)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_each_box_is_digested_once_it_has_arrived(dtype: torch.dtype) -> None:
    memory = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    boxes = [(each, (index,) * each.dim()) for index, each in enumerate(memory)]
    digests = ArrivingDigests(boxes)
    for seed in (1, 2):
        torch.manual_seed(seed)
        arrival = digests.start()
        try:
            for index, each in enumerate(memory):
                if each.numel():
                    assert arrival.values(index, index + 1) is None
                each.copy_(torch.randint(0, 200, each.shape).to(dtype))
                arrival.arrived(index + 1)
                assert [int(value) for value in wait_for(arrival, index, index + 1)] == digest_boxes([boxes[index]])
            assert [int(value) for value in wait_for(arrival, 0, len(boxes))] == digest_boxes(boxes)
        finally:
            arrival.end()


def test_it_ends_in_the_middle_and_can_begin_again() -> None:
    memory = torch.ones(1 << 20, dtype=torch.int16)
    digests = ArrivingDigests([(memory, (0,)), (memory, (0,))])
    arrival = digests.start()
    arrival.arrived(1)
    wait_for(arrival, 0, 1)
    arrival.end()
    assert arrival.values(1, 2) is None
    assert not [each for each in arrival._running if not each.done()]
    again = digests.start()
    again.arrived(2)
    assert wait_for(again, 0, 1) == wait_for(again, 1, 2)
    again.end()
    assert any(each.name.startswith("ckpt-engine-arriving") for each in threading.enumerate())


def test_other_digests_do_not_wait_for_arrivals() -> None:
    memory = torch.ones(4 << 20, dtype=torch.int16)
    arrival = ArrivingDigests([(memory, (0,))]).start()
    try:
        assert digest_boxes([(memory, (0,))])
        assert arrival.values(0, 1) is None
    finally:
        arrival.end()
    assert arriving._pool.cache_info().currsize >= 1

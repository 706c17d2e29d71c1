"""A child that the trainer forks, such as a worker of a data loader: it cannot write into what replicas read."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import torch
from torch import nn

from ckpt_engine.source.open import open_source
from tests.source.reading import assert_equal, read

State = dict[str, torch.Tensor]


def in_child(what: Callable[[], None], meanwhile: Callable[[], None] = lambda: None) -> int:
    """Forks, does `meanwhile` here and then `what` in the child; returns its exit status: 0 if it raised nothing."""
    wait, go_on = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(go_on)
            os.read(wait, 1)
            what()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(wait)
    try:
        meanwhile()
    finally:
        os.close(go_on)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status


def fill(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def published(snapshot: bool | None = None) -> tuple[nn.Linear, Callable[[], State], State]:
    """A model of several pages, how readers see it, and how it is."""
    torch.manual_seed(0)
    model = nn.Linear(2000, 3)
    source = open_source(model, snapshot=snapshot, move=snapshot is None)
    source.seal()
    assert ("re-homed" in source.table().description) == (snapshot is None)
    return model, lambda: read(source.table()), {name: each.clone() for name, each in model.state_dict().items()}


def test_what_a_child_writes_stays_its_own() -> None:
    model, seen, before = published()

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert_equal(dict(model.state_dict()), {name: tensor - 1 for name, tensor in before.items()})

    assert in_child(train) == 0
    assert_equal(dict(model.state_dict()), before)
    assert_equal(seen(), before)


def test_a_child_that_writes_nothing_sees_what_its_parent_steps() -> None:
    """Not what a fork usually means, so `publish` says it, and what helps."""
    model, _, _ = published()

    def look() -> None:
        assert model.weight.eq(5).all()

    assert in_child(look, meanwhile=lambda: fill(model, 5)) == 0


def test_with_a_snapshot_a_child_keeps_the_weights_as_they_were() -> None:
    model, _, before = published(snapshot=True)
    same = in_child(lambda: assert_equal(dict(model.state_dict()), before), meanwhile=lambda: fill(model, 5))
    assert same == 0


def test_after_the_source_was_closed_a_child_is_private_too() -> None:
    model = nn.Linear(20, 3)
    open_source(model, move=True).close()
    before = {name: each.clone() for name, each in model.state_dict().items()}

    def write() -> None:
        fill(model, 0)
        assert not model.weight.any()

    assert in_child(write) == 0
    assert_equal(dict(model.state_dict()), before)


def test_a_child_may_publish_what_it_inherited() -> None:
    model, seen, before = published()

    def publish() -> None:
        fill(model, 2)
        source = open_source(model, move=True)
        source.seal()
        assert read(source.table())["weight"].eq(2).all()

    assert in_child(publish) == 0
    assert_equal(dict(model.state_dict()), before)
    assert_equal(seen(), before)

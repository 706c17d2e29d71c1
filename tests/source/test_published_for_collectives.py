"""Weights that are published for collectives: nobody reads them; what is told is where they lie, and who is asked."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.reach import by_collective
from ckpt_engine.source.lending import offers_collectives
from ckpt_engine.source.open import open_source
from ckpt_engine.transport.collective.lender import NAME
from ckpt_engine.v1.weights_pb2 import Host, NcclLocator, SourceTable
from tests.tiny_model import make_tiny_qwen3


def located(table: SourceTable) -> NcclLocator:
    """What all regions of a table say."""
    (locator,) = {offer.locator for region in table.regions for offer in region.offers}
    assert {offer.transport for region in table.regions for offer in region.offers} == {NAME}
    return NcclLocator.FromString(locator)


def test_each_region_says_where_its_rank_is_found() -> None:
    source = open_source(torch.nn.Linear(3, 5), transport=NAME)
    try:
        told = located(source.table())
        assert (told.host, told.gpu) == ("127.0.0.1", b"")
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", told.port))
    finally:
        source.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", told.port), 10.0)


def test_the_address_that_others_use_is_told() -> None:
    source = open_source({"w": torch.ones(3)}, transport=NAME, advertise="localhost")
    assert located(source.table()).host == "localhost"
    source.close()
    with pytest.raises(CkptEngineError, match=r"could not find this host: no-such-host.invalid: .*\(advertise\)"):
        open_source({"w": torch.ones(3)}, transport=NAME, advertise="no-such-host.invalid")


def test_a_checkpoint_directory_is_copied_for_it(tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path, 1)
    source = open_source(tmp_path, transport=NAME)
    assert source.table().source_copies == 1
    located(source.table())
    source.close()


def test_who_asks_for_nothing_offers_none() -> None:
    source = open_source(torch.nn.Linear(3, 5), advertise="127.0.0.1")
    assert {offer.transport for region in source.table().regions for offer in region.offers} == {"shared_memory"}
    source.close()


def test_a_wish_that_is_neither_yes_nor_no_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_ENGINE_COLLECTIVE", "yes")
    with pytest.raises(CkptEngineError, match="CKPT_ENGINE_COLLECTIVE is 'yes': set it to 1"):
        offers_collectives()


def host(name: str, address: str = "", network: str = "here") -> Host:
    return Host(boot_id=name, name=name, address=address, network_namespace=network)


def test_a_worker_of_another_host_needs_an_address_that_leads_there() -> None:
    worker = host("b")
    assert by_collective(host("b"), worker).ok
    assert by_collective(host("a", "10.0.0.1"), worker).ok
    for told, where in (("", "at no address of its network"), ("127.0.0.1", "at 127.0.0.1 only")):
        verdict = by_collective(host("a", told), worker)
        assert not verdict.ok
        assert f"the trainer on host a is reached {where}, so no worker on host b finds" in verdict.reason
        assert "CKPT_ENGINE_ADVERTISE" in verdict.reason
    assert not by_collective(host("b", network="another"), worker).ok

"""At which addresses of its host a door listens: at no more than whoever is told needs."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ckpt_engine.transport.collective.door import MeetingDoor


def listens(door: MeetingDoor, address: str) -> bool:
    try:
        socket.create_connection((address, door.port), 10.0).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("found", [["127.0.1.1"], ["192.0.2.1", "127.0.1.1"]])
def test_a_name_that_leads_to_loopback_here_and_elsewhere_to_this_host(
    found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts has 127.0.1.1 for the host's own name. The table of names is not a real one."""
    original = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **named: Any) -> Any:
        if host != "this-host":
            return original(host, *rest, **named)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    door = MeetingDoor("this-host")
    try:
        assert door.host == "this-host"
        assert door.address == ("127.0.0.1", door.port)
        assert listens(door, "127.0.0.1")
        assert listens(door, "127.0.1.1")
    finally:
        door.close()


@pytest.mark.parametrize("advertise", ["", "localhost", "127.0.0.1"])
def test_a_door_on_loopback_is_on_that_address_alone(advertise: str) -> None:
    door = MeetingDoor(advertise)
    try:
        assert listens(door, door.address[0])
        assert not listens(door, "127.0.0.2")
    finally:
        door.close()


def test_an_address_that_this_host_does_not_have_is_one_that_leads_to_it() -> None:
    """As that of a load balancer or of a container's host: it is forwarded to any of this host's."""
    door = MeetingDoor("192.0.2.1")
    try:
        assert listens(door, "127.0.0.1")
    finally:
        door.close()

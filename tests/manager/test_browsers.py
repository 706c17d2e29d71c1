"""Which hosts and which pages of browsers the manager's HTTP side answers."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest

from ckpt_engine.addresses import with_port
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.manager.browsers import check_host, check_origin, names_of_host
from ckpt_engine.manager.service import ManagerConfig, ManagerServer


@pytest.mark.parametrize(
    ("header", "loopback", "asks", "taken"),
    [
        ("127.0.0.1:8080", True, False, True),
        ("[::1]:8080", True, False, True),
        ("LOCALHOST", True, False, True),
        ("evil.example:8080", True, False, False),
        ("127.0.0.1.evil.example", True, False, False),
        ("localhost.evil.example", True, True, False),
        ("", True, False, False),
        ("10.0.0.7:8080", False, False, True),
        ("[fd00::7]:8080", False, False, True),
        ("manager:8080", False, False, True),
        ("manager.team.svc:8080", False, False, True),
        ("manager.team.svc.cluster.local", False, False, True),
        ("manager.example.com:8080", False, False, True),
        ("evil.example:8080", False, False, False),
        ("svc.evil.example", False, False, False),
        ("evil.example:8080", False, True, True),
        ("manager.team.svc.cluster.local.", False, False, True),
        ("Manager.Example.com.:8080", False, False, True),
        ("evil.example.", False, False, False),
        ("manager.example.com", True, True, True),
        ("manager.example.com", True, False, False),
    ],
)
def test_a_host_is_ours_or_the_request_is_refused(header: str, loopback: bool, asks: bool, taken: bool) -> None:
    """On loopback it must be this machine; where nobody is asked who calls, no name that a stranger can have made."""
    with nullcontext() if taken else pytest.raises(CkptEngineError, match=re.escape(repr(header))):
        check_host(header, loopback, asks, {"manager.example.com"})


@pytest.mark.parametrize(
    ("method", "headers", "taken"),
    [
        ("POST", {}, True),
        ("POST", {"origin": "http://127.0.0.1:8080"}, True),
        ("POST", {"origin": "http://127.0.0.1:8080", "sec-fetch-site": "same-origin"}, True),
        ("POST", {"origin": "http://127.0.0.1:3000"}, False),
        ("POST", {"origin": "http://127.0.0.1"}, False),
        ("POST", {"origin": "http://evil.example"}, False),
        ("POST", {"origin": "http://evil.example:8080"}, False),
        ("POST", {"origin": "null"}, False),
        ("POST", {"origin": "file://"}, False),
        ("POST", {"origin": "http://127.0.0.1:x"}, False),
        ("POST", {"sec-fetch-site": "cross-site"}, False),
        ("POST", {"sec-fetch-site": "same-site"}, False),
        ("DELETE", {"origin": "http://evil.example"}, False),
        ("GET", {"origin": "http://evil.example"}, True),
    ],
)
def test_a_change_comes_from_our_page_or_from_no_page(method: str, headers: dict[str, str], taken: bool) -> None:
    """What a page of another site reads is kept from it by the browser, since no answer allows it."""
    with nullcontext() if taken else pytest.raises(CkptEngineError, match="may change nothing here"):
        check_origin(method, {"host": "127.0.0.1:8080", **headers})


@pytest.mark.parametrize(
    ("origin", "taken"),
    [
        ("https://manager.example.com", True),
        ("http://Manager.Example.com:8443", True),
        ("https://manager.example.com.evil.example", False),
        ("ftp://manager.example.com", False),
        ("null", False),
        ("http://[", False),
    ],
)
def test_a_page_behind_a_proxy_has_a_name_that_the_manager_was_told(origin: str, taken: bool) -> None:
    with nullcontext() if taken else pytest.raises(CkptEngineError, match="--http-name"):
        check_origin("POST", {"host": "127.0.0.1:8080", "origin": origin}, {"manager.example.com"})


def test_names_of_this_host_are_those_beside_its_own() -> None:
    hosts = "127.0.0.1 localhost\n10.0.0.7 Node7.hpc.uni.edu node7 # its own\n10.0.0.8 node8.hpc.uni.edu node8\n\n::1\n"
    assert names_of_host("node7", hosts) == {"node7", "node7.hpc.uni.edu"}
    assert names_of_host("Alone", "") == {"alone"}


@pytest.mark.parametrize("name", ["", "https://a.example", "a.example:80", "a.example/", "[::1]", "a b", "*.example"])
async def test_a_name_that_is_none_is_refused_at_start(config: ManagerConfig, name: str) -> None:
    with pytest.raises(CkptEngineError, match=f"--http-name {re.escape(repr(name))} is not a name alone"):
        await ManagerServer(replace(config, http_names=(name,))).start()


@pytest.mark.parametrize(
    ("advertised", "dialled"),
    [
        ("manager.example.com", "manager.example.com:50051"),
        ("10.0.0.7:6000", "10.0.0.7:6000"),
        ("fd00::7", "[fd00::7]:50051"),
        ("[fd00::7]", "[fd00::7]:50051"),
        ("[fd00::7]:1", "[fd00::7]:1"),
        ("http://manager:50051", ""),
        ("manager:port", ""),
        ("a b", ""),
        ("manager/", ""),
    ],
)
def test_what_is_advertised_is_an_address_that_can_be_dialled(advertised: str, dialled: str) -> None:
    with nullcontext() if dialled else pytest.raises(CkptEngineError, match=f"--advertise '{re.escape(advertised)}'"):
        assert with_port(advertised, 50051, "--advertise") == dialled


def test_an_origin_without_a_port_has_its_schemes() -> None:
    check_origin("POST", {"host": "manager.example.com", "origin": "https://manager.example.com"})
    check_origin("POST", {"host": "manager.example.com:443", "origin": "https://Manager.Example.com"})
    with pytest.raises(CkptEngineError):
        check_origin("POST", {"host": "manager.example.com:80", "origin": "https://manager.example.com"})

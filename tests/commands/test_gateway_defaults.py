"""What the gateway's command takes when little is said: beside a manager on one host, and with variables for all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import Result

from ckpt_engine.gateway.settings import GatewaySettings
from ckpt_engine.manager.service import ManagerConfig

Run = Callable[..., Result]


def test_a_manager_and_a_gateway_run_on_one_host_as_they_are() -> None:
    manager = ManagerConfig()
    assert len({GatewaySettings.listen, manager.listen, manager.http}) == 3


def test_the_variable_names_its_manager_unless_replicas_are_given(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_ENGINE_MANAGER", "nonsense")
    refused = run("gateway")
    assert (refused.exit_code, "must be HOST:PORT, not 'nonsense'" in refused.stderr) == (1, True)
    refused = run("gateway", "--replica", "ftp://here")
    assert (refused.exit_code, "ftp://here" in refused.stderr) == (1, True)
    refused = run("gateway", "--replica", "http://here:1", "--manager", "there:1")
    assert (refused.exit_code, "give --manager HOST:PORT, or --replica URL" in refused.stderr) == (1, True)

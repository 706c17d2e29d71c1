"""Where options may stand, and what is answered to spellings of before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from click.testing import Result

from ckpt_engine.cli import COMMANDS, GLOBAL, OPERATIONS, command_first
from ckpt_engine.commands import renamed

Run = Callable[..., Result]


@pytest.mark.parametrize(
    ("typed", "words", "behind"),
    [
        ("--manager a:1 status", "status", "--manager a:1"),
        ("--manager=a:1 --json status --watch", "status", "--manager=a:1 --json --watch"),
        ("--manager a:1 replica --json list --pool p", "replica list", "--manager a:1 --json --pool p"),
        ("--manager status update", "update", "--manager status"),
        ("replica hold retry", "replica hold", "retry"),
        ("replica evict list", "replica evict", "list"),
        ("--log-level debug agent -- vllm serve m --json", "agent", "--log-level debug -- vllm serve m --json"),
        ("pull replica", "pull", "replica"),
        ("-h", "", "-h"),
        ("--version", "", "--version"),
        ("--manager a:1", "", "--manager a:1"),
        ("--manager", "", "--manager"),
        ("", "", ""),
    ],
)
def test_what_stands_before_a_command_is_read_behind_it(typed: str, words: str, behind: str) -> None:
    assert command_first(typed.split()) == (words.split(), behind.split())


def test_the_manager_before_a_command_is_the_one_behind_it(
    run: Run, manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_ENGINE_MANAGER", "127.0.0.1:1")  # what is typed wins, wherever it stands
    behind = run("status", "--manager", manager, "--json")
    for typed in (
        ("--manager", manager, "status", "--json"),
        ("--json", "--manager", manager, "status"),
        ("--manager", "127.0.0.1:2", "status", "--json", "--manager", manager),
    ):
        result = run(*typed)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == json.loads(behind.stdout)
    assert json.loads(run("--manager", manager, "replica", "--json", "list").stdout) == []
    assert run("--manager", "127.0.0.1:2", "status").exit_code == 1


@pytest.mark.parametrize(
    ("typed", "now"),
    [
        ("serve", "manager"),
        ("serve --listen 127.0.0.1:0", "manager"),
        ("--log-level debug serve", "manager"),
        ("replica --manager a:1 --engine vllm -- vllm serve m", "agent"),
        ("sleep judge --level 2", "replica sleep"),
        ("wake", "replica wake"),
        ("--manager a:1 retry x", "replica retry"),
        ("trainer list", "lineage list"),
        ("trainer evict run", "lineage evict"),
        ("trainer", "lineage"),
    ],
)
def test_an_old_spelling_is_answered_with_the_new_one_and_does_not_run(run: Run, typed: str, now: str) -> None:
    result = run(*typed.split())
    assert result.exit_code == 2
    assert f"is now `ckpt-engine {now}`" in result.stderr
    assert not result.stdout


def test_what_may_stand_before_a_command_is_in_the_help(run: Run) -> None:
    shown = run("-h").stdout
    behind = "".join(run(*name.split(), "-h").stdout for name in ("status", "update", "manager"))
    for name, has_value in GLOBAL.items():
        assert name in shown
        assert f"{name} <" in behind if has_value else re.search(rf"{name}\b(?!-)", behind)


def test_new_spellings_are_commands() -> None:
    there = {*COMMANDS, *(f"{noun} {name}" for noun, names in OPERATIONS.items() for name in names)}
    assert set(renamed.COMMANDS.values()) <= there
    assert not set(renamed.COMMANDS) - {"replica"} & there


def test_a_replica_is_listed_and_not_run(run: Run) -> None:
    for typed in (["replica"], ["replica", "-h"], ["replica", "--help"]):
        assert "release" in run(*typed).output


def test_a_variable_of_before_is_not_passed_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the one that keeps strangers out."""
    monkeypatch.setenv("CKPT_ENGINE_SERVE_TOKENS", "tokens")
    result = run("manager", "--listen", "127.0.0.1:0", "--http", "")
    assert result.exit_code == 2
    assert "CKPT_ENGINE_SERVE_TOKENS is now CKPT_ENGINE_MANAGER_TOKENS" in result.stderr


@pytest.mark.parametrize("command", ["update", "rollback", "replica sleep", "replica wake", "trace", "prime-rl"])
def test_a_timeout_is_the_same_wherever_a_command_waits(run: Run, command: str) -> None:
    shown = " ".join(run(*command.split(), "-h").stdout.split())
    assert "--timeout SECONDS Seconds that this may take in all; the command waits no longer." in shown

"""Images that are built once for all tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.images.building import Builder, Image
from tests.images.rooms import Mounted, base_room

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "python:3.11-slim"
SETTINGS = {"index-url": "PIP_INDEX_URL", "extra-index-url": "PIP_EXTRA_INDEX_URL", "find-links": "PIP_FIND_LINKS"}
"""What pip is told on this machine, and the arguments of a build that say the same."""


def pip_settings() -> dict[str, str]:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    found: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        argument = SETTINGS.get(name.rpartition(".")[2])
        if argument:
            found[argument] = value.strip("'\"")
    return found


def needed_by_pip(arguments: Mapping[str, str]) -> Iterator[Mounted]:
    """Folders of wheels on this machine that its settings name, and whom it trusts."""
    for value in arguments.values():
        for word in value.split():
            path = Path(urlsplit(word).path if word.startswith("file:") else word)
            if path.is_absolute() and path.is_dir():
                folder = path.parent if path.name == "simple" else path
                yield Mounted(folder, str(folder))
    for path in (Path("/etc/ssl"), Path("/etc/pip.conf")):
        if path.exists():
            yield Mounted(path, str(path))


@pytest.fixture(scope="session")
def arguments() -> dict[str, str]:
    return pip_settings()


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory, arguments: dict[str, str]) -> Builder:
    folder = tmp_path_factory.mktemp("images")
    unique = {each.target: each for each in needed_by_pip(arguments)}
    room = base_room(folder, list(unique.values()))
    return Builder(folder, ROOT, "images/Dockerfile", {PYTHON: room}, arguments)


@pytest.fixture(scope="session")
def manager_image(builder: Builder) -> Image:
    return builder.image("manager")

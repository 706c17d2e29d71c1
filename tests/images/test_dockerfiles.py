"""Our Dockerfiles, and the reader of Dockerfiles that tests rely on."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.images.building import installs
from tests.images.dockerfile import DockerfileError, context_of, stages_of

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "images").glob("*Dockerfile"))
LAST = {"Dockerfile": ["manager", "gateway", "relay", "trainer"], "engine.Dockerfile": ["replica"]}
"""The stages of each that become images."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM a", "each stage has a name"),
        ("FROM a AS b\nADD x y", "ADD is not known"),
        ("FROM a AS b\nrun x", "run is not known"),
        ("FROM a AS b\nCOPY --chown=1 x y", "--chown is not known"),
        ("FROM a AS b\nRUN --mount=type=cache x", "--mount is not known"),
        ("FROM a AS b\nRUN --x", "RUN of what"),
        ("FROM a AS b\nENTRYPOINT x", "exec form"),
        ("FROM a AS b\nCMD x", "exec form"),
        ("FROM a AS b\nRUN cat <<X", "here documents"),
        ("FROM a AS b\nRUN x \\", "goes on behind the last line"),
        ("FROM ${A} AS b", r"\$\{A\} in '\$\{A\}' has no value"),
        ("FROM $A AS b", "has no value"),
        ("ARG A\nFROM a AS b", "no default"),
        ("RUN x", "before FROM"),
        ("FROM a AS b\nFROM a AS b", "stages"),
        ("", "stages"),
    ],
)
def test_what_the_reader_does_not_know_it_refuses(text: str, said: str) -> None:
    with pytest.raises(DockerfileError, match=said):
        stages_of(text, {})


def test_the_context_is_what_images_are_made_of(tmp_path: Path) -> None:
    names = {str(name) for name in context_of(ROOT)}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    followed = set(listed.stdout.splitlines())
    assert {"pyproject.toml", "ckpt_engine/cli.py", "ckpt_engine/demo/moby_dick.txt", "images/alive.py"} <= names
    # Whoever writes a new file has not yet told git of it; nothing else may be there.
    assert not [name for name in names - followed if not name.endswith((".py", "Dockerfile"))]
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", ".git", ".venv"))]
    (tmp_path / "kept").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "kept" / "x.key").write_text("x")
    (tmp_path / ".dockerignore").write_text("*\n!kept\n**/*.key\n")
    assert context_of(tmp_path) == [Path("kept/file")]
    (tmp_path / ".dockerignore").write_text("secret\n")
    with pytest.raises(DockerfileError, match=r"does not begin with \*"):
        context_of(tmp_path)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_our_images_are_what_they_are_said_to_be(path: Path) -> None:
    text = path.read_text()
    stages = {stage.name: stage for stage in stages_of(text, {})}
    for name in LAST[path.name]:
        steps = []
        walked = name
        while walked in stages:
            steps = [*stages[walked].steps, *steps]
            walked = stages[walked].base
        last = {step.instruction: step for step in steps}
        assert last["USER"].text == "10001:10001", f"{name} runs as {last['USER'].text}"
        assert last["ENTRYPOINT"].words[0] in ("ckpt-engine", "torchrun")
        if path.name == "Dockerfile":
            runs = [step.text for step in steps if step.instruction == "RUN"]
            assert not any("pip" in text for text in runs), f"{name}: what builds stays out of the image"
    commands = installs(text)
    assert commands
    for command in commands:
        assert "--no-cache-dir" in command, command
    assert not re.search(r"https?://|\w+\.(?:com|io|org|dev)\b(?!\.)", re.sub(r"org\.opencontainers\.\S+", "", text))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f":{version}" in text, "the command that builds it names this version"


@pytest.mark.parametrize("extra", ["", "trainer", "relay", "demo"])
def test_requirements_are_those_of_the_package(extra: str) -> None:
    """What images install before the package is what its metadata will ask for."""
    done = subprocess.run(
        [sys.executable, "images/requirements.py", *([extra] if extra else [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        "": project["dependencies"],
        "trainer": project["optional-dependencies"]["trainer"],
        "relay": [*project["optional-dependencies"]["trainer"], *project["optional-dependencies"]["relay"][1:]],
        "demo": [*project["optional-dependencies"]["trainer"], *project["optional-dependencies"]["demo"][1:]],
    }
    assert done.stdout.splitlines() == wanted[extra]

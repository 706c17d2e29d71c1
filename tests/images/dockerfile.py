"""Dockerfiles, read strictly: what this reader does not know it refuses, so that no step is left out in silence."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


class DockerfileError(ValueError):
    """A line that this reader does not know, or that no image of ours should have."""


@dataclass(frozen=True)
class Step:
    """One instruction. text: what stands behind it, with variables as they are; flags: its `--name=value`."""

    line: int
    instruction: str
    text: str
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The exec form's list, or the words of the line."""
        if self.text.startswith("["):
            words = json.loads(self.text)
            if not words or not all(isinstance(word, str) for word in words):
                raise DockerfileError(f"line {self.line}: {self.text} is no list of words")
            return words
        return shlex.split(self.text)


@dataclass(frozen=True)
class Stage:
    """base: an image, or the name of a stage before this one."""

    name: str
    base: str
    steps: list[Step]


FLAGS = {"COPY": {"from"}, "HEALTHCHECK": {"interval", "timeout", "start-period"}}
KNOWN = {
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "HEALTHCHECK",
    "LABEL",
    "RUN",
    "USER",
    "VOLUME",
    "WORKDIR",
}
EXEC_FORM = {"CMD", "ENTRYPOINT"}
"""A shell in front of the process would keep SIGTERM from it."""


def instructions(text: str) -> Iterator[Step]:
    """Each instruction with its lines put together."""
    held, begun = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        begun = begun if held else number
        held += line
        if held.endswith("\\"):
            held = held[:-1]
            continue
        if held.strip():
            yield step_of(begun, held.strip())
        held = ""
    if held:
        raise DockerfileError(f"line {begun}: goes on behind the last line")


def step_of(number: int, line: str) -> Step:
    instruction, _, rest = line.partition(" ")
    flags = {}
    while found := re.match(r"--([a-z-]+)=(\S+)\s+", rest):
        flags[found[1]] = found[2]
        rest = rest[found.end() :]
    if unknown := set(flags) - FLAGS.get(instruction, set()):
        raise DockerfileError(f"line {number}: {instruction} with --{', --'.join(sorted(unknown))} is not known here")
    rest = rest.strip()
    if instruction not in KNOWN | {"FROM"}:
        raise DockerfileError(f"line {number}: {instruction} is not known here")
    if not rest or rest.startswith("--"):
        raise DockerfileError(f"line {number}: {instruction} of what?")
    if instruction in EXEC_FORM and not rest.startswith("["):
        raise DockerfileError(f"line {number}: {instruction} is not in the exec form")
    if "<<" in rest:
        raise DockerfileError(f"line {number}: here documents are not known here")
    return Step(number, instruction, rest, flags)


def filled(text: str, variables: Mapping[str, str]) -> str:
    """With ${NAME} replaced; raises for any other form and for a name that has no value."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name is None or name not in variables:
            raise DockerfileError(f"{match[0]} in {text!r} has no value")
        return variables[name]

    return re.sub(r"\$(?:\{(\w+)\})?", value, text)


def stages_of(text: str, arguments: Mapping[str, str]) -> list[Stage]:
    """The stages; arguments: what `--build-arg` says, for the names in FROM. Raises DockerfileError."""
    given: dict[str, str] = {}
    stages: list[Stage] = []
    for step in instructions(text):
        if step.instruction == "FROM":
            words = step.text.split()
            if len(words) != 3 or words[1] != "AS":
                raise DockerfileError(f"line {step.line}: FROM {step.text}: each stage has a name")
            stages.append(Stage(words[2], filled(words[0], given), []))
        elif stages:
            stages[-1].steps.append(step)
        elif step.instruction == "ARG":
            name, equals, default = step.text.partition("=")
            if not equals:
                raise DockerfileError(f"line {step.line}: ARG {name} before FROM has no default")
            given[name] = arguments.get(name, default)
        else:
            raise DockerfileError(f"line {step.line}: {step.instruction} before FROM")
    names = [stage.name for stage in stages]
    if not stages or len(set(names)) != len(names):
        raise DockerfileError(f"stages {names}")
    return stages


def context_of(folder: Path) -> list[Path]:
    """The files of a build context that .dockerignore leaves in, relative to it; the last rule that matches decides."""
    rules = [
        (line.removeprefix("!").rstrip("/"), line.startswith("!"))
        for line in (folder / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    if not rules or rules[0] != ("*", False):
        raise DockerfileError(".dockerignore does not begin with *: what lies in a checkout would be in its images")
    found = []
    for path in sorted(below(folder, rules)):
        name = path.relative_to(folder)
        inside = True
        for pattern, kept in rules:
            if matches(name, pattern):
                inside = kept
        if inside and path.is_file():
            found.append(name)
    return found


def below(folder: Path, rules: list[tuple[str, bool]]) -> Iterator[Path]:
    """What a rule beginning with ! could bring back where * leaves out all: environments are not walked through."""
    for pattern, kept in rules:
        if kept:
            path = folder / pattern
            if not path.exists():
                raise DockerfileError(f".dockerignore keeps {pattern}, which there is not")
            yield from path.rglob("*") if path.is_dir() else [path]


def matches(name: Path, pattern: str) -> bool:
    """A pattern is for a path and all below it; `**/` is any folder or none."""
    names = [str(name), *(str(parent) for parent in name.parents if parent != Path("."))]
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(Path(each).name, pattern.removeprefix("**/")) for each in names)
    return any(fnmatch.fnmatchcase(each, pattern) and each.count("/") == pattern.count("/") for each in names)

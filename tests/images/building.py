"""Performs the steps of a Dockerfile in fresh directories, one root a stage."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.images.dockerfile import DockerfileError, Stage, Step, context_of, filled, stages_of
from tests.images.rooms import Room, inside, run


@dataclass
class Image:
    """What a stage has become."""

    room: Room
    user: str = "0:0"
    directory: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)


class Builder:
    """folder: where roots are made. bases: what images that no stage makes are. arguments: as of `--build-arg`.

    A stage is built when something asks for it, and once.
    """

    def __init__(
        self, folder: Path, context: Path, dockerfile: str, bases: Mapping[str, Room], arguments: Mapping[str, str]
    ) -> None:
        self._folder, self._context, self._arguments, self._bases = folder, context, arguments, bases
        self._dockerfile = dockerfile
        self._stages = {stage.name: stage for stage in stages_of((context / dockerfile).read_text(), arguments)}
        self._images: dict[str, Image] = {}
        self._at, self._other = folder / "at", folder / "other"
        for path in (self._at, self._other):
            path.mkdir(exist_ok=True)

    def on(self, context: Path, folder: Path) -> Builder:
        """The same build of other sources, in another folder."""
        folder.mkdir()
        return Builder(folder, context, self._dockerfile, self._bases, self._arguments)

    def image(self, name: str) -> Image:
        if name not in self._images:
            self._images[name] = self._built(self._stages[name])
        return self._images[name]

    def _built(self, stage: Stage) -> Image:
        top = self._folder / stage.name
        top.mkdir()
        if stage.base in self._stages:
            below = self.image(stage.base)
            environment = dict(below.room.environment)
            room = Room(top, below.room.layers, below.room.mounts, environment)
            image = Image(room, below.user, below.directory, list(below.entrypoint))
            image.volumes, image.labels = list(below.volumes), dict(below.labels)
        elif stage.base in self._bases:
            base = self._bases[stage.base]
            image = Image(Room(top, base.below, base.mounts, dict(base.environment)))
        else:
            raise DockerfileError(f"{stage.name} is FROM {stage.base}, which neither a stage makes nor this test")
        arguments: dict[str, str] = {}
        for step in stage.steps:
            self._perform(step, image, arguments)
        return image

    def _perform(self, step: Step, image: Image, arguments: dict[str, str]) -> None:
        room = image.room
        # Without a value an argument is empty in what is filled in, and no variable of commands.
        variables = {**arguments, **room.environment}
        match step.instruction:
            case "ARG":
                name, equals, default = step.text.partition("=")
                arguments[name] = self._arguments.get(name, default if equals else "")
            case "ENV":
                for word in shlex.split(filled(step.text, variables)):
                    name, _, value = word.partition("=")
                    room.environment[name] = value
            case "LABEL":
                image.labels |= dict(word.split("=", 1) for word in step.words)
            case "WORKDIR":
                image.directory = step.text
                (room.top / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = step.text
            case "EXPOSE":
                image.ports += [int(word) for word in step.words]
            case "VOLUME":
                image.volumes += step.words
            case "CMD":
                image.command = step.words
            case "ENTRYPOINT":
                image.entrypoint, image.command = step.words, []
            case "HEALTHCHECK":
                kind, _, rest = step.text.partition(" ")
                if kind != "CMD" or not rest.startswith("["):
                    raise DockerfileError(f"line {step.line}: HEALTHCHECK {step.text}")
                image.health = Step(step.line, "CMD", rest).words
            case "COPY":
                *sources, target = filled(step.text, variables).split()
                self._copy(image, sources, target, step.flags.get("from"))
            case "RUN":
                given = {name: value for name, value in variables.items() if value}
                run(room, self._at, ["/bin/sh", "-c", step.text], given, image.directory, image.user)
            case _:
                raise DockerfileError(f"line {step.line}: {step.instruction} is not known here")

    def _copy(self, image: Image, sources: list[str], target: str, stage: str | None) -> None:
        if not target.startswith("/"):
            target = f"{image.directory.rstrip('/')}/{target.removeprefix('./')}"
        commands = image.room.mounting(self._at, writable=True)
        if stage is not None:
            commands += self.image(stage).room.mounting(self._other, writable=False)
            root = self._other
        else:
            root = self._folder / "context"
            shutil.rmtree(root, ignore_errors=True)
            for name in context_of(self._context):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._context / name, root / name)
        into = shlex.quote(f"{self._at}{target}")
        for source in sources:
            path = shlex.quote(f"{root}/{source.lstrip('/')}")
            # A folder's contents, or a file: into a folder if the target ends with a slash.
            commands.append(
                f"if [ -d {path} ]; then mkdir -p {into} && cp -a {path}/. {into}; "
                f"else mkdir -p $(dirname {into}x) && cp -a {path} {into}; fi"
            )
            commands.append(f"chown -R --no-dereference 0:0 {into}")
        done = subprocess.run(inside(commands, "true"), capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"COPY {sources} {target}\n{done.stdout}{done.stderr}"


def installs(text: str) -> list[str]:
    """Every command of a Dockerfile that has pip install, download or build something."""
    return [part for part in re.split(r"&&|;|\n", text) if re.search(r"pip\b.*\b(install|wheel|download)\b", part)]

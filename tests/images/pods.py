"""Pods as their manifests have them: containers of built images with the volumes, users and rights that these say."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import eventually
from tests.images.building import Image
from tests.images.rooms import Mounted, entering, inside

GET = """
import ssl, sys, urllib.request, urllib.error
unchecked = ssl.create_default_context()
unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
request = urllib.request.Request(sys.argv[1], headers=dict(each.split("=", 1) for each in sys.argv[2:]))
try:
    answer = urllib.request.urlopen(request, context=unchecked, timeout=5)
except urllib.error.HTTPError as error:
    answer = error
except OSError:
    sys.exit(3)
print(answer.status)
print(answer.read().decode())
"""


@dataclass
class Container:
    """One that runs, or has ended. process: what is its process 1, or with hostPID it itself."""

    name: str
    pod: Pod
    image: Image
    process: subprocess.Popen[bytes]
    log: Path
    environment: dict[str, str]
    user: str

    def said(self) -> str:
        return self.log.read_text()

    @property
    def pid(self) -> int:
        """The container's process 1, as this machine numbers it."""
        return self.until("process 1", self._process_1, 60.0)

    def _process_1(self) -> int | None:
        """None while it is not yet what it is to become: mounted, in its root, and the user that it is to be."""
        pids = [str(self.process.pid)]
        if not self.pod.host_processes:
            pids = Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split()
        if not pids:
            return None
        lines = Path(f"/proc/{pids[0]}/status").read_text().splitlines()
        (user,) = (line.split()[1] for line in lines if line.startswith("Uid:"))
        return int(pids[0]) if user == self.user.partition(":")[0] else None

    def execute(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """What `exec` does: a command beside process 1, with its rights."""
        uid, gid = self.user.split(":")
        target = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--root", "--wd=/"]
        rights = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--bounding-set=-all"]
        variables = ["env", "-i", *(f"{name}={value}" for name, value in self.environment.items())]
        return subprocess.run(
            [*target, *variables, *rights, *words], capture_output=True, text=True, timeout=120, check=False
        )

    def until(self, what: str, look: Any, seconds: float = 120.0) -> Any:
        """Waits for what `look` returns; a container that has ended fails at once, with what it said."""

        def alive() -> Any:
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}\n{self.said()}"
            return look()

        return eventually(what, seconds, alive)

    def stop(self, seconds: float) -> int:
        """SIGTERM to process 1, as a cluster ends a pod; returns its status."""
        os.kill(self.pid, signal.SIGTERM)
        return self.process.wait(seconds)


class Pod:
    """Containers with one network, which nothing else is on. spec: of the pod.

    hosts: holds the directories that hostPath volumes mean, by their paths, and volumes that are claimed and filled.
    """

    def __init__(
        self,
        folder: Path,
        network: int,
        spec: Mapping[str, Any],
        images: Mapping[str, Image],
        fields: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, str]],
        hosts: Path,
    ) -> None:
        folder.mkdir()
        self._folder, self._network, self._spec = folder, network, spec
        # Containers that share one list of processes see the machine's here, and so each other's.
        self.host_processes = bool(spec.get("hostPID") or spec.get("shareProcessNamespace"))
        self._images, self._fields, self._secrets, self._hosts = images, fields, secrets, hosts
        self._containers: list[Container] = []
        self._volumes = {volume["name"]: self._volume(volume) for volume in spec["volumes"]}

    def _volume(self, volume: Mapping[str, Any]) -> Path:
        kind = next(name for name in volume if name != "name")
        group = self._spec["securityContext"].get("fsGroup", 0)
        if kind == "hostPath":
            path = self._hosts / volume[kind]["path"].lstrip("/")
            if volume[kind]["type"] == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True, mode=0o755)
            assert path.is_dir(), (
                f"MountVolume.SetUp failed for {volume['name']}: {volume[kind]['path']} is not a directory"
            )
            return path
        if kind == "persistentVolumeClaim" and (claimed := self._hosts / volume[kind]["claimName"]).is_dir():
            return claimed
        path = self._folder / volume["name"]
        path.mkdir()
        if kind == "secret":
            for name, text in self._secrets[volume[kind]["secretName"]].items():
                (path / name).write_text(text)
                os.chown(path / name, 0, group)
                (path / name).chmod(volume[kind]["defaultMode"])
        else:
            assert kind in ("emptyDir", "persistentVolumeClaim"), f"a volume of {kind} is not known here"
            os.chown(path, 0, group)
            path.chmod(0o2777 if kind == "emptyDir" else 0o2775)
        return path

    def start(self, container: Mapping[str, Any]) -> Container:
        """Starts a container, as its image and its manifest say; what the manifest says wins."""
        image = self._images[container["image"].partition(":")[0]]
        variables = {each["name"]: self._value(each) for each in container.get("env", ())}
        words = [*container.get("command", image.entrypoint), *container.get("args", image.command)]
        words = [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in words]
        context = {**self._spec["securityContext"], **container["securityContext"]}
        user = f"{context['runAsUser']}:{context['runAsGroup']}"
        assert not (context["runAsNonRoot"] and context["runAsUser"] == 0), "container has runAsNonRoot and is root"
        rights = context["capabilities"]
        return self.begin(
            container["name"],
            image,
            words,
            {**image.room.environment, **variables},
            [
                Mounted(self._volumes[mount["name"]], mount["mountPath"], not mount.get("readOnly", False))
                for mount in container["volumeMounts"]
            ],
            user=user,
            caged=rights["drop"] == ["ALL"] and not rights.get("add"),
            writable=not context["readOnlyRootFilesystem"],
        )

    def _value(self, variable: Mapping[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        return self._fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]

    def begin(
        self,
        name: str,
        image: Image,
        words: Sequence[str],
        environment: dict[str, str],
        mounts: Sequence[Mounted],
        *,
        user: str,
        caged: bool,
        writable: bool,
    ) -> Container:
        """Starts it. What mounts stand on is made in a layer of its own, as whatever runs containers does."""
        points, at = self._folder / f"{name}.points", self._folder / f"{name}.root"
        at.mkdir()
        for mount in mounts:
            point = points / mount.target.lstrip("/")
            if not point.is_relative_to(points / "dev"):
                point.mkdir(parents=True, exist_ok=True)
        (points / "etc").mkdir(exist_ok=True, parents=True)
        # A pod finds itself by its name, and the manager's Service by that.
        (points / "etc" / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()} ckpt-engine-manager\n")
        room = type(image.room)(points, image.room.layers, image.room.mounts, image.room.environment)
        commands = room.mounting(at, writable=writable)
        commands += [f"mount --rbind /dev {at}/dev", f"mount -t tmpfs -o mode=1777 tmpfs {at}/dev/shm"]
        commands += [
            f"mount -t proc proc {at}/proc",
            f"mount --bind /sys {at}/sys",
            f"mount -o remount,ro,bind {at}/sys",
        ]
        for mount in mounts:
            commands.append(f"mount --bind {shlex.quote(str(mount.source))} {at}{mount.target}")
            if not mount.writable:
                commands.append(f"mount -o remount,ro,bind {at}{mount.target}")
        last = entering(at, words, environment, image.directory, user, caged=caged)
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                inside(commands, last, network=self._network, host_processes=self.host_processes),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        running = Container(name, self, image, process, log, environment, user)
        self._containers.append(running)
        return running

    def get(self, url: str, *headers: str) -> tuple[int, str]:
        """Status and body of a request from inside the pod's network; 0: nobody answers."""
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{self._network}/ns/net", sys.executable, "-c", GET, url, *headers],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        status, _, body = done.stdout.partition("\n")
        return int(status or 0), body

    def probe(self, container: Mapping[str, Any], kind: str) -> bool:
        """What the cluster would find out by this probe of a container."""
        wanted = container[kind]["httpGet"]
        scheme = wanted.get("scheme", "HTTP").lower()
        status, _ = self.get(f"{scheme}://127.0.0.1:{wanted['port']}{wanted['path']}")
        return 200 <= status < 400

    def close(self) -> None:
        for container in self._containers:
            if container.process.poll() is None:
                container.process.kill()  # and --kill-child what is inside
                container.process.wait(60)


@contextmanager
def network_of_its_own() -> Iterator[int]:
    """The process that keeps a network with nothing but loopback."""
    keeper = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "up\n"
        yield keeper.pid
    finally:
        keeper.kill()
        keeper.wait(60)

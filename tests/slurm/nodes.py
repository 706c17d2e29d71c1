"""Slurm with several nodes on one machine: Debian's munged, slurmctld and slurmd, each node a host of `tests/network`.

It decides how such a cluster is configured, started, broken and ended; what its jobs do is decided by their tests. A
node has a network, process ids, a host name and a /run of its own, and it takes all its processes along when it is
killed. Disks are shared, as home directories of a cluster are.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster import eventually
from tests.network.hosts import NetworkHost, hosts

ROOT = Path(__file__).parents[2]

PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
"""Programs, and Debian's packages that have them."""

CONTROLLER = "controller"

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={controller}({address})
SlurmUser=root
AuthInfo=socket={path}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=8
KillWait=20
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/%n
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/%n.pid
SlurmctldLogFile={path}/slurmctld.log
SlurmdLogFile={path}/%n.log
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
"""CR_Core_Memory: as on most clusters, a step takes its memory and cores from the job's. SlurmdTimeout: seconds of
silence until a node counts as lost; 300 by default. config_overrides: nodes have what is said here, not what the
machine has."""

GPUS = 2
"""Of each node: plain files, which Slurm counts and hands out as it does with devices."""


class Node:
    """A host of the cluster, with processes of its own."""

    def __init__(self, name: str, host: NetworkHost, path: Path, stack: ExitStack) -> None:
        self.name, self._host, self._path = name, host, path
        self._output = stack.enter_context((path / f"{name}.output").open("ab"))
        self.boot()
        stack.callback(self.kill)

    def boot(self) -> None:
        """Makes its namespaces, also those of one that was killed."""
        prepare = f"hostname {self.name} && mount -t tmpfs none /run && mount --bind {self._path}/hosts /etc/hosts"
        command = ["nsenter", f"--net=/proc/{self._host.keeper}/ns/net", "--"]
        command += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        # bash, since it reaps the processes that lose their parent.
        command += ["bash", "-c", f"{prepare} && echo made && (sleep infinity & wait)"]
        self._keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._output)
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"made\n", Path(self._output.name).read_text()
        self._first = _child(self._keeper.pid)
        self._namespace = os.readlink(f"/proc/{self._first}/ns/pid")

    def start(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        """Runs a command here, with the cluster's configuration and our command line on its PATH."""
        inside = ["nsenter", "--all", f"--target={self._first}", f"--wd={ROOT}", "--"]
        program = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "SLURM_CONF": f"{self._path}/slurm.conf", "PATH": program}
        options = {"stdout": self._output, "stderr": self._output, **options}
        return subprocess.Popen([*inside, *command], env=environment, **options)

    def start_daemon(self, program: str) -> None:
        """Starts slurmctld or slurmd."""
        self._daemon = self.start(program, "-D")

    def kill_daemon(self) -> None:
        """Slurm's daemon alone: what it has started goes on."""
        os.kill(_child(self._daemon.pid), signal.SIGKILL)
        self._daemon.wait(60)

    def kill(self) -> None:
        """Everything on this node, at once."""
        self._keeper.kill()
        self._keeper.communicate(timeout=60)

    def of_jobs(self, words: str = "") -> list[psutil.Process]:
        """Processes on this node that are neither its own nor Slurm's, with `words` in their command lines."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == self._namespace:
                    line = " ".join(process.cmdline())
                    if words in line and not process.name().startswith(("bash", "sleep", "slurm")):
                        found.append(process)
        return found


class SlurmCluster:
    """Use `slurm_cluster`. controller: the host of slurmctld, on which no job runs."""

    def __init__(self, path: Path, controller: Node, nodes: Sequence[Node]) -> None:
        self.path, self.controller, self.nodes = path, controller, nodes

    def ask(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """What a command of Slurm prints on the controller's host; AssertionError with its words if it fails."""
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        process = self.controller.start("env", *variables, *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed = process.communicate(timeout=120)[0].decode()
        assert process.returncode == 0, f"{' '.join(command)}: {printed}"
        return printed

    def idle(self) -> None:
        """Waits until every node can have a job."""
        idle = f"idle {len(self.nodes)}\n"
        eventually("all nodes are idle", 100, lambda: self.ask("sinfo", "-h", "-o", "%T %D") == idle)

    def state(self, job: str) -> str:
        """Of a job, with its exit status, such as "COMPLETED 0:0"."""
        told = dict(re.findall(r"(JobState|ExitCode)=(\S+)", self.ask("scontrol", "show", "job", job)))
        return f"{told['JobState']} {told['ExitCode']}"


@contextmanager
def slurm_cluster(path: Path, count: int) -> Iterator[SlurmCluster]:
    """A cluster of so many nodes, n1 and so on, that are idle; skips the test, saying why, where there can be none."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        pytest.skip(f"Slurm is not installed: apt-get install {' '.join(missing)}")
    with ExitStack() as stack:
        _start_munged(path, stack)
        controller, *machines = stack.enter_context(hosts(count + 1))
        names = {f"n{number}": host.address for number, host in enumerate(machines, 1)}
        _configure(path, controller.address, names)
        controlling = Node(CONTROLLER, controller, path, stack)
        nodes = [Node(name, host, path, stack) for name, host in zip(names, machines, strict=True)]
        controlling.start_daemon("slurmctld")
        for node in nodes:
            node.start_daemon("slurmd")
        cluster = SlurmCluster(path, controlling, nodes)
        cluster.idle()
        yield cluster


def _configure(path: Path, controller: str, names: Mapping[str, str]) -> None:
    lines = "\n".join(
        f"NodeName={name} NodeAddr={address} CPUs=8 RealMemory=8000 Gres=gpu:{GPUS}" for name, address in names.items()
    )
    text = CONFIGURATION.format(controller=CONTROLLER, address=controller, path=path, nodes=lines)
    (path / "slurm.conf").write_text(text)
    # Asked for by its name: slurmd looks for the kernel's control groups otherwise, and no part of this uses them.
    (path / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    files = [path / f"gpu{number}" for number in range(GPUS)]
    (path / "gres.conf").write_text("".join(f"NodeName=n[1-{len(names)}] Name=gpu File={file}\n" for file in files))
    for file in files:
        file.touch()
    (path / "state").mkdir()
    hosts_file = [f"{address} {name}\n" for name, address in {CONTROLLER: controller, **names}.items()]
    (path / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts_file))


def _start_munged(path: Path, stack: ExitStack) -> None:
    """Starts what proves to Slurm's daemons which user calls: one for all nodes, since they share the disk.

    --force: its socket may lie where no other user comes.
    """
    (path / "munge.key").write_bytes(secrets.token_bytes(128))
    (path / "munge.key").chmod(0o400)
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    options = [f"--{option}={path / name}" for option, name in files.items()]
    munged = subprocess.Popen(["munged", "--foreground", "--force", *options], stderr=subprocess.DEVNULL)
    stack.callback(munged.wait, 60)
    stack.callback(munged.terminate)
    eventually("munged listens", 60, (path / "munge.socket").exists)


def _child(pid: int) -> int:
    return psutil.Process(pid).children()[0].pid

"""One job is a training run with its replicas: `examples/slurm/train.sbatch` on Debian's Slurm, with three nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster import eventually
from tests.slurm.nodes import SlurmCluster, slurm_cluster
from tests.tiny_model import make_tiny_qwen3

pytestmark = pytest.mark.slow

SCRIPT = "examples/slurm/train.sbatch"
SERVED = re.compile(r"version (\d+) of (\S+): (\d) of \d replicas serve it")


class Job:
    """A submitted job. Its script runs on n1 with rank 0 and 1; n2 and n3 serve."""

    def __init__(self, cluster: SlurmCluster, model: Path, *options: str, **variables: str) -> None:
        self.cluster = cluster
        self.folder = cluster.path / f"job-{len(list(cluster.path.glob('job-*')))}"
        self.folder.mkdir()
        given = {"MODEL": str(model), "FOLDER": str(self.folder), "OMP_NUM_THREADS": "1"}
        given |= {
            "CKPT_ENGINE_RELAY_MEMORY": "64MiB",
            "ENGINE": f"--engine reference --model {model} --",
            "GPUS_PER_REPLICA": "2",
        }
        options = ("--nodes=3", f"--output={self.folder}/job.log", "--parsable", *options)
        self.id = cluster.ask("sbatch", *options, SCRIPT, environment=given | variables).strip()

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def served(self, replicas: int, after: int = -1) -> int:
        """The version that so many replicas serve, waited for; it is higher than `after`."""

        def look() -> int | None:
            found = [
                int(version) for version, _, count in SERVED.findall(self.log("trainer")) if int(count) == replicas
            ]
            return max(found, default=-1) if max(found, default=-1) > after else None

        try:
            return eventually(f"{replicas} replicas serve a version after {after}", 200, look)
        except AssertionError as error:
            logs = "\n".join(f"== {path.name}\n{path.read_text()[-700:]}" for path in self.folder.glob("*.log"))
            raise AssertionError(f"{error}\n{logs}") from None

    def said(self, words: str) -> None:
        """Waits until the job has printed this."""
        eventually(f"the job says {words!r}, not {self.log('job')}", 100, lambda: words in self.log("job"))

    def ended(self) -> str:
        """Its state, once it has ended and no process of it is left on any node, and no secret on the disk."""
        eventually(f"job {self.id} has left the queue", 100, lambda: not self.cluster.ask("squeue", "-h").strip())
        # Slurm finds no process whose parent was killed before; such a one ends by itself, soon after.
        with suppress(AssertionError):
            eventually("no process of it is left", 60, lambda: not any(node.of_jobs() for node in self.cluster.nodes))
        assert [process.cmdline() for node in self.cluster.nodes for process in node.of_jobs()] == []
        assert not {"key.pem", "token", "tokens"} & {path.name for path in self.folder.iterdir()}
        return self.cluster.state(self.id)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_qwen3(path, vocabulary=500, weights=False)
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), 3) as running:
        yield running


def test_a_job_outlives_what_breaks_and_ends_as_one(cluster: SlurmCluster, model: Path) -> None:
    train = f"nice python examples/torchrun/train.py --model {model} --steps 1000000 --replicas 1"
    job = Job(cluster, model, TRAINER=train)
    version = job.served(2)
    for name in ("n2-0", "n3-0"):
        assert "new weights, serving" in job.log(name)
    assert all("relay_memory" in line for line in job.log("trainer").splitlines() if " by " in line)

    address = re.findall(r"manager: (\S+);", job.log("job"))[0]
    secrets = {
        "AUTHORITY": f"{job.folder}/certificate.pem",
        "TOKEN_FILE": f"{job.folder}/token",
        "SERVER_NAME": "manager",
    }
    look = (
        "srun",
        f"--jobid={job.id}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "ckpt-engine",
        "status",
        "--manager",
        address,
    )
    told = cluster.ask(*look, environment={f"CKPT_ENGINE_{name}": value for name, value in secrets.items()})
    assert {"n2-0", "n3-0", "relay-n1", "relay-n2", "relay-n3"} <= set(re.split(r"[\s│]+", told)), told

    _, lost, broken = cluster.nodes
    (agent,) = broken.of_jobs("ckpt-engine agent")
    agent.kill()
    job.said("n3-0 ended with status 137")
    version = job.served(2, job.served(1, version))

    lost.kill_daemon()
    version = job.served(2, version)
    lost.start_daemon("slurmd")
    version = job.served(2, version)

    lost.kill()
    try:
        job.said("n2-0 is gone: its node n2 has left the job")
        version = job.served(1, version)
        cluster.ask("scancel", job.id)
        assert job.ended().startswith("CANCELLED")
    finally:
        lost.boot()
        lost.start_daemon("slurmd")
    cluster.idle()


@pytest.mark.parametrize(
    ("variables", "state", "words"),
    [
        ({"TRAINER": "true", "REPLICAS": "1"}, "COMPLETED 0:0", "the trainer ended with status 0"),
        ({"TRAINER": "python -c exit(7)"}, "FAILED 7:0", "the trainer ended with status 7"),
        (
            {"ENGINE": "--engine nonsense --", "TRAINER": 'python -c __import__("time").sleep(500)'},
            "FAILED 1:0",
            "cannot start, and the job ends:",
        ),
        ({"TRAINER_NODES": "3"}, "FAILED 2:0", "nothing would serve"),
    ],
    ids=["trainer ends", "trainer fails", "engine is unknown", "nothing serves"],
)
def test_the_end_of_a_part_is_the_end_of_the_job(
    cluster: SlurmCluster, model: Path, variables: dict[str, str], state: str, words: str
) -> None:
    job = Job(cluster, model, **variables)
    assert job.ended() == state, job.log("job")
    assert words in job.log("job")


def test_a_trainer_takes_the_rank_of_its_step(cluster: SlurmCluster) -> None:
    """Of a batch script, too, which is one process whatever it was submitted with."""
    program = (
        "import os; from ckpt_engine.trainer.lineage import resolve_rank as rank; print(rank(None, None, os.environ))"
    )
    told = cluster.ask("srun", "--nodes=2", "--ntasks=2", "python", "-c", program)
    assert sorted(line for line in told.splitlines() if line.startswith("(")) == ["(0, 2)", "(1, 2)"], told
    output = cluster.path / "wrapped"
    cluster.ask("sbatch", "--ntasks=4", f"--output={output}", f'--wrap=python -c "{program}"')
    assert eventually("the script has run", 100, lambda: output.exists() and output.read_text()) == "(0, 1)\n"

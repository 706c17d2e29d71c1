"""The first install after a publication, on real processes: nothing is opened or laid out inside the pause."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ckpt_engine import Trainer
from ckpt_engine.trace import ENVIRONMENT
from tests.cluster import outcomes, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.faults.listener import Listener
from tests.tiny_model import make_tiny_qwen3

PAUSE, RESUME = "agent.does.PauseEngine.begin", "agent.does.ResumeEngine.end"


class InOrder(Counter[str]):
    """The points of all processes, also in the order in which they were reached."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[str] = []

    def __setitem__(self, point: str, count: int) -> None:
        super().__setitem__(point, count)
        self.points.append(point)


def test_nothing_is_opened_between_pause_and_resume(tmp_path: Path, bare_model: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model", 3, vocabulary=PADDED_VOCABULARY, weights=False)
    with Listener(tmp_path / "trace") as listener, running_cluster(tmp_path / "cluster") as cluster:
        environment = {ENVIRONMENT: str(listener.path)}
        cluster.replica("one", "reference", bare_model, environment=environment).registered()
        with Trainer(cluster.address, lineage="ready") as trainer:
            trainer.publish(model, move=True)
            for nth in range(2):
                seen = listener.seen = InOrder()
                report = trainer.update_weights()
                assert outcomes(report) == {"one": "new_serving"}
                first, last = seen.points.index(PAUSE), seen.points.index(RESUME)
                work = [index for index, point in enumerate(seen.points) if point.startswith("worker.ready.")]
                assert all(not first <= index <= last for index in work), seen.points
                assert bool(work) == (nth == 0), "what is ready stays so, and nobody is asked again"
                assert seen["agent.does.PrepareEngine.begin"] == (2 if nth == 0 else 0)
                stages = list(report.replicas[0].stages)
                assert stages == [stage for stage in ORDER if stage in stages]
                assert ("ready" in stages) == (nth == 0)


ORDER = ("plan", "ready", "quiesce", "transfer", "install", "verify", "resume")

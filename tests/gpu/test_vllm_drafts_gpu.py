"""vLLM on a GPU with draft models, with CUDA graphs: see tests/engines/drafting.py. The trainer's weights are on the
same GPU, live, so that target and draft are two sources' memory of one version."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpt_engine import Trainer
from tests.cluster import Cluster, Replica, running_cluster
from tests.engines.draft_models import KINDS, Version
from tests.engines.drafting import check_drafts, save
from tests.engines.plain import PlainServer
from tests.gpu.gpu_server import needs_gpu_vllm, plain_vllm, start_gpu_vllm

pytestmark = [*needs_gpu_vllm, pytest.mark.timeout(420)]


class Servers(NamedTuple):
    """One kind's servers: a replica, and one that loads version FRESH from files."""

    path: Path
    cluster: Cluster
    replica: Replica
    fresh: PlainServer


class OnGpu:
    """A kind of drafts with weights on the GPU."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self.name, self.shared = kind.name, kind.shared

    def version(self, path: Path, seed: int, right: bool = True) -> Version:
        made = self._kind.version(path, seed, right)
        target = {name: each.cuda() for name, each in made.target.items()}
        draft = None if made.draft is None else {name: each.cuda() for name, each in made.draft.items()}
        return Version(target, draft)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Servers]]:
    """All servers of this module, started at once. Each replica has a pool of its own."""
    root = tmp_path_factory.mktemp("drafts")
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(root / "cluster"))
        found = {}
        for name, kind in KINDS.items():
            path = root / name
            settings = ["--speculative-config", json.dumps(kind.configure(path))]
            save(kind, path)
            replica = start_gpu_vllm(cluster, name, path / "target", *settings, options=("--pool", name))
            fresh = stack.enter_context(plain_vllm(path / "target", root / f"{name}.fresh.log", *settings))
            found[name] = Servers(path, cluster, replica, fresh)
        yield found


@pytest.mark.parametrize("name", list(KINDS))
def test_drafts_are_those_of_a_server_that_loaded_the_files(servers: dict[str, Servers], name: str) -> None:
    path, cluster, replica, fresh = servers[name]
    replica.registered(300)
    with Trainer(cluster.address, lineage=name, pool=name) as trainer:
        check_drafts(OnGpu(KINDS[name]), path, trainer, replica, fresh, print)

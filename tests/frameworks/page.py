"""What tests of docs/frameworks have in common: a package with a page's diff, and replicas behind a gateway."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import Cluster, running_cluster
from tests.gateway.gateways import GatewayProcess, running_gateway

PAGES = Path(__file__).parents[2] / "docs" / "frameworks"


def copy_with_diff(package: Path, page: str, path: Path) -> None:
    """A copy of `package`, of its name and below `path`, with the diff of that page applied to it."""
    shutil.copytree(package, path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    subprocess.run(["patch", "-p1", "--fuzz=0", "-d", path], input=diff, text=True, check=True)


@contextmanager
def replicas_behind_gateway(path: Path) -> Iterator[tuple[Cluster, GatewayProcess]]:
    """Two replicas of the reference engine for the model at `path`/model."""
    with running_cluster(path) as cluster:
        for name in ("one", "two"):
            cluster.replica(name, "reference", path / "model")
        for replica in cluster.replicas:
            replica.registered()
        with running_gateway(path / "gateway.log", "--manager", cluster.address) as gateway:
            yield cluster, gateway

"""Counts the files of ours that one plain update runs through: python -m benchmarks.files_of_update [-o FILE]

One trainer, one manager, one agent with a reference engine of one worker, each a process; the third update is counted,
when plans and recordings are there. A file counts if a function of it is called while the update goes on, in any of the
processes; what heartbeats and pages do meanwhile counts, too, and takes part in every run alike.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from ckpt_engine import Trainer
from tests.cluster import running_cluster
from tests.tiny_model import make_tiny_qwen3

ROOT = Path(__file__).parents[1]
OWN = ("ckpt_engine", "adapters")
SETTLE_SECONDS = 0.5

COUNTING = """
import atexit, json, os, sys, threading, time
folder, root = os.environ["CKPT_ENGINE_COUNT_FILES"], os.environ["CKPT_ENGINE_COUNT_ROOT"]
found, counting = set(), [False]
def profile(frame, event, argument):
    if counting[0] and event == "call":
        found.add(frame.f_code.co_filename)
def watch():
    while True:
        before, counting[0] = counting[0], os.path.exists(folder + "/on")
        if before and not counting[0]:
            with open(f"{folder}/{os.getpid()}.json", "w") as file:
                json.dump(sorted(name for name in found if name.startswith(root)), file)
        time.sleep(0.01)
sys.setprofile(profile)
threading.setprofile(profile)
threading.Thread(target=watch, daemon=True).start()
"""


def count(seconds: float) -> dict[str, object]:
    """The files, and how many there are by folder. The calls of this process and of its children are counted."""
    folder = Path(os.environ["CKPT_ENGINE_COUNT_FILES"])
    on = folder / "on"
    torch.set_num_threads(1)
    model = make_tiny_qwen3(folder / "model", 1)
    with running_cluster(folder / "cluster") as cluster:
        cluster.replica("one", "reference", folder / "model", "--load-format", "dummy").registered(seconds)
        with Trainer(cluster.address, lineage="counted") as trainer:
            trainer.publish(model)
            for _ in range(2):
                assert trainer.update_weights().ok
            on.touch()
            time.sleep(SETTLE_SECONDS)
            assert trainer.update_weights().ok
            on.unlink()
            time.sleep(SETTLE_SECONDS)
    names = {name for each in folder.glob("*.json") for name in json.loads(each.read_text())}
    files = sorted(str(Path(name).relative_to(ROOT)) for name in names)
    files = [name for name in files if name.startswith(OWN) and "_pb2" not in name]
    folders = Counter(str(Path(name).parent) for name in files)
    return {"files": len(files), "by_folder": dict(folders.most_common()), "names": files}


def main() -> None:
    parser = argparse.ArgumentParser(description="files of ours that one plain update runs through")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0, help="for the replica to come up")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(count(options.seconds)))
        return
    with tempfile.TemporaryDirectory(prefix="ck-files-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(COUNTING)
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "CKPT_ENGINE_COUNT_FILES": folder,
            "CKPT_ENGINE_COUNT_ROOT": str(ROOT),
        }
        command = [sys.executable, "-m", "benchmarks.files_of_update", "--inside", "--seconds", str(options.seconds)]
        told = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    versions = {"commit": commit.strip(), "python": sys.version.split()[0], "torch": torch.__version__}
    found = {**versions, **json.loads(told.splitlines()[-1])}
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['files']} files")
    for name, number in found["by_folder"].items():
        print(f"{number:4} {name}")


if __name__ == "__main__":
    main()

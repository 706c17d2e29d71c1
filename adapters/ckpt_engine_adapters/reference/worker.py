"""A worker process: one rank's model, and the commands that the API process sends it.

Commands come as JSON over a ZeroMQ socket below the engine's directory: the same ones to every rank, in the same order.
They run one after the other on the main thread, so our hooks (`prepare`, `install`) always run between two steps, never
during one. Every rank computes every step; only rank 0 uses the logits.

The process dies with the API process, also when that is killed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq

from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.install.worker import EngineWorker
from ckpt_engine_adapters.reference.model import ReferenceModel, UnsupportedModelError
from ckpt_engine_adapters.reference.sampling import choose

PROCESS_GROUP_SECONDS = 300.0
_PARENT_CHECK_MILLISECONDS = 1000
_PR_SET_PDEATHSIG = 1


class ReferenceWorker:
    """Executes commands against one rank's model. `handle` never sees two commands at once."""

    def __init__(self, model: ReferenceModel, engine_worker: EngineWorker, rank: int) -> None:
        self._model = model
        self._engine_worker = engine_worker
        self._rank = rank
        self._caches: dict[str, Any] = {}

    def handle(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one command and returns the reply's fields other than `ok`.

        Raises:
            ValueError: there is no such command.
        """
        match command["op"]:
            case "step":
                return self._step(command)
            case "score":
                return {"score": self._model.score(command["tokens"], command["more"])}
            case "prepare":
                return {"done": self._engine_worker.prepare()}
            case "install":
                return {"done": self._engine_worker.install(command["epoch"])}
            case "discard":
                self._engine_worker.discard()
                return {}
            case "sleep":
                return self._sleep(command["level"])
            case "wake":
                self._model.restore()
                return {"parameter_bytes": self._model.parameter_bytes()}
        raise ValueError(f"no command {command['op']!r}")

    def _step(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Computes one token for each item. An item with `fresh` has all of its tokens and starts a new cache."""
        for request in command["forget"]:
            self._caches.pop(request, None)
        tokens: dict[str, Any] = {}
        for item in command["items"]:
            request = item["request"]
            if item["fresh"]:
                self._caches[request] = self._model.new_cache()
            logits = self._model.next_logits(item["tokens"], self._caches[request])
            if self._rank == 0:
                tokens[request] = choose(logits, item["temperature"], item["seed"], item["index"])
        return {"tokens": tokens}

    def _sleep(self, level: int) -> dict[str, Any]:
        """Drops the caches, with level 2 also the weights; the state word says so before the first byte is freed."""
        self._caches.clear()
        self._engine_worker.give_back()
        if level == 2:
            self._engine_worker.discard()
            self._model.discard()
        return {"parameter_bytes": self._model.parameter_bytes()}


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when `parent` dies; exits at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("reference worker: the API process has gone")


def serve(worker: ReferenceWorker, socket: zmq.Socket[bytes], parent: int) -> None:
    """Answers commands until the API process ends."""
    while True:
        if not socket.poll(_PARENT_CHECK_MILLISECONDS):
            if os.getppid() != parent:
                return
            continue
        command = json.loads(socket.recv())
        reply: dict[str, Any] = {"id": command["id"]}
        try:
            reply |= worker.handle(command)
        except Exception as error:
            reply["error"] = f"{type(error).__name__}: {error}"
        socket.send(json.dumps(reply).encode())


def _join_group(options: argparse.Namespace, directory: EngineDirectory) -> str:
    """Meets the other ranks; returns the address at which the API process listens for this one."""
    if options.world_size == 1:
        return str(options.endpoint)
    seconds = timedelta(seconds=PROCESS_GROUP_SECONDS)
    store: Any
    if options.master_addr:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            options.master_addr,
            options.master_port,
            is_master=options.rank == 0,
            timeout=seconds,
            wait_for_workers=False,
        )
        if options.rank == 0:
            store.set("endpoint", options.far_endpoint)
    else:
        store = dist.FileStore(str(directory.path / "process_group"), options.world_size)  # type: ignore[attr-defined]
    if options.master_addr in ("", "127.0.0.1"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.world_size, timeout=seconds)
    return str(options.endpoint or store.get("endpoint").decode())


def main(arguments: list[str] | None = None) -> None:
    """Runs a worker, for `worker_process`, until the API process ends."""
    parser = argparse.ArgumentParser(description="one worker of the reference engine; started by its server")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--load-format", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--endpoint", default="", help="of the API process; on another node rank 0 tells it")
    parser.add_argument("--master-addr", default="")
    parser.add_argument("--master-port", type=int, default=0)
    parser.add_argument("--far-endpoint", default="")
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)

    logging.basicConfig(format=f"worker {options.rank}: %(message)s")
    die_with_parent(options.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the API process handles it, and ends us
    directory = EngineDirectory.from_environment()
    assert directory is not None, "the server sets CKPT_ENGINE_DIRECTORY"
    endpoint = _join_group(options, directory)
    dummy = options.load_format == "dummy"
    dtype = getattr(torch, options.dtype)
    try:
        model = ReferenceModel(
            options.model,
            dtype,
            rank=options.rank,
            world_size=options.world_size,
            initialise=dummy,
            device=options.device,
        )
        if not dummy:
            model.load_directory(options.model)
        engine_worker = EngineWorker(directory, options.rank, options.world_size, model.target())
    except (UnsupportedModelError, ValueError, OSError) as error:
        sys.exit(f"worker {options.rank}: {error}")
    worker = ReferenceWorker(model, engine_worker, options.rank)

    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, str(options.rank).encode())
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(endpoint)
    ready = {
        "id": 0,
        "architecture": model.architecture,
        "vocabulary": model.vocabulary,
        "max_positions": model.max_positions,
        "parameter_bytes": model.parameter_bytes(),
    }
    socket.send(json.dumps(ready).encode())
    gc.freeze()
    gc.enable()
    serve(worker, socket, options.parent)

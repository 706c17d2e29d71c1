"""The reference engine's API server: HTTP in front of the scheduler, behind the gate.

`python -m ckpt_engine_adapters.reference.server --model DIR --host 127.0.0.1 --port P` starts it with its workers. It
runs on the CPU, serves any causal LM of transformers, and is what adapters for real engines are compared with. The
process imports no torch; its workers do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import uvicorn

from ckpt_engine.addresses import join_address
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.gate.reader import StateReader
from ckpt_engine_adapters.reference.engine import MAX_RUNNING, ReferenceEngine
from ckpt_engine_adapters.reference.far import serve_far
from ckpt_engine_adapters.reference.gate import ReferenceGate
from ckpt_engine_adapters.reference.pool import NodeMeeting, WorkerFailedError, WorkerPool
from ckpt_engine_adapters.reference.routes import ModelFacts, create_app

START_SECONDS = 300.0
SHUTDOWN_SECONDS = 2


def main(arguments: list[str] | None = None) -> None:
    """Serves until a signal (status 0) or until a worker dies (status 1; the last line of stderr says which and
    how)."""
    options = parse(arguments)
    # After its shutdown uvicorn raises a signal again for the former handler, which must let `finally` run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    listener = _listen(options.host, options.port) if options.node_rank == 0 else None
    directory = EngineDirectory.from_environment()
    by_hand = directory is None
    try:
        directory = directory or EngineDirectory.create()
        os.environ[ENVIRONMENT] = str(directory.path)
        _say(f"engine directory {directory.path}")
        with suppress(KeyboardInterrupt):
            if listener is None:
                far = serve_far(directory, _worker_arguments(options), options.tensor_parallel, _meeting(options))
                asyncio.run(far)
            else:
                asyncio.run(_serve(options, directory, by_hand, listener))
    except (WorkerFailedError, CkptEngineError, TimeoutError) as error:
        cause = str(error) or f"workers not ready within {START_SECONDS:.0f} s"
        _say(f"cannot start: {cause}; the server exits")
        sys.exit(1)
    finally:
        if by_hand and directory is not None:
            directory.remove()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line. Exits with status 2 and a usage line if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m ckpt_engine_adapters.reference.server",
        description="A small inference server, which ckpt-engine keeps supplied with weights.",
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory; config.json is enough")
    parser.add_argument("--served-model-name", default="", help="what clients and routers call it; else its path")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one, printed at start")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="number of worker processes")
    parser.add_argument("--nnodes", type=int, default=1, help="nodes that share the workers; each runs this command")
    parser.add_argument("--node-rank", type=int, default=0, help="of this node; 0 has the HTTP server")
    parser.add_argument("--master-addr", default="", help="address of node 0, where all workers meet")
    parser.add_argument("--master-port", type=int, default=0, help="a free port there")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--load-format", choices=("auto", "dummy"), default="auto", help="auto: safetensors if there are, else dummy"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the first GPU that it sees, for one worker"
    )
    parser.add_argument(
        "--max-running", type=int, default=MAX_RUNNING, help="requests that take part in one step; others wait"
    )
    options = parser.parse_args(arguments)
    if options.max_running < 1:
        parser.error("--max-running must be at least 1")
    if options.device != "cpu" and options.tensor_parallel > 1:
        parser.error("--device cuda is for one worker: workers sum over gloo, on the CPU")
    if options.tensor_parallel < 1:
        parser.error("--tensor-parallel must be at least 1")
    if not 0 <= options.node_rank < options.nnodes:
        parser.error(f"--node-rank {options.node_rank} is none of {options.nnodes} nodes")
    if options.nnodes > 1 and not (options.master_addr and options.master_port):
        parser.error("--nnodes needs --master-addr and --master-port")
    if options.tensor_parallel % options.nnodes:
        parser.error(f"--tensor-parallel {options.tensor_parallel} cannot be shared by {options.nnodes} nodes")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: there is no config.json")
    if options.load_format == "auto" and not any(options.model.glob("*.safetensors")):
        options.load_format = "dummy"
    return options


async def _serve(
    options: argparse.Namespace, directory: EngineDirectory, by_hand: bool, listener: socket.socket
) -> None:
    meeting = _meeting(options) if options.nnodes > 1 else None
    pool = WorkerPool(directory, _worker_arguments(options), options.tensor_parallel, meeting)

    def fatal(message: str) -> None:
        # Not an orderly shutdown: requests would wait for tokens that never come, and its log would hide the cause.
        pool.kill()
        if by_hand:
            directory.remove()
        _fail(message)

    try:
        facts = await pool.start(START_SECONDS)
        pool.on_death = fatal
        page = EnginePage(directory.page)
        engine = ReferenceEngine(pool, StateReader(page).verdict, fatal, options.max_running)
        app = create_app(engine, _facts(options, facts[0], pool))
        # No lifespan: the workers run before the port answers.
        config = uvicorn.Config(
            ReferenceGate(app), lifespan="off", log_level="warning", timeout_graceful_shutdown=SHUTDOWN_SECONDS
        )
        stepping = asyncio.create_task(engine.run())
        host, port = listener.getsockname()[:2]
        _say(f"serving {options.model} on http://{join_address(host, port)} with {pool.world_size} worker(s)")
        try:
            await uvicorn.Server(config).serve(sockets=[listener])
        finally:
            stepping.cancel()
    finally:
        await pool.close()


def _facts(options: argparse.Namespace, worker: dict[str, int | str], pool: WorkerPool) -> ModelFacts:
    return ModelFacts(
        model=str(options.model),
        served_model_name=options.served_model_name or str(options.model),
        architecture=str(worker["architecture"]),
        dtype=options.dtype,
        vocabulary=int(worker["vocabulary"]),
        max_positions=int(worker["max_positions"]),
        workers=tuple(pool.pids),
        tensor_parallel=pool.world_size,
    )


def _meeting(options: argparse.Namespace) -> NodeMeeting:
    return NodeMeeting(options.nnodes, options.node_rank, options.master_addr, options.master_port)


def _worker_arguments(options: argparse.Namespace) -> list[str]:
    values = {"model": options.model, "dtype": options.dtype, "load-format": options.load_format}
    return [part for name, value in (*values.items(), ("device", options.device)) for part in (f"--{name}", str(value))]


def _listen(host: str, port: int) -> socket.socket:
    """Binds the port before anything is loaded, so that a port in use is noticed at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With a named protocol asyncio turns Nagle's algorithm off on accepted sockets; a token must not wait for it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        _fail(f"cannot bind {host}:{port}: {error.strerror}")
    return listener


def _say(message: str) -> None:
    print(f"reference engine: {message}", file=sys.stderr, flush=True)


def _fail(message: str) -> NoReturn:
    _say(f"{message}; the server exits")
    os._exit(1)


if __name__ == "__main__":
    main()

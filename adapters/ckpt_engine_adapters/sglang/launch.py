"""Starts SGLang's own server behind our gate: ``python -m ckpt_engine_adapters.sglang.launch`` and SGLang's options.

Processes and arguments are SGLang's. The gate is put around its application before it starts, requests are salted on
their way to the schedulers (`scheduler_requests.py`), and each scheduler makes our worker once it has a model
(`scheduler.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from ckpt_engine.engine.command import Options
from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.gate.salt import CacheSalt
from ckpt_engine_adapters.sglang.command import (
    REFUSED,
    WORKERS_VARIABLE,
    check_options,
    options_of,
    server_arguments,
    worker_count,
)


def main(arguments: Sequence[str]) -> None:
    """Runs until the server ends. Exits with a message if the arguments do not allow updates."""
    # With this, /health asks for a token, which takes a second and fails while generation is paused.
    os.environ.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")
    options = options_of(arguments)
    _check(options)
    os.environ.setdefault(WORKERS_VARIABLE, str(worker_count(options)))
    directory = EngineDirectory.from_environment()
    if directory is None:
        # Here and not in the gate: the schedulers must know it too.
        directory = EngineDirectory.create()
        os.environ[ENVIRONMENT] = str(directory.path)
        print(f"ckpt-engine: engine directory {directory.path}", flush=True)

    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from ckpt_engine_adapters.sglang.gate import SglangGate
    from ckpt_engine_adapters.sglang.scheduler import run_scheduler_process
    from ckpt_engine_adapters.sglang.scheduler_requests import salt_requests

    load_plugins()
    settings = prepare_server_args(server_arguments(arguments))
    _check(_resolved(settings))  # a --config file may say more than the command line
    in_place = salt_requests(settings, CacheSalt(EnginePage(directory.page)))
    app: Any = http_server.app
    build = app.build_middleware_stack
    # Outermost, whatever SGLang adds while it starts.
    app.build_middleware_stack = lambda: SglangGate(build(), in_place)
    try:
        http_server.launch_server(settings, run_scheduler_process_func=run_scheduler_process)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _check(options: Options) -> None:
    try:
        check_options(options, os.environ)
    except ValueError as error:
        sys.exit(f"ckpt-engine: {error}")


def _resolved(settings: Any) -> Options:
    """The values that SGLang resolved for the options that matter, as if they were on the command line."""
    names = {name: name.removeprefix("--").replace("-", "_") for name in REFUSED}
    names["--pipeline-parallel-size"] = "pp_size"
    names["--data-parallel-size"] = "dp_size"
    names["--enable-dp-attention"] = "enable_dp_attention"
    values = {name: getattr(settings, attribute, None) for name, attribute in names.items()}
    return {name: (str(value),) for name, value in values.items() if value not in (None, False)}


if __name__ == "__main__":
    main(sys.argv[1:])

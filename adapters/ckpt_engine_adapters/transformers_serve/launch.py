"""Starts transformers' own server behind our gate: ``python -m ckpt_engine_adapters.transformers_serve.launch`` and the
arguments of `transformers serve`.

The command, its handlers and its application are transformers'. Before it listens, the model that it has loaded gets
our worker, its continuous batching a gate point, and its application our gate.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.gate.reader import StateReader
from ckpt_engine_adapters.transformers_serve.command import check_command, server_arguments


def main(arguments: Sequence[str]) -> None:
    """Runs until the server ends. Exits with a message if the arguments or the model do not allow updates."""
    try:
        check_command(arguments)
    except ValueError as error:
        sys.exit(f"ckpt-engine: {error}")
    directory = EngineDirectory.from_environment()
    if directory is None:
        directory = EngineDirectory.create()
        os.environ[ENVIRONMENT] = str(directory.path)
        print(f"ckpt-engine: engine directory {directory.path}", flush=True)

    from transformers.cli import transformers as command_line
    from transformers.cli.serving import server

    build = server.build_server

    def behind_gate(model_manager: Any, *handlers: Any, **named: Any) -> Any:
        app = build(model_manager, *handlers, **named)
        return gated(app, model_manager, named["generation_state"], directory)

    server.build_server = behind_gate
    status: Any = 0
    try:
        command_line.app(["serve", *server_arguments(arguments)])
    except SystemExit as ended:
        status = ended.code
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)  # the loop of continuous batching would keep the process


def gated(app: Any, model_manager: Any, generation_state: Any, directory: EngineDirectory) -> Any:
    """Puts the gate around transformers' application, and gives the model that it serves a worker.

    app: FastAPI. Exits with a message if the model cannot be updated.
    """
    from transformers.cli.serving.utils import split_model_id

    from ckpt_engine_adapters.transformers_serve.gate import TransformersGate
    from ckpt_engine_adapters.transformers_serve.generation import PausableGeneration
    from ckpt_engine_adapters.transformers_serve.routes import agents_routes
    from ckpt_engine_adapters.transformers_serve.served import ServedModel
    from ckpt_engine_adapters.transformers_serve.versions import TokenVersions, VersionedAnswers

    name, _ = split_model_id(model_manager.force_model)
    identifier = model_manager.process_model_name(name)
    model, processor = model_manager.load_model_and_processor(identifier)
    modality = model_manager.get_model_modality(model, processor=processor)
    if not generation_state.use_continuous_batching(model, modality):
        sys.exit(
            f"ckpt-engine: {type(model).__name__} is served without continuous batching ({modality.value}), so nothing "
            "could pause what computes; only language models can be updated"
        )
    state = StateReader(EnginePage(directory.page))

    def held() -> int | None:
        identity = state.verdict().identity
        return None if identity is None else identity.version

    versions = TokenVersions(held)
    generation = PausableGeneration(versions, generation_state._cb_config)
    # What transformers itself would put here at the first request.
    generation_state._cb_manager, generation_state._cb_model_id = generation, identifier
    try:
        served = ServedModel(model, generation, directory)
    except (OSError, ValueError) as error:
        sys.exit(f"ckpt-engine: {error}")
    app.include_router(agents_routes(served))
    app.add_middleware(VersionedAnswers, versions=versions)
    return TransformersGate(app)


if __name__ == "__main__":
    main(sys.argv[1:])

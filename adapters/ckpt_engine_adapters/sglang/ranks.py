"""Finds which of a server's workers a scheduler is. SGLang 0.5.16 has that in each runner, 0.5.23 in the process."""

from __future__ import annotations

from typing import Any


def worker_rank(runner: Any) -> tuple[int, int]:
    """The rank among all workers of the server, and their number: data parallel replicas x pipeline x tensor.

    Under data parallel attention the groups are parts of one replica's tensor parallel ranks. runner: a ModelRunner.
    """
    state = getattr(runner, "ps", None)
    if state is not None:
        attention = bool(runner.server_args.enable_dp_attention)
        replicas = 1 if attention else int(state.dp_size)
    else:
        from sglang.srt.runtime_context import get_parallel

        state = get_parallel()
        attention = bool(state.attn_dp_enabled)
        replicas = int(state.dp_size)
    replica = 0 if attention else int(state.dp_rank or 0)
    of_replica = int(state.pp_size) * int(state.tp_size)
    return replica * of_replica + int(state.pp_rank) * int(state.tp_size) + int(state.tp_rank), replicas * of_replica

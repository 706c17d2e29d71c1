"""How a version of an adapter is called within vLLM: the same in its API processes, its core and its workers.

It decides name, number and path of vLLM's LoRARequest. It loads nothing of vLLM, so that the gate can import it.
Name and path go into the hashes of cached blocks, so that no request finds those of another version. Two versions may
have the same content, and so the same root: each has a name, a number and a path of its own, and goes by itself.
"""

from __future__ import annotations

from typing import Any

from ckpt_engine.core.adapters import integer_id, served_name
from ckpt_engine.v1 import weights_pb2

PATH = "ckpt-engine:"
"""What the path of each adapter of ours begins with; its version's name and root follow."""


def vllm_request(kind: Any, identity: weights_pb2.Identity) -> Any:
    """kind: vLLM's class LoRARequest."""
    return kind(served_name(identity), integer_id(identity), path_of(identity))


def path_of(identity: weights_pb2.Identity) -> str:
    """The path by which vLLM's loader is asked for a version. There is no such file: ours answers."""
    return f"{PATH}{served_name(identity)}:{identity.root.hex()}"

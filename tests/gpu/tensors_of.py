"""Which tensors of a vLLM server's kernels differ from another server's: for the message of a test that has failed.

It asks workers that have the extension in inside/worker_tensors.py. It never raises: what went wrong is its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gate.directory import TOKEN_HEADER, EngineDirectory, default_root

ARGUMENTS = ("--worker-extension-cls", "worker_tensors.WorkerTensors")
PATH = str(Path(__file__).with_name("inside"))
"""What a server's PYTHONPATH must have for that."""


def differing(ours: str, plain: str, at_most: int = 24) -> list[str]:
    """A line for each tensor that differs, and their number. ours, plain: addresses of the servers, ours behind a
    gate."""
    try:
        one, other = _digests(ours), _digests(plain)
    except (httpx.HTTPError, CkptEngineError, LookupError, ValueError, OSError) as error:
        return [f"the servers' tensors could not be compared: {type(error).__name__}: {error}"]
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    lines = [f"{name}: {one.get(name, 'none')}; the other server's: {other.get(name, 'none')}" for name in names]
    return [f"{len(names)} of {len(one.keys() | other.keys())} tensors differ", *lines[:at_most]]


def _digests(url: str) -> Mapping[str, str]:
    """Raises LookupError if the server takes no token that this user has."""
    refusals = []
    for token in ("", *_tokens()):
        headers = {TOKEN_HEADER: token} if token else {}
        answer = httpx.post(f"{url}/collective_rpc", json={"method": "tensor_digests"}, headers=headers, timeout=60)
        if answer.status_code == 200:
            found: Mapping[str, str] = answer.json()["results"][0]
            return found
        refusals.append(f"{answer.status_code} {answer.text[:200]}")
    raise LookupError(f"{url} answered {'; '.join(sorted({*refusals}))}")


def _tokens() -> Iterator[str]:
    """Of all engine directories of this user: a test does not know which one its replica made."""
    for path in default_root().iterdir():
        try:
            yield EngineDirectory(path).token()
        except (OSError, CkptEngineError):
            continue

"""Vision models in vLLM on a GPU, with CUDA graphs; see tests/engines/vision_scene.py.

python -m pytest tests/gpu/test_vision.py --seen FILE       what ran, for `python -m tests.gpu.seen`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.engines.vision_models import CLASSES
from tests.engines.vision_scene import PICTURES, SEEDS, TOKENS, check_chats, running
from tests.gpu import exact
from tests.gpu.gpu_server import needs_gpu_vllm, plain_vllm, start_gpu_vllm

pytestmark = [*needs_gpu_vllm, pytest.mark.timeout(900)]

UP_SECONDS = 480.0
"""Until servers answer: four start at once, and compile."""

WIDTH = 256
"""Of the models: heads of 64, which kernels for GPUs know."""

CACHE_BYTES = 256 << 20


@pytest.mark.parametrize("name", list(CLASSES))
def test_chats_after_updates(tmp_path: Path, record_property: Callable[[str, object], None], name: str) -> None:
    make = partial(CLASSES[name], WIDTH)
    arguments = ("--kv-cache-memory-bytes", str(CACHE_BYTES))
    record_property("architecture", make().architectures[0])
    record_property("arguments", "")
    record_property("published in float32", [])
    with running(make, tmp_path, start_gpu_vllm, plain_vllm, UP_SECONDS, arguments) as scene:
        largest, report = check_chats(scene, exact.DEVICE)
    assert {use.transport for replica in report.replicas for use in replica.transports} == {"cuda_ipc"}
    seeing = next(each for each in report.replicas if each.name == "seeing")
    (worker,) = seeing.message.workers
    record_property("verified", worker.verified)
    record_property("verified as loaded", worker.verified_as_loaded)
    record_property("by vLLM's loader", sorted(worker.by_loader))
    record_property("equal tokens", len(SEEDS) * len(PICTURES) * TOKENS)
    record_property("largest difference of a log-probability", largest)

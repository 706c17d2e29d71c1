"""What has changed is installed into a model on a GPU, and proved there, as on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_engine.core.dtypes import ITEMSIZES
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.digest.placed import placed_box
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.install import changes
from ckpt_engine.torch_dtypes import torch_dtype
from tests.digest.test_digest import random_tensor
from tests.install.install_models import TensorParallel, assert_same, state
from tests.install.install_world import Checkpoint
from tests.relay.relay_world import Replica
from tests.relay.test_changed_install import World, assert_by_changes, relay_memory

GPU = torch.device("cuda", 0)
SHAPE = {"layers": 2}


@pytest.mark.parametrize("name", sorted(ITEMSIZES))
def test_what_is_written_is_what_the_digest_gains(name: str) -> None:
    dtype, start = torch_dtype(name), (5, 1 << 35)
    for view in (
        random_tensor((300, 1000), dtype, 1)[3:, 7:501].to(GPU),
        random_tensor((99, 40), dtype, 2).to(GPU).t(),
    ):
        box, before = placed_box(view, start), digest_box(view, start)
        assert box is not None
        places = np.flatnonzero(np.random.default_rng(3).random(view.numel()) < 0.02).astype(np.uint32)
        old = box.read(places)
        new = random_tensor((len(places),), dtype, 4).view(torch.uint8).numpy().view(old.dtype)
        box.write(places, new)
        assert (box.read(places) == new).all()
        assert box.gain(places, old) == (digest_box(view, start) - before) & ((1 << 64) - 1)


def test_version_after_version_goes_by_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "ON_GPUS", True)
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "relays"))
    model = TensorParallel(0, 1, **SHAPE).to(GPU)
    checkpoint = Checkpoint(model.checkpoint(), 1)
    with relay_memory() as relay:
        world = World(checkpoint, Replica(checkpoint, tmp_path / "engine", 1, models=[model]), relay)
        for number in range(5):
            answers = world.next()
            (answer,) = answers
            assert not answer.report.HasField("problem"), answer.report.problem.message
            if number:
                assert_by_changes(answers)
            like = TensorParallel(0, 1, **SHAPE)
            like.load_weights(checkpoint.weights.items())
            assert_same({name: tensor.cpu() for name, tensor in state(model).items()}, state(like))

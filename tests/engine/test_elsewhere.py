"""What other workers load, read by checkpoint name from models that are built as engines build theirs."""

from __future__ import annotations

import pytest
from torch import nn

from ckpt_engine.engine.elsewhere import Elsewhere


class Missing(nn.Module):
    """Stands for a layer of another stage."""


class Tower(nn.Module):
    """Stands for a module that the model was made without."""


class Experts(nn.Module):
    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return (-1, -1, 0, 1)[expert]


class Mapper:
    def _map_name(self, name: str) -> str | None:
        return None if name.startswith("visual.") else name.replace("language.", "model.")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mapper = Mapper()
        self.model = nn.ModuleDict({"here": nn.Linear(1, 1), "there": Missing(), "experts": Experts()})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.there.weight", "another pipeline stage"),
        ("language.there.weight", "another pipeline stage"),
        ("there.weight", "another pipeline stage"),
        ("model.thereabouts.weight", None),
        ("model.here.weight", None),
        ("visual.there.weight", None),
        ("model.experts.1.up.weight", "an expert of another rank"),
        ("experts.0.up.weight", "an expert of another rank"),
        ("model.experts.2.up.weight", None),
        ("model.experts.9.up.weight", None),
        ("model.experts.router.weight", None),
    ],
)
def test_a_checkpoint_name_tells_which_worker_loads_it(name: str, why: str | None) -> None:
    assert Elsewhere(Model(), "mapper", (Missing,)).why(name) == why


def test_a_model_that_is_whole_leaves_nothing_to_others() -> None:
    assert Elsewhere(nn.Sequential(nn.Linear(1, 1)), "mapper", (Missing,)).why("0.weight") is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("language.tower.weight", "was made without its vision tower"),
        ("model.tower.weight", "was made without its vision tower"),
        ("model.towers.weight", None),
        ("model.there.weight", None),
    ],
)
def test_what_the_model_was_made_without_is_absent_and_not_elsewhere(name: str, why: str | None) -> None:
    model = Model()
    model.model["tower"] = Tower()
    left = Elsewhere(model, "mapper", (Missing,), lambda each: "vision tower" if isinstance(each, Tower) else None)
    assert left.absent(name) == why
    assert left.why(name) == ("another pipeline stage" if "there" in name else None)

"""What a Probe takes and refuses, and scores of a model of torch that is left as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine import CkptEngineError, Probe, TokenScores, Trainer
from ckpt_engine.integrations.scoring import model_score
from ckpt_engine.options import options_message, options_of


def half(sequences: Any) -> list[list[float]]:
    """Scores each token as one of two that are equally likely."""
    return [[-0.6931] * (len(each) - 1) for each in sequences]


def test_scores_become_a_message_with_bounds() -> None:
    probe = Probe([[1, 2, 3], (4, 5)], half, mean=None, flips=0.5, seconds=7)
    scores = probe.scores()
    assert [list(each.tokens) for each in scores.sequences] == [[1, 2, 3], [4, 5]]
    assert [len(each.log_probabilities) for each in scores.sequences] == [2, 1]
    assert not scores.bounds.HasField("mean")
    assert (scores.bounds.kl, scores.bounds.flips, scores.seconds) == (0.05, 0.5, 7.0)
    whole = Probe([[1, 2]], lambda _: [TokenScores([-1.0], [2])]).scores()
    assert list(whole.sequences[0].top) == [2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sequences": []}, "1 to 256 sequences, not 0"),
        ({"sequences": [[1]]}, "sequence 0 of the probe has 1 tokens: it needs two or more"),
        ({"sequences": [[1, 2], [3, -1]]}, "sequence 1 of the probe must be token ids, and has -1"),
        ({"sequences": [[1, 2.5]]}, "and has 2.5"),
        ({"sequences": ["a text"]}, "must be token ids, and has 'a text'"),
        ({"sequences": [1, 2, 3]}, "sequence 0 of the probe must be token ids, and has 1: give a list of them"),
        ({"score": "model"}, "score must be a function of the sequences, not 'model'"),
        ({"mean": -1.0}, "the probe's mean -1.0 must be a number from 0 on, or None"),
        ({"kl": float("nan")}, "the probe's kl nan"),
        ({"flips": True}, "the probe's flips True"),
        ({"clip": 1.5}, "the probe's clip 1.5 must be above 0 and below 1"),
        ({"clip": None}, "the probe's clip None must be above 0 and below 1"),
        ({"seconds": 0}, "the probe's seconds"),
    ],
)
def test_what_no_engine_could_be_asked_is_refused_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(CkptEngineError, match=words):
        Probe(**{"sequences": [[1, 2]], "score": half, **arguments})


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([], "returned 0 results for 1 sequences"),
        ([[-1.0, -1.0]], "has 2 tokens and 2 log-probabilities: give 1"),
        ([["much"]], "score of sequence 0 must be numbers"),
        ([None], "score of sequence 0 must be numbers"),
        ([TokenScores([-1.0], [1, 2])], "names 2 likeliest tokens: give 1, or none"),
    ],
)
def test_a_result_that_does_not_fit_the_sequences_is_refused(result: list[Any], words: str) -> None:
    with pytest.raises(CkptEngineError, match=words):
        Probe([[1, 2]], lambda _: result).scores()


def test_a_trainer_takes_a_probe_only() -> None:
    with pytest.raises(CkptEngineError, match=r"probe must be ckpt_engine\.Probe"):
        Trainer("127.0.0.1:1", probe=half)  # type: ignore[arg-type]


def test_the_condition_travels_by_its_name() -> None:
    message = options_message({"strategy": "canary", "condition": "probe"})
    assert [(each.name, each.value) for each in message.conditions] == [("probe", 0.0)]
    assert options_of(message)["condition"] == ["probe"]


class Small(nn.Module):
    """Called as a model of transformers is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        assert not torch.is_grad_enabled()
        return SimpleNamespace(logits=self.head(self.frozen(self.dropout(self.embedding(input_ids)))))


def test_a_model_is_scored_and_left_as_it_was() -> None:
    model = Small()
    random = torch.random.get_rng_state()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    (scores,) = model_score(model)([[1, 2, 3]])
    assert isinstance(scores, TokenScores)
    with torch.no_grad():
        expected = torch.log_softmax(model.head(model.embedding(torch.tensor([1, 2]))), dim=-1)
    assert scores.log_probabilities == pytest.approx([float(expected[0, 2]), float(expected[1, 3])])
    assert list(scores.top) == expected.argmax(dim=-1).tolist()
    assert [each.training for each in (model, model.dropout, model.frozen, model.head)] == [True, True, False, True]
    assert torch.equal(torch.random.get_rng_state(), random), "the training goes on as it would have"
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


def test_a_model_that_fails_is_in_its_own_mode_again() -> None:
    model = Small()
    with pytest.raises(IndexError):
        model_score(model)([[1, 99]])
    assert model.dropout.training

"""Tensors that a callable yields anew at each update."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.source.open import open_source
from ckpt_engine.v1.weights_pb2 import Problem
from tests.source.reading import assert_equal, read, whole_atoms


class Walks:
    """A callable that yields `tensors` under their names, counts its walks, and does as a merged adapter does."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.walks = 0
        self.merged = False
        self.fails_after: int | None = None

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.walks += 1
        self.merged = True
        try:
            for number, (name, tensor) in enumerate(self.tensors.items()):
                if number == self.fails_after:
                    raise RuntimeError("the adapter cannot be merged")
                yield name, tensor.clone()
        finally:
            self.merged = False


def test_each_seal_walks_once_and_the_table_stays() -> None:
    walks = Walks(**{"b.w": torch.randn(3, 4).t(), "b.a": torch.arange(5), "c": torch.tensor(2.5), "d": torch.empty(0)})
    source = open_source(walks)
    table = source.table().SerializeToString()
    assert source.table().stays_sealed
    assert [each.reason for each in source.table().copied] == ["is yielded anew at each update"]
    for number in range(3):
        walks.tensors["c"].fill_(number)
        walks.tensors = dict(reversed(walks.tensors.items()))
        source.check()
        source.seal()
        source.digest(whole_atoms(source.table()))
        assert_equal(read(source.table()), walks.tensors)
    assert walks.walks == 4, "one more when it was opened"
    assert source.table().SerializeToString() == table
    sealed = dict(walks.tensors)
    walks.tensors = {name: tensor + 1 for name, tensor in sealed.items()}
    source.seal(keep=True)
    assert_equal(read(source.table()), sealed)
    assert walks.walks == 4


def test_each_tensor_may_be_freed_before_the_next_one_is_asked_for() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def one_at_a_time() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            gc.collect()
            assert not any(ref() is not None for ref in kept[:-1]), "at most the last one is held"
            tensor = torch.full((8,), float(number))
            kept.append(weakref.ref(tensor))
            yield f"w{number}", tensor
            del tensor

    source = open_source(one_at_a_time)
    kept.clear()
    source.seal()
    assert read(source.table())["w3"].tolist() == [3.0] * 8


def test_another_dtype_is_served() -> None:
    source = open_source(Walks(w=torch.randn(7)), dtype="bfloat16")
    source.seal()
    assert read(source.table())["w"].dtype == torch.bfloat16


def test_a_walk_that_raises_leaves_a_source_that_can_be_sealed_again() -> None:
    """And the generator has put back what it had changed, before anybody trains on."""
    walks = Walks(a=torch.zeros(4), b=torch.zeros(4))
    source = open_source(walks)
    source.seal()
    walks.fails_after = 1
    walks.tensors["a"].fill_(7)
    with pytest.raises(RuntimeError, match="cannot be merged"):
        source.seal()
    assert not walks.merged
    assert torch.is_grad_enabled()
    with pytest.raises(CkptEngineError, match="nothing was sealed"):
        source.seal(keep=True)
    walks.fails_after = None
    source.seal()
    assert_equal(read(source.table()), walks.tensors)


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ({"a": torch.zeros(4)}, "the walk ended without 1 tensors: b"),
        ({"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(1)}, "'c' was not among"),
        ({"a": torch.zeros(5), "b": torch.zeros(2)}, r"'a' is torch.float32 \[5\] on cpu now, and was .*\[4\]"),
        ({"a": torch.zeros(4, dtype=torch.float64), "b": torch.zeros(2)}, "'a' is torch.float64"),
    ],
)
def test_a_walk_that_yields_something_else_is_refused_by_name(later: dict[str, torch.Tensor], said: str) -> None:
    walks = Walks(a=torch.zeros(4), b=torch.zeros(2))
    source = open_source(walks)
    walks.tensors = later
    with pytest.raises(CkptEngineError, match=said) as refused:
        source.seal()
    assert refused.value.problem.code == Problem.CODE_FAILED_PRECONDITION
    assert not walks.merged


def test_what_cannot_be_walked_is_refused_when_it_is_published() -> None:
    def twice() -> list[tuple[str, torch.Tensor]]:
        return [("a", torch.zeros(1)), ("a", torch.zeros(1))]

    for walk, said in ((twice, "twice"), (lambda: [torch.zeros(1)], "pairs"), (list, "nothing to publish")):
        with pytest.raises(CkptEngineError, match=said):
            open_source(walk)  # type: ignore[arg-type]
    with pytest.raises(CkptEngineError, match="do not pass snapshot=False"):
        open_source(Walks(a=torch.zeros(1)), snapshot=False)
    source = open_source(lambda: [("module.a", torch.zeros(1)), ("module.b", torch.zeros(1))])
    assert [tensor.name for tensor in source.table().tensors] == ["a", "b"]

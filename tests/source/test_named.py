"""Named tensors, names, and what is not a source at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.source.names import strip_wrappers
from ckpt_engine.source.open import open_source
from ckpt_engine.v1.weights_pb2 import Problem
from tests.source.reading import assert_equal, read, readable


def test_pairs_and_mappings_are_copied_and_their_memory_left_alone() -> None:
    tensors = {"module.b": torch.randn(3, 4).t(), "module.a": torch.arange(5), "module.c": torch.tensor(2.5)}
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    for given in (tensors, pairs(), list(tensors.items())):
        source = open_source(given)
        table = source.table()
        assert (table.stays_sealed, table.source_copies) == (True, 1)
        assert table.description == "named tensors, copied at each seal"
        tensors["module.a"].add_(1)
        source.check()
        source.seal()
        assert_equal(read(table), {name.removeprefix("module."): tensor for name, tensor in tensors.items()})
        source.close()
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == addresses


def test_they_are_moved_only_when_asked_for() -> None:
    tensors = {"a": torch.randn(3, 4)}
    before = tensors["a"].data_ptr()
    with pytest.raises(CkptEngineError, match=r"'a' .* only with move=True"):
        open_source(tensors, snapshot=False)
    assert tensors["a"].data_ptr() == before
    source = open_source(tensors, move=True, snapshot=False)
    assert tensors["a"].data_ptr() != before
    source.seal()
    tensors["a"].fill_(3)
    assert_equal(read(source.table()), {"a": torch.full((3, 4), 3.0)})
    assert source.table().source_copies == 0


def test_every_rank_publishes_what_it_holds() -> None:
    tables = [open_source({"a": torch.ones(2)}, rank=rank, world_size=2).table() for rank in range(2)]
    assert [table.rank for table in tables] == [0, 1]
    assert tables[0].shards == tables[1].shards
    assert tables[0].host == tables[1].host


@pytest.mark.parametrize(
    ("name", "says"),
    [("__metadata__", "safetensors"), ("a\ud800", "'a\\ud800' cannot be written as UTF-8"), ("", "has no name")],
)
def test_a_name_that_no_file_or_message_can_carry_is_refused_when_it_is_published(name: str, says: str) -> None:
    module = torch.nn.Module()
    if name:
        module.register_parameter(name, torch.nn.Parameter(torch.ones(2)))
    for published in ({name: torch.ones(2)}, [(name, torch.ones(2))], *([module] if name else [])):
        with pytest.raises(CkptEngineError) as caught:
            open_source(published)
        assert caught.value.problem.code == Problem.CODE_INVALID_ARGUMENT
        assert says in caught.value.problem.message


def test_names_lose_what_wrappers_add_and_nothing_else() -> None:
    assert strip_wrappers(["module._orig_mod.layers.0._checkpoint_wrapped_module.w", "module.w"]) == ["layers.0.w", "w"]
    assert strip_wrappers(["_orig_mod.module.module.w", "module.module.b"]) == ["w", "b"]
    assert strip_wrappers(["module.w", "head.w", "my_orig_mod.w", "a.module.w"]) == [
        "module.w",
        "head.w",
        "my_orig_mod.w",
        "a.module.w",
    ]
    assert strip_wrappers(["module", "module"]) == ["module", "module"]
    assert strip_wrappers(["a._fsdp_wrapped_module.w"]) == ["a.w"]
    assert strip_wrappers([]) == []


@pytest.mark.parametrize(
    "odd",
    [
        7,
        None,
        torch.zeros(3),
        b"weights",
        [1],
        ["ab"],
        [("a", 1)],
        [(1, torch.zeros(1))],
        {"a": "b"},
        [],
        {},
        [("a", torch.zeros(1)), ("a", torch.ones(1))],
        [("module.a", torch.zeros(1)), ("module._orig_mod.a", torch.ones(1))],
    ],
)
def test_anything_else_is_refused(odd: object) -> None:
    with pytest.raises(CkptEngineError) as error:
        open_source(odd)  # type: ignore[arg-type]
    assert error.value.problem.code == Problem.CODE_INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (nn.Linear, "cannot publish the class .*Linear.*: give an nn.Module"),
        (lambda: None, "the callable returned a NoneType, not"),
        ({"model": {"a": torch.zeros(1)}}, "'model' is of type dict, not a tensor: publish what it holds by itself"),
        ({"a": np.zeros(1)}, "'a' is of type ndarray, not a tensor: wrap it with torch.from_numpy"),
        ([torch.zeros(1)], r"found an item of type Tensor: a module, or its named_parameters\(\)"),
        ({}, r"there are no tensors \(named tensors\)"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(odd: object, said: str) -> None:
    with pytest.raises(CkptEngineError, match=said) as error:
        open_source(odd)  # type: ignore[arg-type]
    assert error.value.problem.code == Problem.CODE_INVALID_ARGUMENT


@pytest.mark.parametrize(
    "options",
    [{"rank": 1}, {"rank": -1}, {"dtype": "float"}, {"dtype": "int64"}, {"dtype": "x"}, {"dtype": "float8_e4m3fn"}],
)
def test_odd_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(CkptEngineError) as error:
        open_source({"a": torch.zeros(1)}, **options)  # type: ignore[arg-type]
    assert error.value.problem.code == Problem.CODE_INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("transport", "words"), [("cuda_ipc", "for GPU tensors"), ("nvlink", "'nvlink' is none that tensors can")]
)
def test_a_way_that_tensors_cannot_take_is_refused(tmp_path: Path, transport: str, words: str) -> None:
    for weights in ({"a": torch.zeros(1)}, torch.nn.Linear(2, 2), tmp_path):
        with pytest.raises(CkptEngineError, match=words) as error:
            open_source(weights, transport=transport)  # type: ignore[arg-type]
        assert error.value.problem.code == Problem.CODE_INVALID_ARGUMENT
    linear = torch.nn.Linear(2, 2)
    assert readable(open_source(linear, transport="shared_memory").table())[0].transport == "shared_memory"


def test_a_directory_has_one_publisher(tmp_path: Path) -> None:
    with pytest.raises(CkptEngineError, match="one process"):
        open_source(tmp_path, world_size=2)


class Held:
    """Pairs that can be iterated over any number of times."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


GIVEN: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "dictionary": lambda tensors: tensors,
    "proxy": MappingProxyType,
    "items": lambda tensors: tensors.items(),
    "iterable": Held,
}


@pytest.mark.parametrize("kind", GIVEN)
def test_a_replaced_tensor_is_followed_if_it_is_copied(kind: str) -> None:
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2)}
    source = open_source(GIVEN[kind](tensors))  # type: ignore[arg-type]
    source.seal()
    tensors["a"] = torch.ones(3)
    source.check()
    source.seal()
    assert_equal(read(source.table()), {"a": torch.ones(3), "b": torch.zeros(2)})
    source.close()


def test_a_replaced_pair_of_a_list_is_followed() -> None:
    pairs = [("a", torch.zeros(3))]
    source = open_source(pairs)
    pairs[0] = ("a", torch.ones(3))
    source.seal()
    assert_equal(read(source.table()), {"a": torch.ones(3)})


def test_an_iterator_is_read_once() -> None:
    tensors = {"a": torch.zeros(3)}
    source = open_source(iter(tensors.items()))
    tensors["a"] = torch.ones(3)
    source.seal()
    assert_equal(read(source.table()), {"a": torch.zeros(3)})


def replace_moved(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a"] = torch.ones(3)


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["new"] = torch.ones(1)


def remove(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["b"]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a"] = torch.ones(4)


def cast(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a"] = tensors["a"].half()


@pytest.mark.parametrize(
    ("change", "name", "moved"),
    [(replace_moved, "a", True)]
    + [(each, name, moved) for moved in (False, True) for each, name in ((add, "new"), (remove, "b"), (reshape, "a"))]
    + [(cast, "a", False)],
)
def test_a_mapping_that_holds_something_else_is_noticed_by_name(
    change: Callable[[dict[str, torch.Tensor]], None], name: str, moved: bool
) -> None:
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2)}
    source = open_source(tensors, move=moved)
    source.seal()
    change(tensors)
    for attempt in (source.check, source.seal):
        with pytest.raises(CkptEngineError, match="publish again") as noticed:
            attempt()
        assert noticed.value.problem.code == Problem.CODE_FAILED_PRECONDITION
        assert list(noticed.value.problem.tensors) == [name]
    again = open_source(tensors)
    again.seal()
    assert_equal(read(again.table()), tensors)

"""Modules: what is published, that re-homing disturbs nobody, and that moved memory is noticed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.source.open import open_source
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1.weights_pb2 import Atom, Atoms, Problem
from tests.source.reading import assert_equal, read, readable, whole_atoms


class Model(nn.Module):
    """Tied, strided, fused, scalar, empty and non-persistent members: what models really have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 9)
        self.up.weight = nn.Parameter(torch.randn(6, 9).t())
        fused = torch.randn(18, 6)
        self.query = nn.Parameter(fused[:12])
        self.middle = nn.Parameter(fused[6:15])
        self.norm = nn.BatchNorm1d(9)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) @ self.query[:6] * self.scale
        return self.norm(self.up(hidden)).sum() + self.middle.sum() + self.head(hidden).sum()


def expected(model: nn.Module) -> dict[str, torch.Tensor]:
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    state.pop("head.weight", None)
    return state


def opened(model: object, **options: object) -> MemorySource:
    source = open_source(model, **options)  # type: ignore[arg-type]
    assert isinstance(source, MemorySource)
    return source


def refused(code: int, model: object, **options: object) -> Problem:
    with pytest.raises(CkptEngineError) as error:
        open_source(model, **options)  # type: ignore[arg-type]
    assert error.value.problem.code == code
    return error.value.problem


@pytest.mark.parametrize("snapshot", [None, True])
def test_what_a_checkpoint_would_hold_is_published(snapshot: bool | None) -> None:
    torch.manual_seed(1)
    model = Model()
    before = expected(model)
    source = opened(model, snapshot=snapshot, move=not snapshot)
    table = source.table()
    names = [spec.name for spec in table.tensors]
    assert names == sorted(before)
    assert "cache" not in names
    assert "head.weight" not in names
    assert_equal(expected(model), before)
    source.check()
    source.seal()
    assert_equal(read(table), before)
    assert table.source_copies == (1 if snapshot else 0)
    assert table.stays_sealed == bool(snapshot)
    source.close()
    assert_equal(expected(model), before)


def test_rehoming_keeps_objects_ties_aliases_strides_and_the_optimizer() -> None:
    torch.manual_seed(2)
    model = Model()
    twin = copy.deepcopy(model)
    objects = {name: id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, twin)]

    def step() -> None:
        tokens = torch.randint(0, 11, (7,))
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            one(tokens).backward()
            optimizer.step()

    step()
    source = opened(model, move=True)
    assert {name: id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)} == objects
    assert model.head.weight is model.embed.weight
    assert model.up.weight.stride() == (1, 9)
    assert model.middle.data_ptr() == model.query[6:].data_ptr()
    table = source.table()
    for _ in range(3):
        step()
        source.check()
        assert source.seal() == 0.0
        # deepcopy gave the twin no aliases, so its fused weights drift apart; all else must be as if nothing happened.
        mine, theirs = expected(model), expected(twin)
        for name in set(mine) - {"query", "middle"}:
            assert torch.equal(mine[name], theirs[name]), name
        assert_equal(read(table), mine)
        assert source.table() == table


def test_a_snapshot_stays_as_it_was_until_the_next_seal() -> None:
    model = Model()
    source = opened(model, snapshot=True)
    with pytest.raises(CkptEngineError, match="nothing was sealed yet"):
        source.seal(keep=True)
    source.seal()
    before = expected(model)
    digests = source.digest(whole_atoms(source.table()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert source.seal(keep=True) == 0.0
    assert_equal(read(source.table()), before)
    assert source.digest(whole_atoms(source.table())) == digests
    source.seal()
    assert_equal(read(source.table()), expected(model))
    assert source.digest(whole_atoms(source.table())) != digests


@pytest.mark.parametrize("snapshot", [True, False])
def test_tensors_that_hold_nan_or_infinity_are_named_once_by_each_digest(snapshot: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    source = opened(model, snapshot=snapshot or None, move=not snapshot)
    atoms = Atoms(
        atoms=[
            Atom(shard=index, start=[row, *[0] * (len(shard.stop) - 1)], stop=[row + 1, *shard.stop[1:]])
            for index, shard in enumerate(source.table().shards)
            for row in range(shard.stop[0])
        ]
    )
    for wrong in ([], ["0.weight", "1.bias"], ["1.bias"], []):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(float("nan") if name in wrong else 1.0)
        source.seal()
        source.digest(atoms)
        assert source.not_finite() == wrong
    source.close()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_change_between_copy_and_digest_is_named(dtype: str | None) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    source = opened(model, snapshot=True, dtype=dtype)
    atoms = whole_atoms(source.table())
    source.seal()
    with torch.no_grad():
        model[1].weight[0, 0] += 1
    with pytest.raises(CkptEngineError, match="changed while they were copied") as changed:
        source.digest(atoms)
    assert changed.value.problem.code == Problem.CODE_FAILED_PRECONDITION
    assert list(changed.value.problem.tensors) == ["1.weight"]
    assert list(changed.value.problem.ranks) == [0]
    with pytest.raises(CkptEngineError):
        source.seal(keep=True)
    source.seal()
    digests = source.digest(atoms)
    with torch.no_grad():
        model[1].weight[0, 0] += 1
    assert source.digest(atoms) == digests
    source.seal(keep=True)
    assert source.digest(atoms) == digests


def test_what_is_kept_is_not_compared_with_weights_that_went_on() -> None:
    model = nn.Linear(3, 2)
    source = opened(model, snapshot=True)
    source.seal()
    before = expected(model)
    with torch.no_grad():
        model.weight.add_(1)
    source.seal(keep=True)
    source.digest(whole_atoms(source.table()))
    assert_equal(read(source.table()), before)


def test_a_change_of_what_is_conjugated_is_seen_too() -> None:
    base = torch.zeros(3, dtype=torch.complex64)
    source = open_source({"odd": base.conj()})
    source.seal()
    base[1] = 1
    with pytest.raises(CkptEngineError, match="changed while they were copied"):
        source.digest(whole_atoms(source.table()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_nan_that_is_cast_is_no_change(dtype: str) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (99, 37), dtype=torch.int32) | 0x7F800001
    source = opened({"nan": bits.view(torch.float32).t(), "flat": bits.view(torch.float32)}, dtype=dtype)
    source.seal()
    source.digest(whole_atoms(source.table()))


def test_live_weights_cannot_be_kept() -> None:
    source = opened(nn.Linear(2, 2), move=True)
    source.seal()
    with pytest.raises(CkptEngineError, match="live weights") as error:
        source.seal(keep=True)
    assert error.value.problem.code == Problem.CODE_FAILED_PRECONDITION


def test_a_served_dtype_casts_floats_and_copies_only_those() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
    model[1].float()
    source = opened(model, dtype="bfloat16", move=True)
    source.seal()
    state = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in expected(model).items()
    }
    assert state["1.num_batches_tracked"].dtype == torch.int64
    assert_equal(read(source.table()), state)
    assert source.table().source_copies == 1
    assert not source.table().stays_sealed
    with torch.no_grad():
        model[0].weight.add_(1)
    assert torch.equal(read(source.table())["0.weight"], model[0].weight)
    problem = refused(Problem.CODE_INVALID_ARGUMENT, model, dtype=torch.float16, snapshot=False, move=True)
    assert problem.tensors
    assert "snapshot=False" in problem.message


def test_names_are_stripped_and_must_stay_apart() -> None:
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module._orig_mod = nn.Sequential(nn.Linear(2, 2))
    assert [spec.name for spec in opened(wrapped).table().tensors] == ["0.bias", "0.weight"]
    twice = nn.Module()
    twice._orig_mod = nn.Linear(2, 2)
    twice.weight = nn.Parameter(torch.zeros(1))
    assert list(refused(Problem.CODE_INVALID_ARGUMENT, twice).tensors) == ["weight"]


def test_equal_memory_under_two_parameters_is_tied() -> None:
    model = nn.Module()
    model.first = nn.Parameter(torch.ones(2, 3))
    model.second = nn.Parameter(model.first.detach())
    model.turned = nn.Parameter(model.first.detach().t())
    source = opened(model, move=True)
    assert [spec.name for spec in source.table().tensors] == ["first", "turned"]
    source.check()
    source.seal()
    with torch.no_grad():
        model.second.fill_(5)
    assert model.turned.data_ptr() == model.first.data_ptr()
    assert read(source.table())["first"].tolist() == [[5.0] * 3] * 2
    model.second.data = model.second.data.clone()
    with pytest.raises(CkptEngineError, match="came or went"):
        source.check()


@pytest.mark.parametrize("change", ["data", "parameter", "half", "shape", "gone", "more"])
def test_moved_memory_is_named_before_anything_is_sealed(change: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    source = opened(model, move=True)
    source.seal()
    if change == "data":
        model[1].weight.data = model[1].weight.data.clone()
    elif change == "parameter":
        model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    elif change == "half":
        model[1].weight.data = model[1].weight.data.half()
    elif change == "shape":
        model[1].weight.data = model[1].weight.data[:2]
    elif change == "gone":
        del model[1].weight
    else:
        model[1].extra = nn.Parameter(torch.zeros(1))
    for attempt in (source.check, source.seal):
        with pytest.raises(CkptEngineError, match="publish again") as error:
            attempt()
        assert error.value.problem.code == Problem.CODE_FAILED_PRECONDITION
        assert list(error.value.problem.tensors) == ["1.extra" if change == "more" else "1.weight"]
    if change in ("data", "parameter"):
        again = opened(model, move=True)
        again.seal()
        assert_equal(read(again.table()), expected(model))


def test_a_snapshot_follows_a_parameter_that_was_replaced() -> None:
    model = nn.Linear(3, 3)
    source = opened(model, snapshot=True)
    model.weight = nn.Parameter(torch.full((3, 3), 7.0))
    source.check()
    source.seal()
    assert_equal(read(source.table()), expected(model))
    model.weight.data = model.weight.data.half()
    with pytest.raises(CkptEngineError, match=r"1 tensors have other"):
        source.seal()


def test_inference_tensors_are_copied() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 3).requires_grad_(False)
    source = opened(model, move=True)
    source.seal()
    assert source.table().source_copies == 1
    assert_equal(read(source.table()), expected(model))


def test_digests_are_those_of_the_atoms_in_their_order() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(7, 5, dtype=torch.bfloat16).t())
    source = opened(model, move=True)
    atoms = Atoms(
        atoms=[Atom(shard=0, start=[2, 0], stop=[5, 7]), Atom(shard=0, start=[0, 0], stop=[2, 3])],
    )
    with pytest.raises(CkptEngineError, match="sealed nothing"):
        source.digest(atoms)
    source.seal()
    weight = model.weight.detach()
    assert source.digest(atoms) == [digest_box(weight[2:5], (2, 0)), digest_box(weight[0:2, 0:3], (0, 0))]
    for wrong in (Atom(shard=1), Atom(shard=0, start=[0, 0], stop=[6, 7]), Atom(shard=0, start=[0], stop=[5])):
        with pytest.raises(CkptEngineError) as error:
            source.digest(Atoms(atoms=[wrong]))
        assert error.value.problem.code == Problem.CODE_INVALID_ARGUMENT
    with pytest.raises(CkptEngineError, match="published again") as stale:
        source.digest(Atoms(table_digest=bytes(32), atoms=atoms.atoms))
    assert stale.value.problem.code == Problem.CODE_FAILED_PRECONDITION


def test_after_close_nobody_new_reads_and_the_model_lives_on() -> None:
    model = nn.Linear(4, 4)
    source = opened(model, move=True)
    source.seal()
    before = expected(model)
    source.close()
    source.close()
    with pytest.raises(CkptEngineError) as error:
        SharedMemoryTransport().open(readable(source.table()))
    assert error.value.problem.code == Problem.CODE_UNAVAILABLE
    with pytest.raises(CkptEngineError):
        source.digest(whole_atoms(source.table()))
    assert_equal(expected(model), before)
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:The PyTorch API of nested")
def test_what_cannot_be_published_is_refused_by_name() -> None:
    class Holder(nn.Module):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("odd", tensor)

    assert refused(Problem.CODE_INVALID_ARGUMENT, nn.ReLU()).message.startswith("nothing to publish")
    for tensor in (
        torch.zeros(3, dtype=torch.complex32),
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
    ):
        assert list(refused(Problem.CODE_INVALID_ARGUMENT, Holder(tensor)).tensors) == ["odd"]
    assert list(refused(Problem.CODE_INVALID_ARGUMENT, nn.LazyLinear(3)).tensors) == ["weight"]


def test_a_refusal_moves_nothing() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("odd", torch.zeros(3, dtype=torch.complex32))
    before = model.weight.data_ptr()
    refused(Problem.CODE_INVALID_ARGUMENT, model)
    assert model.weight.data_ptr() == before


def test_views_of_several_dtypes_stay_aligned() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    model = nn.Module()
    model.register_buffer("narrow", raw[2:10].view(torch.bfloat16))
    model.register_buffer("wide", raw[4:12].view(torch.int32))
    before = expected(model)
    source = opened(model, move=True)
    source.seal()
    assert_equal(read(source.table()), before)
    model.wide.zero_()
    assert not model.narrow[1:].any()


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("move", [False, True])
def test_a_scripted_model_is_served_as_it_steps(move: bool) -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    source = opened(model, move=move)
    with torch.no_grad():
        dict(model.named_parameters())["0.weight"].fill_(3)
    source.seal()
    assert_equal(read(source.table()), expected(model))

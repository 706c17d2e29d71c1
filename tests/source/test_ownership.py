"""Whose memory it is: nothing moves unless `move=True` asks for it, and nothing that something else is seen to use."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.source import host_memory
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.source.open import open_source
from ckpt_engine.transport.shared_memory.memory import arena_at
from ckpt_engine.v1.weights_pb2 import Problem
from tests.source.reading import assert_equal, read, whole_atoms

Keep = list[object]
"""What somebody keeps aside."""


def flattened(model: nn.Module) -> torch.Tensor:
    """One buffer of which all parameters become views: FSDP1, DeepSpeed and flat optimizers do this."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    at = 0
    for parameter in model.parameters():
        parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    return flat


def opened(model: object, move: bool = True, **options: object) -> MemorySource:
    source = open_source(model, move=move, **options)  # type: ignore[arg-type]
    assert isinstance(source, MemorySource)
    return source


def served(source: MemorySource) -> dict[str, torch.Tensor]:
    """What a worker reads after a seal."""
    source.check()
    source.seal()
    return read(source.table())


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def is_moved(source: MemorySource) -> bool:
    """All of it."""
    return source.table().description.endswith(", re-homed in shared memory")


def test_a_flat_optimizer_is_served_as_it_steps() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    flat = nn.Parameter(flattened(model))
    optimizer = torch.optim.SGD([flat], lr=1.0)
    source = opened(model)
    for _ in range(3):
        flat.grad = torch.ones_like(flat)
        optimizer.step()
        found = served(source)
        assert_equal(found, state(model))
        assert torch.equal(torch.cat([found[name].reshape(-1) for name in dict(model.named_parameters())]), flat)
    (copied,) = source.table().copied
    assert (copied.tensors, copied.bytes, copied.ranks) == (4, flat.nbytes, 1)
    assert list(copied.names) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert "not published" in copied.reason
    assert source.table().stays_sealed


def _learn(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def test_a_learner_process_is_served_as_it_steps() -> None:
    model = nn.Linear(3, 2)
    model.share_memory()
    source = opened(model)
    for _ in range(2):
        before = state(model)
        learner = multiprocessing.get_context("fork").Process(target=_learn, args=(model,))
        learner.start()
        learner.join(60)
        assert learner.exitcode == 0
        found = served(source)
        assert_equal(found, {name: tensor + 1 for name, tensor in before.items()})
    assert [(each.tensors, "shares between processes" in each.reason) for each in source.table().copied] == [(2, True)]


KEPT: dict[str, Callable[[nn.Linear], object]] = {
    "data": lambda model: model.weight.data,
    "detached": lambda model: model.weight.detach(),
    "view": lambda model: model.weight[:1],
    "numpy": lambda model: model.weight.detach().numpy(),
    "dlpack": lambda model: torch.utils.dlpack.to_dlpack(model.weight.detach()),
    "storage": lambda model: model.weight.untyped_storage(),
    "typed storage": lambda model: model.weight.detach().storage(),
    "part of the storage": lambda model: model.weight.untyped_storage()[4:8],
    "state dict": lambda model: model.state_dict(),
    "buffer that is not persistent": lambda model: model.register_buffer("alias", model.weight.data, persistent=False),
    "plain attribute": lambda model: setattr(model, "alias", model.weight.data),
    "graph": lambda model: (model(torch.ones(1, 3, requires_grad=True)) ** 2).sum(),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("kind", KEPT)
def test_what_has_an_alias_is_not_moved(kind: str) -> None:
    model = nn.Linear(3, 2)
    kept = KEPT[kind](model)
    before = model.weight.data_ptr()
    source = opened(model)
    assert model.weight.data_ptr() == before, "its alias was left behind"
    assert "weight" in [name for each in source.table().copied for name in each.names]
    with torch.no_grad():
        model.weight.fill_(7)
    assert_equal(served(source), state(model))
    del kept


@pytest.mark.parametrize("kind", ["numpy", "buffer", "mapped", "safetensors", "loaded"])
def test_memory_that_torch_did_not_allocate_is_not_moved(kind: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2, bias=False)
    array = np.zeros((2, 3), dtype=np.float32)
    if kind == "numpy":
        model.weight = nn.Parameter(torch.from_numpy(array))
    elif kind == "buffer":
        model.weight = nn.Parameter(torch.frombuffer(array, dtype=torch.float32).view(2, 3))
    elif kind == "mapped":
        (tmp_path / "file").write_bytes(bytes(24))
        mapped = torch.from_file(str(tmp_path / "file"), shared=True, size=6)
        model.weight = nn.Parameter(mapped.view(2, 3))
        del mapped
    elif kind == "safetensors":
        save_file({"weight": torch.zeros(2, 3)}, tmp_path / "file")
        model.load_state_dict(load_file(tmp_path / "file"), assign=True)
    else:
        torch.save({"weight": torch.zeros(2, 3)}, tmp_path / "file")
        model.load_state_dict(torch.load(tmp_path / "file", mmap=True), assign=True)
    before = model.weight.data_ptr()
    source = opened(model)
    assert model.weight.data_ptr() == before
    if kind in ("numpy", "buffer"):
        array[:] = 3
    elif kind == "mapped":
        (tmp_path / "file").open("r+b").write(np.full(6, 3, dtype=np.float32).tobytes())
    else:
        model.weight.data.fill_(3)
    assert served(source)["weight"].tolist() == [[3.0] * 3] * 2
    assert [each.tensors for each in source.table().copied] == [1]


def test_a_clone_is_the_models_own(tmp_path: Path) -> None:
    """The documented remedy for what a checkpoint left mapped."""
    model = nn.Linear(3, 2)
    save_file(state(model), tmp_path / "file")
    model.load_state_dict(load_file(tmp_path / "file"), assign=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    source = opened(model)
    assert is_moved(source)
    assert not source.table().copied


def test_what_nobody_else_uses_is_moved_and_nothing_is_said() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 2), nn.BatchNorm1d(2), nn.Linear(3, 3))
    model[3].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model[0](torch.ones(2, 3)).sum().backward()
    optimizer.step()
    source = opened(model)
    assert is_moved(source)
    assert not source.table().copied
    assert source.table().source_copies == 0


def test_an_alias_that_is_only_garbage_does_not_count() -> None:
    model = nn.Linear(3, 2)
    cycle: Keep = [model.weight.data]
    cycle.append(cycle)
    del cycle
    gc.disable()
    try:
        assert is_moved(opened(model))
    finally:
        gc.enable()


def test_only_the_tensors_concerned_are_copied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    alias = model[1].weight.data
    source = opened(model)
    assert [list(each.names) for each in source.table().copied] == [["1.weight"]]
    assert not source.table().stays_sealed
    alias.fill_(5)
    with torch.no_grad():
        model[0].weight.fill_(6)
    assert_equal(served(source), state(model))


def test_many_copied_tensors_are_counted_and_the_first_ones_named() -> None:
    tensors = {f"t{index:02}": torch.ones(index) for index in range(20)}
    (copied,) = opened(tensors, move=False).table().copied
    assert (copied.tensors, copied.bytes) == (19, 4 * sum(range(20)))
    assert list(copied.names) == [f"t{index:02}" for index in range(1, 17)]


def test_empty_tensors_do_not_keep_copies_from_staying_sealed() -> None:
    model = nn.Linear(3, 2)
    model.none = nn.Parameter(torch.zeros(0, 4))
    kept = model.state_dict()
    source = opened(model)
    assert source.table().stays_sealed
    assert source.table().description == "nn.Module, copied at each seal"
    del kept


def test_views_of_one_buffer_that_only_the_model_uses_move_together() -> None:
    model = nn.Module()
    fused = torch.randn(18, 6)
    model.query = nn.Parameter(fused[:12])
    model.middle = nn.Parameter(fused[6:15])
    del fused
    source = opened(model)
    again = opened(model)  # the first one is still open, as when a trainer publishes again
    assert is_moved(source)
    assert is_moved(again)
    assert not again.table().copied
    with torch.no_grad():
        model.query.fill_(3)
    assert model.middle[:6].eq(3).all()
    assert_equal(served(again), state(model))


def test_an_alias_made_after_publishing_stays_when_it_is_published_again() -> None:
    model = nn.Linear(3, 2)
    opened(model)
    flat = nn.Parameter(model.weight.data)
    again = opened(model)
    torch.optim.SGD([flat], lr=1.0)
    with torch.no_grad():
        flat.fill_(4)
    assert served(again)["weight"].tolist() == [[4.0] * 3] * 2


def test_a_cast_tensor_does_not_leave_its_twin_behind() -> None:
    model = nn.Module()
    raw = torch.zeros(4)
    model.register_buffer("whole", raw.view(torch.int32))
    model.weight = nn.Parameter(raw)
    del raw
    source = opened(model, dtype="bfloat16")
    with torch.no_grad():
        model.weight.fill_(1)
    assert model.whole.tolist() == [0x3F800000] * 4
    found = served(source)
    assert found["weight"].tolist() == [1.0] * 4
    assert torch.equal(found["whole"], model.whole)


HIDDEN: dict[str, Callable[[torch.Tensor], object]] = {
    "torch.from_dlpack": torch.from_dlpack,
    "numpy.from_dlpack": np.from_dlpack,
    "capsule": torch.utils.dlpack.to_dlpack,
    "address": lambda tensor: (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr()),
}
"""What keeps the address of a tensor, and shows in no count of its storage."""


def write(holder: object, value: float) -> None:
    """Through what keeps an address."""
    if type(holder).__name__ == "PyCapsule":
        holder = torch.from_dlpack(holder)
    if isinstance(holder, torch.Tensor):
        holder.fill_(value)
    else:
        for index in range(len(holder)):  # type: ignore[arg-type]
            holder[index] = value  # type: ignore[index]


def hidden_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.Module())
    model[1].register_buffer("scale", torch.zeros(4))
    model[1].register_buffer("flag", torch.zeros(3, dtype=torch.bool))
    return model


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_is_written_through_an_address_is_served(kind: str) -> None:
    model = hidden_model()
    holder = HIDDEN[kind](model[1].scale)
    source = opened(model, move=False)
    source.seal()
    write(holder, 7)
    found = served(source)
    assert found["1.scale"].tolist() == [7.0] * 4
    assert_equal(found, state(model))


def test_a_capsule_of_a_parameter_that_needs_gradients_is_served() -> None:
    model = nn.Linear(3, 2)
    capsule = torch.utils.dlpack.to_dlpack(model.weight)
    source = opened(model, move=False)
    write(capsule, 7)
    assert served(source)["weight"].tolist() == [[7.0] * 3] * 2


@pytest.mark.parametrize("kind", [kind for kind in HIDDEN if kind != "address"])
def test_what_dlpack_holds_is_seen_and_not_moved(kind: str) -> None:
    model = hidden_model()
    holder = HIDDEN[kind](model[1].scale)
    before = model[1].scale.data_ptr()
    source = opened(model)
    assert model[1].scale.data_ptr() == before
    (copied,) = source.table().copied
    assert list(copied.names) == ["1.scale"]
    assert "DLPack" in copied.reason
    write(holder, 7)
    assert_equal(served(source), state(model))
    assert model[1].scale.tolist() == [7.0] * 4


def test_a_write_to_memory_that_was_moved_out_of_is_refused_by_name() -> None:
    model = hidden_model()
    holder = HIDDEN["address"](model[1].scale)
    flags = (ctypes.c_bool * 3).from_address(model[1].flag.data_ptr())
    source = opened(model)
    assert is_moved(source)
    for value in (1, 2):
        with torch.no_grad():
            model[0].weight.fill_(value)
        assert_equal(served(source), state(model))
    write(holder, 7)
    flags[2] = True
    source.check()
    for _ in range(2):
        with pytest.raises(CkptEngineError, match="move=True") as refused:
            source.seal()
        assert refused.value.problem.code == Problem.CODE_FAILED_PRECONDITION
        assert list(refused.value.problem.tensors) == ["1.flag", "1.scale"]
        with pytest.raises(CkptEngineError, match="sealed nothing"):
            source.digest(whole_atoms(source.table()))
    options: list[dict[str, object]] = [{}, {"snapshot": True}, {"dtype": "float64"}]
    for value, more in enumerate(options, 8):
        again = opened(model, move=False, **more)  # it was told, and does so no more
        found = {name: each.to(model.state_dict()[name].dtype) for name, each in served(again).items()}
        assert_equal(found, state(model))
        write(holder, value)
        with pytest.raises(CkptEngineError, match="move=True") as refused:
            again.seal()
        assert list(refused.value.problem.tensors) == ["1.scale"]
    other = opened(model[0], move=False)
    write(holder, 0)
    assert_equal(served(other), state(model[0]))


def test_memory_that_was_moved_out_of_lives_as_long_as_what_moved() -> None:
    model = hidden_model()
    source = opened(model)
    arena = arena_at(model[1].scale.data_ptr())
    assert arena is not None
    assert "1.scale" in [name for left in host_memory._former_memories[arena] for name in left.names]
    memory = weakref.ref(arena)
    del arena
    source.close()
    gc.collect()
    assert memory() is not None, "what keeps an address would write to freed memory"
    assert memory() in host_memory._former_memories
    del model, source
    gc.collect()
    assert memory() is None


def test_what_was_moved_once_is_offered_there_ever_after() -> None:
    model = hidden_model()
    first = opened(model)
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    views = {name: torch.from_dlpack(tensor.detach()) for name, tensor in model.state_dict().items()}
    kept = nn.Parameter(model[0].weight.data)
    again = opened(model, move=False, snapshot=False)
    first.close()
    assert is_moved(again)
    assert not again.table().copied
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == addresses
    with torch.no_grad():
        kept.fill_(5)
    write(views["1.scale"], 6)
    found = served(again)
    assert found["0.weight"].eq(5).all()
    assert found["1.scale"].eq(6).all()
    assert_equal(found, state(model))


def test_moved_and_copied_tensors_are_offered_side_by_side() -> None:
    moved, more, plain = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(3, 3)
    opened(moved)
    opened(more)
    every = {
        f"{name}.{key}": each
        for name, one in (("moved", moved), ("more", more), ("plain", plain))
        for key, each in one.state_dict().items()
    }
    for options in (
        {"move": False},
        {"move": True},
        {"move": False, "snapshot": True},
        {"move": False, "dtype": "float64"},
    ):
        source = opened(every, **options)
        for value in (1.0, 2.0):
            for one in (moved, more, plain):
                one.weight.data.fill_(value)
            found = served(source)
            assert {name: each.float().tolist() for name, each in found.items()} == {
                name: each.tolist() for name, each in every.items()
            }
        assert source.digest(whole_atoms(source.table()))
        source.close()


@pytest.mark.parametrize(
    ("weights", "options", "words"),
    [
        (nn.Linear(2, 2), {"snapshot": True}, "pass one of them"),
        (lambda: [("a", torch.zeros(1))], {}, "a callable yields is copied"),
        ("/nowhere", {}, "files are read where they lie"),
        (Path("/nowhere"), {}, "files are read where they lie"),
    ],
    ids=["snapshot", "callable", "text", "path"],
)
def test_moving_what_cannot_move_is_refused(weights: object, options: dict[str, object], words: str) -> None:
    with pytest.raises(CkptEngineError, match=words) as refused:
        opened(weights, **options)
    assert refused.value.problem.code == Problem.CODE_INVALID_ARGUMENT


def test_nothing_moves_unasked() -> None:
    model = hidden_model()
    before = [tensor.data_ptr() for tensor in model.state_dict().values()]
    with pytest.raises(CkptEngineError, match="only with move=True"):
        open_source(model, snapshot=False)
    source = open_source(model)
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == before
    assert source.table().stays_sealed
    assert ["move=True" in each.reason for each in source.table().copied] == [True]


def test_a_copy_that_was_forbidden_is_refused_with_the_reason() -> None:
    model = nn.Linear(3, 2)
    alias = model.weight.data
    for weights in (model, {"weight": alias}):
        with pytest.raises(CkptEngineError, match="not published") as refused:
            open_source(weights, snapshot=False, move=True)
        assert refused.value.problem.code == Problem.CODE_INVALID_ARGUMENT
        assert list(refused.value.problem.tensors) == ["weight"]
        assert "snapshot=False" in refused.value.problem.message
    assert model.weight.data_ptr() == alias.data_ptr()


AFTERWARDS: dict[str, Callable[[nn.Linear], object]] = {
    "share_memory": lambda model: model.share_memory(),
    "load_state_dict": lambda model: model.load_state_dict(
        {name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True
    ),
    "to": lambda model: model.to(torch.bfloat16),
    "spawn": lambda model: torch.multiprocessing.reductions.reduce_storage(model.weight.untyped_storage()),
}


@pytest.mark.parametrize("kind", AFTERWARDS)
def test_memory_that_leaves_after_publishing_is_noticed(kind: str) -> None:
    """Whatever puts the parameters elsewhere, the next update says so, and publishing again follows."""
    model = nn.Linear(3, 2)
    source = opened(model)
    source.seal()
    AFTERWARDS[kind](model)
    with pytest.raises(CkptEngineError, match="publish again") as noticed:
        source.check()
    assert "weight" in noticed.value.problem.tensors
    again = opened(model)
    with torch.no_grad():
        model.weight.fill_(2)
    assert_equal(served(again), state(model))


def test_what_is_copied_is_followed_wherever_it_goes() -> None:
    model = nn.Linear(3, 2)
    kept = model.weight.data, model.bias.data
    source = opened(model)
    model.weight.data = torch.full((2, 3), 5.0)
    assert_equal(served(source), state(model))
    model.share_memory()
    model.weight.data.fill_(6)
    assert_equal(served(source), state(model))
    del kept

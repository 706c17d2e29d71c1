"""What a recording says, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from torch import Tensor, nn

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.engine.target import LoadTarget, ModuleTarget
from ckpt_engine.record.record import NotRecordable, record
from ckpt_engine.record.recording import Recording
from ckpt_engine.v1 import weights_pb2
from tests.install.install_models import Plain, TensorParallel, accounted, state, target_of

Accounted = weights_pb2.Accounted


def manifest(**shapes: tuple[int, ...]) -> weights_pb2.Manifest:
    tensors = [weights_pb2.TensorSpec(name=name, dtype="float32", shape=shapes[name]) for name in sorted(shapes)]
    return weights_pb2.Manifest(tensors=tensors)


def manifest_for(model: TensorParallel, *without: str) -> weights_pb2.Manifest:
    found = weights_pb2.Manifest()
    for name, tensor in sorted(model.checkpoint().items()):
        if name not in without:
            found.tensors.add(name=name, dtype="bfloat16", shape=tensor.shape)
    return found


def needs(recording: Recording) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for number, need in enumerate(recording.needs):
        found.setdefault(recording.name(number), []).append(need.box)
    return found


def refused(target: LoadTarget, described: weights_pb2.Manifest) -> weights_pb2.Problem:
    before = dict(target.named_tensors())
    values = {name: tensor.clone() for name, tensor in before.items()}
    with pytest.raises(CkptEngineError) as caught:
        record(described, target)
    for name, tensor in target.named_tensors():  # whatever the loader did, the model is as it was
        assert tensor is before[name]
        assert torch.equal(tensor.view(torch.uint8), values[name].view(torch.uint8))
    assert caught.value.problem.code == weights_pb2.Problem.CODE_INVALID_ARGUMENT
    return caught.value.problem


def test_a_worker_needs_its_slices_and_nothing_else() -> None:
    recording = record(manifest_for(TensorParallel(1, 2)), ModuleTarget(TensorParallel(1, 2)))
    found = needs(recording)
    assert found["layers.0.q"] == [Box((16, 0), (32, 24))]
    assert found["layers.0.k"] == [Box((8, 0), (16, 24))]
    assert found["layers.0.o_proj"] == [Box((0, 16), (24, 32))]
    assert found["layers.0.down"] == [Box((0, 20), (24, 40))]
    assert found["layers.0.conv1d"] == [Box((0, 20), (24, 40))]
    assert found["layers.0.experts.2.up"] == [Box((20, 0), (40, 24))]
    assert found["embed_tokens.weight"] == [Box((32, 0), (50, 24))]
    assert found["norm.weight"] == [Box((0,), (24,))]
    assert all(len(boxes) == 1 for boxes in found.values())


def test_every_tensor_is_accounted_for_once() -> None:
    model = TensorParallel(tied=True)
    recording = record(manifest_for(model), ModuleTarget(model))
    rows = {row.name: row for row in accounted(recording)}
    assert rows.keys() == state(model).keys()
    assert rows["layers.0.qkv"].kind == Accounted.KIND_LOADED
    assert rows["layers.0.qkv"].bytes == model.layers[0].qkv.numel() * 2
    assert rows["embed_tokens.weight"].kind == Accounted.KIND_FILLED
    assert (rows["lm_head.weight"].bytes, rows["lm_head.weight"].note) == (0, "shares memory with embed_tokens.weight")
    assert (rows["inv_freq"].kind, rows["inv_freq"].note) == (
        Accounted.KIND_CONSTANT,
        "a buffer that is not persistent",
    )
    [fill] = recording.fills
    assert (fill.tensor, fill.box, fill.value) == ("embed_tokens.weight", Box((50, 0), (64, 24)), 0)


def test_recordings_of_one_manifest_and_layout_are_equal() -> None:
    one, other = (record(manifest_for(TensorParallel()), ModuleTarget(TensorParallel())) for _ in range(2))
    assert one.needs_digest == other.needs_digest
    assert one.needs_digest != record(manifest_for(TensorParallel()), ModuleTarget(TensorParallel(0, 2))).needs_digest


def test_fills_that_loading_covers_are_not_replayed() -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        model.w.data.zero_()
        model.w.data.copy_(weight)

    recording = record(manifest(w=(3, 4)), target_of(load_one, w=torch.zeros(3, 4)))
    assert recording.fills == ()
    assert accounted(recording)[0].kind == Accounted.KIND_LOADED


def test_a_model_on_the_meta_device_can_be_recorded() -> None:
    with torch.device("meta"):
        model = TensorParallel(1, 2)
    on_meta = record(manifest_for(model), ModuleTarget(model.to("meta")))
    assert on_meta.needs_digest == record(manifest_for(model), ModuleTarget(TensorParallel(1, 2))).needs_digest


def test_views_of_one_storage_are_told_apart() -> None:
    flat = torch.zeros(24)

    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        getattr(model, name).data.copy_(weight)

    target = target_of(load_one, a=flat[:8].view(2, 4), b=flat[8:20].view(3, 4), c=flat[20:])
    found = record(manifest(a=(2, 4), b=(3, 4), c=(4,)), target)
    assert {copy.tensor: copy.offset for copy in found.copies} == {"a": 0, "b": 0, "c": 0}
    problem = refused(target_of(load_one, a=flat[:8].view(2, 4), b=flat[8:20].view(3, 4)), manifest(a=(2, 4)))
    assert list(problem.tensors) == ["b"]


def test_columns_of_one_storage_are_told_apart() -> None:
    memory = torch.zeros(5, 7)

    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        for row in range(5):
            getattr(model, name).data[row].copy_(weight[row])

    target = target_of(load_one, a=memory[:, :4], b=memory[:, 4:])
    assert {row.name for row in accounted(record(manifest(a=(5, 4), b=(5, 3)), target))} == {"a", "b"}
    assert list(refused(target, manifest(a=(5, 4))).tensors) == ["b"]


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("without", "guess", "missing"),
    [
        ("layers.1.k", "layers.1.k", "layers.1.qkv: 768 of 3072 bytes come from nowhere"),
        ("layers.0.gate", "layers.0.gate", "layers.0.gate_up: 1920 of 3840 bytes"),
        ("layers.0.experts.1.up", "layers.0.experts.1.up", "layers.0.w13: 1920 of 11520 bytes"),
        ("norm.weight", "norm.weight", "norm.weight: 48 of 48 bytes"),
        ("layers.1.o_proj", "layers.1.o_proj", "layers.1.o_proj: 1536 of 1536 bytes"),
    ],
)
def test_a_missing_tensor_is_named_and_guessed(without: str, guess: str, missing: str) -> None:
    model = TensorParallel(layers=2)
    problem = refused(ModuleTarget(model), manifest_for(model, without))
    assert missing in problem.message
    assert f"is {guess} missing?" in problem.message
    assert list(problem.tensors) == [missing.split(":")[0]]


def test_a_model_of_another_depth_is_told_in_few_words() -> None:
    """The first tensors that lack bytes, the last one, and how many there are; a model has hundreds."""
    missing = [
        name for name in TensorParallel(layers=9).checkpoint() if name not in TensorParallel(layers=1).checkpoint()
    ]
    problem = refused(ModuleTarget(TensorParallel(layers=9)), manifest_for(TensorParallel(layers=1)))
    assert len(missing) > 40
    assert len(problem.message) < 600
    assert "layers.1." in problem.message
    assert "more tensors" in problem.message
    assert len(problem.tensors) == 16


def test_what_an_adapter_declares_is_not_missing_unless_half_loaded() -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        model.a.data[:2].copy_(weight)

    model = Plain(load_one, a=torch.zeros(2, 2), scale=torch.zeros(1))
    rows = accounted(record(manifest(w=(2, 2)), ModuleTarget(model, constant={"scale": "always 1"})))
    assert [(row.name, row.kind) for row in rows] == [("a", Accounted.KIND_LOADED), ("scale", Accounted.KIND_CONSTANT)]
    half = Plain(load_one, a=torch.zeros(3, 2))
    assert list(refused(ModuleTarget(half, constant={"a": "no"}), manifest(w=(2, 2))).tensors) == ["a"]


def test_a_tensor_that_the_model_does_not_take() -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        if name == "w":
            model.w.data.copy_(weight)

    model = Plain(load_one, w=torch.zeros(2))
    problem = refused(ModuleTarget(model), manifest(w=(2,), lm_head=(4,), rotary=(1,)))
    assert problem.message.startswith("the model takes no tensor lm_head, rotary;")
    assert list(problem.tensors) == ["lm_head", "rotary"]
    ignored = {"lm_head": "tied to w", "rotary": "computed"}
    recording = record(manifest(w=(2,), lm_head=(4,), rotary=(1,)), ModuleTarget(model, ignored=ignored))
    assert list(needs(recording)) == ["w"]


def test_what_other_workers_load_is_named_with_the_needs() -> None:
    """Two pipeline stages, of which each has one tensor."""

    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        if hasattr(model, name):
            getattr(model, name).data.copy_(weight)

    def stage(mine: str, others: str) -> ModuleTarget:
        model = Plain(load_one, **{mine: torch.zeros(2)})
        return ModuleTarget(model, elsewhere=lambda name: "another stage" if name == others else None)

    shapes = {"a": (2,), "b": (2,)}
    for mine, others, index in (("a", "b", 1), ("b", "a", 0)):
        recording = record(manifest(**shapes), stage(mine, others))
        assert list(needs(recording)) == [mine]
        assert list(weights_pb2.WorkerNeeds.FromString(recording.needs_bytes).elsewhere) == [index]
    assert list(refused(stage("a", "b"), manifest(**shapes, c=(1,))).tensors) == ["c"]


def test_what_the_model_was_made_without_is_named_apart() -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        if hasattr(model, name):
            getattr(model, name).data.copy_(weight)

    model = Plain(load_one, a=torch.zeros(2))
    target = ModuleTarget(model, absent=lambda name: "was made without it" if name.startswith("tower.") else None)
    recording = record(manifest(**{"a": (2,), "tower.x": (3,), "tower.y": (4,)}), target)
    described = weights_pb2.WorkerNeeds.FromString(recording.needs_bytes)
    assert (list(needs(recording)), list(described.absent), list(described.elsewhere)) == (["a"], [1, 2], [])
    (row,) = recording.absent
    assert (row.prefix, row.tensors, row.reason) == ("tower.", 2, "was made without it")


def test_exceptions_of_the_loader_name_the_tensor() -> None:
    model = TensorParallel()
    described = manifest_for(model)
    described.tensors.add(name="layers.0.surprise", dtype="bfloat16", shape=[3])
    problem = refused(ModuleTarget(model), described)
    assert problem.message == "loading layers.0.surprise [3]: the engine's loader says KeyError: 'surprise'"
    assert list(problem.tensors) == ["layers.0.surprise"]

    described = manifest_for(model)
    next(spec for spec in described.tensors if spec.name == "layers.0.o_proj").shape[1] = 30
    problem = refused(ModuleTarget(model), described)
    assert problem.message.endswith("AssertionError: o_proj of (24, 30)")
    assert list(problem.tensors) == ["layers.0.o_proj"]


def test_a_loader_that_takes_all_tensors_first_and_then_fails() -> None:
    class Model(nn.Module):
        def load_weights(self, weights):  # type: ignore[no-untyped-def]
            for name, _ in list(weights):
                raise KeyError(name)

    problem = refused(ModuleTarget(Model()), manifest(a=(2,), b=(2,)))
    assert list(problem.tensors) == ["a"]


def test_other_dtypes_are_refused_with_what_to_do() -> None:
    model = TensorParallel()
    described = manifest_for(model)
    for spec in described.tensors[:2]:
        spec.dtype = "float32"
    problem = refused(ModuleTarget(model), described)
    assert problem.message == (
        "2 tensors published in other dtypes than the model's: float32, and the model keeps bfloat16: "
        'embed_tokens.weight, layers.0.conv1d. Publish with dtype="bfloat16", or start the engine with '
        "the published dtype"
    )
    for spec in described.tensors[:2]:
        spec.dtype = "float16"
    problem = refused(ModuleTarget(TensorParallel(dtype=torch.float32)), described)
    assert "float16, and the model keeps float32: " in problem.message
    described.tensors[0].dtype = "float99"
    assert list(refused(ModuleTarget(model), described).tensors) == ["embed_tokens.weight"]


def assign_data(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data = weight


def replace(model: Plain, name: str, weight: Tensor) -> None:
    model.w = nn.Parameter(weight, requires_grad=False)


def replace_by_copy(model: Plain, name: str, weight: Tensor) -> None:
    model.w = nn.Parameter(torch.empty(4, 4).copy_(weight), requires_grad=False)


def replace_unseen(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(weight)
    model.w = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def add_tensor(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(weight)
    model.extra = nn.Parameter(torch.zeros(2), requires_grad=False)


def remove_tensor(model: Plain, name: str, weight: Tensor) -> None:
    del model.w


def accumulate(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.add_(weight)


def compute_beside(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(torch.randn(4, 4))


def reinterpret(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.view(torch.int32).copy_(weight.view(torch.int32))


def to_numpy(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(torch.from_numpy(weight.numpy()))


def resize(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(weight)
    model.w.data.resize_(2, 8)


UNRECORDABLE = [
    assign_data,
    replace,
    replace_by_copy,
    replace_unseen,
    add_tensor,
    remove_tensor,
    compute_beside,
    accumulate,
    reinterpret,
    to_numpy,
    resize,
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("load_one", UNRECORDABLE)
def test_loaders_that_cannot_be_replayed_are_refused(load_one, device: str) -> None:  # type: ignore[no-untyped-def]
    model = Plain(load_one, w=torch.arange(16.0, device=device).view(4, 4))
    before, address = model.w, model.w.untyped_storage()._cdata
    with pytest.raises(NotRecordable) as caught:
        record(manifest(w=(4, 4)), ModuleTarget(model))
    assert list(caught.value.problem.tensors) == ["w"] or load_one in (add_tensor, resize)
    assert model.w is before
    assert model.w.untyped_storage()._cdata == address
    assert [name for name, _ in model.named_parameters()] == ["w"]
    if device == "cpu":
        assert torch.equal(model.w, torch.arange(16.0).view(4, 4))


def test_recording_has_a_deadline() -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        time.sleep(0.02)
        getattr(model, name).data.copy_(weight)

    shapes = {f"w{number}": (1,) for number in range(50)}
    target = target_of(load_one, **{name: torch.zeros(1) for name in shapes})
    with pytest.raises(CkptEngineError) as caught:
        record(manifest(**shapes), target, time.monotonic() + 0.1)
    assert caught.value.problem.code == weights_pb2.Problem.CODE_DEADLINE_EXCEEDED


BESIDE_DYNAMO = """
import sys
import torch
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.record.record import record
from tests.record.test_record import manifest, needs

class Model(torch.nn.Module):
    turned = staticmethod(torch.t)

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4, 3))

    def load_weights(self, weights):
        for _, tensor in weights:
            self.w.data.copy_(self.turned(tensor)[:, :3])

plain = record(manifest(w=(5, 4)), ModuleTarget(Model()))
assert "torch._dynamo" not in sys.modules
Model.turned = staticmethod(torch.compile(torch.t, backend="eager"))
compiled = record(manifest(w=(5, 4)), ModuleTarget(Model()))
assert needs(plain) == needs(compiled) and plain.copies == compiled.copies, (plain, compiled)
assert "torch._dynamo" in sys.modules
"""


def test_a_compiler_is_not_imported_and_may_be_used_by_a_loader() -> None:
    """Its import takes as long as that of torch, in each worker that loads nothing else of it."""
    run = subprocess.run([sys.executable, "-c", BESIDE_DYNAMO], stderr=subprocess.PIPE, text=True, timeout=300)
    assert run.returncode == 0, run.stderr

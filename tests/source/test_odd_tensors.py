"""Whatever torch calls a tensor: it is published and served bit for bit, at every seal, or refused by name at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.source.open import open_source
from ckpt_engine.v1.weights_pb2 import Problem
from tests.source.reading import read, whole_atoms

Make = Callable[[], torch.Tensor]


def numbers(*shape: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(shape)


class Wrapped(torch.Tensor):
    """A subclass that only has another name."""


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return numbers(3, 2)


def nan_and_more() -> torch.Tensor:
    return torch.tensor([0x7F800001, 0x7FC00000, -1, 1, -(2**31), 0x7F800000], dtype=torch.int32).view(torch.float32)


SERVED: dict[str, Make] = {
    "0-dim": lambda: torch.tensor(2.5),
    "one element, odd strides": lambda: torch.empty_strided((1, 1), (7, 3)).fill_(4),
    "empty": lambda: torch.zeros(0, 4),
    "empty in the middle": lambda: torch.zeros(3, 0, 2),
    "expanded": lambda: numbers(1, 3).expand(4, 3),
    "expanded 0-dim": lambda: torch.tensor(2.5).expand(5),
    "overlapping windows": lambda: numbers(8).unfold(0, 3, 1),
    "transposed": lambda: numbers(3, 5).t(),
    "every second": lambda: numbers(6, 8)[::2, ::3],
    "channels last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "offset": lambda: numbers(11)[3:],
    "conjugated": lambda: torch.view_as_complex(numbers(3, 2)).conj(),
    "conjugated and transposed": lambda: torch.view_as_complex(numbers(3, 4, 2)).mH,
    "negated": lambda: torch.view_as_complex(numbers(3, 2)).conj().imag,
    "resolved": lambda: torch.view_as_complex(numbers(3, 2)).conj().resolve_conj(),
    "complex64": lambda: torch.view_as_complex(numbers(3, 2)),
    "float8_e4m3fn": lambda: numbers(5).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: numbers(5).to(torch.float8_e5m2),
    "float8_e8m0fnu": lambda: numbers(5).abs().to(torch.float8_e8m0fnu),
    "bool": lambda: numbers(5) > 0,
    "uint16": lambda: torch.tensor([1, 65535], dtype=torch.uint16),
    "uint64": lambda: torch.tensor([1, 2**63], dtype=torch.uint64),
    "float64": lambda: numbers(5).double(),
    "NaNs of every kind": nan_and_more,
    "inference": inference,
    "needs gradients": lambda: numbers(3).requires_grad_(),
    "in a graph": lambda: numbers(3).requires_grad_() * 2,
    "a view in a graph": lambda: (numbers(4).requires_grad_() * 2)[1:3],
    "subclass": lambda: numbers(3).as_subclass(Wrapped),
    "parameter": lambda: nn.Parameter(numbers(3)),
    "buffer": lambda: nn.Buffer(numbers(3)),
    "shared": lambda: numbers(3).share_memory_(),
}

REFUSED: dict[str, Make] = {
    "quantised": lambda: torch.quantize_per_tensor(numbers(4), 0.1, 0, torch.qint8),
    "quantised by channel": lambda: torch.quantize_per_channel(
        numbers(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8
    ),
    "sparse": lambda: numbers(3).to_sparse(),
    "sparse rows": lambda: numbers(3, 3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
    "nested, jagged": lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
    "meta": lambda: torch.zeros(3, device="meta"),
    "complex128": lambda: torch.zeros(3, dtype=torch.complex128),
    "complex32": lambda: torch.zeros(3, dtype=torch.complex32),
    "packed": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "bits": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
    "uninitialised": lambda: nn.UninitializedParameter(),
    "fake": lambda: fake(),
    "of torch.func": lambda: grad_tracking(),
}


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


def grad_tracking() -> torch.Tensor:
    kept = []
    torch.func.grad(lambda tensor: (kept.append(tensor), tensor.sum())[1])(numbers(3))
    return kept[0]


def held_by(kind: str, tensor: torch.Tensor) -> object:
    """The ways in which a caller gives tensors."""
    if kind == "pairs":
        return [("odd", tensor)]
    module = nn.Module()
    if isinstance(tensor, nn.Parameter):
        module.register_parameter("odd", tensor)
    else:
        module.register_buffer("odd", tensor)
    return module


def bits(tensor: torch.Tensor) -> list[int]:
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).tolist()


WISHES: dict[str, dict[str, object]] = {"default": {}, "snapshot": {"snapshot": True}, "move": {"move": True}}


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("given", ["module", "pairs"])
@pytest.mark.parametrize("kind", SERVED)
def test_it_is_served_bit_for_bit(kind: str, given: str, wish: str) -> None:
    tensor = SERVED[kind]()
    before = bits(tensor)
    source = open_source(held_by(given, tensor), **WISHES[wish])  # type: ignore[arg-type]
    assert isinstance(source, MemorySource)
    for _ in range(2):
        source.check()
        source.seal()
        found = read(source.table())["odd"]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert bits(found) == before == bits(tensor)
        assert source.digest(whole_atoms(source.table())) == [digest_box(found, (0,) * found.dim())]


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:The PyTorch API of nested", "ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:.*deprecated")
@pytest.mark.parametrize("given", ["module", "pairs"])
@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_by_name(kind: str, given: str) -> None:
    with pytest.raises(CkptEngineError) as refused:
        open_source(held_by(given, REFUSED[kind]()))  # type: ignore[arg-type]
    assert refused.value.problem.code == Problem.CODE_INVALID_ARGUMENT
    assert list(refused.value.problem.tensors) == ["odd"]
    said = refused.value.problem.message
    assert "did you mean" not in said, "nobody has typed the dtype of a tensor"
    assert "INVALID_ARGUMENT" not in said


@pytest.mark.parametrize("given", ["module", "pairs"])
def test_memory_that_was_taken_away_is_refused_and_noticed_by_name(given: str) -> None:
    """As FSDP and offloading leave parameters: reading them would end the process."""
    tensor = numbers(1000)
    source = open_source(held_by(given, tensor), snapshot=True)  # type: ignore[arg-type]
    source.seal()
    tensor.untyped_storage().resize_(0)
    for attempt in (source.check, source.seal, lambda: open_source(held_by(given, tensor))):  # type: ignore[arg-type]
        with pytest.raises(CkptEngineError, match="bring it back") as gone:
            attempt()
        assert gone.value.problem.code == Problem.CODE_FAILED_PRECONDITION
        assert list(gone.value.problem.tensors) == ["odd"]


def test_a_conjugate_is_not_tied_to_what_it_is_a_view_of() -> None:
    module = nn.Module()
    module.register_buffer("base", torch.view_as_complex(numbers(3, 2)))
    module.register_buffer("conjugate", module.base.conj())
    source = open_source(module)
    source.seal()
    found = read(source.table())
    assert torch.equal(found["base"], module.base)
    assert torch.equal(found["conjugate"], module.base.conj())
    module.base.mul_(2)
    source.seal()
    assert torch.equal(read(source.table())["conjugate"], module.base.conj())


OTHERWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugated": lambda tensor: tensor.conj(),
    "negated": lambda tensor: torch._neg_view(tensor),
    "conjugated and negated": lambda tensor: torch._neg_view(tensor.conj()),
}


@pytest.mark.parametrize("kind", OTHERWISE)
@pytest.mark.parametrize("given", ["module", "mapping"])
def test_values_that_are_read_otherwise_at_the_same_place_are_noticed(given: str, kind: str) -> None:
    """Address, strides, shape and dtype stay, the values do not."""
    tensor = torch.complex(numbers(3), numbers(3))
    module, mapping = nn.Module(), {"odd": tensor}
    module.register_buffer("odd", tensor)
    del tensor
    if given == "module":
        mapping.clear()
        source = open_source(module, move=True)
        module.odd = OTHERWISE[kind](module.odd)
    else:
        del module
        source = open_source(mapping, move=True)
        mapping["odd"] = OTHERWISE[kind](mapping["odd"])
    for attempt in (source.check, source.seal):
        with pytest.raises(CkptEngineError, match="publish again") as noticed:
            attempt()
        assert noticed.value.problem.code == Problem.CODE_FAILED_PRECONDITION
        assert list(noticed.value.problem.tensors) == ["odd"]

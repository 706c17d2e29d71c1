"""Small models with loaders of the kinds that engines have: sliced, fused, padded, transposed, stacked, tied."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.record.recording import Recording
from ckpt_engine.v1 import weights_pb2

Weights = Iterable[tuple[str, Tensor]]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """A parameter whose content would be noticed if it stayed."""
    return nn.Parameter(torch.full(shape, float("nan"), dtype=dtype), requires_grad=False)


class TensorParallel(nn.Module):
    """One layer of a decoder, an embedding with padded rows and a tied or separate head; one rank of `size`."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        heads: int = 4,
        kv_heads: int = 2,
        head: int = 8,
        hidden: int = 24,
        inner: int = 40,
        vocabulary: int = 50,
        experts: int = 3,
        tied: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        layers: int = 1,
    ) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.head, self.vocabulary, self.hidden, self.inner = head, vocabulary, hidden, inner
        self.q, self.kv = heads // size * head, max(1, kv_heads // size) * head
        self.kv_replicas = max(1, size // kv_heads)
        self.rows = -(-vocabulary // (16 * size)) * 16
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = empty(self.rows, hidden, dtype=dtype)
        self.lm_head = nn.Module()
        self.lm_head.weight = self.embed_tokens.weight if tied else empty(self.rows, hidden, dtype=dtype)
        self.layers = nn.ModuleList(self._layer(experts, dtype) for _ in range(layers))
        self.norm = nn.Module()
        self.norm.weight = empty(hidden, dtype=dtype)
        self.register_buffer("inv_freq", torch.arange(head, dtype=torch.float32), persistent=False)

    def _layer(self, experts: int, dtype: torch.dtype) -> nn.Module:
        layer, inner, hidden = nn.Module(), self.inner // self.size, self.hidden
        layer.qkv = empty(self.q + 2 * self.kv, hidden, dtype=dtype)
        layer.qkv_bias = empty(self.q + 2 * self.kv, dtype=dtype)
        layer.o_proj = empty(hidden, self.q, dtype=dtype)
        layer.gate_up = empty(2 * inner, hidden, dtype=dtype)
        layer.down = empty(hidden, inner, dtype=dtype)
        layer.conv1d = empty(inner, hidden, dtype=dtype)
        layer.w13 = empty(experts, 2 * inner, hidden, dtype=dtype)
        layer.w2 = empty(experts, hidden, inner, dtype=dtype)
        return layer

    def load_weights(self, weights: Weights) -> set[str]:
        loaded = set()
        for name, weight in weights:
            if name.startswith("layers."):
                _, number, rest = name.split(".", 2)
                self._load_layer(self.layers[int(number)], rest, weight)
            elif name == "norm.weight":
                self.norm.weight.data.copy_(weight)
            else:
                self._load_rows(dict(self.named_parameters(remove_duplicate=False))[name], weight)
            loaded.add(name)
        return loaded

    def _load_rows(self, parameter: Tensor, weight: Tensor) -> None:
        start = self.rank * self.rows
        mine = weight[start : start + self.rows]
        parameter[: mine.shape[0]].data.copy_(mine)
        parameter[mine.shape[0] :].data.fill_(0)

    def _load_layer(self, layer: nn.Module, rest: str, weight: Tensor) -> None:
        kind = rest.rsplit(".", 1)[-1]
        inner = self.inner // self.size
        if rest in ("q", "k", "v"):
            self._load_qkv(layer.qkv, rest, weight)
        elif rest in ("q_bias", "k_bias", "v_bias"):
            self._load_qkv(layer.qkv_bias, rest[0], weight)
        elif rest == "o_proj":
            assert weight.shape[1] == self.q * self.size, f"o_proj of {tuple(weight.shape)}"
            layer.o_proj.data.copy_(weight.narrow(1, self.rank * self.q, self.q))
        elif rest in ("gate", "up"):
            layer.gate_up.data.chunk(2)[rest == "up"].copy_(weight.chunk(self.size)[self.rank])
        elif rest == "down":
            layer.down.data.copy_(weight.narrow(1, self.rank * inner, inner))
        elif rest == "conv1d":
            layer.conv1d.data[...] = weight.t().contiguous()[self.rank * inner : (self.rank + 1) * inner]
        elif rest.startswith("experts."):
            expert = int(rest.split(".")[1])
            if kind == "down":
                layer.w2.data[expert].copy_(weight.narrow(1, self.rank * inner, inner))
            else:
                half = layer.w13.data[expert].narrow(0, inner * (kind == "up"), inner)
                half.copy_(weight.narrow(0, self.rank * inner, inner))
        else:
            raise KeyError(rest)

    def _load_qkv(self, parameter: Tensor, which: str, weight: Tensor) -> None:
        offset, size = {"q": (0, self.q), "k": (self.q, self.kv), "v": (self.q + self.kv, self.kv)}[which]
        rank = self.rank if which == "q" else self.rank // self.kv_replicas
        parameter.data.narrow(0, offset, size).copy_(weight.narrow(0, rank * size, size))

    def checkpoint(self, seed: int = 0) -> dict[str, Tensor]:
        """Random global weights for this architecture, by checkpoint names."""
        hidden, inner, kv = self.hidden, self.inner, self.kv * self.size // self.kv_replicas
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocabulary, hidden),
            "norm.weight": (hidden,),
        }
        if self.lm_head.weight is not self.embed_tokens.weight:
            shapes["lm_head.weight"] = (self.vocabulary, hidden)
        for number, layer in enumerate(self.layers):
            each: dict[str, tuple[int, ...]] = {
                "q": (self.q * self.size, hidden),
                "k": (kv, hidden),
                "v": (kv, hidden),
                "q_bias": (self.q * self.size,),
                "k_bias": (kv,),
                "v_bias": (kv,),
                "o_proj": (hidden, self.q * self.size),
                "gate": (inner, hidden),
                "up": (inner, hidden),
                "down": (hidden, inner),
                "conv1d": (hidden, inner),
            }
            for expert in range(layer.w2.shape[0]):
                each |= {f"experts.{expert}.{kind}": (inner, hidden) for kind in ("gate", "up")}
                each[f"experts.{expert}.down"] = (hidden, inner)
            shapes |= {f"layers.{number}.{name}": shape for name, shape in each.items()}
        generator = torch.Generator().manual_seed(seed)
        dtype = self.norm.weight.dtype
        return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class Plain(nn.Module):
    """Parameters given by name, and a loader given as a function of (parameters, name, weight)."""

    def __init__(self, load_one, **parameters: Tensor) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.load_one = load_one
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            self.load_one(self, name, weight)


def target_of(load_one, **parameters: Tensor) -> ModuleTarget:  # type: ignore[no-untyped-def]
    return ModuleTarget(Plain(load_one, **parameters))


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of everything that the model computes with."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def bits(tensor: Tensor) -> Tensor:
    """So that NaN and signed zeros count when tensors are compared."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(bits(tensor), bits(other[name])), name


def accounted(recording: Recording) -> list[weights_pb2.Accounted]:
    """What an agent is told of every tensor of the model."""
    return list(weights_pb2.WorkerNeeds.FromString(recording.needs_bytes).accounted)

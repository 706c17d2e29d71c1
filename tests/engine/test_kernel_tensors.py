"""Tensors that kernels keep beside a layer's parameters: they stay where captured graphs read, with new values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.engine.attributes import Attributes
from ckpt_engine.engine.kernel_tensors import KernelTensors, parts


@dataclass(frozen=True)
class Scales:
    """As a kernel's configuration: frozen, with a parameter's scale and one that lies nowhere else."""

    weight: Tensor
    inverse: Tensor


class Kernel:
    __slots__ = ("factor", "scales", "strides")

    def __init__(self, scale: Tensor, factor: float) -> None:
        self.scales = Scales(scale, 1 / scale)
        self.strides = [torch.arange(4), {"rows": torch.arange(2)}]
        self.factor = factor


class Method:
    """Makes its kernel anew whenever it processes."""

    kernel: Kernel
    again: Scales

    def process(self, layer: Any, value: float, factor: float = 2.0) -> None:
        layer.scale = nn.Parameter(torch.full((3,), value), requires_grad=False)
        layer.workspace = torch.full((2,), value)
        self.kernel = Kernel(layer.scale, factor)
        self.again = self.kernel.scales
        self.layer = layer


def looked_into(value: object) -> bool:
    return isinstance(value, Method | Kernel | Scales)


def processed(value: float) -> Any:
    layer: Any = nn.Module()
    layer.method = Method()
    layer.method.process(layer, value)
    layer.name = "a layer"
    return layer


def everything(layer: Any) -> list[Tensor]:
    kernel = layer.method.kernel
    return [layer.workspace, kernel.scales.weight, kernel.scales.inverse, kernel.strides[0], kernel.strides[1]["rows"]]


def test_new_values_come_to_where_the_first_kernel_has_them() -> None:
    layer = processed(1.0)
    scale, method, kernel = layer.scale, layer.method, layer.method.kernel
    before = everything(layer)
    kernels = KernelTensors(layer, looked_into)
    assert sorted(kernels.tensors) == [
        "method.kernel.scales.inverse",
        "method.kernel.strides.0",
        "method.kernel.strides.1.rows",
        "workspace",
    ]
    method.process(layer, 4.0)
    scale.data.copy_(layer.scale)  # the adapter's part
    layer.scale = scale
    kernels.take_over()
    assert all(now is own for now, own in zip(everything(layer), before, strict=True))
    assert layer.method is method
    assert method.kernel is kernel
    assert method.again is kernel.scales
    assert torch.equal(kernel.scales.inverse, torch.full((3,), 0.25))
    assert torch.equal(kernel.scales.weight, torch.full((3,), 4.0))
    assert torch.equal(layer.workspace, torch.full((2,), 4.0))


@pytest.mark.parametrize("what", ["gone", "another shape", "another dtype", "a number"])
def test_kernels_of_another_form_are_refused_and_nothing_is_copied(what: str) -> None:
    layer = processed(1.0)
    kernel = layer.method.kernel
    kernels = KernelTensors(layer, looked_into)
    layer.method.process(layer, 4.0, factor=3.0 if what == "a number" else 2.0)
    if what == "gone":
        del layer.method.kernel.strides[1]["rows"]
    elif what == "another shape":
        layer.method.kernel.strides[0] = torch.arange(5)
    elif what == "another dtype":
        layer.method.kernel.strides[0] = torch.arange(4).float()
    with pytest.raises(CkptEngineError, match=r"method\.kernel\.(strides|factor)"):
        kernels.take_over()
    kernels.put_back()
    assert layer.method.kernel is kernel
    assert torch.equal(kernel.scales.inverse, torch.ones(3))
    assert torch.equal(layer.workspace, torch.ones(2))


def test_what_a_kernel_has_kept_since_it_computed_stays() -> None:
    layer = processed(1.0)
    results = KernelTensors(layer, looked_into).paths
    layer.method.kernel.strides.append(workspace := torch.ones(7))
    kernels = KernelTensors(layer, looked_into, results)
    layer.method.process(layer, 4.0)
    kernels.take_over()
    assert layer.method.kernel.strides[2] is workspace
    assert torch.equal(layer.method.kernel.scales.inverse, torch.full((3,), 0.25))


def test_circles_end() -> None:
    layer = processed(1.0)
    layer.method.itself = layer.method
    layer.method.kernel.strides.append(layer.method.kernel.strides)
    assert len(KernelTensors(layer, looked_into).tensors) == 4


def test_they_come_back_after_a_sleep_that_loses_them() -> None:
    layer = processed(2.0)
    kernels = KernelTensors(layer, looked_into)
    attributes = Attributes(layer, "cpu", kernels.tensors.values())
    attributes.keep()
    for tensor in kernels.tensors.values():
        tensor.zero_()
    attributes.keep()
    attributes.put_back()
    assert torch.equal(layer.method.kernel.scales.inverse, torch.full((3,), 0.5))
    assert torch.equal(layer.method.kernel.strides[0], torch.arange(4))


class Packed:
    """As torchao's tensors say what they consist of."""

    def __init__(self) -> None:
        self.data, self.scale, self.zero = torch.ones(2), torch.ones(1), None

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data", "scale", "zero"], None


def test_a_packed_tensor_has_parts() -> None:
    plain: Any = torch.ones(3)
    packed: Any = Packed()
    assert parts(plain) == [plain]
    assert [part is own for part, own in zip(parts(packed), (packed.data, packed.scale), strict=True)] == [True, True]

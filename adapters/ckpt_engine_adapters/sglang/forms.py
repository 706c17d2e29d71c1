"""What a model's layers look like when SGLang's own loader writes to them.

After loading SGLang may repack a layer for its kernels, and then the form that its loader knows is gone. So each
parameter's form is noted when the model has been made and nothing is loaded yet: a meta tensor with the same class and
attributes (its `weight_loader` among them), which takes no memory. Also which tensors lie beside the parameters then:
they cannot depend on weights.

Runs in the scheduler process, on its main thread, before SGLang loads weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Forms = Mapping[nn.Module, Mapping[str, Tensor]]
"""A layer to its parameters' loader forms, by their names in the layer."""

_FORMS = "ckpt_engine_loader_forms"
_BESIDE = "ckpt_engine_tensors_beside"


def note_forms(model: nn.Module) -> None:
    """Notes the forms of a model that was just made. Layers with parameters that have no shape yet are left out."""
    forms: dict[nn.Module, dict[str, Tensor]] = {}
    for layer in model.modules():
        own = {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}
        if own and not any(is_lazy(parameter) for parameter in own.values()):
            forms[layer] = {name: _like(parameter, "meta") for name, parameter in own.items()}
    model.__dict__[_FORMS] = forms
    model.__dict__[_BESIDE] = {
        (layer, name): weakref.ref(value)
        for layer in model.modules()
        for name, value in vars(layer).items()
        if isinstance(value, Tensor)
    }


def noted_forms(model: nn.Module) -> Forms | None:
    """What `note_forms` noted of this model; None if it was made before anybody could."""
    found: Forms | None = model.__dict__.get(_FORMS)
    return found


def was_there(model: nn.Module, layer: nn.Module, name: str) -> bool:
    """Whether the tensor that is `layer`'s attribute `name` now was so already when the model was made."""
    noted = model.__dict__.get(_BESIDE, {}).get((layer, name))
    return noted is not None and noted() is vars(layer)[name]


def materialized(form: Tensor, device: torch.device) -> Tensor:
    """A parameter of this form with memory on `device`; what it holds is undefined."""
    return _like(form, device)


def same_form(one: Tensor, other: Tensor) -> bool:
    """Whether both have one shape, strides and dtype, and neither is of a class of tensor that packs its values."""
    if one.shape != other.shape or one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    return type(one.data) is Tensor and type(other.data) is Tensor


def storage_address(tensor: Tensor) -> int:
    """Where its memory begins; 0 if it has none of its own, as packed classes of tensors."""
    if type(tensor.data) is not Tensor:
        return 0
    return int(tensor.untyped_storage().data_ptr())


def _like(parameter: Tensor, device: torch.device | str) -> Tensor:
    data = torch.empty_strided(tuple(parameter.shape), parameter.stride(), dtype=parameter.dtype, device=device)
    kind: Any = type(parameter)
    twin: Tensor
    if kind is nn.Parameter:
        twin = nn.Parameter(data, requires_grad=False)
    else:
        twin = torch.Tensor._make_subclass(kind, data, False)
    twin.__dict__.update(parameter.__dict__)
    return twin

"""Notes the form of a model's layers in which SGLang's own loader writes to them.

After loading SGLang may repack a layer for its kernels, and the form for its loader is lost. So each parameter's form
is noted when the model exists and nothing is loaded yet: a meta tensor with the same class and attributes (such as its
`weight_loader`), which takes no memory. Tensors beside the parameters are noted, too: those that exist at that time
cannot depend on weights.

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
    """Notes the forms of a model that was just made. Skips layers with parameters that have no shape yet."""
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
    """The forms that `note_forms` noted of this model; None if the model was made before our hooks were in place."""
    forms: Forms | None = model.__dict__.get(_FORMS)
    return forms


def was_there(model: nn.Module, layer: nn.Module, name: str) -> bool:
    """Whether `layer`'s attribute `name` is the same tensor as when the model was made."""
    noted = model.__dict__.get(_BESIDE, {}).get((layer, name))
    return noted is not None and noted() is vars(layer)[name]


def materialized(form: Tensor, device: torch.device) -> Tensor:
    """Makes a parameter of this form with memory on `device`; its values are undefined."""
    return _like(form, device)


def same_form(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same shape, strides and dtype, and neither is of a tensor class that packs its values."""
    if one.shape != other.shape or one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    return type(one.data) is Tensor and type(other.data) is Tensor


def storage_address(tensor: Tensor) -> int:
    """The address of its memory; 0 if it has none of its own, as tensors of packed classes."""
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

"""An adapter (LoRA) of PEFT as what `Trainer.publish` takes: a live PeftModel, or a directory in PEFT's format.

It decides what an adapter is: factors A and B and one scaling for each linear module that it trains. It refuses, by
name, all that would make more of it than that, since engines leave such things out without a word. It does not decide
which engine serves it, nor whether its ranks and modules fit there: the engine's workers do.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ckpt_engine.core.adapters import FACTS, AdapterFacts, factor_name
from ckpt_engine.core.names import some
from ckpt_engine.core.problems import invalid

Pairs: TypeAlias = Iterator[tuple[str, torch.Tensor]]
Base: TypeAlias = str | bytes | Callable[[], str | bytes]

_PREFIX = "base_model.model."

_PLAIN = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out"),
        *("inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core"),
        *("peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config"),
        *("target_modules", "task_type", "use_rslora"),
    }
)
"""Settings of a LoraConfig after which an adapter still is A, B and a scaling. Of any other one only a value that means
"not used" is taken: so what PEFT adds one day is refused, and not left out."""

_PLAIN_STARTS = frozenset({"gaussian", "eva", "orthogonal"})
"""Values of `init_lora_weights` that leave the base weights alone. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change them:
an adapter of these belongs to another base, until PEFT has converted it."""

_WHY = {
    "use_dora": "DoRA has a magnitude beside A and B",
    "modules_to_save": "modules that are trained whole are no adapter",
    "bias": "trained biases are no adapter",
    "lora_bias": "biases of B are no part of what engines take",
    "alora_invocation_tokens": "an activated LoRA is switched on by tokens",
    "layer_replication": "replicated layers make another base model",
    "use_qalora": "QA-LoRA pools its inputs",
    "use_bdlora": "block-diagonal factors are laid out otherwise",
    "trainable_token_indices": "trained tokens are no adapter",
    "target_parameters": "adapters of bare parameters, as of fused experts, are laid out otherwise",
    "loftq_config": "LoftQ changes the base weights",
}


def adapter(source: Any, base: Base, name: str = "default") -> Callable[[], Pairs]:
    """What `Trainer.publish` takes for an adapter. At each update it yields A, B and what is sealed with them.

    source: a PeftModel, whose adapter `name` is read as it is at each update, or the path of a directory that
    `save_pretrained` has written. base: the root of the base version that it is trained on, as `UpdateReport.root` says
    it, 64 hexadecimal digits; a callable is asked at each update. The trainer's lineage and pool must have the name by
    which the adapter is served:

        trainer = Trainer(manager, lineage="policy", pool="policy")
        trainer.publish(adapter(model, base=report.root))

    Raises INVALID_ARGUMENT, at `publish`, for an adapter that is more than A, B and a scaling for each linear module
    (DoRA, trained biases and modules, added tokens, PiSSA and others that were not converted, …), naming the setting
    and what to do instead: publish the merged model (`ckpt_engine.integrations.peft.merged`).
    """
    read = _directory(Path(source)) if isinstance(source, str | os.PathLike) else _live(source, name)

    def walk() -> Pairs:
        scaling: dict[str, float] = {}
        for module, (a, b, scale) in read().items():
            scaling[module] = scale
            yield factor_name(module, "A"), a
            yield factor_name(module, "B"), b
        facts = AdapterFacts(_root(base() if callable(base) else base), scaling).to_bytes()
        yield FACTS, torch.frombuffer(bytearray(facts), dtype=torch.uint8)

    return walk


_Modules: TypeAlias = Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]
"""A [rank, inputs], B [outputs, rank] and the scaling of each module, by the module's name in the base model."""


def _live(model: Any, name: str) -> Callable[[], _Modules]:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        raise invalid(f"an adapter is read from a PeftModel or a directory, not from a {type(model).__name__}")
    if name not in configs:
        raise invalid(f"this PeftModel has no adapter {name!r}, only {some(sorted(configs))}")

    def read() -> _Modules:
        _check_settings(configs[name].to_dict(), name)
        found = {}
        taken: set[int] = set()
        for full, layer in model.named_modules():
            if name not in getattr(layer, "lora_A", ()) or not hasattr(layer, "scaling"):
                continue
            module = full.removeprefix(_PREFIX)
            _check_module(module)
            a, b = layer.lora_A[name], layer.lora_B[name]
            if getattr(b, "bias", None) is not None:
                raise _refusal("lora_bias", True, name)
            if name in getattr(layer, "lora_variant", ()):
                raise invalid(f"{module}: a {type(layer.lora_variant[name]).__name__} is no plain LoRA; {_INSTEAD}")
            found[module] = _checked(module, a.weight.detach(), b.weight.detach(), layer.scaling[name])
            taken |= {id(a.weight), id(b.weight)}
        others = {id(each) for adapter in configs if adapter != name for each in _factors(model, adapter)}
        trained = [
            key
            for key, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in taken | others
        ]
        if trained:
            raise invalid(
                f"beside the adapter {name!r} this model trains {some(trained)}, which are no part of it; {_INSTEAD}",
                trained[:16],
            )
        if not found:
            raise invalid(f"the adapter {name!r} has no linear module")
        return found

    return read


def _factors(model: Any, name: str) -> Iterator[torch.Tensor]:
    for layer in model.modules():
        if name in getattr(layer, "lora_A", ()):
            yield from layer.lora_A[name].parameters()
            yield from layer.lora_B[name].parameters()


def _directory(path: Path) -> Callable[[], _Modules]:
    def read() -> _Modules:
        from safetensors.torch import load_file

        try:
            settings = json.loads((path / "adapter_config.json").read_text())
            tensors = load_file(path / "adapter_model.safetensors")
        except (OSError, ValueError) as error:
            raise invalid(
                f"{path} must have adapter_config.json and adapter_model.safetensors, as PEFT saves them: {error}"
            ) from error
        _check_settings(settings, str(path))
        factors: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight", key)
            if match is None:
                raise invalid(f"{path}: {key} is neither A nor B of a linear module; {_INSTEAD}", [key])
            factors.setdefault(match[1], {})[match[2]] = tensor
        found = {}
        for module, each in factors.items():
            _check_module(module)
            if each.keys() != {"A", "B"}:
                raise invalid(f"{path}: {module} has {' and '.join(each)} only", [module])
            found[module] = _checked(module, each["A"], each["B"], _scaling(settings, module))
            rank = _pattern(settings.get("rank_pattern"), module, settings["r"])
            if rank != each["A"].shape[0]:
                raise invalid(
                    f"{path}: {module} has rank {each['A'].shape[0]}, and its configuration says {rank}", [module]
                )
        if not found:
            raise invalid(f"{path} has no linear module")
        return found

    return read


def _checked(module: str, a: torch.Tensor, b: torch.Tensor, scaling: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        raise invalid(f"{module}: A {list(a.shape)} and B {list(b.shape)} are not those of a linear layer", [module])
    if not math.isfinite(scaling):
        raise invalid(f"{module}: its scaling is {scaling}", [module])
    return a, b, float(scaling)


def _check_module(module: str) -> None:
    last = module.rpartition(".")[2]
    if last in ("lm_head", "embed_tokens", "wte", "word_embeddings"):
        raise invalid(f"{module}: adapters of embeddings and output heads are not served; {_INSTEAD}", [module])
    if ".experts." in f".{module}.":
        raise invalid(f"{module}: adapters of experts are not served; {_INSTEAD}", [module])


_INSTEAD = "publish the merged model instead (ckpt_engine.integrations.peft.merged)"


def _check_settings(settings: Mapping[str, Any], name: str) -> None:
    """Raises INVALID_ARGUMENT for settings that make an adapter more than A, B and a scaling."""
    kind = getattr(settings.get("peft_type"), "value", settings.get("peft_type"))
    if kind != "LORA":
        raise invalid(f"adapter {name}: {kind} is no LoRA; {_INSTEAD}")
    for key, value in settings.items():
        if key == "bias":
            if value != "none":
                raise _refusal(key, value, name)
        elif key == "init_lora_weights":
            if not isinstance(value, bool) and value not in _PLAIN_STARTS:
                raise invalid(
                    f"adapter {name}: init_lora_weights={value!r} has changed the base weights, so that the adapter "
                    "fits another base: convert it (save_pretrained with path_initial_model_for_weight_conversion) and "
                    "publish that directory"
                )
        elif key == "eva_config":
            continue  # of the start only
        elif key not in _PLAIN and value not in (None, False) and value != {} and value != []:
            raise _refusal(key, value, name)


def _refusal(key: str, value: Any, name: str) -> Exception:
    why = _WHY.get(key, "it is not known here to leave an adapter plain")
    return invalid(f"adapter {name}: {key}={value!r}: {why}; {_INSTEAD}")


def _scaling(settings: Mapping[str, Any], module: str) -> float:
    """The scaling that PEFT has for a module."""
    rank = _pattern(settings.get("rank_pattern"), module, settings["r"])
    alpha = _pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"])
    return float(alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank)


def _pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that matches the end of the name from a dot on."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _root(base: str | bytes) -> bytes:
    try:
        root = bytes.fromhex(base) if isinstance(base, str) else base
    except ValueError:
        root = b""
    if len(root) != 32:
        raise invalid(
            f"base must be the root of the base's version, 64 hexadecimal digits as in UpdateReport.root, not {base!r}"
        )
    return root

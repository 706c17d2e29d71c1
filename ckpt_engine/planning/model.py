"""Reads a model's shapes from its files: config.json, the headers of safetensors files, or an index beside a config. It
reads no weights, and needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_engine.core.dtypes import ITEMSIZES, itemsize
from ckpt_engine.core.json_text import load_json
from ckpt_engine.core.manifest import shape_problem
from ckpt_engine.core.problems import invalid, not_found
from ckpt_engine.planning.shapes import Config, key_value_heads, optional, shapes_of
from ckpt_engine.source.safetensors import INDEX, SINGLE, read_header

CONFIG = "config.json"
_LARGEST = 64 << 20  # bytes of a JSON file: an index of 100,000 tensors has ten


class Tensor(NamedTuple):
    """One tensor of a model."""

    name: str
    dtype: str  # as it is served
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Heads:
    """Numbers that tensor and expert parallelism must divide."""

    attention: int
    pairs: int  # key-value heads
    experts: int  # 0: there are none
    layers: int


@dataclass(frozen=True)
class Model:
    """A model's tensors, and what is known of how they may be split."""

    name: str  # for people
    tensors: tuple[Tensor, ...]
    heads: Heads | None  # None: there is no config with them
    tied: bool  # there is no output head besides the embedding
    notes: tuple[str, ...] = ()  # for people, on how it was read
    by_dtype: Mapping[str, int] = field(default_factory=dict)  # bytes
    architecture: str = ""  # as config.json names it; empty: unknown
    quantised: str = ""  # the checkpoint's method, if only its config.json was read; empty: none, or headers were read

    @property
    def bytes(self) -> int:
        """Bytes of one copy of the weights."""
        return sum(self.by_dtype.values())


def read_model(path: Path, dtype: str | None = None) -> Model:
    """Reads the model of a directory, a config.json, a safetensors file or an index. dtype: the served dtype of tensors
    in floating point of two bytes or more; None: as the files say.

    Raises INVALID_ARGUMENT for files that do not give a model's shapes, NOT_FOUND for a path that does not exist.
    """
    if dtype is not None and dtype not in ("bfloat16", "float16", "float32"):
        raise invalid(f"--dtype {dtype!r}: weights are served as bfloat16, float16 or float32")
    if not path.exists():
        raise not_found(f"{path} is not there: give a config.json, a directory that has one, or safetensors files")
    folder = path if path.is_dir() else path.parent
    config = _config_of(path if path.name.endswith(".json") and path.name != INDEX else folder / CONFIG)
    if path.is_dir():
        index, single = path / INDEX, path / SINGLE
        files = _indexed(index) if index.exists() else [single] if single.exists() else []
        files = files or sorted(path.glob("*.safetensors"))
    elif path.name.endswith(".safetensors.index.json"):
        files = _indexed(path)
    else:
        files = [path] if path.suffix == ".safetensors" else []
    if files and all(file.exists() for file in files):
        return _from_headers(folder, files, config, dtype)
    if config is None:
        missing_file = next((file.name for file in files if not file.exists()), "")
        lacks = f"it names {missing_file}, which is not there" if missing_file else "there are no safetensors files"
        raise invalid(
            f"{path} does not say any shapes: {lacks}, and {folder / CONFIG} is not there; put the model's config.json "
            "there"
        )
    model = _from_config(folder, config, dtype)
    index = path if path.name.endswith(".safetensors.index.json") else folder / INDEX
    index_applies = path.is_dir() or path.name in (CONFIG, index.name)
    return _compared(model, index) if index_applies and index.exists() else model


def _from_config(folder: Path, config: Config, dtype: str | None) -> Model:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise invalid("config.json names no architecture (`architectures`); is it that of a model?")
    found = shapes_of(architectures[0], config)
    named_dtype = config.get("dtype") or config.get("torch_dtype")
    stated_dtype = str(named_dtype or "bfloat16").removeprefix("torch.")
    notes = []
    if not named_dtype and dtype is None:
        notes.append("config.json names no dtype, and this counts bfloat16: name another one with --dtype")
    quantised = config.get("quantization_config")
    method = ""
    if quantised:
        method = str(quantised.get("quant_method", "?")) if isinstance(quantised, dict) else "?"
        notes.append(
            f"config.json is of a checkpoint that is quantised ({method}), and this counts {dtype or stated_dtype}, as "
            "a trainer publishes it; give the safetensors files to count those"
        )
    if _predicts_further(config):
        notes.append("layers that predict further tokens (num_nextn_predict_layers) are left out")
    served = dtype or stated_dtype
    if served not in ITEMSIZES:
        raise invalid(f"config.json: dtype {stated_dtype!r} is not known; name the served one with --dtype")
    tensors = [Tensor(each.name, each.dtype or served, each.shape) for each in found]
    model = _model(f"{architectures[0]} ({folder.resolve().name or folder})", tensors, config, notes)
    return replace(model, quantised=method)


def _predicts_further(config: Config) -> bool:
    """Whether a config has layers that a published model mostly lacks."""
    return bool(config.get("num_nextn_predict_layers")) and config.get("model_type") == "deepseek_v3"


def _from_headers(folder: Path, files: list[Path], config: Config | None, dtype: str | None) -> Model:
    tensors = []
    for file in files:
        for each in read_header(file).tensors:
            cast = dtype if dtype and each.dtype in ("bfloat16", "float16", "float32", "float64") else each.dtype
            tensors.append(Tensor(each.name, cast, each.shape))
    duplicates = [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]
    if duplicates:
        raise invalid(f"two of the files of {folder} have a tensor {duplicates[0]!r}")
    notes = [f"shapes from the headers of {len(files)} safetensors file{'s' * (len(files) > 1)}"]
    return _model(str(folder.resolve().name or folder), tensors, config, notes)


def _model(name: str, tensors: list[Tensor], config: Config | None, notes: list[str]) -> Model:
    if not tensors:
        raise invalid(f"{name} has no tensor")
    by_dtype: Counter[str] = Counter()
    for tensor in tensors:
        if problem := shape_problem(tensor.shape, itemsize(tensor.dtype)):
            raise invalid(f"{name}: {tensor.name} {problem}", [tensor.name])
        by_dtype[tensor.dtype] += tensor.bytes
    heads = None
    if config is not None and optional(config, "num_attention_heads") and optional(config, "num_hidden_layers"):
        experts = optional(config, "num_experts", "num_local_experts", "n_routed_experts") or 0
        heads = Heads(config["num_attention_heads"], key_value_heads(config), experts, config["num_hidden_layers"])
    tied = not any(tensor.name.split(".")[-2:-1] == ["lm_head"] for tensor in tensors)
    architectures = (config or {}).get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    by_name = dict(sorted(by_dtype.items()))
    return Model(name, tuple(sorted(tensors)), heads, tied, tuple(notes), by_name, architecture)


def _compared(model: Model, index: Path) -> Model:
    """Compares the tensors that a rule gives with the names of an index, which has no shapes. Raises INVALID_ARGUMENT
    if the index lacks some."""
    names = set(_weight_map(index))
    rule_names = {tensor.name for tensor in model.tensors}
    extra, missing = sorted(names - rule_names), sorted(rule_names - names)
    if missing:
        mismatch = f"{index.name} lacks {len(missing)} tensors that config.json implies, such as {missing[0]}"
        raise invalid(
            f"{mismatch}: the two are of different models; give the safetensors files, whose headers have shapes"
        )
    notes = [*model.notes, f"names agree with {index.name}"]
    if extra:
        notes[-1] = f"{index.name} has {len(extra)} tensors more, such as {extra[0]}, which are not counted"
    return replace(model, notes=tuple(notes))


def _indexed(index: Path) -> list[Path]:
    return [index.parent / name for name in sorted(set(_weight_map(index).values()))]


def _weight_map(index: Path) -> Mapping[str, str]:
    found = _json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise invalid(f"{index} is not an index of safetensors files: it has no weight_map from tensors to files")
    return found


def _config_of(path: Path) -> Config | None:
    if not path.exists() or path.name.endswith(".index.json"):
        return None
    config = _json(path)
    if "weight_map" in config:
        raise invalid(f"{path} is an index of safetensors files: call it {INDEX}, beside the model's config.json")
    # Models that also see or hear keep the language model's numbers in a part of their own.
    inner = config.get("text_config")
    return {**inner, "architectures": config.get("architectures")} if isinstance(inner, dict) else config


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST:
            raise invalid(f"{path} has {path.stat().st_size} bytes, too many for a config or an index")
        found = load_json(path.read_text())
    except (OSError, ValueError) as error:
        raise invalid(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise invalid(f"{path} holds no JSON object")
    return found

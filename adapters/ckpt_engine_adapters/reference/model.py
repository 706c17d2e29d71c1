"""The model of one worker: a transformers causal LM, or this rank's slice of one, and its weight loader.

With tensor parallelism of N, transformers builds the model from a configuration with 1/N of the heads, of the MLP and
of the (padded) vocabulary. This module adds the sums after `o_proj` and `down_proj`, the vocabulary-parallel embedding
and head, and the loader that narrows each global tensor to the rank's slice. It finds the sliced axis of each parameter
by comparing the shapes of the whole model and of the rank's, without a table per architecture.

Runs in a worker process, on its main thread. Importing this module imports torch; transformers only when building.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpt_engine.engine.target import ModuleTarget

COLUMN_PARALLEL = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
ROW_PARALLEL = frozenset({"o_proj", "down_proj"})
VOCABULARY_PARALLEL = frozenset({"embed_tokens", "lm_head"})
VOCABULARY_MULTIPLE = 64  # the vocabulary is padded to a multiple of this times the tensor parallel size


class UnsupportedModelError(Exception):
    """The model cannot be served with this layout; the message names the model, the size and the obstacle."""


@dataclass(frozen=True)
class AxisSlice:
    """The part [start, start + size) of a global axis that this rank holds; rows of the parameter beyond are padding.

    axis None: the rank holds the whole tensor.
    """

    axis: int | None
    start: int = 0
    size: int = 0


class VocabularyParallelEmbedding(nn.Module):
    """Looks up the tokens of this rank's rows and sums over the ranks; all others contribute zeros."""

    def __init__(self, weight: nn.Parameter, rank: int) -> None:
        super().__init__()
        self.weight = weight
        self._start = rank * weight.shape[0]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        local = input_ids - self._start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = nn.functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return _sum_over_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class VocabularyParallelHead(nn.Module):
    """Logits of this rank's rows, gathered over the ranks and cut to the real vocabulary; float32."""

    def __init__(self, weight: nn.Parameter, vocabulary: int) -> None:
        super().__init__()
        self.weight = weight
        self._vocabulary = vocabulary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        local = nn.functional.linear(hidden, self.weight).float().contiguous()
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local)
        return torch.cat(parts, dim=-1)[..., : self._vocabulary]


def _sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Sums partial results in float32, so that only the last rounding is in the model's dtype."""
    total = tensor.float()
    dist.all_reduce(total)
    return total.to(tensor.dtype)


class ReferenceModel:
    """One rank's model: what generation runs, and what ckpt-engine records and installs into (`target`).

    With world_size 2 or more the default process group must exist. Weights are uninitialised (`initialise=False`) or
    random; `load_weights` fills them.

    Raises:
        UnsupportedModelError: heads, key-value heads or MLP do not divide, or this module does not know the
            architecture's parallel parts.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        *,
        rank: int = 0,
        world_size: int = 1,
        initialise: bool = True,
        device: str = "cpu",
    ) -> None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(directory)
        self.vocabulary: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.architecture: str = config.model_type
        if world_size == 1:
            with torch.device(device):
                self.module: Any = _build(config, dtype, initialise)
            self._slices = {name: AxisSlice(None) for name, _ in self.module.named_parameters()}
        else:
            with torch.device("meta"):
                whole = _build(config, dtype, initialise=False)
            with torch.device(device):
                self.module = _build(_rank_config(config, world_size), dtype, initialise)
            self._slices = _slices(whole, self.module, rank, config.model_type)
            _connect(self.module, rank, self.vocabulary)
        self.module.eval()
        self._device = torch.device(device)
        self._parameters: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        self._aliases = {
            name
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
            if name not in self._parameters and any(parameter is other for other in self._parameters.values())
        }

    # ----------------------------------------------------------------------------------------------- loading

    def target(self) -> ModuleTarget:
        """The model for ckpt-engine: loaded in place, nothing derived, rotary buffers constant."""
        return ModuleTarget(self.module, self.load_weights, ignored=self.ignored)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies global checkpoint tensors into this rank's parameters, each narrowed to the rank's slice.

        Tensors may come in any order and any number of calls; parameters without a tensor do not change.

        Raises:
            ValueError: the model has no such parameter, or its shape differs.
        """
        for name, tensor in weights:
            if self.ignored(name) is not None:
                continue
            if name not in self._parameters:
                raise ValueError(f"{name}: this {self.architecture} model has no such parameter")
            self._load(name, tensor)

    def ignored(self, name: str) -> str | None:
        """Why the loader skips the checkpoint tensor `name`; None: it does not."""
        if name in self._aliases:
            return "tied to another tensor"
        if name.endswith("rotary_emb.inv_freq"):
            return "rotary frequencies follow from the configuration"
        return None

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        parameter, part = self._parameters[name].data, self._slices[name]
        if part.axis is None:
            _check_shape(name, tensor.shape, parameter.shape)
            parameter.copy_(tensor)
            return
        real = parameter.narrow(part.axis, 0, part.size)
        target_shape = list(parameter.shape)
        target_shape[part.axis] = tensor.shape[part.axis] if tensor.dim() == len(target_shape) else -1
        _check_shape(name, tensor.shape, target_shape)
        if part.start + part.size > tensor.shape[part.axis]:
            raise ValueError(f"{name}: {tuple(tensor.shape)} ends before row {part.start + part.size} of this rank")
        real.copy_(tensor.narrow(part.axis, part.start, part.size))
        padding = parameter.shape[part.axis] - part.size
        if padding:
            parameter.narrow(part.axis, part.size, padding).zero_()

    # ------------------------------------------------------------------------------------------------ engine

    def load_directory(self, directory: Path) -> None:
        """Loads the safetensors files of a Hugging Face directory.

        Raises:
            FileNotFoundError: there are none.
            ValueError: a tensor is unknown, misshapen or missing.
        """
        from safetensors import safe_open

        missing = set(self._parameters)
        for path in _weight_files(directory):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                    self.load_weights([(name, file.get_tensor(name))])
                    missing.discard(name)
        if missing:
            raise ValueError(f"{directory} lacks {len(missing)} tensors, among them {sorted(missing)[0]}")

    @torch.inference_mode()
    def next_logits(self, tokens: list[int], cache: Any) -> torch.Tensor:
        """Logits [vocabulary] (float32) of the token after `tokens`, which `cache` then contains too."""
        prompt = torch.tensor([tokens], device=self._device)
        # For a single row oneDNN takes longer to prepare bfloat16 than to multiply: without it a step takes two thirds.
        torch.backends.mkldnn.enabled = len(tokens) > 1  # type: ignore[assignment]
        result = self.module(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = result.logits[0, -1].float().cpu()
        return logits

    @torch.inference_mode()
    def score(self, tokens: list[int], more: int) -> dict[str, list[Any]]:
        """Log-probabilities (natural, float32) of each token but the first (`prompt`), the likeliest token at each of
        these places (`top`), `more` greedy tokens after them (`tokens`) and theirs (`chosen`). Uses no cache. A value
        that is not a number is None."""
        whole = list(tokens)
        found = self._log_probabilities(whole)
        prompt = [_number(found[place, token]) for place, token in enumerate(tokens[1:])]
        score: dict[str, list[Any]] = {"prompt": prompt, "top": found[:-1].argmax(dim=-1).tolist()}
        chosen: list[float | None] = []
        for _ in range(more):
            value, token = found[-1].max(dim=-1)
            whole.append(int(token))
            chosen.append(_number(value))
            found = self._log_probabilities(whole)
        return score | {"tokens": whole[len(tokens) :], "chosen": chosen}

    def _log_probabilities(self, tokens: list[int]) -> torch.Tensor:
        """Of the token after each of these: float32 [tokens, vocabulary], on the CPU."""
        logits = self.module(input_ids=torch.tensor([tokens], device=self._device), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1).cpu()

    def new_cache(self) -> Any:
        """An empty key-value cache for one request."""
        from transformers import DynamicCache

        return DynamicCache(config=self.module.config)

    def parameter_bytes(self) -> int:
        """Memory that the parameters occupy now, bytes; 0 while they are discarded."""
        return sum(parameter.nbytes for parameter in self._parameters.values() if not parameter.is_meta)

    def discard(self) -> None:
        """Frees the parameters' memory. They are meta tensors until `restore`: the loader can still be recorded, and
        computing with them is an error. Buffers, which follow from the configuration, stay."""
        self._replace(lambda parameter: torch.empty_like(parameter, device="meta"))

    def restore(self) -> None:
        """Allocates discarded parameters again and fills them with NaN, so that one that is not loaded is noticed."""
        if any(parameter.is_meta for parameter in self._parameters.values()):
            self._replace(lambda parameter: torch.full_like(parameter, math.nan, device=self._device))

    def _replace(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        replacements: dict[nn.Parameter, nn.Parameter] = {}
        for module in self.module.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in replacements:  # tied ones stay tied
                    replacements[parameter] = nn.Parameter(make(parameter.data), requires_grad=False)
                module.register_parameter(name, replacements[parameter])
        self._parameters = dict(self.module.named_parameters())


def _number(value: torch.Tensor) -> float | None:
    """For JSON, which has no number for what is not one."""
    return float(value) if bool(torch.isfinite(value)) else None


def _check_shape(name: str, shape: Iterable[int], target_shape: Iterable[int]) -> None:
    if tuple(shape) != tuple(target_shape):
        raise ValueError(f"{name}: the model's shape is {tuple(target_shape)}, the given one {tuple(shape)}")


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no safetensors file; --load-format dummy starts without")
    return files


def _build(config: Any, dtype: torch.dtype, initialise: bool) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    auto: Any = AutoModelForCausalLM
    if initialise:
        torch.manual_seed(0)
        return auto.from_config(config, dtype=dtype)
    with no_init_weights():
        module = auto.from_config(config, dtype=dtype)
    module.tie_weights()  # skipped together with the initialisation
    return module


def _rank_config(config: Any, world_size: int) -> Any:
    """The configuration of one rank's model: 1/world_size of the heads, the MLP and the padded vocabulary."""
    local = copy.deepcopy(config)
    for attribute in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(config, attribute, None)
        if not isinstance(value, int) or value % world_size:
            raise UnsupportedModelError(f"{config.model_type}: {attribute} {value} does not divide by {world_size}")
    local.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    local.num_attention_heads = config.num_attention_heads // world_size
    local.num_key_value_heads = config.num_key_value_heads // world_size
    local.intermediate_size = config.intermediate_size // world_size
    multiple = VOCABULARY_MULTIPLE * world_size
    local.vocab_size = -(-config.vocab_size // multiple) * multiple // world_size
    local.bos_token_id = local.eos_token_id = local.pad_token_id = None
    return local


def _slices(whole: Any, local: Any, rank: int, architecture: str) -> dict[str, AxisSlice]:
    """The slice of each global parameter on this rank. Raises UnsupportedModelError for one that cannot be combined."""
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    slices = {}
    for name, parameter in local.named_parameters():
        axes = [axis for axis, (a, b) in enumerate(zip(parameter.shape, shapes[name], strict=True)) if a != b]
        module, kind = name.rsplit(".", 2)[-2:]
        expected = [0] if module in COLUMN_PARALLEL | VOCABULARY_PARALLEL else [1] if module in ROW_PARALLEL else []
        if axes != expected or (module in ROW_PARALLEL and kind != "weight"):
            raise UnsupportedModelError(f"{architecture}: no tensor parallelism for models with {name}")
        if not axes:
            slices[name] = AxisSlice(None)
            continue
        extent, total = parameter.shape[axes[0]], shapes[name][axes[0]]
        start = min(rank * extent, total)
        slices[name] = AxisSlice(axes[0], start, min(extent, total - start))
    return slices


def _connect(module: Any, rank: int, vocabulary: int) -> None:
    """Adds the communication: sums after row-parallel layers, vocabulary-parallel embedding and head."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear or head.bias is not None:
        raise UnsupportedModelError(f"no tensor parallelism for {type(embedding).__name__} and {type(head).__name__}")
    module.set_input_embeddings(VocabularyParallelEmbedding(embedding.weight, rank))
    module.set_output_embeddings(VocabularyParallelHead(head.weight, vocabulary))
    for name, layer in module.named_modules():
        if name.rsplit(".", 1)[-1] in ROW_PARALLEL:
            layer.register_forward_hook(lambda _layer, _arguments, output: _sum_over_ranks(output))

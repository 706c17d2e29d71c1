"""TRL: GRPOTrainer and AsyncGRPOTrainer bring each step's weights to replicas, and get their tokens from them.

It decides when an update is made and what is published. It patches nothing of TRL. There are three seams, from the
simplest: `Rollouts` is a `rollout_func` of GRPOTrainer. `WeightTransfer` is a `weight_transfer` of AsyncGRPOTrainer, on
one rank, from the tensors that TRL gathers. `UpdateCallback` updates from every rank without gathering, with any
trainer of transformers.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch
from transformers import TrainerCallback

from ckpt_engine import UpdateReport
from ckpt_engine.integrations.peft import publishable
from ckpt_engine.integrations.sampling import without_neutral
from ckpt_engine.integrations.updates import RankUpdates

SEED_BITS = 62


class UpdateCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Brings the replicas to the trainer's weights when training begins, and after every `every` optimizer steps.

    Every rank has one and publishes what it holds (shards under FSDP2), so nothing is gathered. The version is the
    trainer's `global_step`.
    """

    def __init__(self, updates: RankUpdates, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every}: give the number of optimizer steps from one update to the next")
        self._updates, self._every = updates, every

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Publishes, and updates from the weights that training begins with."""
        if not self._updates.opened:
            weights = publishable(model, merge=not self._updates.adapter)
            self._updates.open(weights, rank=args.process_index, world_size=args.world_size)
        self._updates.bring(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Updates after every `every` steps."""
        if state.global_step % self._every == 0:
            self._updates.bring(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the session; replicas go on serving what they have."""
        self._updates.close()


class Rollouts:
    """A `rollout_func` of GRPOTrainer: has replicas answer the prompts, with the weights as they are at that step.

    updates: of this rank; each rank of the trainer makes its own Rollouts. urls: where to ask: a gateway, a router, or
    the replicas themselves (then in turns). concurrency: requests at once. timeout: seconds for one answer, waiting for
    an update included. model: what servers call it; None: the first one that they name.

    Each prompt is a request of its own with a seed of its own, so equal prompts get different answers, on every rank.
    Raises RuntimeError with the server's text if a request fails, and if an answer is of other weights than those that
    this trainer brought last, as far as gates and gateways report them; no sample is left out.
    """

    def __init__(
        self,
        updates: RankUpdates,
        urls: str | Sequence[str],
        *,
        concurrency: int = 64,
        timeout: float = 600.0,
        model: str | None = None,
    ) -> None:
        self._updates = updates
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        if not self._urls:
            raise ValueError("urls is empty: give the address of a gateway, or those of the replicas")
        self._client = httpx.Client(timeout=timeout, limits=httpx.Limits(max_connections=concurrency))
        self._threads = ThreadPoolExecutor(concurrency, "ckpt-engine-rollout")
        self._model = model

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """One completion for each prompt: prompt_ids, completion_ids, logprobs (of the sampled tokens, natural)."""
        if not self._updates.opened:
            self._updates.open(
                publishable(trainer.accelerator.unwrap_model(trainer.model), merge=not self._updates.adapter),
                rank=trainer.accelerator.process_index,
                world_size=trainer.accelerator.num_processes,
            )
        if self._updates.version != trainer.state.global_step:
            self._updates.bring(trainer.state.global_step)
        prompt_ids = [_ids(prompt, trainer) for prompt in prompts]
        sampling = _sampling(trainer)
        urls = itertools.cycle(self._urls)
        answers = list(self._threads.map(self._complete, prompt_ids, urls, itertools.repeat(sampling)))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [tokens for tokens, _ in answers],
            "logprobs": [logprobs for _, logprobs in answers],
        }

    def close(self) -> None:
        """Ends the session and the connections."""
        self._updates.close()
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def _complete(self, prompt: list[int], url: str, sampling: dict[str, Any]) -> tuple[list[int], list[float]]:
        served = self._updates.served
        assert served is not None
        adapter = f"{self._updates.adapter}@{served.version}" if self._updates.adapter else ""
        body = {
            **sampling,
            "model": adapter or self._model or self._model_name(url),
            "prompt": prompt,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
            "seed": secrets.randbits(SEED_BITS),
        }
        headers = {}
        if not adapter:  # they mean the version of the base
            # A gateway then skips replicas that it knows to hold other weights; a replica that holds them answers 409.
            headers = {"x-ckpt-engine-lineage": served.lineage, "x-ckpt-engine-min-version": str(served.version)}
        response = self._client.post(f"{url}/v1/completions", json=body, headers=headers)
        if response.status_code not in (200, 409):
            raise RuntimeError(f"{url}/v1/completions answered {response.status_code}: {response.text[:500]}")
        if response.status_code == 409:
            raise RuntimeError(_other_run(f"{url} has other weights ({response.text[:500]})", served))
        choice = response.json()["choices"][0]
        tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if tokens is None or logprobs is None or len(tokens) != len(logprobs):
            raise RuntimeError(f"{url} answers without token ids or their logprobs: {str(choice)[:500]}")
        other = _other_adapter(response, choice, adapter) if adapter else _other_weights(response, choice, served)
        if other:
            raise RuntimeError(_other_run(f"{url} answered with {other}", served))
        return tokens, logprobs

    def _model_name(self, url: str) -> str:
        if self._model is None:
            response = self._client.get(f"{url}/v1/models")
            response.raise_for_status()
            self._model = str(response.json()["data"][0]["id"])
        return self._model


class WeightTransfer:
    """A `weight_transfer` of AsyncGRPOTrainer: updates from what its rank 0 gathers, tensor by tensor.

    TRL calls it on rank 0 only, so this is one rank of its own, whatever the trainer's world is. Versions count TRL's
    synchronisations from 1, as its `model_version` does in a run that is not resumed. At the first one all tensors are
    held at once, to learn their names and shapes; after it one at a time.
    """

    def __init__(self, updates: RankUpdates) -> None:
        self._updates = updates
        self._pairs: Iterable[tuple[str, torch.Tensor]] = ()
        self._count = itertools.count(1)

    def init_weight_transfer(self) -> None:
        """Does nothing: `send_weights` opens the session."""

    def pause(self) -> None:
        """Does nothing: agents pause their engines themselves, once the weights are sealed, for the install only."""

    def resume(self) -> None:
        """Does nothing, see `pause`."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Updates from the pairs, on the calling thread; returns when the replicas serve them."""
        if self._updates.opened:
            self._pairs = iterator
        else:
            self._pairs = list(iterator)
            self._updates.open(lambda: self._pairs)
        try:
            self._updates.bring(next(self._count))
        finally:
            self._pairs = ()

    def destroy(self) -> None:
        """Ends the session."""
        self._updates.close()


def _other_run(finding: str, served: UpdateReport) -> str:
    """Why a replica has not the weights that this trainer brought, and what to do. finding: of the replica."""
    return (
        f"{finding}, and this trainer brought version {served.version} of {served.lineage} last: another run updates "
        "these replicas (give each a pool of its own), or min_replicas was enough without this one (ask through a "
        "gateway, which knows who serves what)"
    )


def _other_adapter(response: httpx.Response, choice: dict[str, Any], adapter: str) -> str:
    """The version of an adapter that made an answer, if it is not this one; empty: it is."""
    name = response.headers.get("x-ckpt-engine-adapter") or (choice.get("ckpt_engine") or {}).get("adapter")
    return "" if name == adapter else str(name or "no adapter")


def _other_weights(response: httpx.Response, choice: dict[str, Any], served: UpdateReport) -> str:
    """The weights that made an answer, if they are not `served`; empty: they are, or the answer does not name them."""
    root, version = (response.headers.get(f"x-ckpt-engine-admitted-{name}", "") for name in ("root", "version"))
    if root and root != served.root:
        return f"weights {root[:8]} of version {version}"
    for span in (choice.get("ckpt_engine") or {}).get("spans", ()):
        wrong_root = span["root"] and span["root"] != served.root
        if wrong_root or (span["lineage"] or served.lineage) != served.lineage or span["max_version"] != served.version:
            return f"version {span['max_version']} of {span['lineage']}"
    return ""


def _ids(prompt: Any, trainer: Any) -> list[int]:
    """Token ids of a text, or of a conversation under the model's chat template."""
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(tokenizer.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True, return_dict=False))


def _sampling(trainer: Any) -> dict[str, Any]:
    """The trainer's sampling arguments. Neutral ones are left out, since not all servers know each."""
    args = trainer.args
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    return {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        **without_neutral({name: getattr(args, name) for name in names}),
    }

"""OpenAI's client asks for versions in `extra_body`: run with a Python that has it, prints a JSON object for each call.

Arguments: "gate" or "gateway", the address of one, and the version that it serves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai

BODY: dict[str, Any] = {"model": "tiny", "prompt": [3, 5, 7], "max_tokens": 4, "temperature": 0}


def main(kind: str, url: str, version: int) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(constraint: dict[str, Any], **more: Any) -> dict[str, Any]:
        extra = {"weight_version": constraint, "return_token_ids": True}
        raw = client.completions.with_raw_response.create(**BODY, **more, extra_body=extra)
        answer = raw.parse()
        found = answer.model_extra or {}
        return {
            "tokens": len(answer.choices[0].model_extra["token_ids"]),
            "start": found.get("weight_version_start"),
            "end": found.get("weight_version_end"),
            "header": raw.headers.get("x-ckpt-engine-end-version"),
        }

    def stream(constraint: dict[str, Any]) -> dict[str, Any]:
        extra = {"weight_version": constraint, "return_token_ids": True}
        *_, last = client.completions.create(**BODY, stream=True, extra_body=extra)
        found = last.model_extra or {}
        return {"start": found.get("weight_version_start"), "end": found.get("weight_version_end")}

    def model() -> dict[str, Any]:
        return {"model": client.models.retrieve("tiny").id}

    headers = {"x-ckpt-engine-lineage": "asked"}
    if kind == "gateway":
        headers["x-ckpt-engine-queue-seconds"] = "0"
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "exact": lambda: ask({"exact_version": version}),
        "least": lambda: ask({"min_version": version - 1, "exact_version": None}),
        "gone": lambda: ask({"exact_version": version - 1}),
        "not yet": lambda: ask({"min_version": version + 1}, extra_headers=headers),
        "stream": lambda: stream({"min_required_version": version}),
        "model": model,
    }
    for name, call in calls.items():
        try:
            found = call()
        except openai.APIStatusError as error:
            code = error.body.get("code") if isinstance(error.body, dict) else None
            found = {"error": type(error).__name__, "status": error.status_code, "code": code}
        print(json.dumps({"call": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

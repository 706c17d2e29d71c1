"""An engine that makes a token for every request each so many milliseconds and does nothing else: what stands before it
is what is measured. `python -m benchmarks.paced_engine --port P`. It speaks SGLang's `/generate`, streamed."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKEN_SECONDS = 0.02
MODEL = "paced"


async def generate(request: Request) -> Response:
    body = await request.json()
    count = (body.get("sampling_params") or {}).get("max_new_tokens", 64)
    seconds = request.app.state.token_seconds
    return StreamingResponse(_tokens(len(body.get("input_ids") or ()), count, seconds), media_type="text/event-stream")


async def _tokens(prompt: int, count: int, seconds: float) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for made in range(1, count + 1):
        await asyncio.sleep(max(0.0, begun + made * seconds - loop.time()))
        over = made == count
        meta = {
            "id": "paced",
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "cached_tokens": 0,
            "finish_reason": {"type": "length", "length": count} if over else None,
            "weight_versions": [{"version": "1", "start": 0, "end": made}],
        }
        event = {"text": "", "output_ids": list(range(made)), "meta_info": meta}
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


async def about(_request: Request) -> Response:
    """Whatever routers and the gateway ask for."""
    facts = {"engine": "reference", "model_path": MODEL, "served_model_name": MODEL, "tp_size": 1, "dp_size": 1}
    card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "nobody"}
    return JSONResponse({**facts, "running": 0, "waiting": 0, "object": "list", "data": [card], "is_generation": True})


async def obeys(request: Request) -> Response:
    """What an agent asks in a pause; nothing follows."""
    await request.json()
    return JSONResponse({})


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-seconds", type=float, default=TOKEN_SECONDS)
    options = parser.parse_args()
    names = "/info /health /ckpt_engine/ready /server_info /get_server_info /model_info /get_model_info /v1/models"
    routes = [Route("/generate", generate, methods=["POST"]), *(Route(name, about) for name in names.split())]
    routes += [Route(name, obeys, methods=["POST"]) for name in ("/pause", "/stamp", "/resume")]
    app = Starlette(routes=routes)
    app.state.token_seconds = options.token_seconds
    uvicorn.run(app, port=options.port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()

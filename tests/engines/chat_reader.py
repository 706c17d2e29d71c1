"""Reads chats with OpenAI's own client, which this process's environment need not have: run it in vLLM's Python.

Arguments: a file of JSON with the gateway's address and the chats' bodies. It prints what the client made of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import openai

    asked = json.loads(Path(sys.argv[1]).read_text())
    client: Any = openai.OpenAI(base_url=f"{asked['url']}/v1", api_key="none", max_retries=0)
    for body in asked["bodies"]:
        if body.get("stream"):
            content, reasoning, arguments, name, finish, usage, identifiers = "", "", "", "", None, None, set()
            for chunk in client.chat.completions.create(**body):
                identifiers.add(chunk.id)
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    content += choice.delta.content or ""
                    reasoning += getattr(choice.delta, "reasoning", None) or ""
                    finish = choice.finish_reason or finish
                    for call in choice.delta.tool_calls or []:
                        name += call.function.name or ""
                        arguments += call.function.arguments or ""
        else:
            answer = client.chat.completions.create(**body)
            choice, usage, identifiers = answer.choices[0], answer.usage, {answer.id}
            content, finish = choice.message.content or "", choice.finish_reason
            reasoning = getattr(choice.message, "reasoning", None) or ""
            calls = choice.message.tool_calls or []
            name = "".join(call.function.name for call in calls)
            arguments = "".join(call.function.arguments for call in calls)
        told = {"content": content, "reasoning": reasoning, "name": name, "arguments": arguments, "finish": finish}
        print(json.dumps({**told, "usage": usage and usage.completion_tokens, "ids": len(identifiers)}), flush=True)


main()

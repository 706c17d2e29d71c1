"""NIXL with nothing around it, on one of two hosts, driven by one JSON line at a time.

{"lend": size}: metadata and address; {"read": [metadata, address, size]}: seconds, in one contiguous read into memory
that is registered once; {"cpu": true}: CPU seconds of this process so far.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time

from ckpt_engine.transport.ucx.memory import map_shared, populate
from ckpt_engine.transport.ucx.nixl import Agent

NAP_SECONDS = 50e-6


def memory(size: int) -> int:
    descriptor = os.memfd_create("bare")
    os.ftruncate(descriptor, size)
    address = map_shared(descriptor, size, True)
    populate(address, size, True)
    return address


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NIXL says things there
    agent: Agent | None = None
    here, peer = 0, ""
    for line in sys.stdin:
        question = json.loads(line)
        answer: object = time.process_time()
        if "lend" in question:
            agent = Agent(name, progress=True)
            size = -(-question["lend"] // mmap.PAGESIZE) * mmap.PAGESIZE
            here = memory(size)
            agent.register([(here, size)])
            answer = [agent.metadata().hex(), here]
        elif "read" in question:
            metadata, there, size = question["read"]
            if agent is None:
                agent, here = Agent(name, progress=False), memory(size)
                agent.register([(here, size)])
                peer = agent.connect(bytes.fromhex(metadata))
            began = time.perf_counter()
            read = agent.prepare(peer, [(here, size)], [(there, size)])
            over = agent.begin(read)
            while not over:
                time.sleep(NAP_SECONDS)
                over = agent.finished(read)
            answer = time.perf_counter() - began
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

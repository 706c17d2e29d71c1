"""Updates while clients stream: what they lose, and where the time goes; the engine's own way in the same run.

    python -m benchmarks.gpu.under_load -o FILE                          # a GPU with vLLM: ours, then vLLM's `ipc`
    python -m benchmarks.gpu.under_load -o FILE --engine sglang          # the same; its `update_weights_from_tensor`
    python -m benchmarks.gpu.under_load -o FILE --engine reference       # the reference engine on a GPU; no rival
    python -m benchmarks.gpu.under_load -o FILE --engine reference --cpu --streams 4 --every 0.5   # a small model

Trainer and servers share GPU 0. Every server is first updated without clients (`idle`), then streams ask it
(streams.py, a process of their own), and after a quiet time an update begins every so many seconds. What changes
between updates is one small tensor, since making 16 GB of new values would itself take the GPU from the server; all
bytes are brought and verified all the same. Servers are loaded one after the other, with CUDA graphs, in both pause
modes that keep requests: `keep` recomputes their caches with the new weights, which is computing of the engine's and
begins when the pause is over; `in_place` goes on over the old caches. Ours is then updated by way of a relay, too.

FILE is written anew after each part, so that a run that is cut off leaves what it had. `fields` in it says what the
numbers are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.gpu.clients_view import FIELDS, Window, seen, windows_of
from benchmarks.gpu.lines import LineProcess
from benchmarks.gpu.measure import CopyCeiling, Series, rounded, versions
from benchmarks.gpu.qwen3_8b import Tree, renew, write_config
from benchmarks.gpu.rivals import (
    ENVIRONMENT,
    SGLANG_SIZES,
    NativeServer,
    NativeSglang,
    backend_arguments,
    read_log,
)
from ckpt_engine import Trainer, UpdateReport
from ckpt_engine.core.prediction import PAUSED
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.timeline.drawing import draw
from tests.cluster import Cluster, Replica, running_cluster
from tests.engines.sglang_server import start_sglang
from tests.engines.vllm_server import start_vllm
from tests.gpu.gpu_server import plain_vllm, start_gpu_vllm
from tests.gpu.sglang_fleet import plain_sglang, start_gpu_sglang
from tests.tiny_model import make_tiny_qwen3

ABOUT = FIELDS | {
    "copy_ceiling_GB_s": "one buffer on the GPU to another, sustained: what transfer and install are held against",
    "idle, loaded": "medians, interquartile ranges and the worst of updates without and with clients; seconds",
    "pause_seconds": "ours: as the report tells it; the rival: from the call of /pause to the answer of /resume",
    "call_seconds": "from the trainer's call to its return",
    "stage_*": "as the report has them",
    "rest_of_pause_seconds": f"the pause less its stages ({', '.join(PAUSED)})",
    "step, *": "slices of the update's timeline by process (docs/timeline.md); those of the agent follow one another",
    "ours, rival; ..._in_place": "pause mode keep; in_place, and the rival's pause without clearing caches",
    "ours_by_relay": "pause mode keep; the host's relay fills itself first, and the pause copies from it",
    "ours_over_rival": "medians, ours by the rival's",
}


MODES = {"keep": "", "in_place": "_in_place"}
"""Pause modes, and what they add to a server's name."""

RELAY_BYTES = 31 << 30
"""Of a relay's memory, for Qwen3-8B's shapes."""


@dataclass(frozen=True)
class Load:
    """streams: that ask at the same time, for at most `tokens` tokens each. updates: that count; `warmup` come before,
    under the same load. every: seconds from the begin of one to that of the next. quiet: seconds before the first and
    after the last. idle: updates without clients before it, of which the first maps everything and does not count."""

    streams: int = 32
    tokens: int = 200
    updates: int = 10
    warmup: int = 2
    every: float = 1.5
    quiet: float = 4.0
    idle: int = 31


@dataclass(frozen=True)
class Server:
    """One that is loaded. update: makes one and tells its seconds."""

    name: str
    url: str
    update: Callable[[], dict[str, float]]
    said: Callable[[], str]


class World(NamedTuple):
    """What one run measures. touch: new values in a small tensor of what the trainer publishes. route: at which clients
    ask (streams.py)."""

    servers: list[Server]
    touch: Callable[[int], None]
    model: str
    about: dict[str, Any]
    route: str = "/v1/completions"


def steps_of(report: UpdateReport) -> dict[str, float]:
    """Seconds of each slice of an update's timeline, by process and name; workers as one, the last counts."""
    found: dict[str, float] = {}
    for track in draw(report.message).tracks:
        who = track.process if track.thread in ("update", "weights", "agent") else f"{track.process} {track.thread}"
        for whole in track.slices:
            for part in whole.parts:
                found[f"step, {who}: {part.name}"] = part.end - part.begin
    return found


def ours(trainer: Trainer, replica: Replica, size: int, seconds: float) -> list[Server]:
    """Our replica, once for each pause mode and once by way of a relay. size: bytes that each update has to bring."""
    ways = {f"ours{added}": {"pause_mode": mode, "prefetch": "never"} for mode, added in MODES.items()}
    ways["ours_by_relay"] = {"pause_mode": "keep", "prefetch": "always"}
    return [
        Server(name, replica.url, _ours(trainer, replica, size, {"timeout": seconds, **options}), replica.tail)
        for name, options in ways.items()
    ]


def _ours(trainer: Trainer, replica: Replica, size: int, options: Any) -> Callable[[], dict[str, float]]:
    def update() -> dict[str, float]:
        began = time.perf_counter()
        report = trainer.update_weights(**options)
        call = time.perf_counter() - began
        assert report.ok, f"{report}\n{replica.tail()}"
        assert report.verified
        assert report.nbytes == size, f"{report.nbytes} of {size} bytes: {report}"
        (outcome,) = report.replicas
        used = {use.transport for use in outcome.transports}
        assert ("relay_memory" in used) == (options["prefetch"] == "always"), used
        staged = sum(outcome.stages.get(stage, 0.0) for stage in PAUSED)
        return {
            "pause_seconds": outcome.pause_seconds,
            "call_seconds": call,
            "report_seconds": report.seconds,
            "sync_seconds": outcome.sync_seconds,
            **{f"stage_{name}": value for name, value in outcome.stages.items()},
            "rest_of_pause_seconds": outcome.pause_seconds - staged,
            **steps_of(report),
        }

    return update


def touching(model: nn.Module) -> Callable[[int], None]:
    """Of the last vector (the final norm): every model has one."""
    *_, small = (parameter for parameter in model.parameters() if parameter.dim() == 1)

    def touch(seed: int) -> None:
        with torch.no_grad():
            generator = torch.Generator(device=small.device).manual_seed(seed)
            small.normal_(1.0, 0.02, generator=generator)
            if small.is_cuda:
                torch.cuda.synchronize(small.device)

    return touch


Rival = tuple[str, Callable[[bool], float], Callable[[], str]]
"""Where a rival's server answers; an update of it (whether caches are kept) to its seconds; what it printed."""


@contextlib.contextmanager
def vllm_on_a_gpu(path: Path, rival: bool) -> Iterator[World]:
    """Ours and, if asked for, vLLM's `ipc`, both with CUDA graphs."""

    def plain(stack: contextlib.ExitStack, config: Path) -> Callable[[nn.Module], Rival]:
        environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "0"}
        server = plain_vllm(config, path / "rival.log", *backend_arguments("ipc"), environment=environment)
        started = stack.enter_context(server)

        def up(model: nn.Module) -> Rival:
            started.wait(UP_SECONDS)
            native = NativeServer(started.url, model)
            send = native.ipc()
            return started.url, partial(native.update, send), lambda: read_log(started.log)

        return up

    with _on_a_gpu(path, "vllm", start_gpu_vllm, plain if rival else None) as world:
        yield world


@contextlib.contextmanager
def sglang_on_a_gpu(path: Path, rival: bool) -> Iterator[World]:
    """Ours and, if asked for, SGLang's `update_weights_from_tensor`, both with CUDA graphs."""

    def plain(stack: contextlib.ExitStack, config: Path) -> Callable[[nn.Module], Rival]:
        started = stack.enter_context(plain_sglang(config, path / "rival.log", *SGLANG_SIZES))

        def up(model: nn.Module) -> Rival:
            started.wait(UP_SECONDS)
            native = NativeSglang(started.url, model)
            return started.url, native.update, lambda: read_log(started.log)

        return up

    def start(cluster: Cluster, name: str, config: Path, **given: Any) -> Replica:
        return start_gpu_sglang(cluster, name, config, *SGLANG_SIZES, **given)

    with _on_a_gpu(path, "sglang", start, plain if rival else None) as world:
        yield world._replace(route="/generate")


UP_SECONDS = 400.0
"""Until servers of one run answer."""


@contextlib.contextmanager
def _on_a_gpu(
    path: Path,
    engine: str,
    start: Callable[..., Replica],
    plain: Callable[[contextlib.ExitStack, Path], Callable[[nn.Module], Rival]] | None,
) -> Iterator[World]:
    """start: our server. plain: starts the rival's; what it returns waits until that is up."""
    config = write_config(path / "model")
    with contextlib.ExitStack() as stack:
        up = plain(stack, config) if plain is not None else None
        stack.enter_context(relays_below(path))
        cluster = stack.enter_context(running_cluster(path / "cluster"))
        replica = start(cluster, engine, config, visible="0")
        threads = {"OMP_NUM_THREADS": str(min(16, len(os.sched_getaffinity(0))))}
        relay = cluster.relay("a", "--deltas", "never", "--memory", f"{RELAY_BYTES}B", environment=threads)
        model = Tree("cuda:0")
        renew(model, 1)
        replica.registered(UP_SECONDS)
        relay.registered()
        trainer = stack.enter_context(Trainer(cluster.address, lineage="under-load"))
        trainer.publish(model, move=True)
        size = sum(parameter.nbytes for parameter in model.parameters())
        servers = ours(trainer, replica, size, 60)
        if up is not None:
            url, update, said = up(model)

            def told(keeps_caches: bool) -> dict[str, float]:
                return {"pause_seconds": update(keeps_caches)}

            rivals = [
                Server(f"rival{added}", url, partial(told, mode == "in_place"), said) for mode, added in MODES.items()
            ]
            servers = [*servers[:2], *rivals, *servers[2:]]
        about: dict[str, Any] = {"engine": engine, "rival": RIVALS[engine] if up is not None else "none"}
        about |= {"bytes": size, "copy_ceiling_GB_s": CopyCeiling("cuda:0", "cuda:0", 2 << 30).sustained()}
        yield World(servers, touching(model), "tiny", {**about, "versions": versions(engine)})


RIVALS = {"vllm": "vLLM ipc", "sglang": "SGLang update_weights_from_tensor"}


def relays_below(path: Path) -> Any:
    """A directory of relays of this run's own, for what is started meanwhile."""
    return patch.dict(os.environ, {DIRECTORY: str(path / "relays")})


@contextlib.contextmanager
def engine_on_the_cpu(path: Path, engine: str) -> Iterator[World]:
    """A small model; the engines' own backends need a GPU, so there is no rival."""
    start = {"vllm": start_vllm, "sglang": start_sglang}[engine]
    with _small(path, lambda cluster, config: start(cluster, engine, config)) as world:
        yield world._replace(route="/generate" if engine == "sglang" else world.route)


@contextlib.contextmanager
def reference(path: Path, cpu: bool) -> Iterator[World]:
    """The reference engine: a small model on the CPU, or Qwen3-8B's shapes on GPU 0."""
    if cpu:
        with _small(path, lambda cluster, config: cluster.replica("r", "reference", config)) as world:
            yield world
        return

    def start(cluster: Cluster, name: str, config: Path, visible: str) -> Replica:
        environment = {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": str(min(16, len(os.sched_getaffinity(0))))}
        return cluster.replica(name, "reference", config, "--device", "cuda", environment=environment)

    with _on_a_gpu(path, "reference", start, None) as world:
        yield world._replace(model=str(path / "model"))


@contextlib.contextmanager
def _small(path: Path, start: Callable[[Any, Path], Replica]) -> Iterator[World]:
    model = make_tiny_qwen3(path / "model", 1, weights=False)
    with relays_below(path), running_cluster(path / "cluster") as cluster:
        replica = start(cluster, path / "model")
        cluster.relay("a", "--deltas", "never", "--memory", "64MB").registered()
        replica.registered(300)
        with Trainer(cluster.address, lineage="under-load") as trainer:
            trainer.publish(model, move=True)
            size = sum(parameter.nbytes for parameter in model.parameters())
            servers = ours(trainer, replica, size, 120)
            about = {"engine": "a small model on the CPU", "rival": "none", "bytes": size, "torch": torch.__version__}
            name = "tiny" if "vllm" in replica.name else str(path / "model")
            yield World(servers, touching(model), name, about)


def loaded(server: Server, world: World, load: Load, path: Path) -> dict[str, Any]:
    """One server's numbers: see ABOUT."""
    idle, busy = Series(), Series()
    seeds = iter(range(1, 1 << 30))

    def update(series: Series) -> None:
        world.touch(next(seeds))
        try:
            series.add(**server.update())
        except Exception as error:
            raise AssertionError(f"{server.name}: {error}\n{server.said()}") from error

    for _ in range(max(2, load.idle)):
        update(idle)
    file, log = path / f"{server.name}.requests.json", path / f"{server.name}.clients.log"
    asked = [server.url, world.model, str(load.streams), str(load.tokens), str(file), world.route]
    clients = LineProcess(log, ["benchmarks.gpu.streams", *asked])
    try:
        begun = clients.hear(90)
        assert not begun["problem"], f"{server.name}: {begun['problem']}\n{server.said()}"
        time.sleep(1.0)  # streams begin apart, and half of an answer is over when all of them run
        quiet = time.perf_counter()
        time.sleep(load.quiet)
        begins: list[float] = []
        for number in range(load.warmup + load.updates):
            begins.append(time.perf_counter())
            update(busy)
            late = time.perf_counter() - begins[-1] > load.every and number + 1 < load.warmup + load.updates
            if late:
                print(f"{server.name}: update {number} took longer than {load.every} s", flush=True)
            time.sleep(max(0.0, begins[-1] + load.every - time.perf_counter()))
        end = time.perf_counter()
        time.sleep(load.quiet)
        over = time.perf_counter()
        clients.say("end")
        done = clients.hear(60)
        assert not done["problem"], f"{server.name}: {done['problem']}"
    finally:
        clients.close()
    requests = json.loads(file.read_text())
    windows = windows_of(begins, end)[load.warmup :]
    found = seen(requests, Window(quiet, begins[0]), windows, Window(end, over))
    return {
        **found,
        "idle": {"first": idle.first(), **idle.last(max(2, load.idle) - 1)},
        "loaded": busy.last(load.updates),
    }


def measure(world: World, load: Load, path: Path, wrote: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All servers, one after the other, also after one that failed: then AssertionError at the end. wrote: is given all
    that there is after each."""
    result: dict[str, Any] = {"about": world.about, "load": asdict(load), "fields": ABOUT}
    failed: list[str] = []
    for server in world.servers:
        try:
            result[server.name] = rounded(loaded(server, world, load, path))
        except (AssertionError, ValueError) as error:
            failed.append(f"{server.name}: {error}")
            result["failed"] = [each[:2000] for each in failed]
        else:
            _print(server.name, result[server.name])
        wrote(result)
    for added in MODES.values():
        if not {f"ours{added}", f"rival{added}"} <= result.keys():
            continue
        mine, theirs = result[f"ours{added}"], result[f"rival{added}"]
        result[f"ours_over_rival{added}"] = rounded(
            {
                **{
                    name: mine[name]["median"] / theirs[name]["median"]
                    for name in ("lost_milliseconds", "near_lost_milliseconds", "worst_gap_milliseconds")
                    if theirs[name]["median"] > 0
                },
                "pause": mine["loaded"]["pause_seconds"]["median"] / theirs["loaded"]["pause_seconds"]["median"],
            }
        )
    wrote(result)
    assert not failed, "\n".join(failed)
    return result


def _print(name: str, found: dict[str, Any]) -> None:
    def told(what: str) -> str:
        return f"{found[what]['median']:.1f} ({found[what]['iqr']:.1f})"

    pause = {kind: 1e3 * found[kind]["pause_seconds"]["median"] for kind in ("idle", "loaded")}
    worst = 1e3 * found["idle"]["pause_seconds"]["worst"]
    print(
        f"RESULT {name}: lost {told('lost_milliseconds')} ms, near {told('near_lost_milliseconds')} ms, "
        f"worst gap {told('worst_gap_milliseconds')} ms "
        f"(quiet {told('quiet_worst_gap_milliseconds')}), pause {pause['loaded']:.1f} ms "
        f"(idle {pause['idle']:.1f}, worst of {found['idle']['pause_seconds']['rounds']}: {worst:.1f}), "
        f"{found['rate']['both']:.0f} tokens/s, requests {found['requests']}",
        flush=True,
    )
    stages = {
        key: f"{1e3 * each['median']:.1f} (idle {1e3 * found['idle'].get(key, each)['median']:.1f})"
        for key, each in found["loaded"].items()
        if key != "pause_seconds"
    }
    for key, value in stages.items():
        print(f"  {key}: {value} ms", flush=True)


def world_of(engine: str, cpu: bool, rival: bool, path: Path) -> contextlib.AbstractContextManager[World]:
    """The servers that the command line asks for."""
    if engine == "reference":
        return reference(path, cpu)
    if cpu:
        return engine_on_the_cpu(path, engine)
    return sglang_on_a_gpu(path, rival) if engine == "sglang" else vllm_on_a_gpu(path, rival)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--engine", choices=("vllm", "sglang", "reference"), default="vllm")
    parser.add_argument("--cpu", action="store_true", help="a small model on the CPU")
    parser.add_argument("--no-rival", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="SERVER", help="ours, rival, ours_by_relay, ours_in_place …")
    for name, value in asdict(Load()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --cpu takes a small model without one")
    load = Load(**{name: getattr(options, name) for name in asdict(Load())})
    with TemporaryDirectory(prefix="load") as directory:
        path = Path(directory)

        def wrote(result: dict[str, Any]) -> None:
            options.output.write_text(json.dumps(result, indent=1) + "\n")

        with world_of(options.engine, options.cpu, not options.no_rival, path) as world:
            if options.only:
                world = world._replace(servers=[each for each in world.servers if each.name in options.only])
            measure(world, load, path, wrote)


if __name__ == "__main__":
    main()

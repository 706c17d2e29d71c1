"""The order of the rooms: imports go downward only, nowhere in a circle, and what decides loads no tensors.

A room is a folder of ckpt_engine, or a module that lies in none.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent

ROOMS = (
    "v1",
    "trace",
    "core",
    "options",
    "torch_dtypes",
    "torch_storages",
    "machines",
    "security",
    "addresses",
    "scraping",
    "http_server",
    "http_client",
    "leader",
    "connection",
    "grpc_loops",
    "extras",
    "channel",
    "shell",
    "cuda",
    "host",
    "digest",
    "copy",
    "delta",
    "transport",
    "gate",
    "engine",
    "record",
    "install",
    "source",
    "report",
    "timeline",
    "replica_wait",
    "client_calls",
    "client",
    "trainer",
    "publishing",
    "planning",
    "relay",
    "reading",
    "agent",
    "manager",
    "gateway",
    "integrations",
    "doctor",
    "demo",
    "commands",
    "cli",
    "__main__",
)
"""Lowest first: a room imports from those before it. `ckpt_engine` itself is the public interface, on top of all."""

BESIDE = (("manager", "agent"), ("manager", "trainer"), ("manager", "source"), ("agent", "trainer"))
BESIDE += (("install", "machines"), ("install", "client"), ("install", "security"), ("install", "shell"))
BESIDE += (("manager", "transport"), ("manager", "install"), ("manager", "record"), ("manager", "digest"))
"""Rooms of which the first may import nothing of the second, although that would be downward."""

PURE = ("core", "machines")
HEAVY = ("torch", "numba", "triton")
"""What decides imports none of these: a manager plans for clusters without them, and a relay starts in no time."""

WITHOUT_TENSORS = (
    "ckpt_engine.manager.service",
    "ckpt_engine.agent.session",
    "ckpt_engine.agent.following",
    "ckpt_engine.commands.agent",
    "ckpt_engine.planning.question",
    "ckpt_engine.planning.words",
    "ckpt_engine_adapters.reference.driver",
    "ckpt_engine_adapters.vllm.driver",
    "ckpt_engine_adapters.sglang.driver",
    "ckpt_engine_adapters.transformers_serve.driver",
)
"""What a manager and the agent beside an engine load: tensors would cost each of them seconds and 130 MB."""


@cache
def modules() -> dict[str, Path]:
    found = {}
    for top in (ROOT, ROOT / "adapters"):
        for path in top.glob("ckpt_engine*/**/*.py"):
            name = ".".join(path.relative_to(top).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """What a module imports, wherever in it: also within functions, and for types only."""
    return frozenset(_imports(ast.parse(modules()[name].read_text())))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                yield whole if whole in modules() else node.module


def room_of(module: str) -> str:
    """Empty: the package itself, or no module of its."""
    parts = module.split(".")
    return parts[1] if parts[0] == "ckpt_engine" and len(parts) > 1 else ""


def test_every_room_has_its_place_in_the_order() -> None:
    rooms = {room_of(module) for module in modules()} - {""}
    assert not rooms - set(ROOMS), "say where they are in the order"
    assert len(modules()) > 250


def test_the_page_lists_the_rooms_in_their_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().split("\n## Where things lie\n")[1].split("\n## ")[0]
    first_cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    named = [name for cell in first_cells for name in re.findall(r"`(?:proto/ckpt_engine/)?([\w/]+)(?:\.py)?`", cell)]
    assert named == [*ROOMS, "adapters/ckpt_engine_adapters"]


def test_every_package_is_installed() -> None:
    """Here all of it is imported from the checkout, so nothing else would miss one."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == {name for name, path in modules().items() if path.name == "__init__.py"}


def test_imports_go_downward() -> None:
    place = {room: number for number, room in enumerate(ROOMS)}
    upward = {
        f"{module} imports {other}"
        for module in modules()
        for other in imports(module)
        if room_of(module) and room_of(other) and place[room_of(other)] > place[room_of(module)]
    }
    assert not upward
    beside = {
        f"{module} imports {other}"
        for module in modules()
        for other in imports(module)
        if (room_of(module), room_of(other)) in BESIDE
    }
    assert not beside


def test_no_module_imports_itself_by_way_of_others() -> None:
    order = TopologicalSorter({module: imports(module) & modules().keys() for module in modules()})
    order.prepare()  # raises CycleError, which names the circle


def test_what_decides_and_who_only_commands_loads_no_tensors_and_no_compiler() -> None:
    """What it imports itself, and in a fresh interpreter what that imports."""
    pure = sorted(module for module in modules() if room_of(module) in PURE)
    assert len(pure) > 50
    named = {f"{each} imports {other}" for each in pure for other in imports(each) if other.split(".")[0] in HEAVY}
    assert not named
    code = f"import importlib, sys\nfor name in {[*pure, *WITHOUT_TENSORS]}: importlib.import_module(name)\n"
    code += "from ckpt_engine.transport.on_host import worker_transports; worker_transports()\n"
    code += f"print(*(name for name in {HEAVY} if name in sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=True)
    assert told.stdout.split() == []


def test_what_runs_inside_engines_needs_no_package_of_ours() -> None:
    """SGLang's and vLLM's environments have torch, numpy and protobuf, and need none of what our servers need."""
    absent = (
        "grpc",
        "grpc_health",
        "fastapi",
        "starlette",
        "uvicorn",
        "httpx",
        "httptools",
        "typer",
        "prometheus_client",
    )
    code = f"import sys\nfor name in {absent}: sys.modules[name] = None\n"
    code += "import ckpt_engine.install.worker, ckpt_engine.gate.gate\n"
    code += "import ckpt_engine.transport.collective.on_host, ckpt_engine.transport.collective.on_gpu\n"
    code += "from ckpt_engine.transport.registry import all_transports; print(sorted(all_transports()))"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert told.returncode == 0, told.stderr[-2000:]
    assert "shared_memory" in told.stdout

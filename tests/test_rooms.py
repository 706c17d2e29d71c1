"""Which module may import which: no circles, and what decides loads no tensors and no compiler."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "numba", "triton")
DIGESTS = ("digest", "digest_cuda", "digest_host", "digest_host_jobs", "digest_host_kernel", "digest_kernel")
OF_TENSORS = {f"ckpt_engine.core.{name}" for name in (*DIGESTS, "prepared_digests")}


def modules() -> dict[str, Path]:
    found = {}
    for top in (ROOT, ROOT / "adapters"):
        for path in top.glob("ckpt_engine*/**/*.py"):
            name = ".".join(path.relative_to(top).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that this one imports, wherever in it: also within functions, and for types only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                yield whole if whole in known else node.module


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    assert len(known) > 250
    order = TopologicalSorter(
        {name: {other for other in imported(path, known) if other in known} for name, path in known.items()}
    )
    order.prepare()  # raises CycleError, which names the circle


def test_what_decides_loads_no_tensors_and_no_compiler() -> None:
    """In a fresh interpreter: whatever these modules import, and what that imports."""
    pure = sorted(name for name in modules() if name.startswith("ckpt_engine.core") and name not in OF_TENSORS)
    assert len(pure) > 50
    code = f"import importlib, sys\nfor name in {pure}: importlib.import_module(name)\n"
    code += f"print(*(name for name in {HEAVY} if name in sys.modules))"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.split() == []

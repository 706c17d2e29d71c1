"""Rules of the house that a linter does not know: nothing pickles, no shell, no file is too long."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [ROOT / "ckpt_engine", ROOT / "adapters" / "ckpt_engine_adapters"]
SOURCES = sorted(
    path for package in PACKAGES for path in package.rglob("*.py") if "_pb2" not in path.name
)  # generated code has no say in this

NOT_INSIDE_ENGINES = {"grpc", "fastapi", "httpx", "uvicorn"}
"""An engine's environment need not have them; these rooms are inside engines."""

INSIDE_ENGINES = frozenset(
    ("core", "machines", "host", "cuda", "digest", "copy", "transport", "gate", "engine", "record", "install")
)


PICKLES = {"adapters/ckpt_engine_adapters/sglang/payload.py"}
"""Files that may pickle, since the engine's own API takes nothing else. They may not load pickles either."""


SHELLS = {
    *(f"os.{name}" for name in ("system", "popen")),
    *(f"subprocess.{name}" for name in ("getoutput", "getstatusoutput")),
    "asyncio.create_subprocess_shell",
}


ENGINES = re.compile(r"vllm|sglang|\breference[ -]engine|^reference$", re.IGNORECASE)
"""Names of engines, as they stand in code: in names, and in texts that are no docstrings."""

NAMES_ENGINES = {
    "ckpt_engine/commands/agent.py": "an example of a command, as people type it",
    "ckpt_engine/engine/kinds.py": "the engine that `plan` plans for where nobody says",
    "ckpt_engine/demo/servers.py": "the engine of the demo where nobody says: it is installed with the demo",
}
"""Files of the core that name an engine, and why. Whatever else is to be known of one, its adapter says."""


TRANSPORTS = re.compile(r"(?<![\w.-])(cuda_ipc|nccl|relay_memory|shared_memory|tcp|ucx)(?!\w|://)|^file$")
"""Names of transports, as they stand in texts that are no docstrings."""

NAMES_TRANSPORTS = {
    "ckpt_engine/agent/ports.py": "the kernel's table of sockets",
    "ckpt_engine/core/reach.py": "what its rules say is to be done instead",
    "ckpt_engine/doctor/ucx_checks.py": "transports of UCX itself",
    "ckpt_engine/trainer/lineage.py": "a backend of torch.distributed",
    "ckpt_engine/transport/cuda_ipc/memory.py": "what is to be done instead",
    "ckpt_engine/transport/cuda_ipc/reader.py": "what is to be done instead",
}
"""Files that name a transport outside of its folder, and why. Whatever else is to be known of one, its kind says."""

LOADS_TRANSPORTS = {
    "ckpt_engine/commands/relay.py": "--ucx-devices is an option for one transport",
    "ckpt_engine/relay/archive.py": "versions on the disk of a relay, which it alone reads",
    "ckpt_engine/relay/process.py": "the same",
    "ckpt_engine/doctor/ucx_checks.py": "rows about one transport, which its kind names",
    "ckpt_engine/install/part.py": "a worker's part in a collective",
    "ckpt_engine/relay/door.py": "the owner's side of a relay's memory",
    "ckpt_engine/source/device.py": "memory of GPUs: which allocations tensors lie in",
    "ckpt_engine/source/directory.py": "the files of a checkpoint, as a source reads them itself",
    "ckpt_engine/source/host_memory.py": "memory of the host, which sources own",
    "ckpt_engine/source/rehome.py": "the same",
    "ckpt_engine/source/ways.py": "the same",
    "ckpt_engine/trainer/part.py": "a rank's part in a collective",
    "ckpt_engine/trainer/sealer.py": "the same",
}
"""Files that import from the folder of one transport, and why."""


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def folder_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "ckpt_engine" and len(parts) > 2 else ""


# One test for all files: a test each would be a fifth of all tests, and a message names the file as well.
def test_nothing_pickles_and_engines_need_little() -> None:
    for path in SOURCES:
        folder = folder_of(path)
        for name in imports(path):
            top, *_ = name.split(".")
            if top in ("pickle", "cloudpickle", "dill", "marshal", "shelve"):
                assert str(path.relative_to(ROOT)) in PICKLES, f"{path} imports {name}"
                assert top == "pickle", f"{path} imports {name}"
                used = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}
                assert "dumps" in used, f"{path} imports pickle and writes none"
                assert not used & {"load", "loads", "Unpickler"}, f"{path} loads pickles"
            if folder in INSIDE_ENGINES:
                assert top not in NOT_INSIDE_ENGINES, f"{path} imports {name}, which engines need not have"


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in nodes(path) if isinstance(node, ast.Call))


def test_no_command_goes_through_a_shell() -> None:
    for path in SOURCES:
        for call in calls(path):
            name = ast.unparse(call.func)
            assert name not in SHELLS, f"{path}:{call.lineno} calls {name}"
            for keyword in call.keywords:
                assert keyword.arg != "shell", f"{path}:{call.lineno} says something about a shell"


def test_no_file_is_too_long_to_have_one_idea() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    long = {name: length for name, length in lengths.items() if length > 700}
    assert not long


def test_a_class_has_a_name_of_its_own() -> None:
    """One meaning a name, in the whole code base; `_Leg` in one module and `Leg` in another are one name."""
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


NO_NAMES = {
    "told",
    "said",
    "over",
    "beside",
    "late",
    "back",
    "gone",
    "who",
    "whose",
    "whom",
    "meant",
    "doing",
    "here",
    "there",
    "asked",
    "wanted",
    "kept",
    "given",
    "brought",
    "begun",
    "shown",
    "made",
    "seen",
    "left",
}
"""Participles, adverbs and pronouns that say nothing of what they stand for (`remaining`, `request` or `target` do)."""


def bound_names(path: Path) -> Iterator[tuple[int, str]]:
    """What a module binds: functions, classes, parameters, variables and attributes, with their lines."""
    for node in nodes(path):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def test_names_are_nouns_and_verbs() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, name in bound_names(path)
        if name.strip("_") in NO_NAMES
    ]
    assert not found


def test_files_that_are_begun_first_are_there() -> None:
    names = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(LONGEST) <= names


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()
    pages = [str(page.relative_to(index.parent)) for page in sorted(index.parent.rglob("*.md")) if page != index]
    assert [page for page in pages if f"]({page})" not in index.read_text()] == []


def test_test_files_have_names_of_their_own() -> None:
    """Folders of tests are no packages, so pytest cannot collect two files of one name together."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def docstrings(path: Path) -> set[ast.AST]:
    """The texts that stand alone as statements: of modules, classes and functions, and below what they explain."""
    return {node.value for node in nodes(path) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Every name and every text in a file's code, with its line."""
    documentation = docstrings(path)
    for node in nodes(path):
        match node:
            case ast.Constant(value=str(text)) if node not in documentation:
                yield node.lineno, text
            case ast.Name(id=text) | ast.Attribute(attr=text):
                yield node.lineno, text
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
                yield node.lineno, text
            case ast.alias(name=text) | ast.arg(arg=text):
                yield node.lineno, text


def test_the_core_names_no_engine() -> None:
    """An adapter is one folder: what is to be known of an engine is asked of it, by its entry point."""
    core = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == "ckpt_engine"]
    named = {
        str(path.relative_to(ROOT)): f"{path}:{line}: {text!r}"
        for path in core
        for line, text in words(path)
        if ENGINES.search(text)
    }
    assert [said for path, said in named.items() if path not in NAMES_ENGINES] == []
    assert NAMES_ENGINES.keys() <= named.keys(), "these name none any more"


def test_transports_are_named_in_their_folders() -> None:
    """What is to be known of a transport is asked of its kind, which its entry point names."""
    core = {str(path.relative_to(ROOT)): path for path in SOURCES if path.relative_to(ROOT).parts[0] == "ckpt_engine"}
    folders = sorted(
        path.name for path in (ROOT / "ckpt_engine" / "transport").iterdir() if (path / "kind.py").exists()
    )
    own = {"collective": "nccl"}
    named: dict[str, str] = {}
    loading: set[str] = set()
    for name, path in core.items():
        folder = path.parent.name if path.parent.parent.name == "transport" else ""
        documentation = docstrings(path)
        for node in nodes(path):
            match node:
                case ast.Constant(value=str(text)) if node not in documentation:
                    others = {found[0] for found in TRANSPORTS.finditer(text)} - {own.get(folder, folder)}
                    if others:
                        named[name] = f"{path}:{node.lineno}: {text!r}"
                case ast.ImportFrom(module=str(module)) if path.relative_to(ROOT).parts[1] != "transport":
                    if module.removeprefix("ckpt_engine.transport.").split(".")[0] in folders:
                        loading.add(name)
    assert [said for name, said in named.items() if name not in NAMES_TRANSPORTS] == []
    assert named.keys() >= NAMES_TRANSPORTS.keys(), "these name none any more"
    assert loading == LOADS_TRANSPORTS.keys()


def test_every_folder_of_an_adapter_or_a_transport_has_its_entry_point() -> None:
    """Here all of it is imported from the checkout, so a folder that is not named would be missed by nothing else."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, top, place in (
        ("ckpt_engine.engines", ROOT / "adapters", "ckpt_engine_adapters/*/kind.py"),
        ("ckpt_engine.transports", ROOT, "ckpt_engine/transport/*/kind.py"),
    ):
        there = {".".join(path.relative_to(top).with_suffix("").parts) for path in top.glob(place)}
        assert {what.partition(":")[0] for what in points[group].values()} == there
        for name, what in points[group].items():
            assert resolve_name(what).name == name

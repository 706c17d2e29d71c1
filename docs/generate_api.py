"""Writes docs/api.md: the signatures and docstrings of what `ckpt_engine` exports, and of what its calls return.

    python docs/generate_api.py [FILE]

Reads the source, and imports none of it. Decides what the page shows and how; the words are the code's. A test compares
the page with what this writes.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

_OPTIONS = ("UpdateOptions", "RollbackOptions", "PauseMode", "Prefetch", "Until", "Draft")
_REPORTS = ("UpdateReport", "ReplicaReport", "RelayReport", "TransportUse", "PartUse")

SECTIONS = (
    ("Trainer", "trainer/trainer.py", ("Trainer",)),
    ("Probe", "trainer/probe.py", ("Probe", "TokenScores")),
    ("What a probe has found", "core/probe.py", ("ProbeFinding",)),
    ("Client", "client.py", ("Client", "AsyncClient")),
    ("Options", "options.py", (*_OPTIONS, "Progress")),
    (
        "Reports",
        "report.py",
        (*_REPORTS, "AbsentTensors", "CopiedTensors"),
    ),
    ("Reading a version", "reading/reader.py", ("Reader",)),
    ("Reading a version into files", "reading/pulling.py", ("pull",)),
    ("Deadlines", "core/deadlines.py", ("Deadlines",)),
    ("Errors", "core/problems.py", ("CkptEngineError", "ErrorCode")),
)

HEAD = """# API reference

Made from the code by `docs/generate_api.py` (`make api`); do not edit it here. What the calls are for, with examples,
is in [python.md](python.md). Import all of it from `ckpt_engine`; what is not exported there is returned by what is.
Types of the protocol (`manager_pb2`) are described in `proto/ckpt_engine/v1`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, file, names in SECTIONS:
        parts.append(f"## {title}\n")
        module = _Module(ROOT / "ckpt_engine" / file)
        for name in names:
            parts += module.paragraphs(name)
    return "\n".join(parts).rstrip() + "\n"


class _Module:
    """One source file: its top level by name, and the comments behind its lines and above them."""

    def __init__(self, path: Path) -> None:
        source = path.read_text()
        self._body = ast.parse(source).body
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = [token for token in tokens if token.type == tokenize.COMMENT]
        self._behind, self._whole_lines = (
            {
                token.start[0]: token.string.lstrip("# ")
                for token in comments
                if bool(token.line[: token.start[1]].strip()) is behind
            }
            for behind in (True, False)
        )

    def paragraphs(self, name: str) -> Iterator[str]:
        """The paragraphs of one name. Raises LookupError if the file has no such."""
        for number, node in enumerate(self._body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield from self._of_class(node)
                return
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield f"### `{name}`\n"
                yield from _of_function(node)
                return
            if isinstance(node, ast.AnnAssign) and _code(node.target) == name and node.value is not None:
                yield f"### `{name}`\n"
                yield f"```python\n{name} = {_code(node.value)}\n```\n"
                yield f"{self._explanation(self._body, number)}\n"
                return
        raise LookupError(name)

    def _of_class(self, node: ast.ClassDef) -> Iterator[str]:
        bases = [_code(base) for base in node.bases if _code(base) not in ("TypedDict", "Exception")]
        yield f"### `{node.name}`{f' (of `{bases[0]}`)' if bases else ''}\n"
        yield f"{ast.get_docstring(node) or ''}\n"
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        for method in methods:
            if method.name == "__init__" and not _only_calls_its_base(node):
                yield from _of_function(method, node.name)
        fields = [f"| `{name}` | {kind} | {said} |" for name, kind, said in self._fields(node)]
        if fields:
            yield "\n".join(["| field | type | |", "|---|---|---|", *fields]) + "\n"
        shown = [each for each in methods if not each.name.startswith("_")]
        properties = [each for each in shown if any(_code(mark) == "property" for mark in each.decorator_list)]
        if properties:
            rows = [f"| `{each.name}` | {_type(each.returns)} | {_line(each)} |" for each in properties]
            yield "\n".join(["| property | type | |", "|---|---|---|", *rows]) + "\n"
        for method in shown:
            if method not in properties:
                yield from _of_function(method)

    def _fields(self, node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
        for number, each in enumerate(node.body):
            if isinstance(each, ast.AnnAssign):
                name = _code(each.target)
                value = "" if each.value is None else f" = {_code(each.value)}"
                kind = f"`{_code(each.annotation)}{value}`".replace("|", "\\|")
            elif isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant):
                name, kind = _code(each.targets[0]), f"`{_code(each.value)}`"
            else:
                continue
            if not name.startswith("_"):
                yield name, kind, self._explanation(node.body, number).replace("\n", " ").replace("|", "\\|")

    def _explanation(self, body: list[ast.stmt], number: int) -> str:
        """What stands behind an assignment, in a text below it, or in the comment right above it."""
        below = body[number + 1] if number + 1 < len(body) else None
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            return inspect.cleandoc(below.value.value)
        if (behind := self._behind.get(body[number].end_lineno or 0)) is not None:
            return behind
        first = line = body[number].lineno
        while line - 1 in self._whole_lines:
            line -= 1
        return " ".join(self._whole_lines[each] for each in range(line, first))


def _only_calls_its_base(node: ast.ClassDef) -> bool:
    """An exception's constructor is ours to call."""
    return any(_code(base) == "Exception" for base in node.bases)


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, shown_as: str = "") -> Iterator[str]:
    """A signature as it would be called, and its docstring."""
    arguments = node.args
    if arguments.args and arguments.args[0].arg == "self":
        arguments = ast.arguments(**{**vars(arguments), "args": arguments.args[1:]})
    returns = "" if shown_as or node.returns is None else f" -> {_code(node.returns)}"
    name = f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}{shown_as or node.name}"
    each = _each(arguments)
    line = f"{name}({', '.join(each)}){returns}"
    if len(line) > 100:
        line = "\n".join([f"{name}(", *(f"    {argument}," for argument in each), f"){returns}"])
    yield f"```python\n{line}\n```\n"
    if said := ast.get_docstring(node):
        yield f"{said}\n"


def _each(arguments: ast.arguments) -> list[str]:
    """The arguments one by one, as the code has them."""
    text, found = _code(arguments), list[str]()
    depth = start = 0
    for place, letter in enumerate(f"{text},"):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            found.append(text[start:place].strip())
            start = place + 1
    return [each.replace("=", " = ", 1) if ":" in each else each for each in found if each]


def _code(node: ast.AST) -> str:
    """As the code base writes it."""
    return ast.unparse(node).replace("'", '"')


def _type(annotation: ast.expr | None) -> str:
    return "" if annotation is None else f"`{_code(annotation)}`".replace("|", "\\|")


def _line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return " ".join((ast.get_docstring(node) or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "api.md"
    file.write_text(page())

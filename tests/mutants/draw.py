"""Small mistakes in Python source, each in one place: which there are in a file, and which of them a seed draws. Pure.

A mutation replaces the text of one node, so that what is around it, comments included, stays as it is. Left out is what
only people read: docstrings, messages, what is logged or traced; and types.
"""

from __future__ import annotations

import ast
import copy
import difflib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

FLIPS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
"""Negated, and with the boundary on the other side."""

SWAPS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}

NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}

TELLS = frozenset({"log", "logger", "print", "trace", "warnings"})
"""A call of one of these, or of one's method, is for people or for tests."""

_Draft = tuple[ast.AST, str]
_Node = ast.expr | ast.stmt


@dataclass(frozen=True)
class Mutation:
    """file: relative to the repository. start, end: of the replaced text, in characters of the file."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str
    text: str
    """Of the line in which it begins, stripped."""

    def apply(self, source: str) -> str:
        """The whole file with the mistake in it."""
        return source[: self.start] + self.new + source[self.end :]

    def difference(self, source: str) -> str:
        """For people."""
        lines = source.splitlines(), self.apply(source).splitlines()
        return "\n".join(difflib.unified_diff(*lines, self.file, self.file, lineterm="", n=2))

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Names it by content, so that it is known again when lines before it come or go."""
        return self.file, self.text, self.old, self.new


def mutations(file: str, source: str) -> list[Mutation]:
    """All of a file, in order."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found: dict[tuple[int, int, str], Mutation] = {}
    for node, new in _drafts(ast.parse(source)):
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        old, text = source[start:end], lines[node.lineno - 1].strip()
        found.setdefault((start, end, new), Mutation(file, node.lineno, start, end, old, new, text))
    return [found[key] for key in sorted(found)]


def draw(sources: Mapping[str, str], seed: int, count: int) -> list[Mutation]:
    """At most one of a line; every line that has some is as likely as any other. The same each time for a seed."""
    everything = [each for file in sorted(sources) for each in mutations(file, sources[file])]
    by_line = [list(group) for _, group in groupby(everything, key=lambda each: (each.file, each.line))]
    dice = random.Random(seed)
    return [dice.choice(of_line) for of_line in dice.sample(by_line, min(count, len(by_line)))]


def _drafts(tree: ast.AST) -> Iterator[_Draft]:
    for node in _code(tree):
        match node:
            case ast.Compare():
                yield from _flipped(node)
            case ast.BoolOp():
                yield from _rejoined(node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, _text(operand)
            case ast.BinOp() if type(node.op) in SWAPS and not _is_text(node):
                yield node, _text(_with(node, op=SWAPS[type(node.op)]()))
            case ast.AugAssign() if type(node.op) in SWAPS:
                yield node, ast.unparse(_with(node, op=SWAPS[type(node.op)]()))
            case ast.Constant(value=bool(value)):
                yield node, str(not value)
            case ast.Constant(value=int(value)):
                yield node, str(value + 1)
                yield node, f"({value - 1})" if value < 1 else str(value - 1)
            case ast.Call(func=ast.Name(id=name)) if name in NAMES:
                yield node.func, NAMES[name]
            case ast.If() | ast.While() | ast.IfExp():
                yield node.test, f"(not {_text(node.test)})"
            case ast.comprehension():
                for condition in node.ifs:
                    yield condition, "True"
            case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
                yield node, "return None"
        if isinstance(node, ast.stmt) and _may_go(node):
            yield node, "pass"


def _flipped(node: ast.Compare) -> Iterator[_Draft]:
    for place, op in enumerate(node.ops):
        for other in FLIPS[type(op)]:
            yield node, _text(_with(node, ops=[*node.ops[:place], other(), *node.ops[place + 1 :]]))


def _rejoined(node: ast.BoolOp) -> Iterator[_Draft]:
    yield node, _text(_with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And()))
    for place in range(len(node.values)):
        rest = [*node.values[:place], *node.values[place + 1 :]]
        yield node, _text(_with(node, values=rest) if len(rest) > 1 else rest[0])


def _may_go(node: ast.stmt) -> bool:
    """Names that are never bound would be noticed by any test, so plain assignments stay."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await() | ast.Yield() | ast.YieldFrom()):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            return True
        case ast.Return(value=None):
            return True
    return False


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below that decide something, in order."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr) and not _tells(child):
                yield from _code(child)


def _tells(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name)))):
            return name in TELLS
        case ast.Expr(value=ast.Constant()):
            return True
    return False


def _is_text(node: ast.BinOp) -> bool:
    sides: Sequence[ast.expr] = (node.left, node.right)
    return any(isinstance(each, ast.JoinedStr) or isinstance(getattr(each, "value", None), str) for each in sides)


def _with(node: _Node, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _text(node: ast.AST) -> str:
    return f"({ast.unparse(node)})"

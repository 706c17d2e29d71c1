"""Mutations are drawn alike each time, are one mistake each, and leave out what only people read."""

from __future__ import annotations

import ast

from tests.mutants.__main__ import SELECTIONS, equivalents, selection, sources
from tests.mutants.draw import draw, mutations

SOURCE = '''
"""Text with 1 and 2."""
LIMIT: int = 3

def decide(a: int, b: int = 0) -> bool:
    """More text."""
    trace("here", 1)
    if a <= b and not b:
        raise ValueError(f"{a + 1} ü is too much")
    self.count += 1
    return min(a, b) == LIMIT
'''


def test_each_kind_of_mistake_is_made_once_and_nothing_else() -> None:
    made = {(each.line, each.old, each.new) for each in mutations("file.py", SOURCE)}
    both = "a <= b and not b"
    assert made == {
        (3, "3", "4"),
        (3, "3", "2"),
        (5, "0", "1"),
        (5, "0", "(-1)"),
        (8, both, "(not (a <= b and (not b)))"),
        (8, both, "(a <= b or not b)"),
        (8, both, "(a <= b)"),
        (8, both, "(not b)"),
        (8, "a <= b", "(a < b)"),
        (8, "a <= b", "(a > b)"),
        (8, "not b", "(b)"),
        (9, 'raise ValueError(f"{a + 1} ü is too much")', "pass"),
        (10, "self.count += 1", "pass"),
        (10, "self.count += 1", "self.count -= 1"),
        (10, "1", "2"),
        (10, "1", "0"),
        (11, "return min(a, b) == LIMIT", "return None"),
        (11, "min(a, b) == LIMIT", "(min(a, b) != LIMIT)"),
        (11, "min", "max"),
    }


def test_every_mistake_can_be_parsed_and_differs() -> None:
    for each in mutations("file.py", SOURCE):
        assert ast.dump(ast.parse(each.apply(SOURCE))) != ast.dump(ast.parse(SOURCE)), each
        assert each.difference(SOURCE).count("\n+") == 2, "the name of the file and one line"
    found = sources()
    for each in draw(found, 5, 60):
        ast.parse(each.apply(found[each.file]))


def test_a_seed_draws_the_same_lines_each_time_and_another_one_others() -> None:
    found = sources("install/")
    drawn = draw(found, 1, 20)
    assert drawn == draw(found, 1, 20)
    assert drawn != draw(found, 2, 20)
    assert len({(each.file, each.line) for each in drawn}) == 20
    assert len(draw({"file.py": SOURCE}, 1, 99)) == 6, "one of each line"


def test_what_is_listed_as_equivalent_is_there_and_has_tests() -> None:
    found = sources()
    known = {each.key for file, source in found.items() for each in mutations(file, source)}
    assert [key for key in equivalents() if key not in known] == [], "the code has changed: judge it anew"
    assert all(selection(file) for file in found)
    assert {prefix for prefix, _ in SELECTIONS if not any(file.startswith(prefix) for file in found)} == set()

"""Names of a version's parts."""

from __future__ import annotations

import pytest

from ckpt_engine.core.parts import in_part, own_name, part_of


@pytest.mark.parametrize(
    ("part", "name", "full"), [("", "a.weight", "a.weight"), ("draft", "a.weight", "draft::a.weight")]
)
def test_a_name_is_in_its_part_and_keeps_its_own(part: str, name: str, full: str) -> None:
    assert in_part(part, name) == full
    assert (part_of(full), own_name(full)) == (part, name)


@pytest.mark.parametrize("name", ["draft", "draft.weight", "drafts::x", "other::x", "::x", "x::draft::y"])
def test_names_that_only_look_like_a_parts_are_the_targets(name: str) -> None:
    assert (part_of(name), own_name(name)) == ("", name)

"""Boxes against sets of points: whatever geometry says, counting elements must say too."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.core.boxes import Box, contains, intersect, overlap, refine, remainder, remove, tile, uncovered, whole

Points = set[tuple[int, ...]]


def points(*boxes: Box) -> Points:
    return {
        point for box in boxes for point in product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True)))
    }


@st.composite
def boxes_in_one_tensor(draw: st.DrawFn, most: int = 5) -> tuple[Box, list[Box]]:
    """A box, and others of the same tensor; axes of length 0 and tensors without axes included."""
    rank = draw(st.integers(0, 3))

    def box() -> Box:
        spans = [sorted((draw(st.integers(0, 5)), draw(st.integers(0, 5)))) for _ in range(rank)]
        return Box(tuple(span[0] for span in spans), tuple(span[1] for span in spans))

    return box(), [box() for _ in range(draw(st.integers(0, most)))]


@given(boxes_in_one_tensor(most=1))
def test_intersection_and_difference_are_those_of_the_elements(drawn: tuple[Box, list[Box]]) -> None:
    a, others = drawn
    assert a.volume == len(points(a))
    for b in others:
        common = intersect(a, b)
        assert points(*([common] if common else [])) == points(a) & points(b)
        assert common is None or common.volume > 0
        left = remove(a, b)
        assert points(*left) == points(a) - points(b)
        assert sum(box.volume for box in left) == len(points(*left))
        assert not contains(a, b) or points(b) <= points(a)


@given(boxes_in_one_tensor())
def test_tiles_are_disjoint_and_every_box_is_a_union_of_them(drawn: tuple[Box, list[Box]]) -> None:
    box, others = drawn
    tiles = tile(box, others)
    assert points(*tiles) == points(box)
    assert sum(each.volume for each in tiles) == box.volume
    assert all(each.volume for each in tiles)
    for other in others:
        inside = [each for each in tiles if points(each) <= points(other)]
        assert points(*inside) == points(box) & points(other)


@given(boxes_in_one_tensor())
def test_uncovered_finds_what_no_box_covers(drawn: tuple[Box, list[Box]]) -> None:
    box, others = drawn
    found = uncovered(box, others)
    missing = points(box) - points(*others)
    assert (found is None) == (not missing)
    if found is not None:
        assert found.volume
        assert points(found) <= missing


@given(boxes_in_one_tensor(most=6))
def test_a_remainder_is_what_no_cover_covers_each_element_once(drawn: tuple[Box, list[Box]]) -> None:
    boxes, covers = refine([drawn[0], *drawn[1][::2]]), drawn[1][1::2]
    left = remainder(boxes, covers)
    assert points(*left) == points(*boxes) - points(*covers)
    assert sum(box.volume for box in left) == len(points(*left))
    assert all(box.volume for box in left)


@given(boxes_in_one_tensor(most=7))
def test_overlap_finds_two_boxes_that_share_an_element(drawn: tuple[Box, list[Box]]) -> None:
    _, boxes = drawn
    found = overlap(boxes)
    shared = any(points(a) & points(b) for index, a in enumerate(boxes) for b in boxes[:index])
    assert (found is not None) == shared
    if found is not None:
        one, other = found
        assert one != other
        assert points(boxes[one]) & points(boxes[other])


def test_what_is_not_cut_stays_whole() -> None:
    box = Box((4, 0), (8, 16))
    assert tile(box, [whole((16, 16)), Box((0, 0), (4, 16)), box]) == [box]
    assert tile(box, [Box((0, 0), (6, 16))]) == [Box((4, 0), (6, 16)), Box((6, 0), (8, 16))]


def test_tensors_without_axes_and_without_elements() -> None:
    scalar, empty = whole(()), whole((3, 0))
    assert (scalar.volume, scalar.rank, str(scalar)) == (1, 0, "[]")
    assert tile(scalar, [scalar]) == [scalar]
    assert uncovered(scalar, []) == scalar
    assert uncovered(scalar, [scalar]) is None
    assert empty.volume == 0
    assert tile(empty, []) == []
    assert uncovered(empty, []) is None
    assert intersect(empty, empty) is None


@given(boxes_in_one_tensor())
def test_a_refinement_is_disjoint_and_every_box_is_a_union_of_its_parts(drawn: tuple[Box, list[Box]]) -> None:
    boxes = [drawn[0], *drawn[1]]
    parts = refine(boxes)
    assert parts == sorted(parts)
    assert sum(part.volume for part in parts) == len(points(*parts))
    assert points(*parts) == points(*boxes)
    for box in boxes:
        assert points(*[part for part in parts if contains(box, part)]) == points(box)
    if overlap(list(set(boxes))) is None:
        assert parts == sorted(box for box in set(boxes) if box.volume)

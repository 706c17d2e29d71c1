"""The span of a view against the places of its elements, counted one by one."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.core.strides import span


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4))
def test_a_span_reaches_from_the_first_element_to_the_last(axes: list[tuple[int, int]]) -> None:
    places = [
        sum(index * step for index, (_, step) in zip(place, axes, strict=True))
        for place in product(*(range(extent) for extent, _ in axes))
    ]
    assert span((extent for extent, _ in axes), (step for _, step in axes)) == max(places, default=-1) + 1


def test_a_shape_with_another_number_of_strides_has_no_span() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 3\] and stride \[1\]"):
        span((2, 3), (1,))

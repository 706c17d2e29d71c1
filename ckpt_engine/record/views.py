"""Decodes which part of a tensor a strided view of it shows. Integers only, no torch.

A view shows elements of a storage at ``offset + sum(index * stride)``. Here it is decoded against the axes of the
tensor that the storage holds ("digits": the position of an element in the storage, written with one digit an axis),
so that ``narrow``, ``chunk``, ``transpose``, ``view(heads, dim, hidden)``, ``view(-1)[a:b]`` … all become boxes of
that tensor, together with where the view's elements lie in a second tensor that the view is copied to.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAXIMUM_PARTS = 4096
"""A view that is the union of more boxes than this is not recorded: every box costs work at each install."""


class Undecodable(Exception):  # noqa: N818
    """The view is not a small union of boxes of the tensor."""


class Axis(NamedTuple):
    """One axis of a copy: ``size`` elements, ``stride`` apart in the view's storage, ``partner`` apart in the other."""

    size: int
    stride: int
    partner: int


_NOWHERE = Axis(1, 0, 0)


class View(NamedTuple):
    """A strided view, and at the same time the strided view of the other tensor that it is copied to.

    Offsets and strides are in elements. Views that are only looked at have zeros on the partner's side.
    """

    offset: int
    partner_offset: int
    axes: tuple[Axis, ...]

    @property
    def volume(self) -> int:
        volume = 1
        for axis in self.axes:
            volume *= axis.size
        return volume


class Digit(NamedTuple):
    """One axis of the tensor that a storage holds: ``size`` elements that lie ``weight`` apart."""

    size: int
    weight: int


class AxisPlace(NamedTuple):
    """One axis of a view, found to walk along one digit in steps of ``step``."""

    digit: int
    step: int
    size: int
    partner: int


class ViewPart(NamedTuple):
    """A part of a view in which every axis walks along one digit only, without carries."""

    start: tuple[int, ...]  # the first element, one entry a digit
    partner_offset: int
    places: tuple[AxisPlace, ...]


class ViewBlock(NamedTuple):
    """A box of the tensor (one entry a digit) and where its elements lie in the partner."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    partner_offset: int
    partner_stride: tuple[int, ...]  # one entry a digit


def view_of(sizes: Sequence[int], strides: Sequence[int], offset: int) -> View:
    """A view without a partner."""
    axes = tuple(Axis(size, stride, 0) for size, stride in zip(sizes, strides, strict=True))
    return View(offset, 0, axes)


def copy_of(
    sizes: Sequence[int], strides: Sequence[int], offset: int, partner_strides: Sequence[int], partner_offset: int
) -> View:
    """A view and the partner of the same ``sizes`` that it is copied to."""
    axes = tuple(map(Axis._make, zip(sizes, strides, partner_strides, strict=True)))
    return View(offset, partner_offset, axes)


def row_major(shape: Sequence[int]) -> tuple[Digit, ...]:
    """The digits of a contiguous tensor, one for each axis."""
    digits: list[Digit] = []
    weight = 1
    for size in reversed(shape):
        digits.append(Digit(size, weight))
        weight *= size
    return tuple(reversed(digits))


def parts(view: View, digits: Sequence[Digit]) -> list[ViewPart]:
    """Splits ``view`` into parts that need no carries.

    ``digits`` may come in any order and may leave gaps between elements; no two elements may share a position.
    Raises Undecodable if an element lies outside of the tensor or there would be more than MAXIMUM_PARTS parts.
    """
    order = sorted((index for index, digit in enumerate(digits) if digit.size > 1), key=lambda i: -digits[i].weight)
    todo = [view._replace(axes=tuple(axis for axis in view.axes if axis.size != 1))]
    if view.volume == 0:
        return []
    done: list[ViewPart] = []
    while todo:
        if len(todo) + len(done) > MAXIMUM_PARTS:
            raise Undecodable(f"it is a union of more than {MAXIMUM_PARTS} boxes")
        current = todo.pop()
        outcome = _place(current, digits, order)
        if isinstance(outcome, ViewPart):
            done.append(outcome)
        else:
            todo.extend(reversed(outcome))
    return done


def blocks(view: View, digits: Sequence[Digit]) -> list[ViewBlock]:
    """The boxes of the tensor that ``view`` shows, each with its place in the partner; raises Undecodable."""
    done: list[ViewBlock] = []
    todo = parts(view, digits)
    while todo:
        if len(todo) + len(done) > MAXIMUM_PARTS:
            raise Undecodable(f"it is a union of more than {MAXIMUM_PARTS} boxes")
        part = todo.pop()
        outcome = _block(part, len(digits))
        if isinstance(outcome, ViewBlock):
            done.append(outcome)
        else:
            todo.extend(_each_index(part, outcome))
    return done


def through(view: View, digits: Sequence[Digit], strides: Sequence[int], offset: int) -> list[View]:
    """``view`` of a clone, as views of what was cloned.

    ``digits`` describe the clone; the clone's axis d walks ``strides[d]`` in the original, which starts at ``offset``.
    """
    result = []
    for part in parts(view, digits):
        start = offset + sum(index * stride for index, stride in zip(part.start, strides, strict=True))
        axes = tuple(Axis(axis.size, strides[axis.digit] * axis.step, axis.partner) for axis in part.places)
        result.append(View(start, part.partner_offset, axes))
    return result


def _place(view: View, digits: Sequence[Digit], order: Sequence[int]) -> ViewPart | list[View]:
    """Returns ``view`` as a part, or the views that it has to be split into first."""
    start = [0] * len(digits)
    rest = view.offset
    for index in order:
        start[index], rest = divmod(rest, digits[index].weight)
        if start[index] >= digits[index].size:
            raise Undecodable("it begins outside of the tensor")
    if rest:
        raise Undecodable("it begins between elements of the tensor")
    reach = list(start)
    places: list[AxisPlace] = []
    for number, axis in enumerate(view.axes):
        digit = next((i for i in order if digits[i].weight <= axis.stride), None)
        if digit is None:  # a stride of 0: the same elements again and again
            return _split_all(view, number)
        step, remainder = divmod(axis.stride, digits[digit].weight)
        if remainder:
            return _split_all(view, number)
        if start[digit] + (axis.size - 1) * step >= digits[digit].size:
            return _carry(view, number, step, digits[digit].size, start[digit])
        reach[digit] += (axis.size - 1) * step
        places.append(AxisPlace(digit, step, axis.size, axis.partner))
    for index in order:
        if reach[index] >= digits[index].size:  # each axis stays inside of the digit, their sum does not
            numbers = [number for number, axis in enumerate(places) if axis.digit == index]
            return _split_all(view, min(numbers, key=lambda number: places[number].size))
    return ViewPart(tuple(start), view.partner_offset, tuple(places))


def _carry(view: View, number: int, step: int, size: int, start: int) -> list[View]:
    """Splits an axis that runs over the end of a digit of ``size``: merged axes, as ``view(-1)`` makes them."""
    axis = view.axes[number]
    if step >= size:
        raise Undecodable("it runs over the end of the tensor")
    if size % step:
        return _split_all(view, number)
    if start >= step:  # not at a beginning: up to the first carry, then the rest
        return _split_at(view, number, -(-(size - start) // step))
    period = size // step
    if axis.size % period:
        if axis.size < period:
            raise Undecodable("it runs over the end of the tensor")
        return _split_at(view, number, axis.size - axis.size % period)
    outer = Axis(axis.size // period, axis.stride * period, axis.partner * period)
    inner = Axis(period, axis.stride, axis.partner)
    return [view._replace(axes=(*view.axes[:number], outer, inner, *view.axes[number + 1 :]))]


def _split_at(view: View, number: int, index: int) -> list[View]:
    axis = view.axes[number]
    if not 0 < index < axis.size:
        raise Undecodable("it runs over the end of the tensor")
    before, after = view.axes[:number], view.axes[number + 1 :]
    return [
        _narrow(view, (*before, axis._replace(size=index), *after)),
        _narrow(view, (*before, axis._replace(size=axis.size - index), *after), axis, index),
    ]


def _split_all(view: View, number: int) -> list[View]:
    """One view for each index of an axis."""
    axis = view.axes[number]
    if axis.size > MAXIMUM_PARTS:
        raise Undecodable(f"it is a union of more than {MAXIMUM_PARTS} boxes")
    others = (*view.axes[:number], *view.axes[number + 1 :])
    return [_narrow(view, others, axis, index) for index in range(axis.size)]


def _narrow(view: View, axes: Iterable[Axis], axis: Axis = _NOWHERE, index: int = 0) -> View:
    long_axes = tuple(each for each in axes if each.size != 1)
    return View(view.offset + index * axis.stride, view.partner_offset + index * axis.partner, long_axes)


def _block(part: ViewPart, rank: int) -> ViewBlock | AxisPlace:
    """Returns ``part`` as a box, or the axis that has to be split into its indices first."""
    extent = [1] * rank
    stride = [1] * rank  # of axes with one element, which nothing is ever multiplied with
    for axis in sorted(part.places, key=lambda axis: axis.step):
        if axis.step != extent[axis.digit]:
            return axis  # a gap: indices between are not shown
        if extent[axis.digit] == 1:
            stride[axis.digit] = axis.partner
        elif axis.partner != stride[axis.digit] * extent[axis.digit]:
            return axis  # a gap in the partner
        extent[axis.digit] *= axis.size
    stop = tuple(start + size for start, size in zip(part.start, extent, strict=True))
    return ViewBlock(part.start, stop, part.partner_offset, tuple(stride))


def _each_index(part: ViewPart, axis: AxisPlace) -> list[ViewPart]:
    if axis.size > MAXIMUM_PARTS:
        raise Undecodable(f"it is a union of more than {MAXIMUM_PARTS} boxes")
    others = list(part.places)
    others.remove(axis)
    result = []
    for index in range(axis.size - 1, -1, -1):
        start = list(part.start)
        start[axis.digit] += index * axis.step
        result.append(ViewPart(tuple(start), part.partner_offset + index * axis.partner, tuple(others)))
    return result

"""The digest of memory of this host, compiled by Numba. Importing this needs Numba; digest/host.py makes the jobs.

A job is evenly spaced rows of evenly spaced lanes. Each lane is multiplied by its column's factor, each row's sum by
the row's factor, all by the job's scale. All compiled code is in this file, since Numba checks no other file to see
whether its cached code is stale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ckpt_engine.digest import factors
from ckpt_engine.digest.numba_cache import may_cache

COLUMNS = 32768
"""Lanes of a row, at most; their factors take 256 KiB, which fit a core's second cache."""

COLUMN_AXES = 4
"""Axes that a row spans, at most."""

ADDRESS, SOURCE, SCALE, ROWS, ROW_STEP, SOURCE_ROW_STEP, ROW_HASH, UNIT, COLUMN_STEP, WIDTH, FLIP, MASK, GUARD, AXES = (
    range(14)
)
"""Fields of a job. Addresses and row steps are in bytes, the column step in lanes, UNIT is the bytes of a lane. SOURCE:
the address of memory that is copied to ADDRESS first, or 0; columns are then contiguous. FLIP, MASK, GUARD: how the
greatest lane is found (digest/finite.py); a MASK of 0: it is not. After these come, for each of AXES axes of a row,
slowest first, the hash of its first coordinate (see `factors.word`), and its length."""

FIRST_AXIS = AXES + 1
FIELDS = FIRST_AXIS + 2 * COLUMN_AXES

Array = np.ndarray[Any, Any]

Kernel = Callable[[Array, Array, Array], None]
"""Takes (jobs, uint64 [jobs, FIELDS]; found, greatest, uint64 [jobs]) and writes the last two: the digest, and the
greatest lane as digest/finite.py defines it, or less if that is below `least`. Runs outside of the interpreter's
lock."""

ArrivingKernel = Callable[[Array, Array, Array, Array], None]
"""Takes (jobs; found; finished, uint8 [jobs], 1 where found is written; state, int64 [STATE]). Several threads run it
at once and share the jobs; each ends when no job remains, or at state[ENDED]."""

ChangesKernel = Callable[[Array, Array, Array, Array, Array, int], int]
"""Takes (places, int64 [changes]; old, new, uint8 [changes * bytes of an element]; axes, uint64 [rank, 2]: length, and
hash of the first coordinate; factors of an element's lanes, uint64; bytes of an element) and returns the change of the
digest modulo 2^64."""

ReadKernel = Callable[[Array, Array, Array, Array], int]
"""Takes (places, uint32 [changes], row-major in a box and rising; axes, uint64 [rank, 3]: length, stride in elements,
hash of the first coordinate; memory, from the box's first element to its last one, as unsigned numbers of its elements'
width; elements, of the same type [changes]) and reads the elements at the places. Returns how many it has read: fewer
than there are places where the next one does not rise, or lies outside the box."""

WriteKernel = Callable[[Array, Array, Array, Array], None]
"""Takes the same, and writes the elements there. The places must be those of a whole read."""

SumKernel = Callable[[Array, Array, Array, Array, Array], int]
"""Takes the same and the factors of an element's lanes, uint64, and returns the sum of (what lies there - element) *
factor modulo 2^64. In a third less time than to read the elements, and sum by a ChangesKernel."""

FindKernel = Callable[[Array, Array, Array, Array, Array], int]
"""Takes (words of one and of another memory, uint64; the same memories, as unsigned numbers of their elements' width,
with what is left behind the last word; places, uint32) and writes the numbers of the elements that differ to `places`,
rising. Returns how many there are; those beyond the length of `places` are not written."""

NEXT, READY, ENDED, STATE = 0, 8, 16, 24
"""Indices of a state, each on a cache line of its own: the next free job, how many jobs have their memory, and whether
no more will."""

# Two rows at once halve the loads of factors. What will be read soon is fetched ahead, one row after the other: without
# that, rows and factors come too late, and a core reaches half of this (of a copy: seven eighths).
_SEGMENT = 256  # lanes between two fetches
_AHEAD = np.uint64(4096)
_LINE = 64
_REST_MICROSECONDS = 30
_NONE, _ONE, _TWO = np.uint64(0), np.uint64(1), np.uint64(2)
_ALL = np.uint64((1 << 64) - 1)
_INDEX_STEP = np.uint64(factors.INDEX_STEP)
_MIX_1 = np.uint64(factors.MIX_1)
_MIX_2 = np.uint64(factors.MIX_2)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_LANE_BITS, _LANE_MASK = np.uint64(16), np.uint64(0xFFFF)
_CHANGES_AHEAD = 24  # of which memory is fetched: what is scattered comes too late otherwise


def compiled() -> Kernel:
    """The kernel. Takes about a second, or a tenth where an earlier process could keep what it compiled."""
    kernel: Kernel = _compile(digest_jobs, "void(uint64[:, ::1], uint64[::1], uint64[::1])")
    return kernel


def compiled_arriving() -> ArrivingKernel:
    """The kernel for memory that arrives while it is digested."""
    kernel: ArrivingKernel = _compile(digest_arriving, "void(uint64[:, ::1], uint64[::1], uint8[::1], int64[::1])")
    return kernel


def compiled_changes() -> ChangesKernel:
    """The kernel for elements that have changed."""
    signature = "uint64(int64[::1], uint8[::1], uint8[::1], uint64[:, ::1], uint64[::1], int64)"
    kernel: ChangesKernel = _compile(digest_changes, signature)
    return kernel


def compiled_placed(width: int) -> tuple[ReadKernel, WriteKernel, SumKernel]:
    """The kernels for elements that have changed where they lie. width: bytes of an element."""
    arrays = f"uint32[::1], uint64[:, ::1], uint{8 * width}[::1], uint{8 * width}[::1]"
    read: ReadKernel = _compile(read_changes, f"int64({arrays})")
    write: WriteKernel = _compile(write_changes, f"void({arrays})")
    summed: SumKernel = _compile(sum_changes, f"uint64({arrays}, uint64[::1])")
    return read, write, summed


def compiled_find(width: int) -> FindKernel:
    """The kernel that compares memory. width: bytes of an element."""
    arrays = f"uint64[::1], uint64[::1], uint{8 * width}[::1], uint{8 * width}[::1], uint32[::1]"
    found: FindKernel = _compile(find_changes, f"int64({arrays})")
    return found


def _compile(function: Callable[..., None], signature: str) -> Any:
    if may_cache(Path(__file__).parent):
        with contextlib.suppress(Exception):  # no room, a damaged file: compiled for this process alone then
            return njit(signature, nogil=True, cache=True)(function)
    return njit(signature, nogil=True)(function)


def _loads(bits: int):
    @intrinsic
    def load(context, address, index):
        """The unsigned number at `address[index]`, aligned or not."""

        def build(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(builder.gep(pointer, [arguments[1]]), align=1)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return types.uint64(types.uint64, types.int64), build

    return load


_byte, _lane, _factor = _loads(8), _loads(16), _loads(64)


@intrinsic
def _fetch(context, address):
    """Prefetches a line of memory; any address is allowed."""

    def build(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        fetch = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0i8")
        builder.call(fetch, [builder.inttoptr(arguments[0], pointer), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.uint64), build


@intrinsic
def _copy(context, to, source, size):
    """Copies `size` bytes."""

    def build(context, builder, signature, arguments):
        pointer = ir.IntType(8).as_pointer()
        to, source = (builder.inttoptr(each, pointer) for each in arguments[:2])
        cgutils.raw_memcpy(builder, to, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), build


_EIGHT, _NUMBER = ir.VectorType(ir.IntType(64), 8), ir.IntType(64)


def _everywhere(builder, value):
    """A line of memory with this number in each eight bytes."""
    nothing, zeros = ir.Constant(_EIGHT, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
    first = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, nothing, zeros)


def _walk(builder, address, size, take):
    """Calls `take` for each line: four at a time, then the last ones, which may overlap. size: a line or more."""

    def line(at):
        take(builder.load(builder.inttoptr(builder.add(address, at), _EIGHT.as_pointer()), align=1))

    with cgutils.for_range(builder, builder.lshr(size, _NUMBER(8))) as loop:
        for place in range(0, 4 * _LINE, _LINE):
            line(builder.add(builder.shl(loop.index, _NUMBER(8)), _NUMBER(place)))
    with builder.if_then(builder.icmp_unsigned("!=", builder.and_(size, _NUMBER(255)), _NUMBER(0)), likely=False):
        first = builder.and_(size, _NUMBER((1 << 64) - 256))
        with cgutils.for_range(builder, builder.lshr(builder.sub(size, first), _NUMBER(6))) as loop:
            line(builder.add(first, builder.shl(loop.index, _NUMBER(6))))
        line(builder.sub(size, _NUMBER(_LINE)))


def _gathers(bits: int, combined):
    @intrinsic
    def gather(context, address, size, flip, mask, into):
        """Combines each line of `size` bytes, flipped and masked, with the line at `into`."""
        lines = ir.VectorType(ir.IntType(bits), 8 * _LINE // bits)

        def build(context, builder, signature, arguments):
            address, size, flip, mask, into = arguments
            flips, masks = _everywhere(builder, flip), _everywhere(builder, mask)
            target, found = builder.inttoptr(into, lines.as_pointer()), cgutils.alloca_once(builder, lines)
            builder.store(builder.load(target, align=8), found)

            def take(each):
                value = builder.bitcast(builder.and_(builder.xor(each, flips), masks), lines)
                builder.store(combined(builder, value, builder.load(found)), found)

            _walk(builder, address, size, take)
            builder.store(builder.load(found), target, align=8)
            return context.get_dummy_value()

        return types.void(*[types.uint64] * 5), build

    return gather


_greater = lambda on, one, other: on.select(on.icmp_unsigned(">", one, other), one, other)  # noqa: E731
_compare_bytes, _compare_lanes = _gathers(8, _greater), _gathers(16, _greater)
_note = _gathers(64, lambda on, one, other: on.or_(one, other))


@intrinsic
def _take(context, address):
    """Adds one to the number at an address; returns the former number."""

    def build(context, builder, signature, arguments):
        number = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", pointer, number(1), "monotonic")

    return types.int64(types.uint64), build


@intrinsic
def _peek(context, address):
    """Loads a number that another thread may write, with acquire order: that thread's earlier writes are visible."""

    def build(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.uint64), build


@intrinsic
def _tell(context, address):
    """Writes 1 to a byte, with release order: after all earlier writes."""

    def build(context, builder, signature, arguments):
        byte = ir.IntType(8)
        builder.store_atomic(byte(1), builder.inttoptr(arguments[0], byte.as_pointer()), "release", 1)
        return context.get_dummy_value()

    return types.void(types.uint64), build


@intrinsic
def _rest(context):
    """Leaves the processor to others for a moment."""

    def build(context, builder, signature, arguments):
        number = ir.IntType(32)
        sleep = cgutils.get_or_insert_function(builder.module, ir.FunctionType(number, [number]), "usleep")
        builder.call(sleep, [number(_REST_MICROSECONDS)])
        return context.get_dummy_value()

    return types.void(), build


@njit
def _word(hashed):
    x = (hashed ^ (hashed >> _SHIFTS[0])) * _MIX_1
    x = (x ^ (x >> _SHIFTS[1])) * _MIX_2
    return (x ^ (x >> _SHIFTS[2])) | _ONE


@njit
def _fill(job, table):
    """The factors of a row's columns: the products over its axes, the fastest first."""
    width = np.int64(1)
    for axis in range(np.int64(job[AXES]) - 1, -1, -1):
        hashed = job[FIRST_AXIS + 2 * axis]
        length = np.int64(job[FIRST_AXIS + 1 + 2 * axis])
        if width == 1:
            for index in range(length):
                table[index] = _word(hashed + np.uint64(index) * _INDEX_STEP)
        else:
            for index in range(length - 1, -1, -1):  # the first ones last: the others are made of them
                word = _word(hashed + np.uint64(index) * _INDEX_STEP)
                for column in range(width):
                    table[index * width + column] = word * table[column]
        width *= length


@njit
def _empty(lines, which, guard):
    """Clears a line of memory; returns whether it had a bit of `guard`."""
    bits = _NONE
    for place in range(which * _LINE // 8, (which + 1) * _LINE // 8):
        bits |= lines[place]
        lines[place] = _NONE
    return bits & guard != _NONE


@njit
def _greatest(address, count, step, unit, flip, mask, greatest):
    """The greatest of `count` lanes, `step` apart; 0 if it was merged into the line at `greatest`."""
    size, most = np.uint64(count) * unit, _NONE
    if step == 1 and size >= np.uint64(_LINE):
        if unit == _TWO:
            _compare_lanes(address, size, flip, mask, greatest)
        else:
            _compare_bytes(address, size, flip, mask, greatest)
        return most
    bits = np.uint64(8) * unit
    for column in range(count):
        at, moved = column * step, np.uint64(column) * bits & np.uint64(63)
        lane = _lane(address, at) if unit == _TWO else _byte(address, at)
        most = max(most, (lane ^ (flip >> moved)) & mask >> moved & ((_ONE << bits) - _ONE))
    return most


@njit
def _rows(job, table, lines):
    """The sum of a job, without its scale, and its greatest lane. table: the address of the columns' factors. lines:
    two lines of memory, for its own use."""
    rows, width, column_step = np.int64(job[ROWS]), np.int64(job[WIDTH]), np.int64(job[COLUMN_STEP])
    unit, step, copies = job[UNIT], job[ROW_STEP], job[SOURCE] != _NONE
    flip, mask, guard = job[FLIP], job[MASK], job[GUARD]
    total, most = _NONE, _NONE
    greatest = np.uint64(lines.ctypes.data)
    union = greatest + np.uint64(_LINE)
    noted = mask != _NONE and column_step == 1 and np.uint64(width) * unit >= np.uint64(_LINE)
    _empty(lines, 0, guard)
    _empty(lines, 1, guard)
    for row in range(0, rows, 2):
        index = np.uint64(row)
        paired = row + 1 < rows  # the last one of an odd number pairs with itself, with a factor of 0
        first = job[ADDRESS] + index * step
        second = first + step if paired else first
        source = job[SOURCE] + index * job[SOURCE_ROW_STEP]
        if copies:  # whole rows, which stay in the cache until they are digested
            _copy(first, source, job[WIDTH] * unit)
            if paired:
                _copy(second, source + job[SOURCE_ROW_STEP], job[WIDTH] * unit)
        first_sum, second_sum = _NONE, _NONE
        for begin in range(0, width, _SEGMENT):
            count = _SEGMENT if width - begin > _SEGMENT else width - begin
            skipped, size = np.uint64(begin * column_step) * unit, count * np.int64(unit)
            one, other, part = first + skipped, second + skipped, table + np.uint64(8 * begin)
            # While a copied pair of rows is digested, nothing else is loaded, so the next pair is fetched.
            near = source + _TWO * job[SOURCE_ROW_STEP] + skipped if copies else one + _AHEAD
            far = near + job[SOURCE_ROW_STEP] if copies else other + _AHEAD
            for line in range(0, size, _LINE):
                _fetch(near + np.uint64(line))
            for line in range(0, size, _LINE):
                _fetch(far + np.uint64(line))
            if column_step != 1:
                for column in range(count):
                    factor, at = _factor(part, column), column * column_step
                    first_sum += (_lane(one, at) if unit == _TWO else _byte(one, at)) * factor
                    second_sum += (_lane(other, at) if unit == _TWO else _byte(other, at)) * factor
            elif unit == _TWO:
                for column in range(count):
                    factor = _factor(part, column)
                    first_sum += _lane(one, column) * factor
                    second_sum += _lane(other, column) * factor
            else:
                for column in range(count):
                    factor = _factor(part, column)
                    first_sum += _byte(one, column) * factor
                    second_sum += _byte(other, column) * factor
            if noted:
                more = np.uint64(_LINE - size if size < _LINE else 0)  # of the segment before
                _note(one - more, np.uint64(size) + more, _NONE, _ALL, union)
                if paired:
                    _note(other - more, np.uint64(size) + more, _NONE, _ALL, union)
        if mask != _NONE and (not noted or _empty(lines, 1, guard)):
            most = max(most, _greatest(first, width, column_step, unit, flip, mask, greatest))
            if paired:
                most = max(most, _greatest(second, width, column_step, unit, flip, mask, greatest))
        total += first_sum * _word(job[ROW_HASH] + index * _INDEX_STEP)
        if paired:
            total += second_sum * _word(job[ROW_HASH] + (index + _ONE) * _INDEX_STEP)
    for lane in range(_LINE // np.int64(unit)):
        most = max(most, _lane(greatest, lane) if unit == _TWO else _byte(greatest, lane))
    return total, most


@njit
def _alike(job, other):
    """Whether the columns of two jobs have the same factors."""
    alike = True
    for field in range(AXES, FIELDS):
        alike &= job[field] == other[field]
    return alike


def digest_jobs(jobs, found, greatest):
    """Writes the digest of each job, and its greatest lane."""
    table = np.empty(COLUMNS, dtype=np.uint64)
    lines = np.empty(2 * _LINE // 8, dtype=np.uint64)
    for index in range(jobs.shape[0]):
        if index == 0 or not _alike(jobs[index], jobs[index - 1]):
            _fill(jobs[index], table)
        total, greatest[index] = _rows(jobs[index], np.uint64(table.ctypes.data), lines)
        found[index] = jobs[index, SCALE] * total


def digest_arriving(jobs, found, finished, state):
    """Writes the digest of each job that this thread takes, once its memory has arrived."""
    table = np.empty(COLUMNS, dtype=np.uint64)
    lines = np.empty(2 * _LINE // 8, dtype=np.uint64)
    at = np.uint64(state.ctypes.data)
    done = np.uint64(finished.ctypes.data)
    last = -1
    while True:
        index = _take(at + np.uint64(8 * NEXT))
        if index >= jobs.shape[0]:
            return
        while _peek(at + np.uint64(8 * READY)) <= index:
            if _peek(at + np.uint64(8 * ENDED)) != 0:
                return
            _rest()
        if _peek(at + np.uint64(8 * ENDED)) != 0:
            return
        if last < 0 or not _alike(jobs[index], jobs[last]):
            _fill(jobs[index], table)
        last = index
        total, _ = _rows(jobs[index], np.uint64(table.ctypes.data), lines)
        found[index] = jobs[index, SCALE] * total
        _tell(done + np.uint64(index))


def digest_changes(places, old, new, axes, lanes, size):
    """The sum of (new - old) * factor over elements. places: row-major in the box."""
    one, other = np.uint64(old.ctypes.data), np.uint64(new.ctypes.data)
    unit = np.uint64(1 if size == 1 else 2)
    total = _NONE
    for change in range(places.shape[0]):
        rest, factor = np.uint64(places[change]), _ONE
        for axis in range(axes.shape[0] - 1, -1, -1):
            length = axes[axis, 0]
            above = rest // length
            factor *= _word(axes[axis, 1] + (rest - above * length) * _INDEX_STEP)
            rest = above
        weighted = _NONE
        for lane in range(lanes.shape[0]):
            at = change * lanes.shape[0] + lane
            if unit == _TWO:
                weighted += (_lane(other, at) - _lane(one, at)) * lanes[lane]
            else:
                weighted += (_byte(other, at) - _byte(one, at)) * lanes[lane]
        total += weighted * factor
    return total


@njit
def _enter(place, axes, memory):
    """The row of the last axis in which a place lies: its first place, and the one behind its last; where place 0 would
    lie if it were in this row, in elements of `memory`, and its address; the factor of the row's other coordinates."""
    length, stride = axes[-1, 0], axes[-1, 1]
    row = place // length
    begin = row * length
    origin, factor = _NONE - begin * stride, _ONE
    for axis in range(axes.shape[0] - 2, -1, -1):
        above = row // axes[axis, 0]
        at = row - above * axes[axis, 0]
        origin += at * axes[axis, 1]
        factor *= _word(axes[axis, 2] + at * _INDEX_STEP)
        row = above
    address = np.uint64(memory.ctypes.data) + origin * np.uint64(memory.itemsize)
    return begin, begin + length, origin, address, factor


@njit
def _fetch_change(places, change, address, step):
    """Fetches the memory of a later change, as if it lay in the same row. address: of place 0. step: bytes."""
    ahead = change + _CHANGES_AHEAD
    if ahead < places.shape[0]:
        _fetch(address + np.uint64(places[ahead]) * step)


def read_changes(places, axes, memory, elements):
    """Reads the elements at rising places of a box; see ReadKernel."""
    stride, volume = axes[-1, 1], _ONE
    step = stride * np.uint64(memory.itemsize)
    for axis in range(axes.shape[0]):
        volume *= axes[axis, 0]
    end, origin, address, least = _NONE, _NONE, _NONE, _NONE
    for change in range(places.shape[0]):
        place = np.uint64(places[change])
        if place < least or place >= volume:
            return change
        least = place + _ONE
        if place >= end:
            _, end, origin, address, _ = _enter(place, axes, memory)
        _fetch_change(places, change, address, step)
        elements[change] = memory[origin + place * stride]
    return places.shape[0]


def write_changes(places, axes, memory, elements):
    """Writes the elements at rising places of a box."""
    stride = axes[-1, 1]
    step = stride * np.uint64(memory.itemsize)
    end, origin, address = _NONE, _NONE, _NONE
    for change in range(places.shape[0]):
        place = np.uint64(places[change])
        if place >= end:
            _, end, origin, address, _ = _enter(place, axes, memory)
        _fetch_change(places, change, address, step)
        memory[origin + place * stride] = elements[change]


def sum_changes(places, axes, memory, elements, lanes):
    """The sum of (what lies there - element) * factor over rising places of a box."""
    stride, hashed = axes[-1, 1], axes[-1, 2]
    step = stride * np.uint64(memory.itemsize)
    begin, end, origin, address, factor = _NONE, _NONE, _NONE, _NONE, _ONE
    total = _NONE
    for change in range(places.shape[0]):
        place = np.uint64(places[change])
        if place >= end:
            begin, end, origin, address, factor = _enter(place, axes, memory)
        _fetch_change(places, change, address, step)
        new, old = np.uint64(memory[origin + place * stride]), np.uint64(elements[change])
        weighted = _NONE
        for lane in range(lanes.shape[0]):
            shift = np.uint64(lane) * _LANE_BITS
            weighted += ((new >> shift & _LANE_MASK) - (old >> shift & _LANE_MASK)) * lanes[lane]
        total += weighted * factor * _word(hashed + (place - begin) * _INDEX_STEP)
    return total


def find_changes(one_words, other_words, one, other, places):
    """Finds the elements in which two memories differ; see FindKernel."""
    count, most, each = 0, places.shape[0], 8 // one.itemsize
    for word in range(one_words.shape[0]):
        if one_words[word] != other_words[word]:
            for at in range(word * each, word * each + each):
                if one[at] != other[at]:
                    if count < most:
                        places[count] = at
                    count += 1
    for at in range(one_words.shape[0] * each, one.shape[0]):
        if one[at] != other[at]:
            if count < most:
                places[count] = at
            count += 1
    return count

"""The digest of memory of this host, compiled by Numba. Importing this needs Numba; digest/host.py makes the jobs.

A job is evenly spaced rows of evenly spaced lanes. Each lane is multiplied by its column's factor, each row's sum by
the row's factor, all by the job's scale. What is compiled stands in this file alone, since Numba looks at no other file
to see whether the code that it kept is stale.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ckpt_engine.digest import factors

COLUMNS = 32768
"""Lanes of a row, at most; their factors take 256 KiB, which stay in a core's second cache."""

COLUMN_AXES = 4
"""Axes that a row spans, at most."""

ADDRESS, SOURCE, SCALE, ROWS, ROW_STEP, SOURCE_ROW_STEP, ROW_HASH, UNIT, COLUMN_STEP, WIDTH, AXES = range(11)
"""Fields of a job. Addresses and row steps are in bytes, the column step in lanes, UNIT is the bytes of a lane. SOURCE:
what is copied to ADDRESS first, or 0; columns lie side by side then. After these come, for each of AXES axes of a row,
slowest first, what `factors.word` hashes for its first coordinate, and its length."""

FIRST_AXIS = AXES + 1
FIELDS = FIRST_AXIS + 2 * COLUMN_AXES

Kernel = Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], None]
"""(jobs, uint64 [jobs, FIELDS]; found, uint64 [jobs], what it writes). Runs outside of the interpreter's lock."""

ArrivingKernel = Callable[
    [np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]], None
]
"""(jobs; found; finished, uint8 [jobs], 1 where found is written; state, int64 [STATE]). Several threads run it at
once, and share the jobs out; each ends when none is left, or at state[ENDED]."""

NEXT, READY, ENDED, STATE = 0, 8, 16, 24
"""Of a state, each on a cache line of its own: the next job that nobody has taken, how many jobs have their memory, and
whether no more will."""

# Two rows at once halve the loads of factors. What will be read soon is fetched ahead, one row after the other: without
# that, rows and factors come too late, and a core reaches half of this (of a copy: seven eighths).
_SEGMENT = 256  # lanes between two fetches
_AHEAD = np.uint64(4096)
_LINE = 64
_REST_MICROSECONDS = 30
_TWO = np.uint64(2)
_NONE = np.uint64(0)
_ONE = np.uint64(1)
_INDEX_STEP = np.uint64(factors.INDEX_STEP)
_MIX_1 = np.uint64(factors.MIX_1)
_MIX_2 = np.uint64(factors.MIX_2)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def compiled() -> Kernel:
    """The kernel. Takes about a second, or a tenth where an earlier process could keep what it compiled."""
    kernel: Kernel = _compiled(digest_jobs, "void(uint64[:, ::1], uint64[::1])")
    return kernel


def compiled_arriving() -> ArrivingKernel:
    """The same for what arrives while it is digested."""
    kernel: ArrivingKernel = _compiled(digest_arriving, "void(uint64[:, ::1], uint64[::1], uint8[::1], int64[::1])")
    return kernel


def _compiled(function: Callable[..., None], signature: str) -> Any:
    if _may_cache():
        with contextlib.suppress(Exception):  # no room, a damaged file: compiled for this process alone then
            return njit(signature, nogil=True, cache=True)(function)
    return njit(signature, nogil=True)(function)


def _may_cache() -> bool:
    """Whether the place that Numba would keep compiled code in is one that only this user, or who installed this, can
    write to: it is loaded as code. Numba takes NUMBA_CACHE_DIR, else this folder, else one in the user's home."""
    if os.environ.get("NUMBA_CACHE_DIR") or os.access(Path(__file__).parent, os.W_OK):
        return True
    try:
        home = os.stat(os.path.expanduser("~"))
    except OSError:
        return False
    return home.st_uid == os.geteuid() and not home.st_mode & stat.S_IWOTH


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
    """Brings a line of memory near; any address will do."""

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


@intrinsic
def _take(context, address):
    """Adds one to the number at an address; what it was before."""

    def build(context, builder, signature, arguments):
        number = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", pointer, number(1), "monotonic")

    return types.int64(types.uint64), build


@intrinsic
def _seen(context, address):
    """The number at an address, which another thread may write; and what that one wrote before it."""

    def build(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.uint64), build


@intrinsic
def _tell(context, address):
    """Writes 1 to a byte, after everything that was written before."""

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
def _rows(job, table):
    """The sum of a job, without its scale. table: the address of the columns' factors."""
    rows, width, column_step = np.int64(job[ROWS]), np.int64(job[WIDTH]), np.int64(job[COLUMN_STEP])
    unit, step, copies = job[UNIT], job[ROW_STEP], job[SOURCE] != _NONE
    total = _NONE
    for row in range(0, rows, 2):
        index = np.uint64(row)
        paired = row + 1 < rows  # the last of an odd number is its own neighbour, with a factor of 0
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
            # While a copied pair of rows is digested nothing else is loaded: the next pair is.
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
        total += first_sum * _word(job[ROW_HASH] + index * _INDEX_STEP)
        if paired:
            total += second_sum * _word(job[ROW_HASH] + (index + _ONE) * _INDEX_STEP)
    return total


@njit
def _alike(job, other):
    """Whether the columns of two jobs have the same factors."""
    alike = True
    for field in range(AXES, FIELDS):
        alike &= job[field] == other[field]
    return alike


def digest_jobs(jobs, found):
    """Writes the digest of each job."""
    table = np.empty(COLUMNS, dtype=np.uint64)
    for index in range(jobs.shape[0]):
        if index == 0 or not _alike(jobs[index], jobs[index - 1]):
            _fill(jobs[index], table)
        found[index] = jobs[index, SCALE] * _rows(jobs[index], np.uint64(table.ctypes.data))


def digest_arriving(jobs, found, finished, state):
    """Writes the digest of each job that this thread takes, once its memory is there."""
    table = np.empty(COLUMNS, dtype=np.uint64)
    at = np.uint64(state.ctypes.data)
    done = np.uint64(finished.ctypes.data)
    last = -1
    while True:
        index = _take(at + np.uint64(8 * NEXT))
        if index >= jobs.shape[0]:
            return
        while _seen(at + np.uint64(8 * READY)) <= index:
            if _seen(at + np.uint64(8 * ENDED)) != 0:
                return
            _rest()
        if _seen(at + np.uint64(8 * ENDED)) != 0:
            return
        if last < 0 or not _alike(jobs[index], jobs[last]):
            _fill(jobs[index], table)
        last = index
        found[index] = jobs[index, SCALE] * _rows(jobs[index], np.uint64(table.ctypes.data))
        _tell(done + np.uint64(index))

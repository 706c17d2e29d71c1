"""The page is laid out as docs/protocol.md says: agents and engines of other builds map the same file."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from ckpt_engine.core.sleeping import KV_CACHE, WEIGHTS, Sleeping
from ckpt_engine.gate.page import EngineMark, EnginePage, HoldLimits, RequestHold
from ckpt_engine.host.processes import process_start_time
from ckpt_engine.v1 import weights_pb2

HEADER, SLOT = 256, 256


def test_a_clean_word_lies_where_the_protocol_says(tmp_path: Path) -> None:
    page = EnginePage(tmp_path / "page")
    slot = page.claim(2, 3)
    slot.clean(7, weights_pb2.Identity(lineage="längs", version=-5, root=bytes(range(32))))
    page.mark(EngineMark(own_weights=True, sleeping=Sleeping(2, frozenset({WEIGHTS, KV_CACHE}), rousing=True)))
    raw = (tmp_path / "page").read_bytes()
    assert len(raw) == HEADER + 1024 * SLOT
    assert raw[:16] == b"CKPTPAGE" + struct.pack("<II", 2, 3)
    assert raw[64:68] == bytes([1 | 2, 2, 1 | 2, 0])
    assert not any(raw[16:64]), "nothing else is in the header"
    assert not any(raw[68 : HEADER + 2 * SLOT]), "nor in slots that nobody has claimed"
    page.hold(RequestHold(9, 12.5, closed=True), HoldLimits(30.0, 4096, 1 << 28))
    page.lease(7.25)
    page.keep_caches()
    page.keep_caches()
    head = (tmp_path / "page").read_bytes()[:HEADER]
    hold = struct.pack("<QdBdIQ", 9, 12.5, 1, 30.0, 4096, 1 << 28)
    assert head[128:169] == hold + struct.pack("<I", zlib.crc32(hold))
    assert head[192:200] == struct.pack("<d", 7.25)
    assert head[208:216] == struct.pack("<Q", 2)
    assert not any(head[169:192] + head[200:208] + head[216:])
    word = raw[HEADER + 2 * SLOT : HEADER + 3 * SLOT]
    name = "längs".encode()
    assert word[:16] == slot.boot_id
    assert struct.unpack("<IQIQq", word[16:48]) == (os.getpid(), process_start_time(os.getpid()), 3, 7, -5)
    assert word[48:80] == bytes(range(32))
    assert word[80:202] == struct.pack("<H120s", len(name), name)
    assert word[202:206] == struct.pack("<I", zlib.crc32(word[:202]))
    assert not any(word[206:])


def test_the_other_states_have_their_numbers(tmp_path: Path) -> None:
    page = EnginePage(tmp_path / "page")
    slot = page.claim(0, 1)

    def state() -> int:
        return int.from_bytes((tmp_path / "page").read_bytes()[HEADER + 28 : HEADER + 32], "little")

    assert state() == 1
    slot.dirty(4)
    assert state() == 2
    page.mark(EngineMark(sleeping=Sleeping(1, frozenset({KV_CACHE}))))
    assert (tmp_path / "page").read_bytes()[64:68] == bytes([0, 1, 2, 0])

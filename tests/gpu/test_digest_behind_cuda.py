"""Digests behind a copy within one GPU while it is under way: they are those of what was copied, at each run, and what
does not come is not waited for endlessly."""

from __future__ import annotations

import logging

import pytest
import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.digest import cuda as digest_cuda
from ckpt_engine.digest.prepared import PreparedDigests, prepare_digests

pytestmark = pytest.mark.timeout(120)

SHARES = [1, 2, 4]


def ready(share: int, large: bool) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], TensorCopy, PreparedDigests]:
    """Pairs of several dtypes and layouts, the copy of them, and digests that follow it."""
    rows = 20_000 if large else 200
    wide = torch.zeros(rows, 4100, dtype=torch.bfloat16, device="cuda")
    places = [
        torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda"),
        wide[:, 4:2052],
        torch.zeros(4096, dtype=torch.bfloat16, device="cuda"),
        torch.zeros(1000, 1001, device="cuda"),
        torch.zeros(rows, 1024, dtype=torch.float8_e4m3fn, device="cuda"),
    ]
    pairs = [(place, torch.empty_like(place, memory_format=torch.contiguous_format)) for place in places]
    copy = TensorCopy(pairs)
    pieces = copy.pieces()
    assert pieces is not None
    digests = prepare_digests([(place, (0,) * place.dim()) for place in places])
    assert digests.follow(pieces.first, pieces.end, pieces.arrived, pieces.programs, share)
    return pairs, copy, digests


def renew(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for _, source in pairs:
        source.copy_(torch.randn(source.shape, device="cuda"))


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("share", SHARES)
def test_they_are_those_of_what_was_copied(share: int, large: bool, caplog: pytest.LogCaptureFixture) -> None:
    pairs, copy, digests = ready(share, large)
    sealed = prepare_digests([(source, (0,) * source.dim()) for _, source in pairs])
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            renew(pairs)
            expected = sealed.run()
            digests.begin(copy.clear())
            copy.run()
            assert digests.run() == expected
        pairs[0][1].view(torch.int16)[-1, -1] ^= 1
        digests.begin(copy.clear())
        copy.run()
        assert [one != other for one, other in zip(expected, digests.run(), strict=True)] == [True, *[False] * 4]
    assert not caplog.records, "nothing came too late"


def test_what_does_not_come_is_digested_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(digest_cuda, "_PATIENCE", 1 << 12)
    pairs, copy, digests = ready(2, large=False)
    renew(pairs)
    copy.run()
    expected = prepare_digests([(place, (0,) * place.dim()) for place, _ in pairs]).run()
    digests.begin(copy.clear())
    with caplog.at_level(logging.WARNING):
        assert digests.run() == expected
    assert ["came too late" in record.message for record in caplog.records] == [True]
    digests.begin(copy.clear())
    digests.forsake()
    caplog.clear()
    assert digests.run() == expected
    assert not caplog.records

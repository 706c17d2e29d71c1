"""Digests on a GPU against those on a CPU: equal to the bit, whatever dtype, shape and strides."""

from __future__ import annotations

import random

import pytest
import torch

from ckpt_engine.core.dtypes import ITEMSIZES
from ckpt_engine.digest import cuda as digest_cuda
from ckpt_engine.digest.boxes import SEED, digest_box, digest_boxes
from ckpt_engine.digest.prepared import prepare_digests
from ckpt_engine.torch_dtypes import torch_dtype
from tests.digest.test_digest import random_tensor

GPU = torch.device("cuda", 0)


def test_the_kernel_is_used() -> None:
    assert digest_cuda.missing() == ""
    prepared = prepare_digests([(torch.zeros(4, 4, device=GPU), (0, 0))])
    assert prepared.launches == 1
    assert prepared.run() == [digest_box(torch.zeros(4, 4), (0, 0))]


@pytest.mark.parametrize("name", sorted(ITEMSIZES))
def test_equal_for_any_shape_strides_and_start(name: str) -> None:
    dtype = torch_dtype(name)
    draw = random.Random(name)
    here, there = [], []
    for number in range(60):
        shape = tuple(draw.choice([0, 1, 2, 7, 33, 64, 130]) for _ in range(draw.randint(0, 3)))
        if number % 6 == 0:
            shape = (draw.randint(1, 40), draw.randint(1, 5000))
        whole = random_tensor(tuple(2 * length for length in shape), dtype, number)
        copy = whole.to(GPU)
        order = draw.sample(range(len(shape)), len(shape))
        cuts = [
            slice(None, None, 2) if draw.random() < 0.2 else slice(first := draw.randint(0, length), first + length)
            for length in shape
        ]
        start = tuple(draw.randint(0, 1 << 40) for _ in shape)
        here.append((whole[tuple(cuts)].permute(order), start))
        there.append((copy[tuple(cuts)].permute(order), start))
    expected = [digest_box(view, start) for view, start in here]
    assert digest_boxes(there) == expected
    assert digest_boxes(there) == expected  # from the tables that were kept
    assert prepare_digests(there).run() == expected


@pytest.mark.parametrize(
    "shape", [(151_936, 512), (9_000_001,), (3, 5_000_001), (4, 3, 1000, 700), (2_000_000, 3), (1, 70_000, 1, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_equal_for_large_ones(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    view = random_tensor(shape, dtype, 3)
    start = tuple(range(5, 5 + len(shape)))
    assert digest_boxes([(view.to(GPU), start)]) == [digest_box(view, start)]


def test_a_column_slice_of_a_large_matrix() -> None:
    whole = random_tensor((4096, 12_288), torch.bfloat16, 1)
    there = whole.to(GPU)
    boxes = [(there[:, first : first + 1536], (0, first)) for first in range(0, 12_288, 1536)]
    prepared = prepare_digests(boxes)
    assert prepared.launches == 1
    found = prepared.run()
    assert found == [digest_box(whole[:, first : first + 1536], (0, first)) for first in range(0, 12_288, 1536)]
    assert sum(found) & (1 << 64) - 1 == digest_box(whole, (0, 0))


@pytest.mark.parametrize("served", [torch.bfloat16, torch.float16])
def test_as_if_cast_is_what_torch_casts_to(served: torch.dtype) -> None:
    # Any bits but NaN: subnormal numbers, ties, infinities, overflow.
    bits = torch.randint(-(1 << 31), 1 << 31, (3000, 1111), dtype=torch.int64).to(torch.int32)
    view = bits.view(torch.float32)
    view = torch.where(view.isnan(), 1.0, view)
    view.view(torch.int32)[0, :4] = torch.tensor([0x3F808000, 0x3F818000, 0x3F7FFFFF, 0x7F7FFFFF])
    there = view.to(GPU)
    boxes = [(there, (1, 2)), (there[5:, 3:], (6, 5)), (there.t(), (2, 1)), (there.double(), (1, 2))]
    assert torch.equal(there.to(served).cpu().view(torch.int16), view.to(served).view(torch.int16))
    expected = digest_boxes([(each.to(served), start) for each, start in boxes])
    assert expected[0] == digest_box(view.to(served), (1, 2))
    assert digest_boxes(boxes, served=[served] * 4) == expected
    assert prepare_digests(boxes, served=[served] * 4).run() == expected


def test_not_a_number_is_cast_as_torch_casts_it_on_a_gpu() -> None:
    view = torch.tensor([float("nan"), -float("nan"), 1.0], device=GPU)
    view = torch.cat([view, torch.tensor([0x7F800001, -1], dtype=torch.int32, device=GPU).view(torch.float32)])
    for served in (torch.bfloat16, torch.float16):
        assert digest_boxes([(view, (0,))], served=[served]) == digest_boxes([(view.to(served), (0,))])


@pytest.mark.parametrize("bit", [0, 7, 15])
def test_one_flipped_bit_is_seen_and_named(bit: int) -> None:
    tensors = [torch.randn(257, 1024, device=GPU).bfloat16() for _ in range(20)]
    prepared = prepare_digests([(tensor, (0, 0)) for tensor in tensors])
    before = prepared.run()
    tensors[13].view(torch.int16)[256, 1023] ^= -(1 << 15) if bit == 15 else 1 << bit
    after = prepared.run()
    assert [index for index in range(20) if before[index] != after[index]] == [13]


def test_it_sees_what_the_current_stream_wrote_before() -> None:
    tensor = torch.zeros(8192, 8192, dtype=torch.bfloat16, device=GPU)
    prepared = prepare_digests([(tensor, (0, 0))])
    filled = digest_boxes([(torch.full((8192, 8192), 3.0).bfloat16(), (0, 0))])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            tensor.normal_()
        tensor.fill_(3.0)
        assert prepared.run() == filled


def test_host_and_gpu_boxes_at_once() -> None:
    views = [random_tensor((30, 70), torch.bfloat16, number) for number in range(4)]
    boxes = [(view.to(GPU) if number % 2 else view, (0, number)) for number, view in enumerate(views)]
    expected = [digest_box(view, (0, number)) for number, view in enumerate(views)]
    assert digest_boxes(boxes) == expected
    assert prepare_digests(boxes).run() == expected


def test_kept_tables_keep_no_memory_of_the_model_alive() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    tensor = torch.zeros(1 << 28, dtype=torch.uint8, device=GPU).view(1 << 14, -1)
    digest_boxes([(tensor, (0, 0))])
    del tensor
    assert torch.cuda.memory_allocated() - before < 1 << 26


def test_many_boxes_in_one_launch() -> None:
    tensors = [torch.randn(64, 128 + number % 5 * 8, device=GPU).bfloat16() for number in range(5000)]
    prepared = prepare_digests([(tensor, (0, number)) for number, tensor in enumerate(tensors)])
    assert prepared.launches == 1
    assert prepared.run() == [digest_box(tensor.cpu(), (0, number)) for number, tensor in enumerate(tensors)]
    assert prepared.bytes == sum(tensor.nbytes for tensor in tensors)


def test_digests_on_the_second_gpu(two_gpus: tuple[torch.device, torch.device]) -> None:
    views = [random_tensor((90, 700), torch.bfloat16, number) for number in range(2)]
    boxes = [(view.to(device), (0, 0)) for view, device in zip(views, two_gpus, strict=True)]
    assert digest_boxes(boxes) == [digest_box(view, (0, 0)) for view in views]
    assert digest_box(boxes[1][0], (0, 0), SEED) == digest_box(views[1], (0, 0))

"""Bytes of the CPU allocator are counted by address, regardless of earlier measurements."""

from __future__ import annotations

from functools import partial

import torch

from rekindle.measuring.meters import Resident, covered_bytes, peak_bytes

ON_CPU = torch.device("cpu")
SIZE, BLOCKS = 1000, 200


def _take(held: list[torch.Tensor], n: int) -> None:
    held.extend(torch.empty(SIZE) for _ in range(n))


def _clear_and_take_one(held: list[torch.Tensor]) -> None:
    held.clear()
    _take(held, 1)


def test_freed_blocks_do_not_count_with_the_size_of_an_earlier_block() -> None:
    """The profiler remembers the sizes of blocks that were freed while it was off."""
    held: list[torch.Tensor] = []
    block = SIZE * torch.float32.itemsize
    assert peak_bytes(partial(_take, held, BLOCKS), ON_CPU, list) == BLOCKS * block
    before = {tensor.data_ptr() for tensor in held}
    held.clear()
    _take(held, BLOCKS)
    assert before & {tensor.data_ptr() for tensor in held}  # or this shows nothing
    assert peak_bytes(partial(_clear_and_take_one, held), ON_CPU, partial(_resident, held)) == block


def test_resident_tensors_count_if_they_stay() -> None:
    resident, held = [torch.empty(SIZE)], []
    block = SIZE * torch.float32.itemsize
    assert peak_bytes(partial(_take, held, 2), ON_CPU, partial(_resident, resident)) == 3 * block


def test_bytes_that_a_tensor_covers() -> None:
    whole = torch.empty(4, 6)
    for part in (whole, whole[1:, 1:], whole[:, ::2], whole.mT[2:4], whole[:1].expand(9, 6)):
        dense = torch.empty_strided(part.shape, part.stride())
        assert covered_bytes(part) == dense.untyped_storage().nbytes()
    assert covered_bytes(whole[:0]) == 0


def _resident(tensors: list[torch.Tensor]) -> list[Resident]:
    return [Resident(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors]

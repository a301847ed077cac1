"""What the allocator held is counted by address, whatever the process has measured before."""

from __future__ import annotations

from functools import partial

import torch

from rekindle.measuring.meters import peak_bytes

ON_CPU = torch.device("cpu")
SIZE, BLOCKS = 1000, 200


def _take(held: list[torch.Tensor], n: int) -> None:
    held.extend(torch.empty(SIZE) for _ in range(n))


def _clear_and_take_one(held: list[torch.Tensor]) -> None:
    held.clear()
    _take(held, 1)


def test_blocks_that_go_do_not_count_for_what_lay_there_before() -> None:
    """The profiler remembers the sizes of blocks that were given back while it did not watch."""
    held: list[torch.Tensor] = []
    block = SIZE * torch.float32.itemsize
    assert peak_bytes(partial(_take, held, BLOCKS), ON_CPU, list) == BLOCKS * block
    before = {tensor.data_ptr() for tensor in held}
    held.clear()
    _take(held, BLOCKS)
    assert before & {tensor.data_ptr() for tensor in held}  # or this shows nothing
    assert peak_bytes(partial(_clear_and_take_one, held), ON_CPU, lambda: held) == block


def test_what_is_there_before_counts_if_it_stays() -> None:
    there, held = [torch.empty(SIZE)], []
    block = SIZE * torch.float32.itemsize
    assert peak_bytes(partial(_take, held, 2), ON_CPU, lambda: there) == 3 * block

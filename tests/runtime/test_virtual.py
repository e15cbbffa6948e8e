"""Ranges whose memory comes and goes: on a fake that refuses what a driver refuses, and on a device."""

import gc
import random

import pytest
import torch
from runtime.fake_virtual import UNMAPPED, FakeVirtualMemory

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms.cuda_virtual import cuda_virtual_memory, why_no_virtual_memory
from stepgraph.runtime.platforms.virtual import VirtualRange

PAGE = 4096


def grown(memory: FakeVirtualMemory, pages: int, of: int = 64, piece: int = 4) -> VirtualRange:
    made = VirtualRange(memory, of * PAGE, piece=piece * PAGE)
    made.grow(pages * PAGE)
    return made


def test_it_maps_no_more_than_asked_and_zeroes_what_is_new() -> None:
    memory = FakeVirtualMemory()
    made = grown(memory, 1)
    made.tensor()[:PAGE] = 7
    made.grow(9 * PAGE + 1)
    assert made.mapped == memory.used == 10 * PAGE
    assert memory.calls[-1] == "synchronize"  # whose stream wrote the zeros is not whose step reads them
    assert made.tensor()[:PAGE].eq(7).all() and made.tensor()[PAGE : 10 * PAGE].eq(0).all()
    assert made.tensor()[10 * PAGE :].eq(UNMAPPED).all() and len(made.tensor()) == 64 * PAGE


def test_growing_to_less_changes_nothing() -> None:
    memory = FakeVirtualMemory()
    made = grown(memory, 5)
    made.grow(2 * PAGE)
    assert made.mapped == 5 * PAGE


def test_it_shrinks_by_whole_pieces_after_the_device_has_finished() -> None:
    memory = FakeVirtualMemory()
    made = grown(memory, 18)  # pieces of 4, 4, 4, 4, 2
    made.tensor()[: 18 * PAGE] = 7
    made.shrink(5 * PAGE)
    assert made.mapped == memory.used == 8 * PAGE and memory.calls[-2:] == ["synchronize", "unmap"]
    assert made.tensor()[: 8 * PAGE].eq(7).all()
    made.shrink(0)
    assert made.mapped == memory.used == 0


def test_shrinking_to_more_changes_nothing() -> None:
    memory = FakeVirtualMemory()
    made = grown(memory, 3)
    made.shrink(9 * PAGE)
    assert made.mapped == 3 * PAGE and "unmap" not in memory.calls


def test_the_address_stays_through_any_sizes() -> None:
    rng, memory = random.Random(0), FakeVirtualMemory()
    made = grown(memory, 1)
    start = made.tensor().data_ptr()
    for _ in range(200):
        pages = rng.randint(1, 64)
        (made.grow if rng.random() < 0.5 else made.shrink)(pages * PAGE)
        assert made.tensor().data_ptr() == start and made.mapped == memory.used and memory.untouched()
        made.tensor()[: made.mapped] = rng.randrange(255)


def test_out_of_memory_in_the_middle_gives_back_what_was_added() -> None:
    memory = FakeVirtualMemory(capacity=14 * PAGE)
    made = grown(memory, 3)
    with pytest.raises(torch.OutOfMemoryError):
        made.grow(30 * PAGE)
    assert made.mapped == memory.used == 3 * PAGE
    made.grow(14 * PAGE)
    assert made.mapped == memory.used == 14 * PAGE


def test_more_than_the_range_is_refused() -> None:
    with pytest.raises(ValueError, match="of a range of"):
        grown(FakeVirtualMemory(), 65)


def test_a_tensor_keeps_its_memory_when_the_range_is_gone() -> None:
    memory = FakeVirtualMemory()
    made = grown(memory, 5)
    view = made.tensor().view(torch.float32)[3:9]
    del made
    gc.collect()
    assert memory.used == 5 * PAGE and view.eq(0).all()
    del view
    gc.collect()
    assert not memory.used and not memory.ranges and memory.calls[-2:] == ["synchronize", "unmap"]


def test_a_range_that_was_never_mapped_gives_its_addresses_back() -> None:
    memory = FakeVirtualMemory()
    made = VirtualRange(memory, PAGE)
    assert memory.ranges
    del made
    gc.collect()
    assert not memory.ranges


def test_a_cpu_has_none() -> None:
    assert "cpu" in (why_no_virtual_memory(torch.device("cpu")) or "")
    with pytest.raises(ConfigError, match="virtual memory"):
        cuda_virtual_memory(torch.device("cpu"))


@pytest.mark.gpu
def test_a_graph_reaches_memory_that_is_mapped_after_its_capture() -> None:
    memory = cuda_virtual_memory(torch.device("cuda"))
    made = VirtualRange(memory, 1 << 30, piece=16 << 20)
    made.grow(1)
    cache = made.tensor().view(torch.bfloat16)
    index = torch.zeros(1, dtype=torch.int64, device="cuda")
    ones = torch.ones(1, dtype=torch.bfloat16, device="cuda")
    cache.index_copy_(0, index, ones)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.index_copy_(0, index, ones)
    made.grow(made.nbytes)
    index.fill_(cache.numel() - 1)
    graph.replay()
    assert cache[-1].item() == 1 and cache[1:-1].count_nonzero().item() == 0


@pytest.mark.gpu
@pytest.mark.alone
def test_memory_that_is_given_back_is_free_on_the_device() -> None:
    memory = cuda_virtual_memory(torch.device("cuda"))

    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    made = VirtualRange(memory, 1 << 30)
    made.grow(memory.granularity)
    view = made.tensor()[:16]
    assert view.eq(0).all().item()  # so that torch has taken what it takes for this
    before = free()
    for _ in range(3):
        made.grow(1 << 30)
        assert before - free() >= (1 << 30) - memory.granularity
        made.shrink(memory.granularity)
        assert abs(before - free()) <= 64 << 20 and view.eq(0).all().item()
    del made
    assert view.eq(0).all().item()
    del view
    gc.collect()
    assert free() >= before

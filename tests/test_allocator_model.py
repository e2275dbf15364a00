"""The model of the allocator against what must always hold, whatever is asked of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from gpuwatch.allocator.blocks import LIVE, UNMAPPED, Block
from gpuwatch.allocator.imagined import Imagined
from gpuwatch.allocator.model import Allocator
from gpuwatch.allocator.settings import parse
from gpuwatch.allocator.sizes import GIB, MIB, rounded
from tests.tracemaking import check

CONFS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:40",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:32",
    "expandable_segments:True,max_split_size_mb:64",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
]

SIZES = some.one_of(
    some.integers(1, MIB), some.integers(MIB, 30 * MIB), some.sampled_from([512, MIB, 2 * MIB, 9 * MIB, 10 * MIB])
)
STEPS = some.lists(
    some.one_of(
        some.tuples(some.just("allocate"), SIZES, some.integers(0, 1)),
        some.tuples(some.just("free"), some.integers(0, 1000), some.just(0)),
        some.tuples(some.just("empty"), some.just(0), some.just(0)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("conf", CONFS)
@settings(max_examples=40, deadline=None)
@given(steps=STEPS, capacity=some.one_of(some.none(), some.integers(64 * MIB, GIB)))
def test_blocks_tile_their_segments_and_no_byte_is_lost(
    conf: str, steps: list[tuple[str, int, int]], capacity: int | None
) -> None:
    model = Allocator(parse(conf))
    run = Imagined(model, capacity)
    live: list[Block] = []
    for what, number, stream in steps:
        if what == "allocate":
            size = rounded(model.settings, number)
            block = run.allocate((0, 0), stream, size)
            if block is None:
                assert capacity is not None
            else:
                assert block.size >= size and block.pool.stream == stream and block.pool.small == (size <= MIB)
                live.append(block)
        elif what == "free" and live:
            run.free(live.pop(number % len(live)))
        elif what == "empty":
            releasable, reserved = model.releasable, model.reserved
            run.empty_cache()
            assert model.reserved == reserved - releasable and model.releasable == 0
        assert capacity is None or model.reserved <= capacity
        check(model)
        assert {id(block) for block in model.blocks.values() if block.use == LIVE} == {id(block) for block in live}
    for block in live:
        run.free(block)
    run.empty_cache()
    assert model.reserved == model.active == 0
    assert all(block.use == UNMAPPED for block in model.blocks.values())  # address space that nothing was mapped into


def test_the_best_fit_is_the_smallest_block_and_of_equals_the_lowest() -> None:
    model = Allocator(parse(""))
    run = Imagined(model)
    sizes = [12 * MIB, 30 * MIB, 12 * MIB, 16 * MIB]
    blocks = [run.allocate((0, 0), 0, size) for size in sizes]
    for block in blocks:
        assert block is not None
        run.free(block)
    assert model.find(model.pool((0, 0), False, 0), 11 * MIB) is blocks[0]
    assert model.find(model.pool((0, 0), False, 0), 13 * MIB) is blocks[3]
    assert model.find(model.pool((0, 0), False, 0), 31 * MIB) is None
    assert model.find(model.pool((0, 0), False, 9), 11 * MIB) is None


def test_a_large_block_keeps_a_remainder_of_up_to_one_mebibyte() -> None:
    model = Allocator(parse(""))
    run = Imagined(model)
    whole = run.allocate((0, 0), 0, 40 * MIB)
    assert whole is not None
    run.free(whole)
    kept = run.allocate((0, 0), 0, 39 * MIB)
    assert kept is not None and kept.size == 40 * MIB
    run.free(kept)
    split = run.allocate((0, 0), 0, 39 * MIB - 512)
    assert split is not None and split.size == 39 * MIB - 512


def test_blocks_above_the_split_limit_serve_only_requests_of_about_their_size() -> None:
    model = Allocator(parse("max_split_size_mb:40"))
    run = Imagined(model)
    big = run.allocate((0, 0), 0, 80 * MIB)
    assert big is not None
    run.free(big)
    pool = model.pool((0, 0), False, 0)
    assert model.find(pool, 30 * MIB) is None  # smaller than the limit: not from an oversize block
    assert model.find(pool, 59 * MIB) is None  # wastes more than 20 MiB
    assert model.find(pool, 61 * MIB) is big


def test_an_expandable_segment_grows_by_pages_at_its_end_and_fills_holes_first() -> None:
    model = Allocator(parse("expandable_segments:True"))
    run = Imagined(model)
    first = run.allocate((0, 0), 0, 30 * MIB)
    second = run.allocate((0, 0), 0, 50 * MIB)
    assert first is not None and second is not None
    assert second.address == first.address + 30 * MIB
    assert model.reserved == 80 * MIB and run.device.allocations == 2
    run.free(first)
    run.empty_cache()
    assert model.reserved == 60 * MIB  # one page of 20 MiB is free as a whole, the other holds part of the second
    third = run.allocate((0, 0), 0, 25 * MIB)
    assert third is not None and third.address == first.address and model.reserved == 80 * MIB


def test_memory_that_ran_out_is_made_by_emptying_the_cache_once() -> None:
    model = Allocator(parse(""))
    run = Imagined(model, capacity=64 * MIB)
    block = run.allocate((0, 0), 0, 40 * MIB)
    assert block is not None
    run.free(block)
    assert run.allocate((0, 0), 0, 50 * MIB) is not None
    assert run.device.retries == 1 and run.device.frees == 1
    assert run.allocate((0, 0), 0, 20 * MIB) is None

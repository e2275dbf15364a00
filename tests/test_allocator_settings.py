"""The allocator's settings and sizes: as torch reads the one and computes the other."""

from __future__ import annotations

import pytest

from gpuwatch.allocator.settings import UNLIMITED, Settings, SettingsError, conf_of, parse, recorded
from gpuwatch.allocator.sizes import KIB, MIB, rounded, segment_size
from tests.tracemaking import stated_settings

CONFS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:128,max_non_split_rounding_mb:30",
    "large_segment_size_mb:64",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[1:8,2:8,4:8,8:8,16:8,32:8,64:8,128:2,256:4,512:2,1024:4,2048:1,4096:1,8192:1,16384:1,32768:1]",
    "backend:cudaMallocAsync",
]


@pytest.mark.parametrize("conf", CONFS)
def test_settings_are_written_as_they_are_read(conf: str) -> None:
    assert conf_of(parse(conf)) == conf


def test_intervals_of_the_rounding_are_read_as_torch_reads_them() -> None:
    divisions = parse("roundup_power2_divisions:[64:8, 128:2,256:4,512:2,1024:4,>:1]").roundup_power2_divisions
    assert divisions == (8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1)


def test_settings_that_place_no_block_are_accepted_and_ignored() -> None:
    assert parse("pinned_use_background_threads:True, release_lock_on_cudamalloc:False") == Settings()


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ("expandable_segments", "is not a setting; expected key:value"),
        ("expandable_segments:yes", "expected True or False"),
        ("max_split_size_mb:10", "at least 20"),
        ("max_split_size_mb:12e3", "expected a whole number of MiB"),
        ("large_segment_size_mb:10", "more than 10"),
        ("garbage_collection_threshold:2", "between 0 and 1"),
        ("garbage_collection_threshold:nan", "between 0 and 1"),
        ("roundup_power2_divisions:3", "expected a power of two"),
        ("roundup_power2_divisions:[64:8", "expected a closing ]"),
        ("expandable_segment:True", "unknown allocator setting 'expandable_segment'; known: expandable_segments"),
    ],
)
def test_what_torch_would_not_take_is_refused_in_one_line(conf: str, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse(conf)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("conf", [conf for conf in CONFS if "fraction" not in conf])
def test_what_a_snapshot_states_is_read_back(conf: str) -> None:
    assert recorded(stated_settings(parse(conf))) == parse(conf)


def test_single_values_of_a_snapshot_beat_its_text() -> None:
    stated = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "expandable_segments": False, "max_split_size": -1}
    assert recorded(stated) == Settings()
    assert recorded({"max_split_size": "odd", "roundup_power2_divisions": {"1": "x"}}).max_split_size == UNLIMITED


@pytest.mark.parametrize(
    ("conf", "requested", "size"),
    [
        ("", 0, 512),
        ("", 1, 512),
        ("", 513, 1024),
        ("", 5 * MIB + 1, 5 * MIB + 512),
        ("roundup_power2_divisions:4", 1200 * KIB, 1280 * KIB),
        ("roundup_power2_divisions:4", 1024 * KIB, 1024 * KIB),
        ("roundup_power2_divisions:4", 1900 * KIB, 2048 * KIB),
        ("roundup_power2_divisions:4", 2000, 2048),
        ("roundup_power2_divisions:8", 3500, 3584),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 600 * MIB, 768 * MIB),
        ("roundup_power2_divisions:1", 600 * MIB + 1, 600 * MIB + 512),
    ],
)
def test_requests_are_rounded_as_torch_rounds_them(conf: str, requested: int, size: int) -> None:
    assert rounded(parse(conf), requested) == size


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (90 * MIB, 90 * MIB),
    ],
)
def test_segments_have_the_sizes_that_torch_asks_for(size: int, segment: int) -> None:
    assert segment_size(Settings(), size) == segment


def test_the_size_of_large_segments_can_be_set() -> None:
    assert segment_size(parse("large_segment_size_mb:64"), 2 * MIB) == 64 * MIB
    assert segment_size(parse("large_segment_size_mb:64"), 12 * MIB) == 12 * MIB

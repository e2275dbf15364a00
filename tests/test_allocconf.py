"""The allocator's settings: how they are read, and which pairs of them do not work."""

from __future__ import annotations

import pytest

from gpuwatch_hooks.allocconf import conflicts, in_force, options, unsafe


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": "True"}),
        (
            " expandable_segments : True , max_split_size_mb:128",
            {"expandable_segments": "True", "max_split_size_mb": "128"},
        ),
        (
            "roundup_power2_divisions:[256:1,512:2,>:8],backend:native",
            {"roundup_power2_divisions": "[256:1,512:2,>:8]", "backend": "native"},
        ),
        ("nonsense", {}),
        ("max_split_size_mb:,backend:native", {"backend": "native"}),
        (",,:,[", {}),
    ],
)
def test_a_text_is_read_as_far_as_it_makes_sense(text: str, expected: dict[str, str]) -> None:
    assert options(text) == expected


def test_the_older_name_is_in_force_also_when_it_is_empty() -> None:
    both = {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "backend:native"}
    assert in_force(both) == {}
    assert in_force({"PYTORCH_ALLOC_CONF": "backend:native"}) == {"backend": "native"}
    assert len(list(conflicts(both))) == 1


def test_the_same_settings_twice_are_no_conflict() -> None:
    twice = {"PYTORCH_CUDA_ALLOC_CONF": "a:1,b:2", "PYTORCH_ALLOC_CONF": "b:2, a:1"}
    assert not list(conflicts(twice))
    assert not list(conflicts({}))


@pytest.mark.parametrize(
    ("settings", "fraction", "named"),
    [
        ("expandable_segments:True,max_split_size_mb:128", 1.0, ["max_split_size_mb"]),
        ("expandable_segments:False,max_split_size_mb:128", 1.0, []),
        ("max_split_size_mb:128", 1.0, []),
        ("garbage_collection_threshold:0.8", 1.0, ["garbage_collection_threshold"]),
        ("garbage_collection_threshold:0.8", 0.5, []),
        ("garbage_collection_threshold:0.8", None, []),
        ("garbage_collection_threshold:0.8,per_process_memory_fraction:0.9", 1.0, []),
        ("backend:cudaMallocAsync,max_split_size_mb:64", 1.0, ["max_split_size_mb"]),
        ("backend:cudaMallocAsync", 1.0, []),
    ],
)
def test_pairs_that_do_not_work_are_named(settings: str, fraction: float | None, named: list[str]) -> None:
    assert [which for which, _ in unsafe(options(settings), fraction)] == named

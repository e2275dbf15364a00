"""Capacity and fragmentation: a scripted device goes through what allocators go through, and the advisor is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuwatch import catalog
from gpuwatch_hooks.accelerator import CudaAccelerator
from gpuwatch_hooks.allocator import stranded
from tests.scripted_device import GIB, MIB, Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    yield Bench(tmp_path)


def test_a_healthy_device_is_nothing_to_speak_of(bench: Bench) -> None:
    bench.steps(400, backward_bytes=40 * GIB)
    assert bench.rules() == set()
    assert bench.value(catalog.DEVICE_STEP_ACTIVE.name) == 40 * GIB
    assert bench.value(catalog.DEVICE_NOT_TORCH.name) == GIB


def test_a_large_cache_on_an_empty_device_is_healthy(bench: Bench) -> None:
    bench.device.change(reserved_bytes=60 * GIB, active_peak_bytes=14 * GIB, allocated_peak_bytes=14 * GIB)
    bench.device.used = 61 * GIB
    bench.steps(200, backward_bytes=14 * GIB)
    assert bench.rules() == set()


def test_a_step_that_nearly_fills_the_device_is_named_before_it_runs_out(bench: Bench) -> None:
    bench.device.change(active_peak_bytes=75 * GIB, allocated_peak_bytes=75 * GIB, reserved_bytes=77 * GIB)
    bench.device.used = 78 * GIB
    bench.steps(100, backward_bytes=70 * GIB)
    (finding,) = bench.findings()
    assert (finding.rule, finding.severity) == ("mem-near-capacity", "warn")
    assert "75 GiB of 80 GiB" in finding.evidence


def test_a_single_peak_of_the_first_steps_is_not_the_step(bench: Bench) -> None:
    bench.device.change(active_peak_bytes=76 * GIB, allocated_peak_bytes=76 * GIB, reserved_bytes=50 * GIB)
    bench.steps(100, backward_bytes=40 * GIB)
    assert bench.rules() == set()


def test_retries_in_two_windows_are_a_fault_and_a_single_burst_is_none(bench: Bench, tmp_path: Path) -> None:
    bench.steps(60)
    bench.steps(1, alloc_retries=5, stream_syncs=5, device_frees=100, device_allocs=100)
    bench.steps(300)
    assert bench.rules() == set()
    other = Bench(tmp_path / "other")
    for _ in range(20):
        other.steps(19)
        other.steps(1, alloc_retries=1, stream_syncs=1, device_frees=30, device_allocs=30)
    (finding,) = other.findings()
    assert (finding.rule, finding.severity) == ("frag-alloc-retries", "warn")
    other.steps(200, alloc_retries=1, stream_syncs=1, device_frees=30, device_allocs=30)
    assert [finding.severity for finding in other.findings()] == ["critical"]


def test_an_emptied_cache_is_told_from_a_retry(bench: Bench) -> None:
    bench.steps(250, device_allocs=6, device_frees=6, stream_syncs=1)
    (finding,) = bench.findings()
    assert finding.rule == "frag-alloc-churn"
    assert "12 device allocations and frees a step; 1 unforced" in finding.evidence


def test_warm_up_may_allocate_as_it_likes(bench: Bench) -> None:
    bench.steps(49, device_allocs=40, device_frees=10, stream_syncs=1)
    bench.steps(151)
    assert bench.rules() == set()
    assert bench.value(catalog.DEVICE_CALL_RATE.name) == 0


def test_memory_that_nobody_can_use_is_an_overhang(bench: Bench) -> None:
    bench.device.change(reserved_bytes=74 * GIB)
    bench.device.used = 75 * GIB
    bench.steps(100, backward_bytes=38 * GIB)
    assert bench.rules() == {"frag-overhang"}


def test_blocks_that_wait_for_streams_are_told(bench: Bench) -> None:
    bench.device.change(active_peak_bytes=70 * GIB, allocated_peak_bytes=52 * GIB, reserved_bytes=72 * GIB)
    bench.device.used = 73 * GIB
    bench.steps(100, backward_bytes=60 * GIB)
    assert bench.rules() == {"frag-record-stream"}


def test_rounding_that_takes_a_fifth_is_told(bench: Bench) -> None:
    bench.device.change(requested_bytes=15 * GIB)
    bench.steps(60)
    assert bench.rules() == {"frag-rounding"}


def test_memory_beside_the_cache_is_told_once_it_is_steady(bench: Bench) -> None:
    bench.device.used = 70 * GIB
    bench.steps(15)
    assert bench.rules() == set()
    bench.steps(30)
    assert bench.rules() == {"mem-non-torch"}
    bench.device.used = 49 * GIB
    bench.steps(15)
    assert bench.rules() == set()


def blocks(*sizes: tuple[int, str]) -> list[dict[str, Any]]:
    return [{"size": size, "state": state} for size, state in sizes]


def test_only_what_is_between_live_blocks_is_stranded() -> None:
    live, free = "active_allocated", "inactive"
    whole = {"segment_type": "large", "blocks": blocks((20 * MIB, free))}
    split = {"segment_type": "large", "blocks": blocks((4 * MIB, live), (10 * MIB, free), (2 * MIB, "active_pending"))}
    pool = {"segment_type": "large", "segment_pool_id": (0, 1), "blocks": blocks((4 * MIB, live), (9 * MIB, free))}
    assert stranded([whole, split, pool]) == (10 * MIB, 10 * MIB)
    # of 50 MiB of holes in a segment that can grow, one page of 20 MiB is wholly free
    grown = {
        "segment_type": "large",
        "is_expandable": True,
        "blocks": blocks((10 * MIB, live), (35 * MIB, free), (5 * MIB, live), (15 * MIB, free), (MIB, live)),
    }
    assert stranded([grown]) == (30 * MIB, 15 * MIB)
    assert stranded([]) == (0, 0)


def test_segments_are_looked_at_under_pressure_alone_and_at_most_every_five_minutes(bench: Bench) -> None:
    segment = {"segment_type": "large", "blocks": blocks((40 * MIB, "active_allocated"), (60 * MIB, "inactive"))}
    bench.device.state = {"segments": [segment] * 400}
    bench.steps(100)
    assert bench.device.snapshots == 0 and bench.rules() == set()
    bench.device.change(reserved_bytes=74 * GIB, active_peak_bytes=60 * GIB, allocated_peak_bytes=60 * GIB)
    bench.device.used = 75 * GIB
    bench.steps(200)
    assert bench.device.snapshots == 1
    (finding,) = bench.findings()
    assert finding.rule == "frag-stranded-split" and "62914560 bytes" in finding.evidence.replace(",", "")
    bench.device.state = {"segments": []}
    bench.steps(200)
    assert bench.device.snapshots == 2 and bench.rules() == set()


def test_memory_that_grows_at_the_same_point_of_every_step_is_a_leak(bench: Bench) -> None:
    bench.steps(100, allocated_bytes=24 * MIB, active_bytes=24 * MIB, requested_bytes=24 * MIB)
    (finding,) = bench.findings()
    assert finding.rule == "leak-device" and "grows by 24 MiB a step" in finding.evidence
    bench.steps(100)
    assert bench.rules() == set()


def test_a_buffer_that_fills_up_and_two_jumps_are_no_leak(bench: Bench, tmp_path: Path) -> None:
    bench.steps(30, allocated_bytes=24 * MIB)
    bench.steps(200)
    assert bench.rules() == set()
    other = Bench(tmp_path / "other")
    for _ in range(2):
        other.steps(30)
        other.steps(1, allocated_bytes=300 * MIB)
        other.steps(30)
        assert "leak-device" not in other.rules()


def test_a_growing_leak_is_the_reason_for_a_full_device(bench: Bench) -> None:
    bench.device.change(active_peak_bytes=79 * GIB, allocated_peak_bytes=79 * GIB, reserved_bytes=79 * GIB)
    bench.device.used = 80 * GIB
    bench.steps(100, backward_bytes=78 * GIB, allocated_bytes=200 * MIB, active_bytes=200 * MIB)
    assert "mem-near-capacity" not in bench.rules() and "leak-device" in bench.rules()


def test_a_pool_of_pinned_memory_of_a_quarter_of_the_host_is_told(bench: Bench) -> None:
    bench.record.values[bench.record.series(catalog.HOST_TOTAL.name)] = 64 * GIB
    bench.device.pinned = 20 * GIB
    bench.steps(20)
    assert bench.rules() == {"leak-pinned-host"}


def test_another_backend_that_counts_nothing_is_not_believed(bench: Bench) -> None:
    bench.device.change(
        active_bytes=0, active_peak_bytes=0, requested_bytes=0, segments=0, alloc_retries=0, reserved_bytes=0
    )
    bench.steps(150)
    assert bench.value(catalog.DEVICE_ALLOCATED.name) == 20 * GIB
    assert bench.value(catalog.DEVICE_ACTIVE_PEAK.name) is None
    assert bench.rules() == set()


def test_settings_that_contradict_each_other_are_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    bench.steps(1)
    (finding,) = bench.findings()
    assert finding.rule == "env-alloc-conf-conflict" and "PYTORCH_CUDA_ALLOC_CONF='' is in force" in finding.evidence


@pytest.mark.parametrize("expandable", [True, False])
def test_segments_that_were_to_grow_and_do_not_are_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, expandable: bool
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    bench.device.state = {"segments": [], "allocator_settings": {"expandable_segments": expandable}}
    bench.steps(1)
    assert bench.rules() == (set() if expandable else {"env-alloc-conf-conflict"})


def test_settings_that_work_against_each_other_are_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,>:4]")
    bench.steps(1)
    (finding,) = bench.findings()
    assert (finding.rule, finding.where) == ("env-alloc-conf-unsafe", "garbage_collection_threshold")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_device_answers_every_question() -> None:
    device = CudaAccelerator()
    kept = torch.ones(1 << 20, device="cuda")
    assert device.ready()
    counters = device.counters()
    unknown = {name for name, number in vars(counters).items() if number is None}
    assert unknown <= {"private_pool_bytes"}
    assert counters.allocated_bytes is not None and counters.allocated_bytes >= kept.nbytes
    used, reserved = device.used_bytes(), counters.reserved_bytes
    assert used is not None and reserved is not None and used >= reserved
    snapshot = device.snapshot()
    assert snapshot is not None and {"segments", "allocator_settings"} <= snapshot.keys()
    segments = snapshot["segments"]
    assert isinstance(segments, list) and stranded(segments)[0] >= 0
    assert device.memory_fraction() == 1.0 and device.pinned_bytes() is not None


def test_activations_that_fill_a_device_are_told_with_the_modules_to_checkpoint(bench: Bench) -> None:
    parts = {"parameters": 4 * GIB, "gradients": 4 * GIB, "optimizer": 8 * GIB, "activations": 50 * GIB}
    for part, size in parts.items():
        bench.record.values[bench.record.series(catalog.MODEL_MEMORY.name, part=part)] = size
    bench.record.observe("mem-activation-dominant", "layers.*", "checkpointing each saves 49 GiB at most", 50 * GIB)
    bench.device.change(active_peak_bytes=75 * GIB, allocated_peak_bytes=75 * GIB, reserved_bytes=77 * GIB)
    bench.device.used = 78 * GIB
    bench.steps(60, backward_bytes=72 * GIB)
    (finding,) = bench.findings()
    assert (finding.rule, finding.where) == ("mem-activation-dominant", "layers.*")
    assert "49 GiB at most" in finding.evidence


def test_a_device_that_waits_with_half_its_memory_free_is_given_a_batch_size(bench: Bench) -> None:
    for part in ("parameters", "gradients", "optimizer"):
        bench.record.values[bench.record.series(catalog.MODEL_MEMORY.name, part=part)] = 2 * GIB
    bench.record.values[bench.record.series(catalog.LOADER_BATCH.name)] = 32
    bench.record.values[bench.record.series(catalog.DEVICE_DONE_EARLY.name)] = 1.0
    bench.device.change(active_peak_bytes=16 * GIB, allocated_peak_bytes=16 * GIB, reserved_bytes=20 * GIB)
    bench.device.used = 21 * GIB
    bench.steps(60, backward_bytes=16 * GIB)
    (finding,) = bench.findings()
    assert finding.rule == "mem-headroom-unused"
    assert "6.2 times" in finding.evidence and "198 items instead of 32" in finding.evidence

"""Debugging switches left on, and switches that are on for a reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic

from tests.loops import convolutional, found, from_step, loader_of, only, quiet, train

anomaly = torch.autograd.detect_anomaly

pytestmark = [
    pytest.mark.usefixtures("records"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
]


@pytest.fixture(autouse=True)
def _switches_as_before() -> Iterator[None]:
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def test_anomaly_mode_for_a_whole_run_is_found() -> None:
    torch.autograd.set_detect_anomaly(True)
    finding = only(train(80), "debug-anomaly")
    assert "for 64 training steps in a row" in finding.evidence, "as long as every step was looked at"


@pytest.mark.parametrize("first", [0, 100, 130])
@pytest.mark.parametrize("part", ["around_step", "around_backward"])
def test_anomaly_mode_in_a_with_block_is_found_wherever_it_begins(first: int, part: str) -> None:
    assert found(train(first + 150, **{part: from_step(first, anomaly)}), "debug-anomaly")  # type: ignore[arg-type]


def test_anomaly_mode_that_begins_when_looks_are_rare_is_found() -> None:
    assert found(train(850, around_backward=from_step(600, anomaly)), "debug-anomaly")


@pytest.mark.parametrize("first", [0, 20, 92, 93, 94, 95, 125])
def test_anomaly_mode_for_three_steps_is_a_search_and_no_mistake(first: int) -> None:
    hunt = train(250, around_step=lambda step: anomaly() if first <= step < first + 3 else contextlib.nullcontext())
    assert not found(hunt, "debug-anomaly")


@pytest.mark.parametrize("period", [8, 16, 31, 32, 33])
def test_a_switch_that_is_on_now_and_then_is_never_taken_for_one_that_stays_on(period: int) -> None:
    checks = train(1200, around_step=lambda step: anomaly() if step % period < 3 else contextlib.nullcontext())
    assert not found(checks, "debug-anomaly")


def test_anomaly_mode_around_one_of_two_backwards_of_a_step_is_found() -> None:
    model = convolutional()
    inputs = torch.randn(4, 8)

    def penalty(step: int) -> None:
        with anomaly():
            model(inputs).square().mean().backward()

    assert found(train(150, model=model, before=penalty), "debug-anomaly")


@pytest.mark.parametrize("first", [0, 100])
def test_a_profiler_that_never_stops_is_found(first: int) -> None:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def begin(step: int) -> None:
        if step == first:
            profiler.start()

    try:
        findings = train(first + 140, before=begin)
    finally:
        profiler.stop()
    assert found(findings, "debug-profiler-on")


@pytest.mark.parametrize(
    "schedule",
    [
        {"wait": 5, "warmup": 1, "active": 3, "repeat": 2},
        {"wait": 23, "warmup": 1, "active": 8, "repeat": 0},
        {"skip_first": 40, "wait": 1, "warmup": 1, "active": 10, "repeat": 1},
    ],
)
def test_a_profiler_with_a_schedule_is_quiet(schedule: dict[str, int]) -> None:
    plan = torch.profiler.schedule(**schedule)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=plan, acc_events=True) as profiler:
        findings = train(300, after=lambda *_: profiler.step())
    assert not found(findings, "debug-profiler-on")


def test_the_fill_of_deterministic_mode_is_found() -> None:
    torch.use_deterministic_algorithms(True)
    assert found(train(80), "debug-deterministic-fill")


def test_deterministic_algorithms_without_the_fill_are_a_choice() -> None:
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    assert not found(train(80), "debug-deterministic-fill")


@pytest.mark.parametrize(
    ("name", "value"), [("CUDA_LAUNCH_BLOCKING", "1"), ("TORCH_DISTRIBUTED_DEBUG", "detail"), ("NCCL_DEBUG", "TRACE")]
)
def test_a_debugging_variable_of_the_environment_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert only(train(80), "debug-env-sync").where == f"{name}={value}"


@pytest.mark.parametrize(
    ("name", "value"), [("CUDA_LAUNCH_BLOCKING", "0"), ("TORCH_DISTRIBUTED_DEBUG", "INFO"), ("NCCL_DEBUG", "WARN")]
)
def test_an_ordinary_variable_of_the_environment_is_not(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert not found(train(80), "debug-env-sync")


def test_a_plain_run_has_no_finding_of_any_kind() -> None:
    assert quiet(train(200, model=convolutional(), loader=loader_of(50)))

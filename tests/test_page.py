from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpuwatch.layout import State
from gpuwatch.nvml import GpuReading, NvmlUnavailable
from gpuwatch.page import RUNS_IN_FULL
from gpuwatch.page import page as rendered
from gpuwatch.sampler import Sampler
from tests.recorded import write_run
from tests.serving import eventually, rank

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """A page as a browser takes it apart: its elements, its text; fails when tags do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(text for text in self.texts if text)


def no_gpus() -> list[GpuReading]:
    raise NvmlUnavailable("no GPU telemetry: this is a test")


def look(directory: Path, sampler: Sampler | None = None) -> Page:
    return Page(rendered(directory, sampler or Sampler(no_gpus)).decode())


def test_with_no_record_it_says_what_to_do(records: Path) -> None:
    page = look(records)
    assert "No run yet" in page.text
    assert "gpuwatch.attach(model, loader)" in page.text


def test_a_run_is_shown_with_its_time_its_memory_and_its_findings(records: Path) -> None:
    observed = [("debug-anomaly", "train.py:31", "detect_anomaly() is on", 120.0)]
    write_run(records, name="resnet", observations=observed, state=State.EXCEPTION)
    page = look(records)
    for text in (
        "resnet exception 200 steps",
        "data 30 %",
        "backward 40 %",
        "host peak 512 MiB",
        "debug-anomaly",
        "train.py:31",
        "detect_anomaly() is on",
        "where",
        "fix",
        "gain",
        "check",
    ):
        assert text in page.text, text
    widths = [
        found[1]
        for name, style in page.attributes
        if name == "style" and (found := re.match(r"width: (.*)%", style or ""))
    ]
    assert [float(width) for width in widths] == [30, 20, 40, 5, 5]


def test_the_ranks_of_a_run_are_shown_together_and_a_shared_finding_once(records: Path) -> None:
    observed = [("debug-anomaly", "train.py:31", "on", 120.0)]
    with (
        rank(records, rank=0, world_size=2, observations=observed),
        rank(records, rank=1, world_size=2, observations=observed) as second,
    ):
        assert look(records).tags.count("h2") == 2  # the run and the GPUs
        second.kill()
        second.wait()
        page = look(records)
    assert page.texts.count("debug-anomaly") == 1
    assert "all 2 ranks" in page.text
    assert page.texts.count("running") == 1
    assert page.texts.count("killed") == 2  # the rank and the run
    assert "run-dead" in page.text


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "&lt;b&gt;", "]]></style><b>"]
)
def test_hostile_text_is_shown_as_text(records: Path, text: str) -> None:
    observed = [("debug-anomaly", f"{text}:31", f"seen {text}", 120.0)]
    write_run(records, name=text, observations=observed, identity={"script": text, "device": text})
    page = look(records)
    assert {"script", "img", "b"}.isdisjoint(page.tags)
    assert page.texts.count(text) == 1
    assert f"{text}:31" in page.texts
    assert f"seen {text}" in page.text
    assert not any(name.startswith("on") for name, _ in page.attributes)


def test_characters_that_no_page_may_hold_are_written_out(records: Path) -> None:
    write_run(records, name="a\x00b\x1b[31mc\ud800d\u202ee")
    assert r"a\x00b\x1b[31mc\ud800d\u202ee" in look(records).texts


def test_nothing_is_loaded_from_elsewhere(records: Path) -> None:
    write_run(records)
    page = look(records)
    assert {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
    assert [target for name, target in page.attributes if name in ("href", "src")] == ["/metrics"]
    assert ("http-equiv", "refresh") in page.attributes


def test_the_newest_runs_are_in_full_and_the_others_in_a_line(records: Path) -> None:
    for number in range(RUNS_IN_FULL + 2):
        write_run(records, name=f"run{number}", steps=100 + number)
        time.sleep(0.002)
    page = look(records)
    named = [text for text in page.texts if re.fullmatch(r"run\d", text)]
    assert named == [f"run{number}" for number in reversed(range(RUNS_IN_FULL + 2))]
    assert page.texts.count("Time of a step") == RUNS_IN_FULL
    assert "Earlier runs" in page.texts


def test_of_many_ranks_the_most_alarming_are_read_whole(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwatch.page.RANKS_READ", 2)
    for number in range(4):
        observed = [("debug-anomaly", "train.py:31", "detect_anomaly() is on", 120.0)]
        state = State.EXCEPTION if number == 3 else State.CLEAN
        write_run(records, rank=number, world_size=4, steps=100 + number, state=state, observations=observed)
    page = look(records)
    assert [step for step in ("100", "101", "102", "103") if step in page.texts] == ["100", "101", "102", "103"]
    assert "who ranks 0, 3, most on rank 0" in page.text


def test_a_file_that_is_no_record_is_named_with_the_reason(records: Path) -> None:
    write_run(records)
    (records / "noise.gpw").write_bytes(b"noise")
    assert "noise.gpw has 5 bytes" in look(records).text


def test_the_absence_of_gpus_is_one_line(records: Path) -> None:
    sampler = Sampler(no_gpus, period_seconds=0.01)
    sampler.start()
    eventually(lambda: sampler.unavailable() == "no GPU telemetry: this is a test")
    page = look(records, sampler)
    sampler.stop()
    assert page.texts.count("no GPU telemetry: this is a test") == 1


def test_a_gpu_that_heat_holds_back_is_shown_with_the_advice(records: Path) -> None:
    hot = GpuReading(
        index=1,
        uuid="GPU-1",
        name="H100 <b>",
        utilization_ratio=0.98,
        memory_used_bytes=60 << 30,
        memory_total_bytes=80 << 30,
        power_watts=655.4,
        power_limit_watts=700.0,
        temperature_celsius=91.0,
        sm_clock_hertz=990e6,
        sm_clock_max_hertz=1980e6,
        clock_reasons=0x40,
        processes=((4242, None),),
    )
    sampler = Sampler(lambda: [hot], period_seconds=0.002)
    sampler.start()
    eventually(lambda: sampler.history(hot))
    page = look(records, sampler)
    sampler.stop()
    for text in ("H100 <b>", "60 GiB of 80 GiB", "655 W of 700 W", "91 °C", "990 MHz of 1.98 GHz", "throttled"):
        assert text in page.texts, text
    assert "hw-thermal-throttle" in page.texts
    assert "GPU 1 (GPU-1)" in page.texts
    assert "at most 2.00x as fast" in page.text


def test_strangers_on_a_gpu_are_named_by_their_process(records: Path) -> None:
    shared = GpuReading(
        0, "GPU-0", memory_total_bytes=80 << 30, processes=((7, 9 << 30), (4343, 2 << 30)),
        foreign_processes=((4343, 2 << 30),),
    )  # fmt: skip
    sampler = Sampler(lambda: [shared], period_seconds=0.002)
    sampler.start()
    eventually(lambda: sampler.history(shared))
    page = look(records, sampler)
    sampler.stop()
    assert "mem-foreign-process" in page.texts
    assert "pid 4343 holds 2 GiB" in page.text and "pid 7" not in page.text

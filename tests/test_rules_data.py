"""What is said of a run that waits for data: the cause and not its consequences, and the numbers that are known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuwatch.advisor import Finding, advise, firing
from gpuwatch.catalog import (
    LOADER_AFFORDABLE,
    LOADER_ALONE,
    LOADER_BEST_PREFETCH,
    LOADER_BEST_WAIT,
    LOADER_BEST_WORKERS,
    LOADER_ITEM_SECONDS,
    LOADER_WORKERS,
)
from gpuwatch.layout import State
from gpuwatch.reader import read
from gpuwatch.render.runbooks import runbook
from gpuwatch.rulebook import RULES_BY_ID
from gpuwatch.rulebook.waiting import WAITING
from tests.recorded import write_run

DATA = [rule for rule in RULES_BY_ID.values() if rule.id.startswith("data-")]
CAUSES = {
    "data-collate-slow": ["data-collate-slow"],
    "data-io-bound": ["data-io-bound"],
    "data-cpu-bound": ["data-cpu-bound"],
    "data-workers-oversubscribed": ["data-workers-oversubscribed"],
    "data-workers-zero": ["data-workers-zero"],
    "data-stall": ["data-stall"],
    "data-single-batch-iter": ["data-single-batch-iter"],
    "data-epoch-restart": ["data-epoch-restart"],
}


@pytest.mark.parametrize(("id", "said"), CAUSES.items())
def test_of_a_cause_and_its_consequences_only_the_cause_is_said(id: str, said: list[str]) -> None:
    for example in RULES_BY_ID[id].examples:
        if example.fires:
            loud = [rule.id for rule, severity in firing(example.history(), DATA) if severity != "info"]
            # Where the training thread waits for storage itself there are two causes, and a fix for each.
            allowed = [said, ["data-workers-zero", *said]] if id == "data-io-bound" else [said]
            assert loud in allowed, example.name


def test_a_wait_without_a_known_cause_is_still_said() -> None:
    examples = {example.name: example for example in RULES_BY_ID["data-stall"].examples}
    history = examples["a quarter of each step"].history()
    assert WAITING.holds(history)
    assert [rule.id for rule, _ in firing(history, DATA)] == ["data-stall"]


def stalled(directory: Path, id: str, **values: float) -> Finding:
    """A run that waits for 30 % of its time: what is said of it."""
    known = {
        "workers": LOADER_WORKERS.name,
        "item": LOADER_ITEM_SECONDS.name,
        "best": LOADER_BEST_WORKERS.name,
        "ahead": LOADER_BEST_PREFETCH.name,
        "left": LOADER_BEST_WAIT.name,
        "making": LOADER_ALONE.name,
        "affordable": LOADER_AFFORDABLE.name,
    }
    gauges = {known[name]: value for name, value in values.items() if name in known}
    writer = write_run(directory, state=None, values={LOADER_ITEM_SECONDS.name: 0.0009, **gauges})
    writer.close(State.CLEAN)
    (finding,) = [finding for finding in advise(read(writer.path)) if finding.rule == id]
    return finding


def test_the_fix_names_the_setting_and_the_stall_that_would_remain(tmp_path: Path) -> None:
    fix = stalled(tmp_path, "data-workers-zero", best=3, ahead=2, left=0.012).fix
    assert "`num_workers=3, prefetch_factor=2` is enough: about 1.2 % of step time" in fix
    assert "must come down" not in fix


def test_where_no_setting_is_enough_the_fix_says_what_must_shrink(tmp_path: Path) -> None:
    numbers = {"best": 2.0, "ahead": 4.0, "left": 0.41, "making": 0.12, "affordable": 0.07}
    fix = stalled(tmp_path, "data-workers-zero", **numbers).fix
    assert "`num_workers=2, prefetch_factor=4` is the best there is, and 41 % of step time" in fix
    assert fix.endswith("making a batch must come down from 120 ms to about 70 ms.")


def test_a_sentence_whose_numbers_are_not_known_is_left_out(tmp_path: Path) -> None:
    assert stalled(tmp_path, "data-workers-zero").fix == RULES_BY_ID["data-workers-zero"].fix
    with_half = stalled(tmp_path, "data-workers-zero", best=2, left=0.41)
    assert with_half.fix == RULES_BY_ID["data-workers-zero"].fix


def test_where_no_worker_would_help_none_is_recommended(tmp_path: Path) -> None:
    finding = stalled(tmp_path, "data-stall", workers=0, best=0, ahead=2, left=0.3, making=0.03, affordable=0.0)
    assert "num_workers=0" not in finding.fix and "By this run's own costs" not in finding.fix


EVERY_TEXT: Sequence[tuple[str, str]] = [
    (rule.id, example.name) for rule in DATA for example in rule.examples if example.fires
]


@pytest.mark.parametrize(("id", "name"), EVERY_TEXT, ids=[f"{id}: {name}" for id, name in EVERY_TEXT])
def test_no_text_on_data_speaks_of_what_is_unknown(id: str, name: str, tmp_path: Path) -> None:
    rule = RULES_BY_ID[id]
    example = next(example for example in rule.examples if example.name == name)
    writer = write_run(tmp_path, state=None)
    for key, values in example.series.items():
        family, _, labels = key.partition("{")
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if family.endswith("_observation"):
            writer.observe(named["rule"], named["where"], "", values[-1])
        elif not family.startswith(("gpuwatch_window", "gpuwatch_phase")):
            writer.values[writer.series(family, **named)] = values[-1]
    writer.close(State.CLEAN)
    for finding in advise(read(writer.path), [rule]):
        assert "unknown" not in finding.evidence + finding.fix
        assert not re.search(r"\{\w+\}", finding.evidence + finding.fix)


def test_a_runbook_shows_what_a_finding_would_add() -> None:
    page = runbook(RULES_BY_ID["data-workers-zero"])
    assert "## With the run's own numbers" in page and "`num_workers=BEST, prefetch_factor=AHEAD`" in page

"""Numbers of a rank beside those of its peers, and what rules on several ranks see of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gpuwatch.advisor import advise, advise_run
from gpuwatch.catalog import DEVICE_ACTIVE_PEAK, DEVICE_CAPACITY, RANK_GONE_TIME
from gpuwatch.expr import Across, Const, Metric, Peered, Placed, Recorded, by_rank, of_place, places_of, series_key
from gpuwatch.history import history_of
from gpuwatch.layout import State
from gpuwatch.reader import Snapshot, read
from gpuwatch.report.document import document
from gpuwatch.rulebook import RULES_BY_ID
from gpuwatch.rulebook.rule import of_ranks
from tests.recorded import write_run

GAUGE = Metric("m_seconds", "gauge", "seconds", "A gauge.")
PHASES = Metric("m_own_seconds", "gauge", "seconds", "A gauge.", labels=("phase",))


def peers(*values: float) -> Peered:
    """The first of some ranks with these values."""
    histories = [{GAUGE.name: [(0.0, value)]} for value in values]
    return Peered(histories[0], histories)


# -- both readings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "expected", "promql"),
    [
        ("max", 9.0, "max by (run) (m_seconds)"),
        ("min", 1.0, "min by (run) (m_seconds)"),
        ("sum", 12.0, "sum by (run) (m_seconds)"),
        ("avg", 4.0, "avg by (run) (m_seconds)"),
        ("count", 3.0, "count by (run) (m_seconds)"),
        ("median", 2.0, "quantile by (run) (0.5, m_seconds)"),
    ],
)
def test_a_number_over_all_ranks(how: str, expected: float, promql: str) -> None:
    assert Across(how, GAUGE).value(peers(2, 1, 9)) == expected
    assert Across(how, GAUGE).promql() == promql
    assert Across(how, GAUGE).value(Peered({}, [])) is None


def test_a_rank_that_does_not_say_is_left_out() -> None:
    history = Peered({}, [{}, {GAUGE.name: [(0.0, 4.0)]}])
    assert Across("count", GAUGE).value(history) == 1
    assert (Across("avg", GAUGE) - GAUGE).value(history) is None


def test_a_rank_is_paired_with_its_run_and_a_phase_with_its_own() -> None:
    own, mean = Placed(PHASES), Across("avg", Placed(PHASES))
    assert (GAUGE - Across("avg", GAUGE)).promql() == "(m_seconds - on (run) group_left () avg by (run) (m_seconds))"
    assert (Across("avg", GAUGE) - GAUGE).promql() == "(avg by (run) (m_seconds) - on (run) group_right () m_seconds)"
    assert (own - mean).promql() == (
        "(m_own_seconds - on (run, phase) group_left () avg by (run, phase) (m_own_seconds))"
    )
    once = "max by (instance, run, rank) ((m_seconds != 0))"  # a daemon may be scraped by two jobs
    assert (own / GAUGE).promql() == f"(m_own_seconds / on (instance, run, rank) group_left () {once})"
    assert (own * 2 + Const(1)).promql() == "((m_own_seconds * 2) + 1)"


def test_conditions_are_joined_by_what_both_sides_carry() -> None:
    on = ("instance", "run", "rank")
    phase, rank, run = Placed(PHASES) > 1, GAUGE > 1, Across("count", GAUGE) > 1
    assert "\nand on (instance, run, rank)\n" in (phase & rank).promql(on)
    assert "\nand on (run)\n" in (rank & run).promql(on)
    assert "\nand on (instance, run, rank, phase)\n" in (phase & phase).promql(on)


def test_what_is_recorded_is_computed_from_what_it_is_recorded_from() -> None:
    recorded = Recorded("rank:m:excess", GAUGE - Across("avg", GAUGE))
    assert recorded.value(peers(9, 1, 2)) == 5
    assert (recorded > 1).promql(()) == "rank:m:excess > 1"
    assert recorded.metrics() == {GAUGE.name}


def test_a_history_of_several_ranks_is_taken_apart() -> None:
    flat = {key: [(0.0, values[0])] for key, values in of_ranks({"m": (1.0,)}, {'m{a="x"}': (2.0,)}).items()}
    assert by_rank(flat) == {"0": {"m": [(0.0, 1.0)]}, "1": {'m{a="x"}': [(0.0, 2.0)]}}


def test_a_place_is_seen_without_the_others_on_every_rank() -> None:
    keys = {place: series_key(PHASES.name, {"phase": place}) for place in ("data", "forward")}
    one = {keys["data"]: [(0.0, 1.0)], keys["forward"]: [(0.0, 5.0)], GAUGE.name: [(0.0, 9.0)]}
    seen = of_place(Peered(one, [one, one]), "phase", "data")
    assert set(seen) == {keys["data"], GAUGE.name}
    assert Across("max", Placed(PHASES)).value(seen) == 1
    assert places_of(one, "phase") == ["data", "forward"]


# -- records -----------------------------------------------------------------------------------------------------------


def run_of(directory: Path, *peaks: float) -> list[Snapshot]:
    """Records of ranks that fill their devices to these shares."""
    return [
        read(
            write_run(
                directory,
                rank=rank,
                world_size=len(peaks),
                values={DEVICE_ACTIVE_PEAK.name: peak * 80e9, DEVICE_CAPACITY.name: 80e9},
                identity={"node": f"node-{rank // 2}"},
            ).path
        )
        for rank, peak in enumerate(peaks)
    ]


def test_the_fullest_rank_is_named_with_its_node(tmp_path: Path) -> None:
    found = run_of(tmp_path, 0.6, 0.61, 0.95)
    ((finding, whose),) = [pair for pair in advise_run(found) if pair[0].rule == "dist-memory-imbalance"]
    assert whose is found[2]
    assert finding.where == "rank 2 on node-1"
    assert "its peak is 70.8 GiB, 95 % of its device; the least of a rank is 44.7 GiB" in finding.evidence


def test_a_rank_by_itself_is_no_imbalance(tmp_path: Path) -> None:
    found = run_of(tmp_path, 0.6, 0.61, 0.95)
    assert "dist-memory-imbalance" not in {finding.rule for finding in advise(found[2])}


def test_a_run_with_a_dead_rank_does_not_hang_but_has_a_dead_rank(tmp_path: Path) -> None:
    dead, waiting = (read(write_run(tmp_path, rank=rank, world_size=2, state=None).path) for rank in (0, 1))
    dead = dataclasses.replace(dead, up=False, run_seconds=50.0)
    waiting = dataclasses.replace(waiting, up=True, progress_age=900.0)
    assert "run-hang" in [finding.rule for finding, _ in advise_run([waiting])]
    found = advise_run([dead, waiting])
    assert [(finding.rule, whose) for finding, whose in found if finding.rule.startswith("run")] == [("run-dead", dead)]


def test_of_two_dead_ranks_the_first_is_named(tmp_path: Path) -> None:
    ranks = [read(write_run(tmp_path, rank=rank, world_size=2, state=None).path) for rank in (0, 1)]
    created = ranks[0].created
    gone = [
        dataclasses.replace(each, up=False, created=created, run_seconds=seconds)
        for each, seconds in zip(ranks, (50.0, 49.0), strict=True)
    ]
    said = [finding for finding, _ in advise_run(gone) if finding.rule == "run-dead"]
    assert [finding.where for finding in said] == ["rank 1"]
    assert "2 of the run's ranks are gone" in said[0].evidence
    assert history_of(gone[1])[RANK_GONE_TIME.name][-1][1] == created + 49


def test_steps_that_are_only_counted_are_progress(tmp_path: Path) -> None:
    writer = write_run(tmp_path, state=None)
    snapshot = read(writer.path)
    assert snapshot.progress_age < 5 and snapshot.step_age is not None
    assert snapshot.progress_age <= snapshot.step_age
    assert snapshot.state is State.RUNNING


def test_rules_on_several_ranks_are_seen_at_each_rank_or_at_the_run() -> None:
    series = of_ranks({GAUGE.name: (1.0,)}, {GAUGE.name: (2.0,)})
    flat = {key: [(0.0, value) for value in values] for key, values in series.items()}
    assert set(RULES_BY_ID["dist-memory-imbalance"].views(flat)) == {("0", ""), ("1", "")}
    assert set(RULES_BY_ID["dist-comm-exposed"].views(flat)) == {("", "")}
    assert set(RULES_BY_ID["data-stall"].views(flat)) == {("", "")}
    assert RULES_BY_ID["dist-straggler"].place == "phase"
    assert RULES_BY_ID["debug-anomaly"].place == "where"


def test_the_rank_that_failed_first_is_why_a_run_ended(tmp_path: Path) -> None:
    found = [read(write_run(tmp_path, rank=rank, world_size=3, state=State.EXCEPTION).path) for rank in range(3)]
    ended = [dataclasses.replace(each, ended=at) for each, at in zip(found, (30.0, 10.0, 20.0), strict=True)]
    assert str(document(ended)["run"]["cause"]).startswith("rank 1: ")

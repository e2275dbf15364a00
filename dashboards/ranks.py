"""The dashboard "Ranks": the ranks of a run beside each other: who is slow, who is behind, who is gone, who waits."""

from __future__ import annotations

from dashboards.options import COLORS, Limit
from dashboards.panels import Panel, Query, board, heatmap, row, stat, statetimeline, table, timeseries
from dashboards.parts import RANK, VARIABLES, limits, metrics, rule_panel, runbook
from dashboards.queries import ALONE, as_of_now, narrowed, rate, select
from gpuwatch.catalog import (
    COLLECTIVES,
    CPU_WAIT_SECONDS,
    DDP_SECONDS,
    DEVICE_ACTIVE_PEAK,
    GRADIENT_SYNCS,
    OWN_SECONDS,
    OWN_STEP_SECONDS,
    RANK_ENDED,
    RANK_EXIT_INFO,
    RANK_INFO,
    RANK_LAST_STEP,
    RANK_POSITION,
    RANK_PROGRESS_AGE,
    RANK_UP,
    STEPS,
    WINDOW_STEP_SECONDS,
)
from gpuwatch.rulebook import RULES_BY_ID

_STRAGGLER = RULES_BY_ID["dist-straggler"].value
_EXCESS_LIMITS = limits("dist-straggler", _STRAGGLER.expr)
_NOISE = min(limit.value for limit in _EXCESS_LIMITS) / 10
"""Below a tenth of the limit ranks differ anyway; not to draw that spares most of the series of a large run."""

_MEDIAN = select(WINDOW_STEP_SECONDS.where(quantile="0.5"))
_PHASE_OF_RANK = RANK + " {{phase}}"


def ranks() -> str:
    """The dashboard's JSON."""
    return board(
        "gpuwatch / Ranks",
        "gpuwatch-ranks",
        "The ranks of a run beside each other: who is slow and in which phase, who is behind, who is gone.",
        VARIABLES,
        (*_summary(), *_speed(), *_stragglers(), *_life(), *_communication()),
        ("gpuwatch", "distributed"),
    )


def _excess() -> str:
    """What each rank needs beyond its peers, by phase: as the rule has it."""
    return narrowed(_STRAGGLER.expr, ALONE)


def _summary() -> tuple[Panel, ...]:
    nobody = f"0 * count({select(RANK_UP)})"
    dead = f"({select(RANK_UP)} == 0) and ({select(RANK_ENDED)} == 0)"
    last = as_of_now(RANK_LAST_STEP, STEPS)
    return (
        row("The ranks"),
        stat("Alive", "Ranks whose process lives.", Query(f"sum({select(RANK_UP)})", "ranks"), "none"),
        stat("Died", RULES_BY_ID["run-dead"].title + ".",
             Query(f"count({dead}) or {nobody}", "ranks"), "none", limits=(Limit(1, COLORS["critical"]),)),
        stat("Steps apart", "How far the ranks of a run are apart. A rank is read now and then: a few are none.",
             Query(f"max(max by (run) ({last}) - min by (run) ({last}))", "steps"), "none", decimals=0),
        stat("Since last progress", RANK_PROGRESS_AGE.help + " The largest of the chosen ranks.",
             Query(f"max({select(RANK_PROGRESS_AGE)})", "age"), "s",
             limits=limits("run-hang", RULES_BY_ID["run-hang"].value.expr)),
        stat("Worst straggler", RULES_BY_ID["dist-straggler"].title + ": its share of a step.",
             Query(f"max({_excess()})", "share"), "percentunit", limits=_EXCESS_LIMITS),
        stat("Reductions a step", GRADIENT_SYNCS.help,
             Query(f"max({select(GRADIENT_SYNCS)}) or {nobody}", "reductions"), "none", decimals=1,
             limits=limits("dist-no-sync-missing", GRADIENT_SYNCS)),
    )  # fmt: skip


def _speed() -> tuple[Panel, ...]:
    return (
        row("Speed"),
        heatmap("How long a step takes on each rank", "The median of recent steps.",
                Query(f"max by (run, rank) ({_MEDIAN})", RANK), "s", width=12),
        heatmap("How long each rank works by itself", "Median time of a step that the rank spends on work of its own. "
                "A rank that stands out holds up the others, even where all steps take equally long.",
                Query(f"max by (run, rank) ({select(OWN_STEP_SECONDS)})", RANK), "s", width=12),
        timeseries("How many steps each rank makes", STEPS.help, [Query(rate(STEPS), RANK)], "ops"),
        timeseries("How much of its time each rank waits for a core", CPU_WAIT_SECONDS.help,
                   [Query(rate(CPU_WAIT_SECONDS), RANK)], "percentunit"),
    )  # fmt: skip


def _stragglers() -> tuple[Panel, ...]:
    own = select(OWN_SECONDS)
    return (
        row("Who holds up the others"),
        table("Who is slower than the peers, and in which phase",
              "The time a rank needs for work of its own beyond the mean of its peers, as a share of a step; from "
              f"{_NOISE:.0%} on.",
              Query(f"sort_desc(max by (run, rank, instance, phase) ({_excess()}) > {_NOISE:g})", _PHASE_OF_RANK),
              columns={"run": "Run", "rank": "Rank", "instance": "Node", "phase": "Phase", "Value": "Excess"},
              unit="percentunit", width=12, empty="none is"),
        timeseries("How much longer than its peers a rank works", RULES_BY_ID["dist-straggler"].title
                   + " (dist-straggler). " + RULES_BY_ID["dist-straggler"].because,
                   [Query(f"({_excess()}) > {_NOISE:g}", _PHASE_OF_RANK)], "percentunit", limits=_EXCESS_LIMITS,
                   links=[runbook("dist-straggler")], empty="none does"),
        timeseries("What the slowest rank works on, and the middle one", OWN_SECONDS.help + " Dashed: the median rank.",
                   [Query(f"max by (run, phase) ({own})", "{{run}} {{phase}}, slowest"),
                    Query(f"quantile by (run, phase) (0.5, {own})", "{{run}} {{phase}}, median", bound=True)],
                   "s", width=24),
    )  # fmt: skip


def _life() -> tuple[Panel, ...]:
    return (
        row("Who lives"),
        statetimeline("Which ranks are alive", "Whether the rank's process lives, has written an end mark, or died.",
                      [Query(f"max by (run, rank) ({select(RANK_UP)}) + 2 * max by (run, rank) ({select(RANK_ENDED)})",
                             RANK)],
                      states={0: ("died", COLORS["critical"]), 1: ("alive", "green"), 2: ("ended", COLORS["info"]),
                              3: ("alive", "green")}),
        rule_panel("run-hang", "How long nothing has happened"),
        timeseries("How far each rank is", RANK_POSITION.help,
                   [Query(select(RANK_POSITION), RANK)], "none"),
        table("How ended ranks ended", "The cause of each end that was seen.",
              Query(f"max by (run, rank, instance, cause) ({select(RANK_EXIT_INFO)})", RANK),
              columns={"run": "Run", "rank": "Rank", "instance": "Node", "cause": "Cause"}, width=9,
              empty="no rank has ended"),
        table("Where each rank runs", "The node, process, job and experiment of each rank.",
              Query(select(RANK_INFO), RANK),
              columns={"run": "Run", "rank": "Rank", "node": "Node", "job_id": "Job", "experiment": "Experiment",
                       "pid": "Process", "restart": "Restarts"}, width=15),
    )  # fmt: skip


def _communication() -> tuple[Panel, ...]:
    enqueued = as_of_now(COLLECTIVES.where(state="enqueued"))
    return (
        row("Communication"),
        timeseries("What a step of DistributedDataParallel is made of", DDP_SECONDS.help,
                   [Query(f"avg by (run, part) ({select(DDP_SECONDS)})", "{{run}} {{part}}")], "s"),
        rule_panel("dist-comm-exposed", "How much of a step is communication that nothing hides", "{{run}}"),
        timeseries("How many collectives each rank enters and completes", COLLECTIVES.help,
                   [Query(rate(COLLECTIVES), RANK + " group {{group}} {{state}}")], "ops"),
        timeseries("How far the ranks' collectives are apart",
                   "Collectives enqueued by the first rank of a run less those of the last, the least of a minute: a "
                   "gap that stays is a rank that did not enter one.",
                   [Query(f"min_over_time((max by (run, group) ({enqueued}) - min by (run, group) ({enqueued}))[1m:])",
                          "{{run}} group {{group}}")], "none"),
        metrics("How often a step reduces gradients", [GRADIENT_SYNCS], RANK),
        metrics("How much each rank's device held at its peak", [DEVICE_ACTIVE_PEAK], RANK),
    )  # fmt: skip

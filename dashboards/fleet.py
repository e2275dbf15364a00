"""The dashboard "Fleet": all runs of all nodes, what is wrong with them, and the GPUs that do nothing."""

from __future__ import annotations

from dashboards.options import COLORS, Limit, Link
from dashboards.panels import Panel, Query, Variable, board, row, stat, statetimeline, table, timeseries
from dashboards.parts import limits, runbook
from dashboards.queries import ALERTS, ALONE, narrowed, plain, plain_rate, worst_first
from gpuwatch.catalog import (
    GPU_ENERGY,
    GPU_INFO,
    GPU_POWER,
    GPU_PROCESSES,
    GPU_UTILIZATION,
    RANK_ENDED,
    RANK_EXIT_INFO,
    RANK_LAST_STEP,
    RANK_UP,
    RECORDS,
    RECORDS_REJECTED,
    SERIES_DROPPED,
    SOURCE_UP,
    STEPS,
)
from gpuwatch.limits import IDLE_GPU_RATIO
from gpuwatch.render.runbooks import RUNBOOKS
from gpuwatch.rulebook import RULES_BY_ID
from gpuwatch.rulebook.capacity import PEAK_SHARE

VARIABLES = (
    Variable("job", "Job", f"label_values({RANK_UP.name}, job)"),
    Variable("run", "Run", f'label_values({RANK_UP.name}{{job=~"$job"}}, run)'),
    Variable("node", "Node", f'label_values({RECORDS.name}{{job=~"$job"}}, instance)'),
    Variable("gpu", "GPU", f'label_values({GPU_INFO.name}{{job=~"$job", instance=~"$node"}}, gpu)'),
    Variable("runbooks", "Runbooks at", text=RUNBOOKS),
)

_UP = f"{plain(RANK_UP)} == 1"
_DEAD = f"({plain(RANK_UP)} == 0) and ({plain(RANK_ENDED)} == 0)"
_USED = f"avg_over_time({plain(GPU_UTILIZATION)}[10m])"
_RUNBOOK = {"rule": Link("Runbook", "${runbooks}${__value.raw}.md")}


def _of_runs(more: str = 'rule!=""') -> str:
    """The firing alerts of runs, one for each rule and rank, at however many places a rule fires."""
    return f"max by (job, instance, run, rank, rule, severity) ({ALERTS % (ALONE['rank'] + ', ' + more)})"


def _firing(more: str = 'rule!=""') -> str:
    """The same, and those of GPUs."""
    gpus = ALERTS % f'{ALONE["gpu"]}, run="", {more}'
    return f"({_of_runs(more)} or max by (job, instance, gpu, rule, severity) ({gpus}))"


def fleet() -> str:
    """The dashboard's JSON."""
    return board(
        "gpuwatch / Fleet",
        "gpuwatch-fleet",
        "Every run and every GPU: what is wrong, who waits, and what does nothing.",
        VARIABLES,
        (*_summary(), *_findings(), *_runs(), *_gpus(), *_daemons()),
        ("gpuwatch", "fleet"),
    )


def _summary() -> tuple[Panel, ...]:
    nobody = f"0 * count({plain(RANK_UP)})"
    return (
        row("The fleet"),
        stat("Runs", "Runs with a rank that lives.",
             Query(f"count(count by (run) ({_UP})) or {nobody}", "runs"), "none"),
        stat("Ranks", "Ranks whose process lives.", Query(f"count({_UP}) or {nobody}", "ranks"), "none"),
        stat("Ranks that died", "Gone without an end mark.", Query(f"count({_DEAD}) or {nobody}", "ranks"), "none",
             limits=(Limit(1, COLORS["critical"]),)),
        stat("Findings", "Rules that fire now, counted for each rank and GPU on which they do.",
             Query(f"count({_firing()}) or {nobody}", "findings"), "none", limits=(Limit(1, COLORS["warn"]),)),
        stat("GPUs", "GPUs that NVML lists on these nodes.", Query(f"count({plain(GPU_INFO)})", "gpus"), "none"),
        stat("GPUs that do nothing", f"Busy for less than {IDLE_GPU_RATIO:.0%} of the last ten minutes.",
             Query(f"count({_USED} < {IDLE_GPU_RATIO}) or 0 * count({plain(GPU_INFO)})", "gpus"), "none",
             limits=(Limit(1, COLORS["info"]),)),
    )  # fmt: skip


def _findings() -> tuple[Panel, ...]:
    return (
        row("What is wrong"),
        table("Findings by rule", "How many ranks and GPUs each rule fires on. Its name leads to its runbook.",
              Query(worst_first(lambda only: f"sort_desc(count by (rule, severity) ({_firing(only)}))"), "{{rule}}"),
              columns={"severity": "Severity", "rule": "Rule", "Value": "Ranks or GPUs"}, width=10, links=_RUNBOOK,
              empty="nothing: no alert fires"),
        table("Findings by run", "Which runs they are found in.",
              Query(worst_first(lambda only: f"sort_desc(count by (run, rule, severity) ({_of_runs(only)}))"),
                    "{{run}} {{rule}}"),
              columns={"severity": "Severity", "rule": "Rule", "run": "Run", "Value": "Ranks"}, width=14,
              links=_RUNBOOK, empty="nothing: no alert fires"),
        timeseries("How many findings there are", "Rules that fire, counted for each rank and GPU on which they do.",
                   [Query(f"count by (rule) ({_firing()})", "{{rule}}")], "none", width=24, stacked=True, stairs=True,
                   empty="nothing: no alert fires"),
    )  # fmt: skip


def _runs() -> tuple[Panel, ...]:
    stall, peak = RULES_BY_ID["data-stall"], RULES_BY_ID["mem-near-capacity"]
    return (
        row("The runs"),
        table("Ranks of each run", "How many of its ranks live.",
              Query(f"sort_desc(count by (run) ({_UP}))", "{{run}}"),
              columns={"run": "Run", "Value": "Ranks"}, width=8),
        table("How far each run got", RANK_LAST_STEP.help + " Of its slowest rank.",
              Query(f"sort_desc(min by (run) ({plain(RANK_LAST_STEP)}))", "{{run}}"),
              columns={"run": "Run", "Value": "Step"}, width=8),
        table("How ended ranks ended", "The cause of each end that was seen.",
              Query(f"max by (run, rank, cause) ({plain(RANK_EXIT_INFO)})", "{{run}} rank {{rank}}"),
              columns={"run": "Run", "rank": "Rank", "cause": "Cause"}, width=8, empty="no rank has ended"),
        timeseries("How many steps each run makes in a second", STEPS.help + " Mean of its ranks.",
                   [Query(f"avg by (run) ({plain_rate(STEPS)})", "{{run}}")], "ops"),
        timeseries("How much of each run's time waits for data", f"{stall.title} ({stall.id}). Mean of its ranks.",
                   [Query(f"avg by (run) ({narrowed(stall.value.expr, ALONE)})", "{{run}}")], "percentunit",
                   limits=limits(stall.id, stall.value.expr), links=[runbook(stall.id)]),
        timeseries("How full each run's fullest device was", f"{peak.title} ({peak.id}).",
                   [Query(f"max by (run) ({narrowed(PEAK_SHARE, ALONE)})", "{{run}}")], "percentunit",
                   limits=limits(peak.id, PEAK_SHARE), links=[runbook(peak.id)]),
        timeseries("How many ranks each run has", "Ranks whose process lives.",
                   [Query(f"sum by (run) ({plain(RANK_UP)})", "{{run}}")], "none"),
    )  # fmt: skip


def _gpus() -> tuple[Panel, ...]:
    gpu = "{{instance}} gpu {{gpu}}"
    return (
        row("The GPUs"),
        table("Which GPUs do nothing", f"Busy for less than {IDLE_GPU_RATIO:.0%} of ten minutes; those in use first.",
              Query(f"sort_desc({plain(GPU_PROCESSES)} and ({_USED} < {IDLE_GPU_RATIO}))", gpu),
              columns={"instance": "Node", "gpu": "GPU", "uuid": "UUID", "Value": "Processes"}, width=12),
        timeseries("How busy the GPUs of each node are", GPU_UTILIZATION.help + " Mean of a node.",
                   [Query(f"avg by (instance) ({plain(GPU_UTILIZATION)})", "{{instance}}")], "percentunit"),
        timeseries("How many GPUs do nothing", f"Busy for less than {IDLE_GPU_RATIO:.0%} of ten minutes, by node.",
                   [Query(f"count by (instance) ({_USED} < {IDLE_GPU_RATIO}) or 0 * count by (instance) ({_USED})",
                          "{{instance}}")], "none"),
        timeseries("How much power each node's GPUs draw", GPU_POWER.help,
                   [Query(f"sum by (instance) ({plain(GPU_POWER)})", "{{instance}}")], "watt"),
        timeseries("How much power they drew on average", "By their counters of energy: no peak between two scrapes "
                   "is missed.",
                   [Query(f"sum by (instance) ({plain_rate(GPU_ENERGY)})", "{{instance}}")], "watt", width=24),
    )  # fmt: skip


def _daemons() -> tuple[Panel, ...]:
    return (
        row("The daemons"),
        timeseries("How many records each reads", RECORDS.help, [Query(plain(RECORDS), "{{instance}}")], "none",
                   width=8),
        timeseries("What each turns away", f"{RECORDS_REJECTED.help} {SERIES_DROPPED.help}",
                   [Query(f"sum by (instance) ({plain(RECORDS_REJECTED)})", "{{instance}} files"),
                    Query(plain(SERIES_DROPPED), "{{instance}} series")], "none", width=8),
        statetimeline("Which sources did not answer", "When a daemon asked them last.",
                      [Query(f"{plain(SOURCE_UP)} == 0", "{{instance}} {{source}}")],
                      states={0: ("no answer", COLORS["critical"])}, width=8, empty="none: all of them answer"),
    )  # fmt: skip

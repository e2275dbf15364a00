"""The dashboard "Training run": where a run's time and memory go, and what is wrong with it."""

from __future__ import annotations

from dashboards.options import PHASES, Limit, Link
from dashboards.panels import Panel, Query, board, row, stat, table, timeseries
from dashboards.parts import GPU, RANK, VARIABLES, limits, metrics, rule_panel
from dashboards.queries import NAMED, alerts, expression, gathered, quantile, rate, select, worst_first
from gpuwatch.catalog import (
    ALLOC_RETRIES,
    BETWEEN_SECONDS,
    DEVICE_ALLOCATED,
    DEVICE_CAPACITY,
    DEVICE_RESERVED,
    EPOCH_START_SECONDS,
    EVALUATION_SECONDS,
    GC_LONGEST,
    GPU_MEMORY_TOTAL,
    GPU_MEMORY_USED,
    GPU_POWER,
    GPU_SM_CLOCK,
    GPU_SM_CLOCK_MAX,
    GPU_TEMPERATURE,
    GPU_UTILIZATION,
    GUARD_FAULTS,
    HOST_IN_USE,
    HOST_RESIDENT,
    OBSERVATION,
    PHASE_SECONDS,
    RANK_INFO,
    RANK_LAST_STEP,
    RANK_PROGRESS_AGE,
    RANK_STEP_AGE,
    RANK_UP,
    SOURCE_SECONDS,
    SOURCE_UP,
    STEP_SECONDS,
    STEPS,
    WINDOW_SLOW_EXCESS_SECONDS,
)
from gpuwatch.rulebook import RULES_BY_ID
from gpuwatch.rulebook.waiting import RESTART_COST


def training() -> str:
    """The dashboard's JSON."""
    panels = (*_summary(), *_findings(), *_time(), *_memory(), *_hardware(), *_ranks())
    return board(
        "gpuwatch / Training run",
        "gpuwatch-training",
        "Where a training run's time and memory go, and what to do about it.",
        VARIABLES,
        panels,
        ("gpuwatch", "pytorch"),
    )


def _summary() -> tuple[Panel, ...]:
    return (
        row("The run"),
        stat("Ranks up", "Ranks whose process lives.", Query(f"sum({select(RANK_UP)})", "ranks"), "none"),
        stat("Slowest rank's step", RANK_LAST_STEP.help + " Of the rank that is behind.",
             Query(f"min({select(RANK_LAST_STEP)})", "step"), "none"),
        stat("Steps per second", "Mean over the chosen ranks; on one rank, its own.",
             Query(f"avg({rate(STEPS)})", "steps per second"), "none", decimals=2),
        stat("Median step", "Half of the steps are faster. " + STEP_SECONDS.help,
             Query(quantile(0.5, STEP_SECONDS), "median"), "s"),
        stat("Since last progress", RANK_PROGRESS_AGE.help + " The largest of the chosen ranks.",
             Query(f"max({select(RANK_PROGRESS_AGE)})", "age"), "s",
             limits=limits("run-hang", RULES_BY_ID["run-hang"].value.expr)),
        stat("Findings", "Alerts of gpuwatch that fire now; the table below names them.",
             Query(f"count({alerts()}) or 0 * count({select(RANK_UP)})", "findings"), "none",
             limits=(Limit(1, "orange"),)),
    )  # fmt: skip


def _findings() -> tuple[Panel, ...]:
    runbook = Link("Runbook", "${runbooks}${__value.raw}.md")
    return (
        table(
            "What is wrong now",
            "Firing alerts, with the place in the program where a hook saw it. Where a rule fires on more than "
            f"{NAMED} ranks, they are counted. The rule's name leads to its runbook.",
            Query(worst_first(lambda only: gathered(alerts(only))), "{{rule}}"),
            columns={"severity": "Severity", "rule": "Rule", "run": "Run", "rank": "Rank", "gpu": "GPU",
                     "instance": "Node", "where": "Where", "Value": "Count"},
            height=10,
            links={"rule": runbook},
            empty="nothing: no alert fires",
        ),
        table(
            "What the hooks observed, also below a rule's limit",
            OBSERVATION.help + " The largest of the chosen ranks.",
            Query(f"max by (run, rule, where) ({select(OBSERVATION)}) > 0", "{{rule}}"),
            columns={"rule": "Rule", "run": "Run", "where": "Where", "Value": "Magnitude"},
            unit="short",
            height=6,
            links={"rule": runbook},
            empty="nothing",
        ),
    )  # fmt: skip


def _time() -> tuple[Panel, ...]:
    steps = f"sum by (phase) ({rate(PHASE_SECONDS)})"
    evaluation, training_time, between = (
        f"sum without (phase) ({rate(metric)})" for metric in (EVALUATION_SECONDS, PHASE_SECONDS, BETWEEN_SECONDS)
    )
    starts = f"sum without (phase) ({rate(EPOCH_START_SECONDS)})"
    return (
        row("Time"),
        timeseries(
            "Where the time of a step goes",
            PHASE_SECONDS.help + " As shares of all chosen ranks.",
            [Query(f"{steps} / ignoring (phase) group_left () sum({rate(PHASE_SECONDS)})", "{{phase}}")],
            "percentunit", stacked=True, top=1, colors=PHASES,
        ),
        timeseries(
            "How long steps take",
            STEP_SECONDS.help + " Quantiles over all chosen ranks.",
            [Query(quantile(share, STEP_SECONDS), f"p{100 * share:.0f}") for share in (0.5, 0.95, 0.99)],
            "s",
        ),
        rule_panel("data-stall", "How much of a step waits for data"),
        timeseries("How many steps each rank makes in a second", STEPS.help, [Query(rate(STEPS), RANK)], "ops"),
        rule_panel("data-epoch-restart", "How much of the time goes into starting epochs"),
        timeseries("What the start of an epoch costs", "Mean wait for the first batch of an epoch, the first left out.",
                   [Query(expression(RESTART_COST), RANK)], "s"),
        timeseries(
            "How much of the time is evaluation",
            EVALUATION_SECONDS.help + " As a share of all time, waits at epoch starts and between steps included.",
            [Query(f"{evaluation} / ({evaluation} + {training_time} + {starts} + {between})", RANK)],
            "percentunit", top=1,
        ),
        rule_panel("comp-step-jitter", "How many steps are far slower than the others"),
        metrics("How much longer slow steps take", [WINDOW_SLOW_EXCESS_SECONDS], RANK, width=24),
        rule_panel("comp-gc-pause", "How much of the time Python collects garbage"),
        metrics("The longest garbage collection", [GC_LONGEST], RANK),
    )  # fmt: skip


def _memory() -> tuple[Panel, ...]:
    return (
        row("Memory"),
        metrics("What the process holds in host memory", [HOST_RESIDENT, HOST_IN_USE], RANK),
        metrics("What the process holds on the device", [DEVICE_ALLOCATED, DEVICE_RESERVED], RANK,
                bound=DEVICE_CAPACITY),
        timeseries("How often the allocator had to flush its cache", ALLOC_RETRIES.help,
                   [Query(rate(ALLOC_RETRIES), RANK)], "ops"),
        metrics("What the driver has handed out", [GPU_MEMORY_USED], GPU, bound=GPU_MEMORY_TOTAL),
    )  # fmt: skip


def _hardware() -> tuple[Panel, ...]:
    return (
        row("GPUs of the nodes it runs on"),
        metrics("How much of the time any kernel ran", [GPU_UTILIZATION], GPU),
        rule_panel("hw-thermal-throttle", "How much of the time heat holds the clock down", GPU),
        metrics("How hot the GPUs are", [GPU_TEMPERATURE], GPU, width=8),
        metrics("How fast the GPUs are clocked", [GPU_SM_CLOCK], GPU, width=8, bound=GPU_SM_CLOCK_MAX),
        metrics("How much power they draw", [GPU_POWER], GPU, width=8),
    )


def _ranks() -> tuple[Panel, ...]:
    info = f"{select(RANK_UP)} * on (job, instance, run, rank) group_left (local_rank, world_size, pid, script, torch)"
    return (
        row("Ranks, and gpuwatch itself"),
        table(
            "Who the ranks are",
            "Where each rank runs and what, and whether its process lives.",
            Query(f"{info} {select(RANK_INFO)}", RANK),
            columns={"run": "Run", "rank": "Rank", "instance": "Node", "local_rank": "Local rank",
                     "world_size": "World size", "pid": "Process", "script": "Script", "torch": "torch",
                     "Value": "State"},
            states={0: ("gone", "red"), 1: ("alive", "green")},
        ),
        metrics("How long ago the last step ended", [RANK_STEP_AGE], RANK, width=8),
        timeseries("Faults of gpuwatch that were kept from the run", GUARD_FAULTS.help,
                   [Query(f"sum by (run, rank, probe) ({select(GUARD_FAULTS)})", RANK + " {{probe}}")],
                   "none", width=8, empty="no faults"),
        timeseries("How long the daemon takes to collect", SOURCE_SECONDS.help + " And sources that did not answer.",
                   [Query(select(SOURCE_SECONDS), "{{instance}} {{source}}"),
                    Query(f"{select(SOURCE_UP)} == 0", "{{instance}} {{source}} is down")],
                   "s", width=8),
    )  # fmt: skip

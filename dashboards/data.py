"""The dashboard "Data": whether training is fed, what a batch is made of, what the workers do and what they need."""

from __future__ import annotations

from dashboards.options import COLORS, Limit
from dashboards.panels import Panel, Query, board, row, stat, statetimeline, timeseries
from dashboards.parts import RANK, VARIABLES, limits, metrics, rule_panel
from dashboards.queries import expression, rate, select
from gpuwatch.catalog import (
    BATCH_PINNED,
    BATCHES,
    CPU_BUDGET,
    EPOCH_STARTS,
    LOADER_BATCH_BYTES,
    LOADER_BATCH_CPU_SECONDS,
    LOADER_BEST_WORKERS,
    LOADER_ITEM_SECONDS,
    LOADER_NEEDED_CORES,
    LOADER_PART_SECONDS,
    LOADER_READY,
    LOADER_WORKERS,
    OTHER_THREAD_CORES,
    RANK_UP,
    SHARED_MEMORY_TOTAL,
    SHARED_MEMORY_USED,
    TORCH_THREADS,
    WINDOW_WAIT_SECONDS,
    WORKER_BLOCKED,
    WORKER_BUSY,
    WORKER_COPIED,
    WORKER_CPU,
    WORKER_CPU_WAIT,
    WORKER_DEATHS,
    WORKER_UNIQUE,
    WORKERS_IDLE,
)
from gpuwatch.rulebook import RULES_BY_ID
from gpuwatch.rulebook.waiting import RESTART_COST, WAIT_SHARE


def data() -> str:
    """The dashboard's JSON."""
    return board(
        "gpuwatch / Data",
        "gpuwatch-data",
        "Whether training is fed, what a batch is made of, what the workers do, and how many this run needs.",
        VARIABLES,
        (*_summary(), *_batches(), *_workers(), *_epochs(), *_memory(), *_beside()),
        ("gpuwatch", "pytorch"),
    )


def _summary() -> tuple[Panel, ...]:
    return (
        row("Is training fed?"),
        stat("Waits for data", "The largest share of step time that any chosen rank spends waiting for a batch.",
             Query(f"max({expression(WAIT_SHARE)})", "share"), "percentunit", limits=limits("data-stall", WAIT_SHARE)),
        stat("Batches ready", LOADER_READY.help + " Of the rank that is fed worst.",
             Query(f"min({select(LOADER_READY)})", "ready"), "percentunit"),
        stat("Workers in use", LOADER_WORKERS.help, Query(f"max({select(LOADER_WORKERS)})", "workers"), "none"),
        stat("Workers recommended", LOADER_BEST_WORKERS.help,
             Query(f"max({select(LOADER_BEST_WORKERS)})", "workers"), "none"),
        stat("Workers that died", WORKER_DEATHS.help,
             Query(f"sum({select(WORKER_DEATHS)}) or 0 * count({select(RANK_UP)})", "workers"), "none",
             limits=(Limit(1, COLORS[RULES_BY_ID["data-worker-died"].severity]),)),
        stat("Idle workers", WORKERS_IDLE.help,
             Query(f"sum({select(WORKERS_IDLE)}) or 0 * count({select(RANK_UP)})", "workers"), "none"),
        rule_panel("data-stall", "How much of a step waits for data"),
        metrics("How long a step waits for its batch", [WINDOW_WAIT_SECONDS], RANK),
    )  # fmt: skip


def _batches() -> tuple[Panel, ...]:
    return (
        row("What a batch is made of"),
        timeseries(
            "Where the time of a batch goes", LOADER_PART_SECONDS.help + " The largest of the chosen ranks.",
            [Query(f"max by (part) ({select(LOADER_PART_SECONDS)})", "{{part}}")], "s", stacked=True,
        ),
        rule_panel("data-collate-slow", "How much of making a batch is its collation"),
        metrics("How long an item takes, and the CPU time of a batch",
                [LOADER_ITEM_SECONDS, LOADER_BATCH_CPU_SECONDS], RANK),
        metrics("How large batches are", [LOADER_BATCH_BYTES], RANK),
        rule_panel("data-padding-waste", "How much of a batch is padding"),
        rule_panel("data-h2d-pageable", "How much of a step copies a pageable batch"),
        statetimeline("Whether batches are pinned", "Whether batches come in pinned memory.",
                      [Query(select(BATCH_PINNED), RANK)],
                      states={0: ("pageable", "#808080"), 1: ("pinned", "green")}, height=6),
    )  # fmt: skip


def _workers() -> tuple[Panel, ...]:
    return (
        row("What the workers do"),
        timeseries(
            "How the workers spend their time",
            f"{WORKER_BUSY.help} {WORKER_CPU_WAIT.help}",
            [Query(select(WORKER_BUSY), RANK + " makes batches"),
             Query(select(WORKER_CPU_WAIT), RANK + " waits for a core")],
            "percentunit", top=1,
        ),
        timeseries(
            "What making a batch waits for",
            f"{WORKER_CPU.help} {WORKER_BLOCKED.help}",
            [Query(select(WORKER_CPU), RANK + " runs"), Query(select(WORKER_BLOCKED), RANK + " is blocked")],
            "percentunit", top=1,
        ),
        timeseries(
            "How many workers there are, and how many this run needs",
            f"{LOADER_WORKERS.help} {LOADER_BEST_WORKERS.help}",
            [Query(select(LOADER_WORKERS), RANK + " in use"),
             Query(select(LOADER_BEST_WORKERS), RANK + " recommended", bound=True)], "none",
        ),
        timeseries(
            "How many cores training and loading need",
            f"{LOADER_NEEDED_CORES.help} {CPU_BUDGET.help}",
            [Query(select(LOADER_NEEDED_CORES), RANK + " needs"),
             Query(select(CPU_BUDGET), RANK + " may use", bound=True)], "none",
        ),
    )  # fmt: skip


def _epochs() -> tuple[Panel, ...]:
    return (
        row("Starts of epochs"),
        rule_panel("data-epoch-restart", "How much of the time goes into starting epochs"),
        timeseries("What the start of an epoch costs", "Mean wait for the first batch of an epoch, the first left out.",
                   [Query(expression(RESTART_COST), RANK)], "s"),
        rule_panel("data-loader-rebuilt", "How many workers belong to loaders that are used no more"),
        timeseries("How many iterators are made for a batch", f"{EPOCH_STARTS.help} {BATCHES.help} 1 is one for each.",
                   [Query(f"{rate(EPOCH_STARTS)} / {rate(BATCHES)}", RANK)], "none"),
    )  # fmt: skip


def _memory() -> tuple[Panel, ...]:
    return (
        row("Memory of the workers"),
        metrics("How much memory the largest worker takes", [WORKER_UNIQUE], RANK, width=8),
        metrics("How much of the data set the workers copied", [WORKER_COPIED], RANK, width=8),
        timeseries("How full /dev/shm is", f"{SHARED_MEMORY_USED.help} {SHARED_MEMORY_TOTAL.help}",
                   [Query(f"max by (instance) ({select(SHARED_MEMORY_USED)})", "{{instance}} used"),
                    Query(f"max by (instance) ({select(SHARED_MEMORY_TOTAL)})", "{{instance}} total", bound=True)],
                   "bytes", width=8),
        rule_panel("data-shm-pressure", "How much of /dev/shm is in use"),
        rule_panel("data-not-cached", "How large the data set would be in memory"),
    )  # fmt: skip


def _beside() -> tuple[Panel, ...]:
    return (
        row("What else runs in the process"),
        metrics("How many cores other Python threads keep busy", [OTHER_THREAD_CORES], RANK),
        metrics("How many threads torch uses", [TORCH_THREADS], RANK),
    )

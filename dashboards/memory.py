"""The dashboard "Memory": how full the device is and with what, what leaks, and what the allocator goes through."""

from __future__ import annotations

from dashboards.options import Link
from dashboards.panels import Panel, Query, board, row, stat, table, timeseries
from dashboards.parts import GPU, RANK, VARIABLES, limits, metrics, rule_panel
from dashboards.queries import SELECTORS, expression, rate, select
from gpuwatch.catalog import (
    ALLOC_RETRIES,
    DEVICE_ACTIVE,
    DEVICE_ACTIVE_PEAK,
    DEVICE_ALLOCATED,
    DEVICE_CALLS,
    DEVICE_CAPACITY,
    DEVICE_INACTIVE_SPLIT,
    DEVICE_NOT_TORCH,
    DEVICE_PRIVATE_POOLS,
    DEVICE_RESERVED,
    DEVICE_SEGMENTS,
    DEVICE_STEP_ACTIVE,
    GPU_MEMORY_TOTAL,
    GPU_MEMORY_USED,
    HOST_IN_USE,
    HOST_PINNED,
    HOST_RESIDENT,
    HOST_TOTAL,
    MODEL_MEMORY,
    MODULE_MEMORY,
    OBSERVATION,
    OOMS,
    OPEN_DESCRIPTORS,
)
from gpuwatch.rulebook.capacity import PEAK_SHARE

_LEAKS = f'{OBSERVATION.name}{{{SELECTORS["rank"]}, rule=~"leak-.+"}}'


def memory() -> str:
    """The dashboard's JSON."""
    return board(
        "gpuwatch / Memory",
        "gpuwatch-memory",
        "What fills the device, which modules hold it, what keeps growing, and what the allocator goes through.",
        VARIABLES,
        (*_capacity(), *_model(), *_leaks(), *_allocator(), *_neighbours()),
        ("gpuwatch", "pytorch"),
    )


def _capacity() -> tuple[Panel, ...]:
    allocated, active, reserved = (select(metric) for metric in (DEVICE_ALLOCATED, DEVICE_ACTIVE, DEVICE_RESERVED))
    return (
        row("How full the device is"),
        stat("Peak of live memory", "The largest share of its device that any chosen rank had in use.",
             Query(f"max({expression(PEAK_SHARE)})", "peak"), "percentunit",
             width=6, limits=limits("mem-near-capacity", PEAK_SHARE)),
        stat("Headroom at the peak", "What the fullest of the chosen ranks had left at its peak.",
             Query(f"min({select(DEVICE_CAPACITY)} - {select(DEVICE_ACTIVE_PEAK)})", "headroom"), "bytes", width=6),
        stat("Saved for backward", MODEL_MEMORY.help + " Activations alone, of the rank with most of them.",
             Query(f'max({select(MODEL_MEMORY.where(part="activations"))})', "activations"), "bytes", width=6),
        stat("Leak suspects", "What the hooks see growing, also below a rule's limit.",
             Query(f"count({_LEAKS} > 0) or 0 * count({select(OBSERVATION)})", "suspects"), "none", width=6),
        timeseries(
            "What the device's memory is used for",
            "Tensors, blocks that wait for a stream, the allocator's cache, and what is not PyTorch's, of all chosen "
            "ranks; the line is what they may use together.",
            [Query(f"sum({allocated})", "tensors"),
             Query(f"sum({active} - {allocated})", "waiting for streams"),
             Query(f"sum({reserved} - {active})", "free in the cache"),
             Query(f"sum({select(DEVICE_NOT_TORCH)})", "not PyTorch's"),
             Query(f"sum({select(DEVICE_CAPACITY)})", "capacity", bound=True)],
            "bytes", stacked=True,
        ),
        rule_panel("mem-near-capacity", "How near the peak comes to the capacity"),
        metrics("What a step needs at its peak", [DEVICE_STEP_ACTIVE, DEVICE_ACTIVE_PEAK], RANK),
        rule_panel("mem-headroom-unused", "How much is free even at the peak"),
    )  # fmt: skip


def _model() -> tuple[Panel, ...]:
    return (
        row("What the model holds"),
        timeseries("What the model's memory is", MODEL_MEMORY.help + " Summed over the chosen ranks.",
                   [Query(f"sum by (part) ({select(MODEL_MEMORY)})", "{{part}}")], "bytes", stacked=True),
        table("Which modules hold it", MODULE_MEMORY.help + " Names with numbers are folded: layers.*.",
              Query(f"sort_desc(max by (run, module) ({select(MODULE_MEMORY)}) > 0)", "{{module}}"),
              columns={"run": "Run", "module": "Module", "Value": "Bytes"}, unit="bytes", width=12),
        rule_panel("mem-activation-dominant", "How much of the peak is saved for backward"),
        rule_panel("mem-state-dominant", "How much of the peak is there whatever the batch"),
    )  # fmt: skip


def _leaks() -> tuple[Panel, ...]:
    return (
        row("What keeps growing"),
        table("What leaks, and who holds it",
              "What the hooks saw growing with the steps: the rule's unit is a count or bytes a step. The rule's name "
              "leads to its runbook.",
              Query(f"sort_desc(max by (run, rank, rule, where) ({_LEAKS}) > 0)", "{{rule}}"),
              columns={"rule": "Rule", "run": "Run", "rank": "Rank", "where": "Held by", "Value": "Magnitude"},
              unit="short",
              links={"rule": Link("Runbook", "${runbooks}${__value.raw}.md")}),
        metrics("What the process holds in host memory", [HOST_RESIDENT, HOST_IN_USE], RANK, width=24,
                bound=HOST_TOTAL, of="instance"),
        metrics("How much host memory is pinned", [HOST_PINNED], RANK),
        metrics("How many descriptors are open", [OPEN_DESCRIPTORS], RANK),
    )  # fmt: skip


def _allocator() -> tuple[Panel, ...]:
    return (
        row("What the allocator goes through"),
        timeseries("How often memory ran out or nearly did", f"{ALLOC_RETRIES.help} {OOMS.help}",
                   [Query(rate(ALLOC_RETRIES), RANK + " flushed and tried again"),
                    Query(rate(OOMS), RANK + " out of memory")], "ops"),
        rule_panel("frag-alloc-retries", "How often a step has to flush the cache"),
        timeseries("How often the device's own allocator is called", DEVICE_CALLS.help,
                   [Query(rate(DEVICE_CALLS), RANK)], "ops"),
        rule_panel("frag-alloc-churn", "How often a step calls it"),
        rule_panel("frag-overhang", "How much is reserved that no step needs"),
        rule_panel("frag-record-stream", "How much waits for other streams at the peak"),
        rule_panel("frag-rounding", "How much of the memory is rounding"),
        metrics("What is free in split segments and in private pools",
                [DEVICE_INACTIVE_SPLIT, DEVICE_PRIVATE_POOLS], RANK),
        metrics("How many segments there are", [DEVICE_SEGMENTS], RANK, width=24),
    )  # fmt: skip


def _neighbours() -> tuple[Panel, ...]:
    return (
        row("Who else is on the GPUs"),
        rule_panel("mem-non-torch", "How much is in use that is not PyTorch's"),
        rule_panel("mem-foreign-process", "How much processes of no watched run hold", GPU),
        metrics("What the driver has handed out", [GPU_MEMORY_USED], GPU, width=24, bound=GPU_MEMORY_TOTAL),
    )

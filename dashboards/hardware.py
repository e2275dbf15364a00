"""The dashboard "GPU hardware": what NVML says of every GPU, in a run or not, and what its utilisation does not say."""

from __future__ import annotations

from dashboards.options import COLORS, Limit, Link
from dashboards.panels import Panel, Query, Variable, board, row, stat, statetimeline, table, timeseries
from dashboards.parts import limits, runbook
from dashboards.queries import ALERTS, ALONE, UNITS, ever, narrowed, plain, plain_rate, worst_first
from gpuwatch.catalog import (
    GPU_CLOCK_REASON,
    GPU_ECC_CORRECTED,
    GPU_ECC_UNCORRECTED,
    GPU_ENERGY,
    GPU_FOREIGN_MEMORY,
    GPU_GRAVE_ERRORS,
    GPU_INFO,
    GPU_MEMORY_BUSY,
    GPU_MEMORY_CLOCK,
    GPU_MEMORY_TOTAL,
    GPU_MEMORY_USED,
    GPU_NVLINK_RECEIVED,
    GPU_NVLINK_SENT,
    GPU_PCIE_GENERATION,
    GPU_PCIE_GENERATION_MAX,
    GPU_PCIE_RECEIVED,
    GPU_PCIE_REPLAYS,
    GPU_PCIE_SENT,
    GPU_PCIE_WIDTH,
    GPU_PCIE_WIDTH_MAX,
    GPU_POWER,
    GPU_POWER_DEFAULT_LIMIT,
    GPU_POWER_LIMIT,
    GPU_PROCESSES,
    GPU_REMAP_FAILED,
    GPU_REMAP_PENDING,
    GPU_REMAPPED_ROWS,
    GPU_SM_CLOCK,
    GPU_SM_CLOCK_MAX,
    GPU_TEMPERATURE,
    GPU_UTILIZATION,
    GPU_XID_ERRORS,
    GPU_XID_TIME,
    GRAVE_XIDS,
    SOURCE_SECONDS,
    SOURCE_UP,
)
from gpuwatch.expr import Metric
from gpuwatch.render.runbooks import RUNBOOKS
from gpuwatch.rulebook import RULES_BY_ID

GPU = "{{instance}} gpu {{gpu}}"
VARIABLES = (
    Variable("job", "Job", f"label_values({GPU_INFO.name}, job)"),
    Variable("node", "Node", f'label_values({GPU_INFO.name}{{job=~"$job"}}, instance)'),
    Variable("gpu", "GPU", f'label_values({GPU_INFO.name}{{job=~"$job", instance=~"$node"}}, gpu)'),
    Variable("runbooks", "Runbooks at", text=RUNBOOKS),
)


def hardware() -> str:
    """The dashboard's JSON."""
    return board(
        "gpuwatch / GPU hardware",
        "gpuwatch-hardware",
        "What every GPU does and what holds it back: load, clocks, power, heat, errors, links.",
        VARIABLES,
        (*_summary(), *_load(), *_clocks(), *_errors(), *_links(), *_telemetry()),
        ("gpuwatch", "gpu"),
    )


def _lines(title: str, shown: list[tuple[Metric, str]], *, width: int = 12, hint: str = "") -> Panel:
    """Gauges as they are, each called by its GPU and a word; those after the first are its bounds."""
    return timeseries(
        title,
        " ".join([*(metric.help for metric, _ in shown), *([hint] if hint else [])]),
        [Query(plain(metric), f"{GPU} {word}".rstrip(), bound=index > 0) for index, (metric, word) in enumerate(shown)],
        UNITS.get(shown[0][0].unit, "none"),
        width=width,
    )


def _rates(title: str, shown: list[tuple[Metric, str]], unit: str, *, width: int = 12, hint: str = "") -> Panel:
    return timeseries(
        title,
        " ".join([*(metric.help for metric, _ in shown), *([hint] if hint else [])]),
        [Query(plain_rate(metric), f"{GPU} {word}".rstrip()) for metric, word in shown],
        unit,
        width=width,
    )


def _rule(id: str, title: str, *, width: int = 12) -> Panel:
    rule = RULES_BY_ID[id]
    return timeseries(
        title,
        f"{rule.title} ({rule.id}). {rule.because}",
        [Query(narrowed(rule.value.expr, ALONE), GPU)],
        UNITS.get(rule.value.unit, "none"),
        width=width,
        limits=limits(id, rule.value.expr),
        links=[runbook(rule.id)],
    )


def _summary() -> tuple[Panel, ...]:
    none = f"0 * count({plain(GPU_INFO)})"
    return (
        row("The GPUs"),
        stat("GPUs", "GPUs that NVML lists on these nodes.", Query(f"count({plain(GPU_INFO)})", "gpus"), "none"),
        stat("Busy", "GPUs on which some kernel ran in at least half of the last minute.",
             Query(f"count(avg_over_time({plain(GPU_UTILIZATION)}[1m]) >= 0.5) or {none}", "busy"), "none"),
        stat("Power", "Drawn by all chosen GPUs together.", Query(f"sum({plain(GPU_POWER)})", "power"), "watt"),
        stat("Hottest", GPU_TEMPERATURE.help, Query(f"max({plain(GPU_TEMPERATURE)})", "temperature"), "celsius"),
        stat("Clock held down", RULES_BY_ID["hw-thermal-throttle"].title + ": the share of five minutes.",
             Query(f"max({narrowed(RULES_BY_ID['hw-thermal-throttle'].value.expr, ALONE)})", "share"), "percentunit",
             limits=limits("hw-thermal-throttle", RULES_BY_ID["hw-thermal-throttle"].value.expr)),
        stat("Grave errors", GPU_GRAVE_ERRORS.help + " Over the range shown.",
             Query(f"sum(increase({plain(GPU_GRAVE_ERRORS)}[$__range]))", "errors"), "none", decimals=0,
             limits=(Limit(1, COLORS["critical"]),)),
        table("What is wrong with them now", "Firing alerts on GPUs. The rule's name leads to its runbook.",
              Query(worst_first(lambda only: ALERTS % f'{ALONE["gpu"]}, rule!="", {only}'), "{{rule}}"),
              columns={"severity": "Severity", "rule": "Rule", "instance": "Node", "gpu": "GPU"},
              width=9, links={"rule": Link("Runbook", "${runbooks}${__value.raw}.md")}, empty="nothing"),
        table("Which GPUs there are", "The GPUs that NVML lists on the chosen nodes.",
              Query(plain(GPU_INFO), "{{name}}"),
              columns={"instance": "Node", "gpu": "GPU", "name": "Name", "pci_bus_id": "PCI address", "uuid": "UUID"},
              width=15),
    )  # fmt: skip


def _load() -> tuple[Panel, ...]:
    share = f"{plain(GPU_POWER)} / ({plain(GPU_POWER_LIMIT)} > 0)"
    return (
        row("Load"),
        _lines("How much of the time any kernel ran", [(GPU_UTILIZATION, "")],
               hint="One small kernel counts as much as a full device: compare with the power and the memory below."),
        timeseries(
            "How hard it worked while a kernel ran",
            "Power drawn as a share of the limit, where some kernel ran at all. Utilisation near 100 % with little "
            "power is a device that waits: for small kernels, for memory, for its peers.",
            [Query(f"({share}) and ({plain(GPU_UTILIZATION)} >= 0.5)", GPU)],
            "percentunit"),
        _lines("How much of the time its memory was read or written", [(GPU_MEMORY_BUSY, "")]),
        _lines("How much memory the driver has handed out", [(GPU_MEMORY_USED, "used"), (GPU_MEMORY_TOTAL, "total")]),
        _lines("How many processes compute on it", [(GPU_PROCESSES, "")]),
        _lines("What strangers hold of its memory", [(GPU_FOREIGN_MEMORY, "")]),
    )  # fmt: skip


def _clocks() -> tuple[Panel, ...]:
    return (
        row("Clocks, power and heat"),
        _lines("At what clock it runs", [(GPU_SM_CLOCK, ""), (GPU_SM_CLOCK_MAX, "at most")]),
        _rule("hw-thermal-throttle", "How much of the time heat or a power brake held the clock down"),
        statetimeline(
            "What holds the clock down",
            "What NVML names as holding the clock down, at any time of the range shown. The power cap is left out: it "
            "is normal at full load.",
            [Query(ever(plain(GPU_CLOCK_REASON, but='reason!="sw_power_cap"')), GPU + " {{reason}}")],
            states={0: ("free", "transparent"), 1: ("held down", COLORS["warn"])}, empty="nothing",
        ),
        _lines("How much power it draws",
               [(GPU_POWER, ""), (GPU_POWER_LIMIT, "limit"), (GPU_POWER_DEFAULT_LIMIT, "default limit")]),
        _lines("How hot it is", [(GPU_TEMPERATURE, "")]),
        _rates("How much power it drew on average", [(GPU_ENERGY, "")], "watt",
               hint="As power: no peak between two scrapes is missed."),
        _lines("At what clock its memory runs", [(GPU_MEMORY_CLOCK, "")]),
    )  # fmt: skip


def max_of(metric: Metric) -> str:
    """One series for each of the metric's own labels, whatever else it carries."""
    return f"max by (instance, gpu, {', '.join(metric.labels)}) ({plain(metric)})"


def _errors() -> tuple[Panel, ...]:
    grave = ", ".join(f"{code} {meaning}" for code, meaning in GRAVE_XIDS.items())
    return (
        row("Errors"),
        # Totals: an increase over the window of a rate shows one event as one at each of several points.
        timeseries("Which errors the driver reported so far", GPU_XID_ERRORS.help + f" Grave ones: {grave}.",
                   [Query(f"{plain(GPU_XID_ERRORS)} > 0", GPU + " XID {{xid}}")], "none", stairs=True, empty="none"),
        timeseries("How long ago the driver last reported an error", "Time since its last error (XID), of any kind.",
                   [Query(f"time() - {plain(GPU_XID_TIME)}", GPU)], "s", empty="it reported none"),
        timeseries("How many memory errors there were", f"{GPU_ECC_CORRECTED.help} {GPU_ECC_UNCORRECTED.help}",
                   [Query(f"{plain(GPU_ECC_CORRECTED)} > 0", GPU + " corrected"),
                    Query(f"{plain(GPU_ECC_UNCORRECTED)} > 0", GPU + " uncorrected")], "none", stairs=True,
                   empty="none"),
        timeseries("How many rows of memory were replaced", GPU_REMAPPED_ROWS.help + " In all.",
                   [Query(max_of(GPU_REMAPPED_ROWS), GPU + " {{cause}}")], "none", stairs=True),
        statetimeline("Where a row waits to be replaced, or could not be",
                      "Rows of memory that are replaced at the next reset, and such as could not be.",
                      [Query(ever(plain(GPU_REMAP_PENDING)), GPU + " waits"),
                       Query(ever(plain(GPU_REMAP_FAILED)), GPU + " failed")],
                      states={0: ("no", "transparent"), 1: ("yes", COLORS["critical"])}, width=12, empty="nowhere"),
        _rule("hw-memory-errors", "How many grave errors there were"),
    )  # fmt: skip


def _links() -> tuple[Panel, ...]:
    return (
        row("Links"),
        _rates("What goes over PCIe", [(GPU_PCIE_RECEIVED, "to it"), (GPU_PCIE_SENT, "from it")], "Bps"),
        _rates("What goes over NVLink", [(GPU_NVLINK_RECEIVED, "to it"), (GPU_NVLINK_SENT, "from it")], "Bps"),
        _lines("How wide the PCIe link is", [(GPU_PCIE_WIDTH, ""), (GPU_PCIE_WIDTH_MAX, "at most")], width=8),
        _lines("Which generation of PCIe it speaks",
               [(GPU_PCIE_GENERATION, ""), (GPU_PCIE_GENERATION_MAX, "at most")], width=8,
               hint="An idle link slows down to save power."),
        _rates("How often PCIe had to send again", [(GPU_PCIE_REPLAYS, "")], "ops", width=8),
    )  # fmt: skip


def _telemetry() -> tuple[Panel, ...]:
    return (
        row("The telemetry itself"),
        statetimeline("Whether NVML answers", "Whether it answered when the daemon last asked.",
                      [Query(plain(SOURCE_UP.where(source="nvml")), "{{instance}}")],
                      states={0: ("no answer", COLORS["critical"]), 1: ("answers", "green")}, width=12),
        timeseries("How long NVML takes to answer", "How long the daemon's last collection from NVML took.",
                   [Query(plain(SOURCE_SECONDS.where(source="nvml")), "{{instance}}")], "s"),
    )  # fmt: skip

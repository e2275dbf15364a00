"""What the GPU itself says, by NVML."""

from __future__ import annotations

from gpuwatch.catalog import (
    GPU_CLOCK_REASON,
    GPU_ECC_UNCORRECTED,
    GPU_GRAVE_ERRORS,
    GPU_PCIE_GENERATION,
    GPU_PCIE_GENERATION_MAX,
    GPU_PCIE_WIDTH,
    GPU_PCIE_WIDTH_MAX,
    GPU_POWER_DEFAULT_LIMIT,
    GPU_POWER_LIMIT,
    GPU_REMAP_FAILED,
    GPU_SM_CLOCK,
    GPU_SM_CLOCK_MAX,
    GPU_TEMPERATURE,
    GPU_THROTTLED,
    GPU_UTILIZATION,
)
from gpuwatch.expr import AverageOverTime, Quantity, Rate, series_key
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, one_minus

_THROTTLED = AverageOverTime(GPU_THROTTLED, 5)
_LOAD = AverageOverTime(GPU_UTILIZATION, 5)
_CAPPED = AverageOverTime(GPU_CLOCK_REASON.where(reason="sw_power_cap"), 5)
_CAPPED_KEY = series_key(GPU_CLOCK_REASON.name, {"reason": "sw_power_cap"})
_CLOCK = Quantity("clock", GPU_SM_CLOCK, "hertz")
_CLOCK_MAX = Quantity("clock_max", GPU_SM_CLOCK_MAX, "hertz")
_LOST_CLOCK = one_minus(GPU_SM_CLOCK / GPU_SM_CLOCK_MAX)
_ERROR_MINUTES = 30  # an error is an event: it stays in sight this long

RULES = (
    Rule(
        id="hw-thermal-throttle",
        title="Heat or a power brake holds the GPU's clock down",
        severity="critical",
        scope="gpu",
        when=(_THROTTLED >= 0.10) & (_LOAD >= 0.50),
        hold_minutes=1,
        value=Quantity("share", _THROTTLED, "ratio"),
        quantities=(
            Quantity("temperature", GPU_TEMPERATURE, "celsius"),
            _CLOCK,
            _CLOCK_MAX,
        ),
        because=(
            "NVML reports a thermal slowdown or a hardware power brake in at least a tenth of the samples of five "
            "minutes under load. The temperature alone never fires, nor does the normal power cap."
        ),
        evidence="the clock was held down in {share} of samples; {temperature}, {clock} of {clock_max}",
        fix="Check airflow, fans, dust, the neighbours' heat and the power supply; lower the power limit "
        "(`nvidia-smi -pl`) to trade peak clock for steadiness.",
        gain=Gain("the clock that is lost", removable=_LOST_CLOCK),
        check="The thermal reasons stay clear under load.",
        techniques=("T32",),
        examples=(
            Example("hot under load", {GPU_THROTTLED.name: flat(1), GPU_UTILIZATION.name: flat(0.98)}, True),
            Example("hot but idle", {GPU_THROTTLED.name: flat(1), GPU_UTILIZATION.name: flat(0.02)}, False),
            Example(
                "hot, with a single burst of work",
                {GPU_THROTTLED.name: flat(1), GPU_UTILIZATION.name: (*flat(0.02, 7), 0.98, *flat(0.02, 1))},
                False,
            ),
            Example("cool under load", {GPU_THROTTLED.name: flat(0), GPU_UTILIZATION.name: flat(0.98)}, False),
        ),
    ),
    Rule(
        id="hw-memory-errors",
        title="The GPU reports errors of its memory or its links",
        severity="critical",
        scope="gpu",
        when=(Rate(GPU_GRAVE_ERRORS, _ERROR_MINUTES) > 0) | GPU_REMAP_FAILED.equals(1),
        value=Quantity("errors", GPU_GRAVE_ERRORS, "count"),
        quantities=(
            Quantity("memory", GPU_ECC_UNCORRECTED, "count"),
            Quantity("failed", GPU_REMAP_FAILED, "count"),
        ),
        because=(
            "An uncorrected memory error, a row that could not be replaced, or one of the driver's error codes (XID "
            "48, 63, 64, 74, 79, 94, 95) that call for an operator. Results computed on this device are in doubt. A "
            "row that waits to be replaced is none: the running job is not affected."
        ),
        evidence="{errors} grave errors, {memory} of them uncorrected memory errors; {failed} failed row remappings",
        fix="Drain the node and reset the GPU (`nvidia-smi --gpu-reset`); run the vendor's diagnosis, and have the "
        "device replaced when the errors come back. Resume from a checkpoint written before them.",
        gain=Gain("results that can be trusted"),
        check="The counters stand still after the reset.",
        examples=(
            Example(
                "an error under way",
                {GPU_GRAVE_ERRORS.name: (*flat(0, 34), *flat(1, 5)), GPU_REMAP_FAILED.name: flat(0, 40)},
                True,
            ),
            Example(
                "a row that cannot be replaced",
                {GPU_GRAVE_ERRORS.name: flat(1, 40), GPU_REMAP_FAILED.name: flat(1, 40)},
                True,
            ),
            Example(
                "errors of long ago",
                {GPU_GRAVE_ERRORS.name: flat(1, 40), GPU_REMAP_FAILED.name: flat(0, 40)},
                False,
            ),
        ),
    ),
    Rule(
        id="hw-pcie-degraded",
        title="The GPU's PCIe link runs below what device and slot can do",
        severity="warn",
        scope="gpu",
        when=(GPU_PCIE_WIDTH < GPU_PCIE_WIDTH_MAX)
        | ((GPU_PCIE_GENERATION < GPU_PCIE_GENERATION_MAX) & (_LOAD >= 0.50)),
        hold_minutes=5,
        value=Quantity("lanes", GPU_PCIE_WIDTH, "count"),
        quantities=(
            Quantity("lanes_max", GPU_PCIE_WIDTH_MAX, "count"),
            Quantity("generation", GPU_PCIE_GENERATION, "count"),
            Quantity("generation_max", GPU_PCIE_GENERATION_MAX, "count"),
        ),
        because=(
            "Fewer lanes than possible are a loose card, a riser or a slot that is shared. A lower generation counts "
            "under load only: an idle link slows down to save power."
        ),
        evidence="{lanes} of {lanes_max} lanes, generation {generation} of {generation_max}",
        fix="Reseat the card; look at the riser, the slot's width and the BIOS setting of its PCIe generation.",
        gain=Gain("faster copies between host and device"),
        check="Lanes and generation reach their maximum under load.",
        examples=(
            Example("half of the lanes", {GPU_PCIE_WIDTH.name: flat(8), GPU_PCIE_WIDTH_MAX.name: flat(16)}, True),
            Example(
                "an old generation under load",
                {
                    GPU_PCIE_WIDTH.name: flat(16),
                    GPU_PCIE_WIDTH_MAX.name: flat(16),
                    GPU_PCIE_GENERATION.name: flat(1),
                    GPU_PCIE_GENERATION_MAX.name: flat(4),
                    GPU_UTILIZATION.name: flat(0.9),
                },
                True,
            ),
            Example(
                "an old generation and a little work now and then",
                {
                    GPU_PCIE_WIDTH.name: flat(16),
                    GPU_PCIE_WIDTH_MAX.name: flat(16),
                    GPU_PCIE_GENERATION.name: flat(1),
                    GPU_PCIE_GENERATION_MAX.name: flat(4),
                    GPU_UTILIZATION.name: ((0.9, 0.1, 0.1) * 4)[:11],
                },
                False,
            ),
            Example(
                "asleep",
                {
                    GPU_PCIE_WIDTH.name: flat(16),
                    GPU_PCIE_WIDTH_MAX.name: flat(16),
                    GPU_PCIE_GENERATION.name: flat(1),
                    GPU_PCIE_GENERATION_MAX.name: flat(4),
                    GPU_UTILIZATION.name: flat(0.0),
                },
                False,
            ),
            Example(
                "at its best",
                {
                    GPU_PCIE_WIDTH.name: flat(16),
                    GPU_PCIE_WIDTH_MAX.name: flat(16),
                    GPU_PCIE_GENERATION.name: flat(4),
                    GPU_PCIE_GENERATION_MAX.name: flat(4),
                    GPU_UTILIZATION.name: flat(0.9),
                },
                False,
            ),
        ),
    ),
    Rule(
        id="hw-power-limited",
        title="A lowered power limit holds the GPU's clock down",
        severity="info",
        scope="gpu",
        when=(GPU_POWER_LIMIT < GPU_POWER_DEFAULT_LIMIT * 0.9) & (_CAPPED >= 0.50),
        hold_minutes=5,
        value=Quantity("limit", GPU_POWER_LIMIT, "watts"),
        quantities=(Quantity("default", GPU_POWER_DEFAULT_LIMIT, "watts"), _CLOCK, _CLOCK_MAX),
        because=(
            "The power limit is set below what the device was built for, and it is what holds the clock. At the "
            "default limit the same sign is normal under full load, and nothing is said."
        ),
        evidence="the limit is {limit}, the default {default}; the clock {clock} of {clock_max}",
        fix="Raise the limit (`nvidia-smi -pl`) if power and cooling allow it, or take the lower clock as meant.",
        gain=Gain("the clock that is lost", removable=_LOST_CLOCK),
        check="The power cap is set in fewer than half of the samples.",
        techniques=("T32",),
        examples=(
            Example(
                "limited",
                {
                    GPU_POWER_LIMIT.name: flat(500),
                    GPU_POWER_DEFAULT_LIMIT.name: flat(700),
                    _CAPPED_KEY: flat(1),
                },
                True,
            ),
            Example(
                "full load at the default limit",
                {
                    GPU_POWER_LIMIT.name: flat(700),
                    GPU_POWER_DEFAULT_LIMIT.name: flat(700),
                    _CAPPED_KEY: flat(1),
                },
                False,
            ),
            Example(
                "a limit that does not bind",
                {
                    GPU_POWER_LIMIT.name: flat(500),
                    GPU_POWER_DEFAULT_LIMIT.name: flat(700),
                    _CAPPED_KEY: ((1, 0, 0) * 4)[:11],
                },
                False,
            ),
            Example(
                "a limit behind a thermal slowdown",
                {
                    GPU_POWER_LIMIT.name: flat(500),
                    GPU_POWER_DEFAULT_LIMIT.name: flat(700),
                    _CAPPED_KEY: flat(0),
                    series_key(GPU_CLOCK_REASON.name, {"reason": "hw_thermal"}): flat(1),
                },
                False,
            ),
        ),
    ),
)

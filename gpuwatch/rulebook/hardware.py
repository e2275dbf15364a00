"""What the GPU itself says, by NVML."""

from __future__ import annotations

from gpuwatch.catalog import GPU_SM_CLOCK, GPU_SM_CLOCK_MAX, GPU_TEMPERATURE, GPU_THROTTLED, GPU_UTILIZATION
from gpuwatch.expr import AverageOverTime, Quantity
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, one_minus

_THROTTLED = AverageOverTime(GPU_THROTTLED, 5)

RULES = (
    Rule(
        id="hw-thermal-throttle",
        title="Heat or a power brake holds the GPU's clock down",
        severity="critical",
        scope="gpu",
        when=(_THROTTLED >= 0.10) & (AverageOverTime(GPU_UTILIZATION, 5) >= 0.50),
        hold_minutes=1,
        value=Quantity("share", _THROTTLED, "ratio"),
        quantities=(
            Quantity("temperature", GPU_TEMPERATURE, "celsius"),
            Quantity("clock", GPU_SM_CLOCK, "hertz"),
            Quantity("clock_max", GPU_SM_CLOCK_MAX, "hertz"),
        ),
        because=(
            "NVML reports a thermal slowdown or a hardware power brake in at least a tenth of the samples of five "
            "minutes under load. The temperature alone never fires, nor does the normal power cap."
        ),
        evidence="the clock was held down in {share} of samples; {temperature}, {clock} of {clock_max}",
        fix="Check airflow, fans, dust, the neighbours' heat and the power supply; lower the power limit "
        "(`nvidia-smi -pl`) to trade peak clock for steadiness.",
        gain=Gain("the clock that is lost", removable=one_minus(GPU_SM_CLOCK / GPU_SM_CLOCK_MAX)),
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
)

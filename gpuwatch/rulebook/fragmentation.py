"""The caching allocator: flushes, holes, churn, and settings that work against it.

A large cache is no fault, and the share of it that is free says nothing: every rule here asks for memory pressure, or
for calls that cost time.
"""

from __future__ import annotations

from gpuwatch.catalog import (
    ALLOC_RETRIES,
    ALLOC_RETRY_RATE,
    CACHE_EMPTIED_RATE,
    DEVICE_ACTIVE_PEAK,
    DEVICE_ALLOCATED,
    DEVICE_ALLOCATED_PEAK,
    DEVICE_CALL_RATE,
    DEVICE_CAPACITY,
    DEVICE_REQUESTED,
    DEVICE_RESERVED,
)
from gpuwatch.expr import Quantity
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed, one_minus

GIB = 1 << 30
_CAP = 80 * GIB
_OVERHANG = DEVICE_RESERVED - DEVICE_ACTIVE_PEAK
_WAITING = DEVICE_ACTIVE_PEAK - DEVICE_ALLOCATED_PEAK
_ROUNDED = DEVICE_ALLOCATED - DEVICE_REQUESTED


def _cache(reserved: float, peak: float, capacity: float = _CAP) -> dict[str, tuple[float, ...]]:
    return {
        DEVICE_RESERVED.name: flat(reserved),
        DEVICE_ACTIVE_PEAK.name: flat(peak),
        DEVICE_CAPACITY.name: flat(capacity),
    }


def _peaks(active: float, allocated: float, capacity: float = _CAP) -> dict[str, tuple[float, ...]]:
    return {
        DEVICE_ACTIVE_PEAK.name: flat(active),
        DEVICE_ALLOCATED_PEAK.name: flat(allocated),
        DEVICE_CAPACITY.name: flat(capacity),
    }


RULES = (
    Rule(
        id="frag-alloc-retries",
        title="Allocations fail and flush the cache, over and over",
        severity="warn",
        scope="rank",
        when=ALLOC_RETRY_RATE >= 0.01,
        critical_when=ALLOC_RETRY_RATE >= 0.1,
        hold_minutes=2,
        value=Quantity("rate", ALLOC_RETRY_RATE, "count"),
        quantities=(Quantity("retries", ALLOC_RETRIES, "count"),),
        because=(
            "The device had no room for a segment, so the allocator waited for all work on the device, gave its cache "
            "back and tried again: in both of the last two windows of 50 steps, so it is no single event."
        ),
        evidence="the cache was flushed {retries} times after a failed allocation so far",
        fix="Set `PYTORCH_ALLOC_CONF=expandable_segments:True` before torch is imported; if it goes on, use a smaller "
        "micro-batch with gradient accumulation.",
        gain=Gain("no wait for the whole device at each retry"),
        check="`gpuwatch_alloc_retries_total` stays level.",
        techniques=("T23", "T15"),
        suppresses=("frag-alloc-churn",),
        examples=(
            Example("every fiftieth step", {ALLOC_RETRY_RATE.name: flat(0.02)}, True),
            Example("every other step", {ALLOC_RETRY_RATE.name: flat(0.5)}, True, severity="critical"),
            Example("none", {ALLOC_RETRY_RATE.name: flat(0)}, False),
        ),
    ),
    Rule(
        id="frag-overhang",
        title="Far more memory is reserved than a step ever needs, on a device that is nearly full",
        severity="warn",
        scope="rank",
        when=(
            (_OVERHANG / DEVICE_RESERVED >= 0.25) & (_OVERHANG >= 2 * GIB) & (DEVICE_RESERVED / DEVICE_CAPACITY >= 0.80)
        ),
        hold_minutes=5,
        value=Quantity("overhang", _OVERHANG, "bytes"),
        quantities=(Quantity("reserved", DEVICE_RESERVED, "bytes"), Quantity("peak", DEVICE_ACTIVE_PEAK, "bytes")),
        because=(
            "Reserved memory beyond the largest amount that was ever in use at once: segments whose sizes do not fit "
            "later requests. Only where 80 % of the device is reserved: elsewhere a large cache does no harm."
        ),
        evidence="{reserved} is reserved, the peak in use was {peak}: {overhang} serves nothing",
        fix="Set `PYTORCH_ALLOC_CONF=expandable_segments:True` before torch is imported, or run the largest shape "
        "first, so that its segments serve the smaller ones.",
        gain=Gain("up to that much memory"),
        check="Reserved minus the peak of active bytes falls below a quarter of what is reserved.",
        techniques=("T23",),
        examples=(
            Example("many shapes on a full device", _cache(74 * GIB, 45 * GIB), True),
            Example("a large cache on an empty device", _cache(32 * GIB, 12 * GIB), False),
            Example("a full device in use", _cache(74 * GIB, 68 * GIB), False),
            Example("a small device", _cache(5 * GIB, 3.5 * GIB, 6 * GIB), False),
        ),
    ),
    Rule(
        id="frag-stranded-split",
        title="Free memory is trapped between live blocks",
        severity="warn",
        scope="rank",
        when=observed("frag-stranded-split") >= GIB,
        value=Quantity("stranded", observed("frag-stranded-split"), "bytes"),
        because=(
            "Free blocks of segments that also hold live ones, at least a fifth of what is reserved: they can neither "
            "be given back nor be joined. Looked at under memory pressure alone (a retry, an out-of-memory error, 90 % "
            "of the device reserved), at most every five minutes."
        ),
        evidence="{stranded} is trapped",
        fix="Set `PYTORCH_ALLOC_CONF=expandable_segments:True` before torch is imported; make long-lived tensors "
        "(model, optimizer state, buffers) before the first step; avoid allocations on side streams.",
        gain=Gain("up to that much memory"),
        check="`gpuwatch snapshot` shows less stranded memory.",
        techniques=("T23",),
        suppresses=("frag-overhang",),
        observed=True,
        examples=(
            Example("a quarter of 60 GiB", {observation("frag-stranded-split", ""): flat(15 * GIB)}, True),
            Example("some small holes", {observation("frag-stranded-split", ""): flat(0.3 * GIB)}, False),
        ),
    ),
    Rule(
        id="frag-alloc-churn",
        title="Segments are allocated from the device and given back at every step",
        severity="warn",
        scope="rank",
        when=DEVICE_CALL_RATE >= 1,
        hold_minutes=2,
        value=Quantity("calls", DEVICE_CALL_RATE, "count"),
        quantities=(Quantity("emptied", CACHE_EMPTIED_RATE, "count"),),
        because=(
            "Past the warm-up the cache should serve every allocation. Calls of the device's own allocator in both of "
            "the last two windows of 50 steps mean that something empties the cache (`torch.cuda.empty_cache()`), or "
            "that shapes never repeat."
        ),
        evidence="{calls} device allocations and frees a step; {emptied} unforced flushes of the cache a step",
        fix="Remove `torch.cuda.empty_cache()` from the loop; if there is none, pad or bucket the shapes of the input "
        "so that they repeat.",
        gain=Gain("the driver's calls, and the wait for the device at each free"),
        check="`gpuwatch_device_memory_calls_total` stays level after the first steps.",
        techniques=("T24", "T23"),
        examples=(
            Example(
                "empty_cache at every step", {DEVICE_CALL_RATE.name: flat(12), CACHE_EMPTIED_RATE.name: flat(1)}, True
            ),
            Example(
                "a new shape now and then", {DEVICE_CALL_RATE.name: flat(0.2), CACHE_EMPTIED_RATE.name: flat(0)}, False
            ),
        ),
    ),
    Rule(
        id="frag-record-stream",
        title="Freed blocks wait for other streams",
        severity="warn",
        scope="rank",
        when=(
            (_WAITING / DEVICE_ACTIVE_PEAK >= 0.10) & (_WAITING >= GIB) & (DEVICE_ACTIVE_PEAK / DEVICE_CAPACITY >= 0.80)
        ),
        hold_minutes=5,
        value=Quantity("waiting", _WAITING, "bytes"),
        quantities=(
            Quantity("active", DEVICE_ACTIVE_PEAK, "bytes"),
            Quantity("allocated", DEVICE_ALLOCATED_PEAK, "bytes"),
        ),
        because=(
            "A block whose tensor is gone stays active until every stream that was recorded on it has passed. The peak "
            "of active bytes lies far above that of allocated bytes, on a device that is nearly full."
        ),
        evidence="the peak of active memory is {active}, of tensors {allocated}: {waiting} waits for streams",
        fix="Replace `Tensor.record_stream` by keeping a reference until `stream.wait_stream` has been called, as "
        "FSDP2 does.",
        gain=Gain("a lower peak, by up to that much"),
        check="The peaks of active and allocated bytes come together.",
        techniques=("T31",),
        examples=(
            Example("a third more than the tensors", _peaks(70 * GIB, 52 * GIB), True),
            Example("the same on an empty device", _peaks(30 * GIB, 20 * GIB), False),
            Example("peaks together", _peaks(70 * GIB, 69 * GIB), False),
            Example("a small device", _peaks(3.9 * GIB, 3.2 * GIB, 4 * GIB), False),
        ),
    ),
    Rule(
        id="frag-rounding",
        title="Rounding of sizes takes much of the memory",
        severity="info",
        scope="rank",
        when=(one_minus(DEVICE_REQUESTED / DEVICE_ALLOCATED) >= 0.15) & (_ROUNDED >= GIB),
        hold_minutes=5,
        value=Quantity("share", one_minus(DEVICE_REQUESTED / DEVICE_ALLOCATED), "ratio"),
        quantities=(Quantity("rounded", _ROUNDED, "bytes"),),
        because=(
            "What tensors asked for, against what they got. The allocator rounds to 512 bytes, more with "
            "`roundup_power2_divisions`, and a block that is a little too large is not split."
        ),
        evidence="{share} of allocated memory ({rounded}) is rounding",
        fix="Raise `roundup_power2_divisions` (a larger number rounds less) or drop it; lower `max_split_size_mb` "
        "only without expandable segments; pad shapes to sizes that repeat.",
        gain=Gain("up to that much memory"),
        check="Requested bytes come within a tenth of allocated bytes.",
        techniques=("T23",),
        examples=(
            Example("a fifth", {DEVICE_REQUESTED.name: flat(32 * GIB), DEVICE_ALLOCATED.name: flat(40 * GIB)}, True),
            Example("a little", {DEVICE_REQUESTED.name: flat(39 * GIB), DEVICE_ALLOCATED.name: flat(40 * GIB)}, False),
            Example(
                "a fifth of a small model",
                {DEVICE_REQUESTED.name: flat(0.8 * GIB), DEVICE_ALLOCATED.name: flat(GIB)},
                False,
            ),
        ),
    ),
    Rule(
        id="env-alloc-conf-conflict",
        title="The allocator does not run with the settings that were asked for",
        severity="warn",
        scope="rank",
        when=observed("env-alloc-conf-conflict") >= 1,
        value=Quantity("settings", observed("env-alloc-conf-conflict"), "count"),
        because=(
            "`PYTORCH_CUDA_ALLOC_CONF` and `PYTORCH_ALLOC_CONF` are both set and differ (torch takes the older name, "
            "also when it is empty), or expandable segments were asked for and the allocator does without them."
        ),
        evidence="the environment's allocator settings are not all in force",
        fix="Keep `PYTORCH_ALLOC_CONF` alone, and set it before torch is imported; with torch 2.9 use the older name.",
        gain=Gain("the settings do what they were meant to do"),
        check="`torch.cuda.memory._snapshot()['allocator_settings']` shows what you asked for.",
        techniques=("T23",),
        observed=True,
        examples=(
            Example("two names, two texts", {observation("env-alloc-conf-conflict", "environment"): flat(1)}, True),
            Example("one name", {observation("env-alloc-conf-conflict", "environment"): flat(0)}, False),
        ),
    ),
    Rule(
        id="env-alloc-conf-unsafe",
        title="Allocator settings that do not work together",
        severity="warn",
        scope="rank",
        when=observed("env-alloc-conf-unsafe") >= 1,
        value=Quantity("settings", observed("env-alloc-conf-unsafe"), "count"),
        because=(
            "`max_split_size_mb` with expandable segments lets reserved memory grow without bound (pytorch #193400), "
            "`garbage_collection_threshold` does nothing without a memory fraction (#76648), and "
            "`backend:cudaMallocAsync` ignores what is meant for the native allocator."
        ),
        evidence="a setting of the allocator works against another, or does nothing",
        fix="Drop the setting that is named, or give the process a fraction with "
        "`torch.cuda.set_per_process_memory_fraction`.",
        gain=Gain("memory that stays bounded, settings that do something"),
        check="The allocator's settings name no such pair.",
        techniques=("T23",),
        observed=True,
        examples=(
            Example(
                "max_split_size_mb beside them", {observation("env-alloc-conf-unsafe", "max_split"): flat(1)}, True
            ),
            Example("expandable segments alone", {observation("env-alloc-conf-unsafe", "max_split"): flat(0)}, False),
        ),
    ),
)

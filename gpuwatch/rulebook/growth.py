"""Things that rise with the steps: memory of the device, pinned memory, descriptors, hooks."""

from __future__ import annotations

from gpuwatch.catalog import DEVICE_FULL_SECONDS, HOST_PINNED, HOST_TOTAL, OPEN_DESCRIPTORS
from gpuwatch.expr import Quantity
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed

GIB = 1 << 30
HOUR = 3600.0


def _pinned(pool: float, total: float) -> dict[str, tuple[float, ...]]:
    return {HOST_PINNED.name: flat(pool), HOST_TOTAL.name: flat(total)}


RULES = (
    Rule(
        id="leak-device",
        title="Memory of the device grows with every step",
        severity="warn",
        scope="rank",
        when=observed("leak-device") >= 1024,
        critical_when=(observed("leak-device") >= 1024) & (DEVICE_FULL_SECONDS < 2 * HOUR),
        value=Quantity("growth", observed("leak-device"), "bytes"),
        because=(
            "What is allocated right after the optimizer's step is the same at every step of a sound loop. Here it "
            "grew in every quarter of the window, by more than 64 MiB and 2 % of what is held; batches that differ in "
            "size are not judged. It is critical when a second window agrees and the device is full within two hours: "
            "what the peak leaves of the capacity, over the growth a step, times the time of a step."
        ),
        evidence="memory that is held between steps grows by {growth} a step",
        fix="Look for tensors that are kept: `.append(loss)` (keep `.item()`), metrics and caches on the device, "
        "outputs with their graph (`.detach().cpu()`), a hidden state that is carried on.",
        gain=Gain("no out-of-memory error after hours"),
        check="`gpuwatch_device_memory_allocated_bytes` comes back to the same value after each step.",
        suppresses=("mem-near-capacity",),
        techniques=("T17", "T30"),
        observed=True,
        examples=(
            Example("a batch of outputs a step", {observation("leak-device", ""): flat(4 << 20)}, True),
            Example(
                "full in an hour",
                {observation("leak-device", ""): flat(4 << 20), DEVICE_FULL_SECONDS.name: flat(HOUR)},
                True,
                severity="critical",
            ),
            Example(
                "full in three days",
                {observation("leak-device", ""): flat(4 << 20), DEVICE_FULL_SECONDS.name: flat(72 * HOUR)},
                True,
            ),
            Example("a log of numbers", {observation("leak-device", ""): flat(40)}, False),
            Example(
                "an observation for another rule",
                {observation("leak-tensors"): flat(131072), DEVICE_FULL_SECONDS.name: flat(HOUR)},
                False,
            ),
        ),
    ),
    Rule(
        id="leak-pinned-host",
        title="The pool of pinned host memory is very large",
        severity="warn",
        scope="rank",
        when=(HOST_PINNED / HOST_TOTAL >= 0.25) & (HOST_PINNED >= 4 * GIB),
        hold_minutes=2,
        value=Quantity("pinned", HOST_PINNED, "bytes"),
        quantities=(Quantity("total", HOST_TOTAL, "bytes"),),
        because=(
            "Pinned memory is never swapped and, in torch's pool, not given back: a block is rounded up to a power of "
            "two and kept for the next request. Batches of varying size fill the pool with blocks."
        ),
        evidence="{pinned} of the host's {total} is pinned",
        fix="Do not call `pin_memory()` on tensors of ever new sizes; pad them, or limit the pool with "
        "`pinned_max_round_threshold_mb` and `pinned_max_cached_size_mb` in `PYTORCH_ALLOC_CONF`.",
        gain=Gain("host memory for the page cache and the workers"),
        check="`gpuwatch_host_memory_pinned_bytes` stays below a quarter of the host's memory.",
        techniques=("T02",),
        examples=(
            Example("a third of the host", _pinned(20 * GIB, 60 * GIB), True),
            Example("a prefetch queue", _pinned(6 * GIB, 500 * GIB), False),
            Example("a small host", _pinned(1.5 * GIB, 4 * GIB), False),
        ),
    ),
    Rule(
        id="leak-fds",
        title="The process opens more and more descriptors",
        severity="warn",
        scope="rank",
        when=observed("leak-fds") >= 24,
        value=Quantity("growth", observed("leak-fds"), "count"),
        quantities=(Quantity("open", OPEN_DESCRIPTORS, "count"),),
        because=(
            "The number of open descriptors rose in every quarter of the window. Batches of worker processes are "
            "shared by descriptors: a kept batch keeps its own open. At the limit (`ulimit -n`) the next one fails "
            "with 'Too many open files'."
        ),
        evidence="{growth} descriptors more over the window; {open} are open",
        fix="Clone what you keep of a batch (`batch.clone()`), or call "
        "`torch.multiprocessing.set_sharing_strategy('file_system')`; close files and sockets that the loop opens.",
        gain=Gain("no 'Too many open files' after hours"),
        check="`gpuwatch_open_descriptors` stays level.",
        observed=True,
        examples=(
            Example(
                "a file at every step", {observation("leak-fds", ""): flat(300), OPEN_DESCRIPTORS.name: flat(700)}, True
            ),
            Example(
                "a file at every third step",
                {observation("leak-fds", ""): flat(28), OPEN_DESCRIPTORS.name: flat(110)},
                True,
            ),
            Example("a few loaders", {observation("leak-fds", ""): flat(12), OPEN_DESCRIPTORS.name: flat(60)}, False),
        ),
    ),
    Rule(
        id="leak-hooks",
        title="Hooks are put on a module again and again",
        severity="warn",
        scope="rank",
        when=observed("leak-hooks") >= 3,
        value=Quantity("hooks", observed("leak-hooks"), "count"),
        because=(
            "The number of hooks on a module rose at least three times during the run and never fell. Each of them "
            "runs at every call, and keeps alive what it refers to."
        ),
        evidence="{hooks} hooks were added since the run's first steps",
        fix="Keep the handle that `register_*_hook` returns and call `handle.remove()` when it has done its work; "
        "register once, outside of the loop.",
        gain=Gain("the calls of hooks that nobody needs, and what they keep alive"),
        check="The number of hooks on the module stays level.",
        techniques=("T17",),
        observed=True,
        examples=(
            Example("one at every epoch", {observation("leak-hooks", "encoder"): flat(9)}, True),
            Example("two at the start", {observation("leak-hooks", "encoder"): flat(2)}, False),
        ),
    ),
)

"""Memory that is kept."""

from __future__ import annotations

from gpuwatch.catalog import OUT_OF_MEMORY, WORKER_COPIED
from gpuwatch.expr import Quantity, series_key
from gpuwatch.limits import COPIED_BYTES, HOST_GROWTH_BYTES, KEPT_GRAPHS
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed

_FIRST = {
    "capacity": "a smaller micro-batch with gradient accumulation, activation checkpointing of the largest modules, or "
    "sharding (`torch.distributed.fsdp.fully_shard`).",
    "fragmentation": "`PYTORCH_ALLOC_CONF=expandable_segments:True`, set before the start.",
    "foreign": "end the other process (`nvidia-smi` names it), or give this one a device of its own.",
    "spike": "bucket the batches by length, or cap the length: one input needs far more than the rest.",
    "leak": "let go of what is kept from step to step; the leak's own finding names it.",
    "host": "fewer loader workers, a smaller prefetch, data that is mapped (`numpy.memmap`) instead of loaded.",
    "killed": "ask for more host memory for the job, or use less: fewer loader workers, a smaller prefetch, data that "
    "is mapped (`numpy.memmap`) instead of loaded. Resume from the last checkpoint.",
}
"""What to do first, by kind."""

RULES = (
    Rule(
        id="mem-oom",
        title="Memory ran out",
        severity="warn",
        scope="rank",
        when=observed("mem-oom") >= 1,
        critical_when=(observed("mem-oom") >= 1) & (OUT_OF_MEMORY >= 1),
        value=Quantity("errors", observed("mem-oom"), "count"),
        because=(
            "Memory ran out: an error ended the run (critical), the kernel killed it (critical), or an error was "
            "caught and the run went on (by the program, or by a library that tries out algorithms). Its kind says "
            "what to do first: capacity (the step needs more than there is), fragmentation (enough is free, in "
            "pieces), foreign (other processes hold it), spike (this step needed far more than any before), leak (it "
            "grew step by step), host (the machine's own memory), killed (by the kernel, for the host's memory)."
        ),
        evidence="memory ran out",
        fix=" ".join(f"{kind.capitalize()}: {first}" for kind, first in _FIRST.items())
        + " Caught: each one costs the step and empties the allocator's cache; use the size that fits from the start.",
        advice=(
            *(
                (OUT_OF_MEMORY.where(kind=kind).equals(1), first[0].upper() + first[1:])
                for kind, first in _FIRST.items()
            ),
            (
                observed("mem-oom") >= 1,
                "Use the batch (or the length) that fits from the start: each error costs the step and empties the "
                "allocator's cache.",
            ),
        ),
        gain=Gain("the run"),
        check="The run passes the step at which it ended; `gpuwatch_ooms_total` does not grow.",
        techniques=("T10", "T15"),
        observed=True,
        examples=(
            Example(
                "ended by one",
                {observation("mem-oom"): flat(1), series_key(OUT_OF_MEMORY.name, {"kind": "spike"}): flat(1)},
                True,
                severity="critical",
            ),
            Example("two that were caught", {observation("mem-oom", ""): flat(2)}, True),
            Example(
                "an observation for another rule",
                {observation("leak-tensors"): flat(131072), series_key(OUT_OF_MEMORY.name, {"kind": "leak"}): flat(1)},
                False,
            ),
            Example("none", {observation("mem-oom"): flat(0)}, False),
        ),
    ),
    Rule(
        id="leak-graph-retained",
        title="Autograd graphs of old steps are still referenced",
        severity="warn",
        scope="rank",
        when=observed("leak-graph-retained") >= KEPT_GRAPHS,
        value=Quantity("graphs", observed("leak-graph-retained"), "count"),
        because=(
            "Something keeps a tensor that still carries its graph: a list of losses, a running sum, an output, a "
            "hidden state. The graph lives as long as the tensor does, with whatever it saved. Graphs of the last 50 "
            "steps are not counted, nor a buffer that is cleared again."
        ),
        evidence="the graphs of about {graphs} steps that ended more than 50 steps ago are still alive",
        fix="Keep numbers, not graphs: `.detach()` before you store (or `.item()` every N steps).",
        gain=Gain("memory stops growing with every step"),
        check="Memory in use at the same point of the step stays level.",
        suppresses=("leak-host", "leak-device", "mem-near-capacity"),
        techniques=("T17",),
        observed=True,
        examples=(
            Example("a list of losses", {observation("leak-graph-retained"): flat(200)}, True),
            Example("the last few outputs", {observation("leak-graph-retained"): flat(4)}, False),
        ),
    ),
    Rule(
        id="leak-tensors",
        title="A container keeps more tensors with every step",
        severity="warn",
        scope="rank",
        # A log of small results grows too, and is meant to; what matters grows by the size of a batch.
        when=observed("leak-tensors") >= HOST_GROWTH_BYTES,
        value=Quantity("growth", observed("leak-tensors"), "bytes"),
        because=(
            "Tensors are added to it and never removed. A slice keeps the whole storage it was cut from; a buffer that "
            "fills up and stops, or is cleared at an epoch's end, is not reported."
        ),
        evidence="it keeps {growth} more with every step",
        fix="Keep what you need of each (a number, a reduced tensor, `.clone()` of a slice), move it to the CPU, or "
        "clear the container at the end of an epoch.",
        gain=Gain("memory stops growing with every step"),
        check="The length of the container, and memory in use at the same point of the step, stay level.",
        suppresses=("leak-host", "leak-device", "mem-near-capacity"),
        techniques=("T17", "T30"),
        observed=True,
        examples=(
            Example("a batch of outputs at every step", {observation("leak-tensors"): flat(131072)}, True),
            Example("a short vector at every step", {observation("leak-tensors"): flat(2048)}, False),
        ),
    ),
    Rule(
        id="leak-host",
        title="Host memory in use grows with every step",
        severity="warn",
        scope="rank",
        when=observed("leak-host") >= HOST_GROWTH_BYTES,
        value=Quantity("growth", observed("leak-host"), "bytes"),
        because=(
            "Bytes handed out by the C allocator grew in every quarter of the window, at the same point of the step "
            "and on batches of one size, and no one holder of tensors accounts for it: texts, numbers, bytes or "
            "several small tensors pile up (then the evidence names what holds them, and its growth is an estimate "
            "from a sample), an iterator remembers (`itertools.cycle`), a library's cache, a cycle through native "
            "code. Or loader workers copy the data set by reading it: a Python object carries its reference count, "
            "and reading it writes the page it lies on."
        ),
        evidence="memory in use grows by {growth} a step",
        fix="Empty what the evidence names, or write it to a file. Else look for what remembers every batch: "
        "`itertools.cycle(loader)` saves all of them (write "
        "`while True: yield from loader`), a custom autograd function that stores its output on `ctx` (use "
        "`save_for_backward`), a cache without a limit.",
        gain=Gain("host memory stops growing with every step"),
        advice=(
            (
                WORKER_COPIED >= COPIED_BYTES,
                "Keep what the data set knows of its items in arrays (numpy, torch, Arrow) or in one serialised "
                "buffer, instead of a list or dict of Python objects: workers share an array, and copy each object "
                "that they read.",
            ),
        ),
        check="`gpuwatch_host_memory_in_use_bytes` stays level, and `gpuwatch_loader_workers_copied_bytes` small.",
        techniques=("T17",),
        observed=True,
        examples=(
            Example("a batch kept at every step", {observation("leak-host"): flat(400000)}, True),
            Example("an allocator's noise", {observation("leak-host"): flat(900)}, False),
        ),
    ),
    Rule(
        id="leak-cyclic",
        title="Garbage in cycles piles up",
        severity="warn",
        scope="rank",
        when=observed("leak-cyclic") >= HOST_GROWTH_BYTES,
        value=Quantity("growth", observed("leak-cyclic"), "bytes"),
        because=(
            "Objects that refer to each other are made at every step, and only a garbage collection frees them: "
            "garbage, not a leak. With automatic collection off it piles up; with it on memory saws, and the peak is "
            "many steps' worth, on a device too."
        ),
        evidence="{growth} of garbage a step waits for the collector",
        fix="Break the cycle: in a custom autograd function `ctx.save_for_backward(output)` instead of an attribute of "
        "`ctx`, elsewhere a weak reference to the parent. Or call `gc.enable()`, or `gc.collect()` every few hundred "
        "steps.",
        gain=Gain("host memory stops growing with every step"),
        check="Memory in use falls at each collection and stays level between.",
        suppresses=("leak-host",),
        observed=True,
        examples=(
            Example("tensors in cycles", {observation("leak-cyclic"): flat(400000)}, True),
            Example("small objects in cycles", {observation("leak-cyclic"): flat(300)}, False),
        ),
    ),
)

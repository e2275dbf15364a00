"""Holders that are hard to see: in other threads, in loops without a name, in keys, far down a list; and numbers."""

from __future__ import annotations

import collections
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import gpuwatch
from gpuwatch.advisor import Finding
from gpuwatch_hooks import leaks as searching
from gpuwatch_hooks.bounds import TRIMMED, shrinks
from gpuwatch_hooks.namespace import Root
from gpuwatch_hooks.sites import grown_at
from gpuwatch_hooks.walk import MEMORY_BYTES, Walk
from tests.holders import FEATURES, Twin, wide
from tests.loops import AfterStep, Batch, loader_of, perceptron, train

pytestmark = pytest.mark.usefixtures("records", "unhurried")

STEPS = 130
LATER = 1 << 62
"""A deadline that no search meets."""


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches within a larger budget: a busy machine's cost more, and the budget has its own tests."""
    monkeypatch.setattr(searching, "ALLOWANCE_NANOSECONDS", 1_000_000_000)


def leak_findings(findings: list[Finding]) -> list[Finding]:
    """Those on memory."""
    return [finding for finding in findings if finding.rule.startswith("leak-")]


def keyed_by_tensors(leaks: bool) -> AfterStep:
    seen: dict[torch.Tensor, float] = {}

    ring = [wide() for _ in range(9)]

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        seen[wide() if leaks else ring[step % 9]] = loss.item()

    return after


class Link:
    """Of a linked list."""

    def __init__(self, value: torch.Tensor, previous: Link | None) -> None:
        self.value = value
        self.previous = previous


def linked_list(leaks: bool) -> AfterStep:
    newest: Link | None = None

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        nonlocal newest
        newest = Link(wide(), newest if leaks or step % 12 else None)

    return after


def pairs_within_pairs(leaks: bool) -> AfterStep:
    history: tuple[Any, ...] = ()

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        nonlocal history
        history = (wide(), history if leaks or step % 12 else ())

    return after


def variable_of_another_thread(leaks: bool) -> AfterStep:
    inbox: queue.Queue[torch.Tensor] = queue.Queue()
    taken: queue.Queue[int] = queue.Queue()

    def collect() -> None:
        everything: collections.deque[torch.Tensor] = collections.deque(maxlen=None if leaks else 6)
        while True:
            everything.append(inbox.get())
            taken.put(len(everything))

    threading.Thread(target=collect, daemon=True).start()

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        inbox.put(wide())
        taken.get()

    return after


def of_this_thread(leaks: bool) -> AfterStep:
    local = threading.local()
    local.items = collections.deque(maxlen=None if leaks else 9)
    return lambda step, output, loss: local.items.append(wide())


def lists_by_class(leaks: bool) -> AfterStep:
    by_class: dict[int, list[torch.Tensor]] = {}

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        rows = wide()
        for number in range(8):
            kept = by_class.setdefault(number, [])
            kept.append(rows[number])
            if not leaks and len(kept) > 5:
                del kept[0]

    return after


def a_queue_that_memory_cannot_hold(leaks: bool) -> AfterStep:
    most = MEMORY_BYTES // wide().nbytes
    ring: collections.deque[torch.Tensor] = collections.deque(maxlen=10 * most if leaks else most // 10)
    return lambda step, output, loss: ring.append(wide())


def lists_of_many(leaks: bool) -> AfterStep:
    users: dict[int, collections.deque[torch.Tensor]] = {
        number: collections.deque(maxlen=None if leaks else 3) for number in range(90)
    }

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        for number in range(90):
            users[number].append(torch.zeros(64))

    return after


def simple_queue(leaks: bool) -> AfterStep:
    outbox: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def taken(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        outbox.put(wide())
        outbox.get()

    return taken if not leaks else lambda step, output, loss: outbox.put(wide())


def under_changing_names(leaks: bool) -> AfterStep:
    kept: collections.deque[torch.Tensor] = collections.deque(maxlen=None if leaks else 9)
    names: dict[str, Any] = {}

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        kept.append(wide())
        names.clear()
        names[f"since {step // 20}"] = kept

    def hidden(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        ring[0](step, output, loss)

    ring = [after]
    return hidden


NAMED: list[tuple[Twin, str]] = [
    (lists_of_many, "users (dict)"),
    (simple_queue, "outbox"),
    (under_changing_names, "kept"),
    (keyed_by_tensors, "seen"),
    (linked_list, "newest (chain of Link)"),
    (pairs_within_pairs, "history (chain of tuple)"),
    (variable_of_another_thread, "everything"),
    (of_this_thread, "local.items"),
    (lists_by_class, "by_class (dict)"),
    (a_queue_that_memory_cannot_hold, "ring"),
]


@pytest.mark.parametrize(("twin", "name"), NAMED, ids=[case[0].__name__ for case in NAMED])
def test_a_hidden_holder_is_named_and_its_sound_twin_is_quiet(twin: Twin, name: str) -> None:
    (finding,) = leak_findings(train(STEPS, after=twin(True)))
    assert name in finding.where
    assert not leak_findings(train(STEPS, after=twin(False)))


def numbers(leaks: bool) -> AfterStep:
    scores: collections.deque[float] = collections.deque(maxlen=None if leaks else 4_000)
    return lambda step, output, loss: scores.extend(wide()[:16].flatten().tolist())


def texts(leaks: bool) -> AfterStep:
    lines: list[str] = []

    def newest(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        lines[:] = [*lines[-5:], f"{step} " * 20_000]

    return (lambda step, output, loss: lines.append(f"{step} " * 20_000)) if leaks else newest


def checkpoints_in_bytes(leaks: bool) -> AfterStep:
    backups: dict[int, bytes] = {}

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        backups[step if leaks else step % 3] = bytes(100_000)

    return after


PLAIN: list[tuple[Twin, str]] = [(numbers, "scores"), (texts, "lines"), (checkpoints_in_bytes, "backups")]


@pytest.mark.parametrize(("twin", "name"), PLAIN, ids=[case[0].__name__ for case in PLAIN])
def test_what_piles_up_without_tensors_is_named_by_the_growth_of_host_memory(twin: Twin, name: str) -> None:
    (finding,) = leak_findings(train(STEPS, after=twin(True)))
    assert finding.rule == "leak-host" and f":{name}` (" in finding.evidence and "it grows at" in finding.evidence
    assert not leak_findings(train(STEPS, after=twin(False)))


def remembered(loader: Any, most: int | None) -> Iterator[Batch]:
    handed_out: collections.deque[Batch] = collections.deque(maxlen=most)
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        handed_out.append(batch)
        yield batch


class Prefetcher:
    """Keeps what it handed out."""

    def __init__(self, loader: Any, most: int | None) -> None:
        self.batches = iter(loader)
        self.handed_out: collections.deque[Batch] = collections.deque(maxlen=most)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch: Batch = next(self.batches)
        self.handed_out.append(batch)
        return batch


@pytest.mark.parametrize("iterate", [remembered, Prefetcher])
@pytest.mark.parametrize("leaks", [True, False])
def test_an_iterator_that_only_a_for_statement_holds(iterate: Callable[..., Iterator[Batch]], leaks: bool) -> None:
    model, loader = perceptron(1024), loader_of(150, 16, 1024)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for inputs, targets in itertools.islice(iterate(loader, None if leaks else 9), STEPS):
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    watch.detach()
    findings = leak_findings(watch.findings())
    assert [finding.rule for finding in findings] == (["leak-tensors"] if leaks else [])
    assert not leaks or "handed_out" in findings[0].where


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("leaks", [True, False])
def test_gradients_that_carry_the_graphs_of_all_steps(leaks: bool) -> None:
    model, loader = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 2)), loader_of(STEPS)
    watch = gpuwatch.attach(model, loader)
    for inputs, targets in loader:
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward(create_graph=True)  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.01 * parameter.grad.data
            parameter.grad.data.zero_()
            parameter.grad = parameter.grad if leaks else None
    watch.detach()
    findings = leak_findings(watch.findings())
    assert [finding.rule for finding in findings] == (["leak-graph-retained"] if leaks else [])
    assert not leaks or "Sequential.0.weight.grad" in findings[0].where


def test_a_graph_goes_back_no_further_than_the_run() -> None:
    total: list[Any] = [0.0]

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        total[0] = total[0] + loss  # the graph's first operation is the model's own first

    (finding,) = leak_findings(
        train(STEPS, model=nn.Sequential(nn.Linear(FEATURES, 2)), after=after, loader=loader_of(STEPS, 4, FEATURES))
    )
    steps = float(finding.evidence.partition("goes back ")[2].partition(" steps, +")[0])
    assert STEPS / 2 < steps <= STEPS


def test_hooks_of_a_few_long_epochs_are_found() -> None:
    model = perceptron()
    findings = train(
        STEPS, model=model, before=lambda step: step % 30 == 0 and model[0].register_forward_hook(print_nothing)
    )
    assert [finding.rule for finding in leak_findings(findings)] == ["leak-hooks"]


def print_nothing(*arguments: object) -> None:
    """A hook."""


def code_of(text: str) -> list[CodeType]:
    return [compile(text, "train.py", "exec")]


@pytest.mark.parametrize(
    ("text", "bounded"),
    [
        ("if len(items) < 200: items.append(x)", True),
        ("def keep(self, x):\n if len(self.items) <= self.most and x: self.items.append(x)", True),
        ("while len(items) < most: items.add(x)", True),
        ("items.append(x)\nif len(items) < 10: print(x)", False),
        ("if len(items) > 10: print(sum(items[-10:]))\nitems.append(x)", False),
        ("if len(others) < 10: items.append(x)", False),
        ("def keep(items, x): items[x].append(x)\nif len(items[x]) > 3: items[x].pop(0)", True),
        ("items[x] = items[x][-3:]", True),
        ("items[x] = y[-3:]", False),
        ("items.append(others.pop())", False),
        ("self.items = ()\nfor x in y: self.items += (x,)", False),
    ],
)
def test_what_grows_only_up_to_a_length_is_bounded(text: str, bounded: bool) -> None:
    assert (shrinks("items", code_of(text), None, True) == TRIMMED) is bounded
    assert bounded or not shrinks("items", code_of(text), None, True)


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\nself.items.append(x)",
        "x = 1\nitems['a'].extend(x)",
        "x = 1\nitems[x] = y",
        "x = 1\nitems += (x,)",
        "x = 1\nitems = torch.cat([items, x])",
        "items = []\ndef add(x): items.append(x)",
    ],
)
def test_the_line_that_makes_it_grow_is_told(text: str) -> None:
    assert grown_at("items", code_of(text), None).startswith("train.py:2 (")


def kept_by_parameters(leaks: bool) -> AfterStep:
    model = perceptron()
    model[0].weight.history = collections.deque(maxlen=None if leaks else 9)  # type: ignore[union-attr]

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        model[0].weight.history.append(wide())  # type: ignore[operator, union-attr]

    return after


@pytest.mark.parametrize("leaks", [True, False])
def test_an_attribute_of_a_parameter(leaks: bool) -> None:
    findings = leak_findings(train(STEPS, after=kept_by_parameters(leaks)))
    assert [finding.rule for finding in findings] == (["leak-tensors"] if leaks else [])
    assert not leaks or "0.weight.history" in findings[0].where


remembered_lately: list[torch.Tensor] = []


def forget() -> None:
    """Elsewhere than on the stack: takes out again what others put into the module's variable."""
    remembered_lately.pop(0)


def test_a_function_of_the_module_that_takes_out_is_known_by_the_global_variable() -> None:
    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        remembered_lately.append(wide())
        if len(remembered_lately) > 200:
            forget()

    assert not leak_findings(train(100, after=after))
    remembered_lately.clear()


def test_a_list_too_long_to_come_to_its_end_is_left_as_it_was() -> None:
    newest: Link | None = None
    for _ in range(30_000):
        newest = Link(torch.zeros(1), newest)
    walk = Walk(LATER)
    walk.search([Root("newest", newest, "train.py:1 (main)")])
    assert walk.unsure == {("train.py(main)", "newest")} and not walk.found
    while newest is not None:  # link by link: all at once is too deep for the interpreter
        newest = newest.previous

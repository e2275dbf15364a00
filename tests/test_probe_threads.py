"""Python threads beside training: those that take its turn, and those that do not."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader

import gpuwatch
from gpuwatch.advisor import Finding
from gpuwatch.catalog import LOCAL_RANKS, OTHER_THREAD_CORES, TORCH_THREADS
from gpuwatch_hooks import threads
from gpuwatch_hooks.threads import BusyThread, python_threads
from tests.loops import Slow, epochs, found, only, perceptron

pytestmark = pytest.mark.usefixtures("records")

RULE = "comp-gil-contention"


@contextmanager
def beside(work: Callable[[], object], name: str = "beside") -> Iterator[None]:
    """``work`` again and again on another thread."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def trained(steps: int = 110, seconds: float = 0.006) -> tuple[list[Finding], dict[str, float]]:
    """Steps of some milliseconds: what was found, and the last readings."""
    model, loader = perceptron(), DataLoader(Slow(steps, 0.0), batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for _, _, (inputs, targets) in epochs(loader, steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        time.sleep(seconds)
    assert watch._run is not None
    values = dict(watch._run.session.snapshot().values)
    watch.detach()
    return watch.findings(), values


def compute() -> int:
    """Python, nothing but Python."""
    return sum(number * number for number in range(2_000))


def test_a_thread_that_computes_in_python_is_found_and_named() -> None:
    with beside(compute, "poller"):
        findings, values = trained(24, 0.02)
    finding = only(findings, RULE)
    assert 'thread "poller"' in finding.evidence and "test_probe_threads.py" in finding.where
    assert values[OTHER_THREAD_CORES.name] > 0.05


def test_a_thread_that_sleeps_is_quiet() -> None:
    with beside(lambda: time.sleep(0.01)):
        findings, values = trained()
    assert not found(findings, RULE) and values[OTHER_THREAD_CORES.name] < 0.3


def test_a_thread_that_computes_with_the_interpreter_let_go_is_quiet() -> None:
    block = b"x" * 8_000_000
    with beside(lambda: hashlib.sha256(block).digest()):
        findings, _ = trained()
    assert not found(findings, RULE)


def test_a_thread_that_is_done_early_is_quiet() -> None:
    until = time.monotonic() + 0.1
    with beside(lambda: compute() if time.monotonic() < until else time.sleep(0.01)):
        findings, _ = trained()
    assert not found(findings, RULE)


def test_training_alone_has_no_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())  # what earlier tests left in this process
    monkeypatch.setattr(threads, "python_threads", lambda: [one for one in python_threads() if one not in before])
    findings, values = trained(70, 0.001)
    assert not found(findings, RULE)
    assert values[OTHER_THREAD_CORES.name] == 0.0
    assert values[TORCH_THREADS.name] == torch.get_num_threads() and values[LOCAL_RANKS.name] == 1


def test_threads_of_torch_and_of_the_training_loop_are_not_counted() -> None:
    over = threading.Event()
    pinning = threading.Thread(target=torch.utils.data._utils.pin_memory._pin_memory_loop, name="pins")
    mine = threading.Thread(target=over.wait, name="mine", daemon=True)
    mine.start()
    threading._active[-1] = pinning  # type: ignore[attr-defined]
    try:
        names = {thread.name for thread in python_threads()}
    finally:
        del threading._active[-1]  # type: ignore[attr-defined]
        over.set()
        mine.join()
    assert "mine" in names and "pins" not in names and threading.current_thread().name not in names


# -- glances ---------------------------------------------------------------------------------------------------------


def glanced(monkeypatch: pytest.MonkeyPatch, asleep: Sequence[bool | None], taken: Sequence[bool]) -> BusyThread:
    """A thread after glances that found this."""
    seen = list(taken)
    monkeypatch.setattr(threads, "turn_is_taken", lambda: seen.pop(0))
    thread = BusyThread(threading.current_thread())
    for answer in asleep:
        monkeypatch.setattr(threads, "asleep_meanwhile", lambda tid, answer=answer: answer)
        thread.glance(0)
    assert not seen, "asked only where a glance did not tell"
    return thread


def test_a_thread_that_is_asleep_in_most_glances_needs_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert glanced(monkeypatch, [True] * 5 + [False], []).needs_turns
    assert not glanced(monkeypatch, [True] * 3 + [False] * 3, []).needs_turns
    assert not glanced(monkeypatch, [True] * 5, []).needs_turns, "not settled yet"


def test_where_a_glance_does_not_tell_the_interpreter_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert glanced(monkeypatch, [None] * 6, [True] * 4 + [False] * 2).needs_turns
    assert not glanced(monkeypatch, [None] * 6, [False] * 6).needs_turns
    settled = glanced(monkeypatch, [None, True, True, True, False, None], [True, False])
    assert settled.needs_turns and not settled.glances and settled.next_check > 0


def test_a_thread_that_sleeps_is_asleep_and_one_that_is_gone_tells_nothing() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    tid = thread.native_id
    # Sooner or later: it may still be on its way to sleep, or the machine take this thread off its core.
    assert any(threads.asleep_meanwhile(tid) for _ in range(10_000))
    assert threads.state_of(tid) in "SR" and (threads.time_on_core(tid) or 0) > 0
    over.set()
    thread.join()
    while threads.state_of(tid):
        time.sleep(0.001)  # the system takes its time
    assert threads.asleep_meanwhile(tid) is None and threads.time_on_core(tid) is None
    assert threads.time_on_core(None) is None


def test_alone_nobody_takes_the_turn() -> None:
    assert not threads.turn_is_taken()

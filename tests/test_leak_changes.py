"""Pairs of leaks and their look-alikes in what changes with the steps: lengths, averages, what is trained."""

from __future__ import annotations

import contextvars
import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import gpuwatch
from gpuwatch.advisor import Finding
from gpuwatch_hooks import in_use
from tests.holders import FEATURES, Twin, wide
from tests.loops import AfterStep, Batch, loader_of, perceptron
from tests.test_leak_holders import LEAKS, leaks, unhurried

__all__ = ["unhurried"]

pytestmark = pytest.mark.usefixtures("records", "unhurried")


def leak_findings(watch: gpuwatch.Watch) -> list[Finding]:
    """What a watch says of leaks, at its end."""
    watch.detach()
    return [finding for finding in watch.findings() if finding.rule in LEAKS]


# -- bounded structures that fill up -----------------------------------------------------------------------------------


class Unrolled(nn.Module):
    """A cell that is stepped through a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores, and the state after the last place."""
        for place in range(inputs.shape[1]):
            state = self.cell(inputs[:, place], state)
        assert state is not None
        return self.head(state), state


def batches(sizes: Iterator[tuple[int, int]]) -> Iterator[torch.Tensor]:
    for batch, length in sizes:
        yield torch.randn(batch, length, 8)


def unroll(sizes: list[tuple[int, int]]) -> list[Finding]:
    """Train on batches of these sizes and lengths."""
    model = Unrolled()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model)
    for inputs in batches(iter(sizes)):
        optimizer.zero_grad()
        output, _ = model(inputs)
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
    return leak_findings(watch)


def test_sequences_that_grow_are_quiet() -> None:
    assert not unroll([(4, 2 + step // 12) for step in range(150)])


def test_batches_that_double_are_quiet() -> None:
    assert not unroll([(2 << step // 30, 3) for step in range(150)])


@pytest.mark.parametrize("carried", [True, False])
def test_a_state_that_is_carried_through_unrolled_steps(carried: bool) -> None:
    model, head = Unrolled(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(head.parameters(), 0.01)
    loader, state = loader_of(150, 4, 8), None
    watch = gpuwatch.attach(model, loader)
    for inputs, targets in loader:
        scores, state = model(inputs.unsqueeze(1), state)
        if not carried:
            state = state.detach()
        optimizer.zero_grad()
        functional.mse_loss(head(scores.detach()), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    findings = leak_findings(watch)
    assert any("state" in finding.where for finding in findings) if carried else not findings


class Ema(nn.Module):
    """Keeps a running mean of its output, in an attribute or in a buffer."""

    def __init__(self, buffer: bool, detached: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)
        self.detached = detached
        if buffer:
            self.register_buffer("ema", torch.zeros(()))
        else:
            self.ema: torch.Tensor = torch.zeros(())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        output: torch.Tensor = self.layer(inputs)
        mean = output.detach().mean() if self.detached else output.mean()
        self.ema = 0.9 * self.ema + 0.1 * mean
        return output


@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize("detached", [True, False])
def test_a_running_mean_in_a_module(buffer: bool, detached: bool) -> None:
    findings = leaks(lambda step, output, loss: None, 120, model=Ema(buffer, detached))
    assert any("ema" in finding.where for finding in findings) is not detached
    assert detached is not bool(findings)


def test_layers_that_are_unfrozen_midway_are_quiet() -> None:
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(6)), nn.Linear(FEATURES, 2))
    for parameter in model[:5].parameters():
        parameter.requires_grad_(False)

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        if step in (40, 60, 80, 100, 120):
            model[4 - (step - 40) // 20].requires_grad_(True)

    assert not leaks(after, 180, model=model)


def test_an_average_of_the_weights_that_starts_late_is_quiet() -> None:
    model = perceptron(FEATURES)
    average: list[nn.Module] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        if step == 70:
            average.append(copy.deepcopy(model))
        if average:
            for mine, its in zip(average[0].parameters(), model.parameters(), strict=True):
                mine.data.lerp_(its.data, 0.1)

    assert not leaks(after, 160, model=model)


def test_a_search_for_the_learning_rate_is_quiet() -> None:
    rates: list[float] = []
    losses: list[float] = []
    start = {name: tensor.clone() for name, tensor in perceptron(FEATURES).state_dict().items()}
    model = perceptron(FEATURES)

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        rates.append(1e-6 * 1.1**step)
        losses.append(loss.item())
        if step == 80:
            model.load_state_dict(start)

    assert not leaks(after, 150, model=model)


@pytest.mark.parametrize("graphs", [True, False])
def test_eight_batches_to_a_step(graphs: bool) -> None:
    model, loader = perceptron(FEATURES), loader_of(300, 4, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    parts: list[torch.Tensor] = []
    history: list[torch.Tensor] = []
    for _ in range(4):
        for number, (inputs, targets) in enumerate(loader):
            loss = functional.mse_loss(model(inputs), targets) / 8
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append(loss)
            if number % 8 == 7:
                optimizer.step()
                optimizer.zero_grad()
                total = torch.stack(parts).sum()
                history.append(total if graphs else total.detach())
                parts = []
    findings = leak_findings(watch)
    assert any("history" in finding.where for finding in findings) if graphs else not findings


def endless(loader: DataLoader[Batch]) -> Iterator[Batch]:
    while True:
        yield from loader


@pytest.mark.parametrize("cycled", [True, False])
def test_a_loop_over_a_cycle_that_no_name_leads_to(cycled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use, "AT_FIRST", 1 << 40)  # a busy machine's readings cost more
    model, loader = perceptron(2048), loader_of(140, 8, 2048)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for inputs, targets in itertools.islice(itertools.cycle(loader) if cycled else endless(loader), 130):
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    findings = leak_findings(watch)
    said = [finding.evidence for finding in findings if finding.rule == "leak-host"]
    assert bool(said) is bool(findings) is cycled
    assert not cycled or ("test_leak_changes.py" in said[0] and "uses itertools.cycle" in said[0])


Make = Callable[[], AfterStep]


def history_of_rewards() -> AfterStep:
    rewards: dict[str, list[dict[str, torch.Tensor]]] = {"train": []}
    return lambda step, output, loss: rewards["train"].append({"reward": loss, "value": wide()})


def late() -> AfterStep:
    features: list[torch.Tensor] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        if step >= 110:
            features.append(wide())

    return after


@pytest.mark.parametrize(("make", "name"), [(history_of_rewards, "rewards"), (late, "features")])
def test_a_leak_is_named_within_150_steps_of_its_start(make: Make, name: str) -> None:
    assert any(name in finding.where for finding in leaks(make(), 260))


# -- holders without tensors of their own, and those of more than one name ---------------------------------------------


def nodes_of_graphs(leaks: bool) -> AfterStep:
    nodes: list[object] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        nodes.append(loss.grad_fn)
        if not leaks:
            del nodes[:-5]

    return (lambda step, output, loss: nodes.append(loss.grad_fn)) if leaks else after


def one_text(leaks: bool) -> AfterStep:
    report = ""

    def longer(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        nonlocal report
        report += f"{step} " * 20_000

    def newest(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        nonlocal report
        report = f"{step} " * 20_000

    return longer if leaks else newest


def one_buffer(leaks: bool) -> AfterStep:
    archive = bytearray()

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        archive.extend(bytes(60_000))
        if len(archive) > 500_000:
            archive.clear()

    return (lambda step, output, loss: archive.extend(bytes(60_000))) if leaks else after


def small_columns(leaks: bool) -> AfterStep:
    columns = {name: torch.zeros(0, 50) for name in ("loss", "output", "target")}

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        for name in columns:
            columns[name] = torch.cat([columns[name] if leaks else columns[name][:50], torch.zeros(50, 50)])

    return after


@pytest.mark.parametrize(
    ("twin", "rule", "name"),
    [
        (nodes_of_graphs, "leak-graph-retained", "nodes"),
        (one_text, "leak-host", "report"),
        (one_buffer, "leak-host", "archive"),
        (small_columns, "leak-host", "columns['"),
    ],
)
def test_what_is_no_container_of_tensors(twin: Twin, rule: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use, "AT_FIRST", 1 << 40)  # a busy machine's readings cost more
    (finding,) = leaks(twin(True), 140)
    assert finding.rule == rule and name in finding.where + finding.evidence
    assert not leaks(twin(False), 140)


class Encoder(nn.Module):
    """Keeps its outputs in a default argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, inputs: torch.Tensor, *, remembered: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
        """The layer's output."""
        remembered[len(remembered)] = wide()
        output: torch.Tensor = self.layer(inputs)
        return output


def test_a_default_argument_of_a_method() -> None:
    (finding,) = leaks(lambda step, output, loss: None, 100, model=Encoder())
    assert "remembered" in finding.where
    (Encoder.forward.__kwdefaults__ or {})["remembered"].clear()


def test_sparse_gradients_weigh_what_they_hold() -> None:
    kept: list[torch.Tensor] = []
    place = torch.arange(4_096).unsqueeze(0)

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        kept.append(torch.sparse_coo_tensor(place.clone(), torch.zeros(4_096, 4), (4_096, 4), check_invariants=False))

    (finding,) = leaks(after, 100)
    assert "kept" in finding.where and "96 KiB a step" in finding.evidence


def test_the_value_of_a_context_variable() -> None:
    trail: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar("trail", default=[])  # noqa: B039
    latest: contextvars.ContextVar[torch.Tensor] = contextvars.ContextVar("latest")
    assert not leaks(lambda step, output, loss: latest.set(wide()), 100)
    (finding,) = leaks(lambda step, output, loss: trail.get().append(wide()), 100)
    assert "trail" in finding.where


def test_a_list_that_is_a_default_argument_and_a_variable_is_told_of_once() -> None:
    def run(history: list[torch.Tensor] = []) -> list[Finding]:  # noqa: B006 - the fault
        return leaks(lambda step, output, loss: history.append(wide()), 120)

    (finding,) = run()
    assert "history" in finding.where


def test_a_tensor_of_two_names_is_told_of_once() -> None:
    drift = torch.zeros(())

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        nonlocal drift
        drift = drift + output.square().mean()

    (finding,) = leaks(after, 140)
    assert "drift" in finding.where


def test_a_table_by_tensors_weighs_what_it_holds() -> None:
    model = perceptron(FEATURES)
    history: dict[torch.Tensor, list[torch.Tensor]] = {parameter: [] for parameter in model.parameters()}

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        for kept in history.values():
            kept.append(torch.zeros(2_048))

    (finding,) = leaks(after, 120, model=model)
    assert "history" in finding.where and "32 KiB a step" in finding.evidence


def by_place(leaks: bool) -> AfterStep:
    bank: dict[int, torch.Tensor] = {}

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        bank[step if leaks else step * 701 % 997] = wide()

    return after


def test_a_bank_by_places_in_a_shuffled_data_set_is_quiet_while_it_fills() -> None:
    assert not leaks(by_place(False), 140)
    (finding,) = leaks(by_place(True), 140)
    assert "bank" in finding.where


def all_results(results: list[torch.Tensor], fresh: list[torch.Tensor]) -> None:
    results.extend(fresh)


def latest_results(results: list[torch.Tensor], fresh: list[torch.Tensor]) -> None:
    results[:] = fresh


@pytest.mark.parametrize("keep", [all_results, latest_results])
def test_results_of_evaluations_that_are_kept(keep: Callable[[list[torch.Tensor], list[torch.Tensor]], None]) -> None:
    model, loader = perceptron(FEATURES), loader_of(20, 8, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    results: list[torch.Tensor] = []
    watch = gpuwatch.attach(model, loader)
    for _ in range(10):
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        keep(results, [wide() for _ in range(12)])
    named = ["results" in finding.where for finding in leak_findings(watch)]
    assert named == ([True] if keep is all_results else [])

"""What becomes of gradients between two steps: zeroed in place, forgotten, or kept on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch.advisor import Finding
from tests.loops import convolutional, epochs, found, loader_of, perceptron, quiet, train

pytestmark = pytest.mark.usefixtures("records")

ZEROED, KEPT = "opt-zero-grad-inplace", "opt-grads-not-zeroed"

Clear = Callable[[torch.optim.Optimizer, int], object]


def zeros(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def zeros_by_hand(optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None:
            parameter.grad.zero_()


def zeros_behind_the_version(optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def none_by_hand(optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def nothing(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Forget it."""


def to_none(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()


OPTIMIZERS = [
    lambda parameters: torch.optim.SGD(parameters, 0.001),
    lambda parameters: torch.optim.SGD(parameters, 0.001, momentum=0.9, foreach=True),
    lambda parameters: torch.optim.AdamW(parameters, 1e-4),
]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clear", [zeros, zeros_by_hand])
@pytest.mark.parametrize("first", [0, 100])
def test_gradients_zeroed_in_place_are_found(
    make_optimizer: Callable[[object], torch.optim.Optimizer], clear: Clear, first: int
) -> None:
    findings = train(
        first + 100, make_optimizer=make_optimizer, clear=lambda *step: (clear if step[1] >= first else to_none)(*step)
    )
    assert found(findings, ZEROED) and not found(findings, KEPT)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("first", [0, 100, 600])
def test_gradients_that_are_never_cleared_are_found(
    make_optimizer: Callable[[object], torch.optim.Optimizer], first: int
) -> None:
    findings = train(
        first + 250,
        model=convolutional(),
        make_optimizer=make_optimizer,
        clear=lambda *step: None if step[1] >= first else to_none(*step),
    )
    assert found(findings, KEPT) and not found(findings, ZEROED)


def forgotten_for_ten_steps(optimizer: torch.optim.Optimizer, step: int) -> None:
    if not 60 <= step % 150 < 70:
        optimizer.zero_grad()


@pytest.mark.parametrize("clear", [to_none, none_by_hand, zeros_behind_the_version, forgotten_for_ten_steps])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [70, 300])
def test_gradients_cleared_in_other_ways_are_quiet(
    clear: Clear, make_optimizer: Callable[[object], torch.optim.Optimizer], steps: int
) -> None:
    assert quiet(train(steps, clear=clear, make_optimizer=make_optimizer))


def test_zeroing_behind_the_version_does_not_keep_every_step_looked_at() -> None:
    looked = []
    watched = train(
        400,
        clear=zeros_behind_the_version,
        after=lambda *_: looked.append(gpuwatch_is_looking()),
    )
    assert quiet(watched)
    assert sum(looked[150:]) < 30


def gpuwatch_is_looking() -> bool:
    from gpuwatch_hooks import attach

    assert attach._active is not None
    return attach._active.session.pace.looking


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulation_over_several_batches_is_right(micro_batches: int) -> None:
    def clear(optimizer: torch.optim.Optimizer, step: int) -> None:
        if step % micro_batches == 0:
            optimizer.zero_grad()

    model, loader = perceptron(), loader_of(100)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    watch = gpuwatch.attach(model, loader)
    for step, _, (inputs, targets) in epochs(loader, 150 * micro_batches):
        clear(optimizer, step)
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if step % micro_batches == micro_batches - 1:
            optimizer.step()
    watch.detach()
    assert quiet(watch.findings())


def two_networks(clear_second: Clear, steps: int = 150, second_every: int = 1) -> list[Finding]:
    """A generator and a discriminator; the generator's gradients of the other's backward stay until its own turn."""
    maker, judge = perceptron(), perceptron(2)
    optimizers = [torch.optim.SGD(network.parameters(), 0.001) for network in (maker, judge)]
    loader = loader_of(100)
    first = gpuwatch.attach(maker, loader)
    second = gpuwatch.attach(judge, loader)
    for step, _, (inputs, targets) in epochs(loader, steps):
        optimizers[1].zero_grad()
        made = maker(inputs)
        (judge(made.detach()).square().mean() + judge(targets).square().mean()).backward()
        optimizers[1].step()
        if step % second_every == 0:
            clear_second(optimizers[0], step)
            judge(made).square().mean().backward()
            optimizers[0].step()
    first.detach()
    second.detach()
    return second.findings()


@pytest.mark.parametrize("second_every", [1, 3])
@pytest.mark.parametrize("clear", [to_none, none_by_hand])
def test_two_networks_that_keep_gradients_for_each_other_are_right(clear: Clear, second_every: int) -> None:
    assert quiet(two_networks(clear, 200, second_every))


def test_gradients_cleared_after_the_step_are_right() -> None:
    model, loader = convolutional(), loader_of(50)
    optimizer = torch.optim.Adam(model.parameters())
    watch = gpuwatch.attach(model, loader)
    for _, _, (inputs, targets) in epochs(loader, 200):
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    watch.detach()
    assert quiet(watch.findings())


def test_an_optimizer_made_anew_at_every_epoch_is_followed() -> None:
    model, loader = perceptron(), loader_of(90)
    watch = gpuwatch.attach(model, loader)
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), 0.0001)
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    watch.detach()
    assert found(watch.findings(), KEPT)

"""Small training runs of many kinds, to compare what comes of them with gpuwatch and without.

Each takes ``attach`` (gpuwatch's, or one that does nothing) and returns what it computed. They run for more than a
hundred steps: past the steps that are all looked at, and over looks between resting ones.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

Attach = Callable[..., object]
Batch = tuple[torch.Tensor, torch.Tensor]
Training = Callable[[Attach], list[object]]

torch.set_num_threads(1)  # for tensors this small, several only stand in each other's way

BATCHES = 36
EPOCHS = 3  # 108 steps


class Noise(Dataset[Batch]):
    """Items that draw from all three generators of random numbers."""

    def __init__(self, *shape: int, length: int = 2 * BATCHES) -> None:
        self.shape = shape
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        scale = random.random() + float(numpy.random.rand())
        return torch.randn(self.shape) * scale, torch.rand(1)


class Transformer(nn.Module):
    """An encoder under a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """One number an item."""
        scores: torch.Tensor = self.head(self.layers(batch).mean(1))
        return scores


class Recurrent(nn.Module):
    """A GRU that gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 6, batch_first=True, num_layers=2, dropout=0.2)
        self.head = nn.Linear(6, 1)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores and the hidden state."""
        output, hidden = self.cell(batch)
        return self.head(output[:, -1]), hidden


def perceptron() -> nn.Module:
    """Linear layers with dropout."""
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 1))


def convolution() -> nn.Module:
    """Convolution and batch norm."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (6,)),
    "convolution": (convolution, (2, 4, 4)),
    "recurrent": (Recurrent, (5, 4)),
    "transformer": (Transformer, (5, 8)),
}


def loss_of(model: Callable[..., Any], batch: Batch) -> torch.Tensor:
    """Squared error."""
    output = model(batch[0])
    return functional.mse_loss(output[0] if isinstance(output, tuple) else output, batch[1])


def usual(name: str, workers: int) -> Training:
    """The textbook loop, with a validation after each epoch: without gradients, with them, in inference mode."""

    def train(attach: Attach) -> list[object]:
        make, shape = ARCHITECTURES[name]
        model = make()
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": name == "recurrent"} if workers else {}
        loader = DataLoader(Noise(*shape), 2, shuffle=True, **options)
        held_out = DataLoader(Noise(*shape, length=6), 2)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
        attach(model, loader)
        seen: list[object] = []
        for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            for batch in loader:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                seen.append(loss.item())
            model.eval()
            with context():
                seen.extend(loss_of(model, batch).item() for batch in held_out)
            model.train()
        return [*seen, model.state_dict(), optimizer.state_dict(), schedule.state_dict()]

    return train


def batches(count: int, *shape: int) -> Iterator[Batch]:
    """Batches without a loader."""
    for _ in range(count):
        yield torch.randn(2, *shape), torch.rand(2, 1)


def accumulation(attach: Attach) -> list[object]:
    """Two backwards a step, a clipped norm."""
    model, loader = perceptron(), DataLoader(Noise(6, length=4 * BATCHES), 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    attach(model, loader)
    seen: list[object] = []
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader):
            loss = loss_of(model, batch) / 2
            loss.backward()  # type: ignore[no-untyped-call]
            if number % 2:
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            seen.append(loss.item())
    return [*seen, model.state_dict(), optimizer.state_dict()]


def closure(attach: Attach) -> list[object]:
    """LBFGS calls the loss several times a step."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    attach(model)
    seen: list[object] = []
    for batch in batches(110, 6):

        def loss_again(batch: Batch = batch) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        seen.append(optimizer.step(loss_again))  # type: ignore[no-untyped-call]
    return [*seen, model.state_dict(), optimizer.state_dict()]


def adversarial(attaches: int) -> Training:
    """Two networks, two optimizers, ``retain_graph``; watched one by one or as one container."""

    def train(attach: Attach) -> list[object]:
        both = nn.ModuleDict({"maker": nn.Linear(3, 6), "judge": perceptron()})
        maker, judge = both["maker"], both["judge"]
        loader = DataLoader(Noise(3), 2)
        optimizers = [torch.optim.Adam(part.parameters(), 1e-3) for part in (maker, judge)]
        if attaches == 2:
            attach(maker, loader)
            attach(judge, loader)
        else:
            attach(both, loader)
        seen: list[object] = []
        for _ in range(EPOCHS):
            for seeds, _ in loader:
                made = maker(seeds)
                verdict = judge(made).mean()
                optimizers[1].zero_grad()
                verdict.backward(retain_graph=True)
                optimizers[1].step()
                optimizers[0].zero_grad()
                loss = -judge(made).mean()
                loss.backward()
                optimizers[0].step()
                seen += [verdict.item(), loss.item()]
        return [*seen, both.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]

    return train


def mixed_precision(attach: Attach) -> list[object]:
    """Autocast to bfloat16, with a scaler that skips a step."""
    model, loader = perceptron(), DataLoader(Noise(6), 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10)
    attach(model, loader)
    seen: list[object] = []
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch) * (float("inf") if (epoch, number) == (2, 5) else 1.0)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            seen.append(loss.item())
    return [*seen, model.state_dict(), optimizer.state_dict(), scaler.state_dict()]


def checkpointed(reentrant: bool) -> Training:
    """Activations computed again in backward, dropout among them; the watched model whole, and a part of it."""

    def train(attach: Attach) -> list[object]:
        model = perceptron()
        head = nn.Linear(1, 1)
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
        attach(model)
        seen: list[object] = []
        for inputs, goal in batches(110, 6):
            optimizer.zero_grad()
            hidden = checkpoint(model, inputs.requires_grad_(), use_reentrant=reentrant)
            loss = functional.mse_loss(head(hidden), goal)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen += [loss.item(), inputs.grad]
        return [*seen, model.state_dict(), optimizer.state_dict()]

    return train


def double_backward(attach: Attach) -> list[object]:
    """A penalty on the gradient at the input, which itself is differentiated."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    attach(model)
    seen: list[object] = []
    for inputs, goal in batches(110, 6):
        inputs.requires_grad_()
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        loss = functional.mse_loss(output, goal) + slope.square().mean()
        optimizer.zero_grad()
        torch.autograd.backward([loss])
        optimizer.step()
        seen += [loss.item(), slope]
    return [*seen, model.state_dict(), optimizer.state_dict()]


def functional_transforms(attach: Attach) -> list[object]:
    """``torch.func`` through a watched model, parameters updated by hand."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    attach(model)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss_at(parameters: dict[str, torch.Tensor], inputs: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(torch.func.functional_call(model, parameters, (inputs,)), goal)

    seen: list[object] = []
    for inputs, goal in batches(110, 6):
        gradients, loss = torch.func.grad_and_value(loss_at)(parameters, inputs, goal)
        each = torch.func.vmap(torch.func.grad(loss_at), in_dims=(None, 0, 0))(parameters, inputs, goal)
        parameters = {name: parameter - 0.1 * gradients[name] for name, parameter in parameters.items()}
        seen += [loss.item(), *each.values()]
    return [*seen, parameters]


def optimizer_in_backward(attach: Attach) -> list[object]:
    """An optimizer per parameter, stepped as its gradient is complete."""
    model, loader = Transformer(), DataLoader(Noise(5, 8), 2)
    own = {parameter: torch.optim.Adam([parameter], 1e-3) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        own[parameter].step()  # type: ignore[index]
        own[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    attach(model, loader)
    seen: list[object] = []
    for _ in range(EPOCHS):
        for batch in loader:
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            seen.append(loss.item())
    return [*seen, model.state_dict(), *(optimizer.state_dict() for optimizer in own.values())]


def by_hand(attach: Attach) -> list[object]:
    """No optimizer, under anomaly mode for a while."""
    model, loader = perceptron(), DataLoader(Noise(6), 2)
    attach(model, loader)
    seen: list[object] = []
    for epoch in range(EPOCHS):
        with torch.autograd.set_detect_anomaly(epoch == 1):
            for batch in loader:
                loss = loss_of(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.sub_(parameter.grad, alpha=0.1)
                        parameter.grad.data.zero_()
                seen.append(loss.item())
    return [*seen, model.state_dict()]


def rebuilt(attach: Attach) -> list[object]:
    """Optimizer and loader made anew each epoch, the first loader given up in the middle."""
    model = perceptron()
    first = DataLoader(Noise(6), 2)
    attach(model, first)
    seen: list[object] = []
    for epoch in range(EPOCHS + 1):
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(Noise(6), 2) if epoch else first
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen.append(loss.item())
            if number > 25 and not epoch:
                break
        seen.append(optimizer.state_dict())
    return [*seen, model.state_dict()]


def fused_layer(attach: Attach) -> list[object]:
    """A bare encoder layer: any hook on it would switch its fused path off in eval mode."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    attach(model)
    seen: list[object] = []
    for number in range(110):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 5, 8)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        if number % 10 == 0:
            model.eval()
            with torch.no_grad():
                seen.append(model(torch.randn(2, 5, 8)))
            model.train()
    return [*seen, model.state_dict()]


def copies(attach: Attach) -> list[object]:
    """An average of the weights and a teacher, copied while the model is looked at; sparse gradients."""
    model = nn.Sequential(nn.EmbeddingBag(10, 6, sparse=True), nn.Linear(6, 1))
    sparse = torch.optim.SparseAdam(list(model[0].parameters()))
    dense = torch.optim.RMSprop(model[1].parameters())
    attach(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    teacher = copy.deepcopy(model).eval()
    seen: list[object] = []
    for _ in range(110):
        codes = torch.randint(10, (2, 3))
        loss = functional.mse_loss(model(codes), teacher(codes) + average(codes) + 1)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in (sparse, dense):
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
        average.update_parameters(model)
        seen.append(loss.item())
    stored = io.BytesIO()
    torch.save(model, stored)
    seen.append(torch.load(io.BytesIO(stored.getvalue()), weights_only=False).state_dict())
    return [*seen, model.state_dict(), average.state_dict(), teacher.state_dict()]


TRAININGS: dict[str, Training] = {
    **{f"{name} with {workers} workers": usual(name, workers) for name in ARCHITECTURES for workers in (0, 2)},
    "accumulated gradients": accumulation,
    "LBFGS": closure,
    "two networks watched by two attaches": adversarial(2),
    "two networks watched by one attach": adversarial(1),
    "autocast and scaler": mixed_precision,
    "reentrant checkpoint": checkpointed(True),
    "checkpoint": checkpointed(False),
    "double backward": double_backward,
    "torch.func": functional_transforms,
    "optimizers in backward": optimizer_in_backward,
    "updates by hand": by_hand,
    "optimizer and loader rebuilt": rebuilt,
    "a fused layer": fused_layer,
    "copies of the model": copies,
}

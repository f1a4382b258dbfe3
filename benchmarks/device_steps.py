"""Steps of the device check's model: attached or plain, measured, with limited memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch
from torch import nn

import rematic
from benchmarks.device_model import Size, Stack, leftovers, make_ids, make_model
from rematic.journal import EventSink
from rematic.memory import Probe, SimulatedProbe
from rematic.recipes import PolicyConfig, Recipe

UNLIMITED = 1 << 40
"""A budget that no device comes near."""


def two_steps(
    device: torch.device,
    size: Size,
    dtype: torch.dtype,
    dropout: float,
    *,
    policy: str | None = None,
    backend: str | None = None,
) -> dict[str, torch.Tensor]:
    """Runs two steps that accumulate; returns what they leave behind.

    Args:
        device: Where.
        size: How large.
        dtype: Of weights and activations.
        dropout: Its probability.
        policy: The policy of a session, None for plain steps.
        backend: Compiles every block with it, None for no compiling.
    """
    model = make_model(device, size, dtype=dtype, dropout=dropout)
    if backend is not None:
        for block in model.blocks:
            block.compile(backend=backend)
    return _steps(model, policy, number=2)


def _steps(model: Stack, policy: str | None, *, number: int) -> dict[str, torch.Tensor]:
    device, session = next(model.parameters()).device, None
    size = Size.on(device)
    if policy is not None:
        session = rematic.attach(model, policy=policy, budget=UNLIMITED)
    torch.manual_seed(9)
    losses = []
    for _ in range(number):
        ids = make_ids(device, size)
        with contextlib.nullcontext() if session is None else session.step(ids):
            losses.append(backward(model, ids))
    if session is not None:
        session.detach()
    return leftovers(model, losses)


def trained(
    device: torch.device,
    size: Size,
    *,
    policy: str | None = None,
    dtype: torch.dtype = torch.float32,
    journal: EventSink | None = None,
    probe: Probe | None = None,
) -> tuple[dict[str, torch.Tensor], int]:
    """Trains two steps; returns what they leave behind, and the peak.

    The graph of a further forward is alive while the optimizer steps, so that an allocation that
    fails there can be answered as well.
    """
    model = make_model(device, size, dtype=dtype, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    meter = probe if isinstance(probe, SimulatedProbe) else None
    if device.type != "cuda" and meter is None:
        meter = SimulatedProbe()
    session = None
    if policy is not None:
        session = rematic.attach(
            model,
            optimizer,
            recipe=Recipe(policy=PolicyConfig(op_retry="always")),
            policy=policy,
            budget=UNLIMITED,
            journal=journal,
            probe=meter or "auto",
        )
    losses, peak = _train(model, optimizer, session, meter)
    if session is not None:
        session.detach()
    return leftovers(model, losses), peak


def _train(
    model: Stack,
    optimizer: torch.optim.Optimizer,
    session: rematic.Session | None,
    meter: SimulatedProbe | None,
) -> tuple[list[torch.Tensor], int]:
    device = next(model.parameters()).device
    ids, losses = make_ids(device, Size.on(device)), []
    if meter is None:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        meter.track(model.parameters())
    torch.manual_seed(9)
    with contextlib.nullcontext() if meter is None else meter:
        for _ in range(2):
            if session is None:
                losses.append(backward(model, ids))
            else:
                losses.append(session.run(lambda ids: backward(model, ids), ids))
            with contextlib.nullcontext() if session is None else session.step(ids):
                alive = model(ids)
                optimizer.step()
                del alive
    peak = torch.cuda.max_memory_allocated(device) if meter is None else meter.peak_allocated_bytes
    return losses, peak


@contextlib.contextmanager
def only(device: torch.device, limit_bytes: int) -> Iterator[Probe | None]:
    """Lets memory run out beyond `limit_bytes`, really on a GPU, in a simulation on a CPU."""
    if device.type != "cuda":
        yield SimulatedProbe(limit_bytes)
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


class Watching(nn.Module):
    """Notes the thread of every replay and changes nothing."""

    def __init__(self, seen: set[int]) -> None:
        super().__init__()
        self.note = lambda: seen.add(threading.get_ident())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what it is given, of any shape."""
        if rematic.replaying():
            self.note()
        return x


class _Adapted(nn.Module):
    """A 4-bit layer with a low-rank adapter."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        import bitsandbytes as bnb

        self.base = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        self.base.load_state_dict(layer.state_dict())
        self.base.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, 8, bias=False)
        self.b = nn.Linear(8, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted_step(device: torch.device, size: Size, policy: str | None) -> dict[str, torch.Tensor]:
    """Runs two steps of a frozen model over 4-bit layers whose adapters are trained."""
    torch.manual_seed(0)
    model = Stack(size, dropout=0.1)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = _Adapted(block.up), _Adapted(block.down)
    return _steps(model.to(device), policy, number=2)


def backward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Runs forward and backward; returns the loss without its graph."""
    loss = model(ids)
    loss.backward()
    return loss.detach()


def now(device: torch.device) -> float:
    """Returns the time in seconds when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

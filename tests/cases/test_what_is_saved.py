"""Group E and F: what recomputation is worth, and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rematic
from rematic.activations import Engine
from rematic.memory import SimulatedProbe
from rematic.policy import ACTIONS, Keep, Plan, Policy, Rule, action_named
from rematic.stash import CompressStash
from tests.activations.blocks import make_input, make_model
from tests.cases.policies import attach


class Attention(nn.Module):
    """One head over 64 features, either written out or by torch's kernel."""

    def __init__(self, kernel: bool) -> None:
        super().__init__()
        self.kernel = kernel
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.kernel:
            q, k, v = (part[None, None] for part in (q, k, v))
            return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]
        scores = (q @ k.t() / 8).masked_fill(torch.ones(len(x), len(x)).triu(1) > 0, -1e9)
        return x + torch.softmax(scores, -1) @ v


def _held(kernel: bool) -> tuple[int, int]:
    """Returns what two units keep, as records declare it and as the allocator counts it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Attention(kernel), Attention(kernel)))
    engine = Engine(model, trust=["*"])
    x = torch.randn(1024, 64)
    model(x).sum().backward()
    engine.apply(Plan(actions=(Keep(), Keep())))
    with SimulatedProbe() as probe:
        output = model(x)
        declared = engine.ledger.resident_bytes()
        before = probe.allocated_bytes()
        freed = engine.ledger.evict(declared).bytes_freed
        measured = before - probe.allocated_bytes()
        output.sum().backward()
    assert freed == measured
    return declared // 2, measured // 2


def test_case_e6_bytes_are_measured_and_not_taken_from_a_formula() -> None:
    written_out, by_kernel = _held(kernel=False), _held(kernel=True)
    squares = 1024 * 1024  # what every formula for attention counts
    assert written_out[1] > 4 * squares
    assert by_kernel[1] < written_out[1] / 4  # so recomputing the kernel saves little
    assert by_kernel[1] < 4 * squares / 2
    assert (written_out[0], by_kernel[0]) == (written_out[1], by_kernel[1])


def test_case_e6_what_plans_know_of_a_class_is_what_was_measured() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Attention(kernel=True), Attention(kernel=True)))
    probe = SimulatedProbe()
    session = rematic.attach(model, budget="1GiB", probe=probe)
    with probe:
        for _ in range(2):
            x = torch.randn(1024, 64)
            with session.step({"x": x[None]}):
                model(x).sum().backward()
    known = session._costs.kept_curve("Attention").at(1024)
    assert known == _held(kernel=True)[0]
    session.detach()


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Branching(nn.Module):
    """Computes something whose gradient nobody asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)])
        self.unused = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.unused(x)
        return x


@pytest.mark.parametrize("policy", ["offload", "recompute+offload"])
def test_case_f18_moved_tensors_leave_nothing_behind(policy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Branching()
    recipe = {"memory": {"scratch_dir": str(tmp_path)}}
    session = rematic.attach(model, policy=policy, recipe=recipe)
    places = session._engine._places
    x = torch.randn(512, 64, requires_grad=True)
    with _without_collector():
        for step in range(20):
            with contextlib.suppress(KeyError), session.step(x):
                output = model(x)
                assert places._offload is not None
                assert places._offload.used_bytes > 0
                if step % 5 == 3:
                    del output
                    raise KeyError
                output.square().sum().backward()
                del output
            assert places._offload.used_bytes == 0
            session.switch("recompute" if step % 2 else policy)
            session.switch(policy)
    session.detach()
    assert list(tmp_path.iterdir()) == []


def test_case_f18_hooks_of_others_are_reported_and_not_overridden(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model()
    session = attach(model, "selective")
    packed = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packed
        packed += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(make_input()).backward()
    assert packed > 0  # they see what they would have seen without rematic
    assert "not managed in this call: other saved-tensor hooks are active" in caplog.text
    session.detach()


class Pair(nn.Module):
    """Two token-wise units whose activations are large enough to be moved (64 KiB and more)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _rounds(model: nn.Module, session: rematic.Session, step: int, policies: list[Policy]) -> None:
    kind = step % 5
    if kind == 0:
        session.switch(policies[step // 5 % len(policies)])
    x = torch.randn(1, 1024, 16, requires_grad=True)
    with contextlib.suppress(KeyError, torch.OutOfMemoryError), session.step(x):
        if kind == 1:
            model(x)  # forward only
        elif kind == 2:
            model(x)
            raise KeyError
        elif kind == 3:
            with SimulatedProbe(1):
                model(x)
        else:
            loss = model(x).square().sum()
            session.evict(1 << 20)
            loss.backward()
            assert x.grad is not None
    model.zero_grad()


def _policy(action: str) -> Policy:
    options = {"num_tiles": 3} if action == "tile" else {}
    rule = Rule(pattern="*", action=action_named(action, **options))
    return Policy(name=action, rules=(rule,))


# (the others are in every turn)
@pytest.mark.parametrize("action", [name for name in ACTIONS if name not in ("keep", "recompute")])
def test_case_f19_two_hundred_steps_are_flat_without_the_collector(
    action: str, tmp_path: Path
) -> None:
    """Finished, forward-only, aborted and failed steps, and forty switches with each action."""
    if action == "compress":
        pytest.importorskip("bitsandbytes")
        CompressStash().put([torch.ones(2**14)])  # makes its code, once for all
    torch.manual_seed(0)
    model, probe = Pair(), SimulatedProbe()
    recipe = {"memory": {"scratch_dir": str(tmp_path)}, "policy": {"allow_lossy": True}}
    session: Any = rematic.attach(model, recipe=recipe, policy="keep", probe=probe)
    places = session._engine._places
    policies = [_policy(name) for name in (action, "keep", action, "recompute")]
    held, used, moved, objects = [], [], [], []

    def bytes_moved() -> int:
        stashes = [s for s in (places._offload, places._compress) if s is not None]
        return sum(stash.used_bytes for stash in stashes)

    model.register_forward_hook(lambda *_: moved.append(bytes_moved()))
    with _without_collector(), probe:
        for step in range(200):
            _rounds(model, session, step, policies)
            held.append(probe.allocated_bytes())
            used.append(bytes_moved())
            if step in (79, 199):  # the same place in the turn of policies
                objects.append(len(gc.get_objects()))
        alive = session._engine.ledger.records()
    session.detach()
    assert (max(moved) > 0) == (action in ("offload", "recompute+offload", "compress"))
    assert held == [0] * 200
    assert used == [0] * 200
    assert alive == []
    # not one a step: 24 are the switches in the history, up to 24 inputs that have died lately
    assert objects[1] - objects[0] < 100

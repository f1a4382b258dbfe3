"""Actions that move tensors away: the bits stay, the memory goes, the places are left clean."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import pytest
import torch

from rematic.activations import Engine
from rematic.memory import SimulatedProbe
from rematic.policy import Action, Compress, Offload, Plan, Recompute, RecomputeOffload
from rematic.stash import DiskStash, StashError
from tests.activations.families import FAMILIES, LLAMA_SDPA, Family
from tests.activations.parity import Outcome, differences, make, run_steps

MOVING = {"offload": Offload(), "recompute+offload": RecomputeOffload()}


@functools.cache
def plain_outcome(family: Family, *, autocast: bool = False) -> Outcome:
    return run_steps(make(family), family, autocast=autocast)


@pytest.fixture
def small_tensors_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the tests are small: moves them whatever their size."""
    monkeypatch.setattr(
        "rematic.activations.stash_places.DiskStash", functools.partial(DiskStash, min_bytes=1)
    )


def moving(model: torch.nn.Module, action: Action, scratch_dir: Path) -> Engine:
    engine = Engine(model, scratch_dir=scratch_dir)
    engine.apply(Plan(actions=tuple(action for _ in engine.units)))
    return engine


@pytest.mark.usefixtures("small_tensors_move")
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("action", MOVING.values(), ids=MOVING.keys())
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_moved_tensors_come_back_with_the_same_bits(
    family: Family, action: Action, autocast: bool, tmp_path: Path
) -> None:
    model = make(family)
    engine = moving(model, action, tmp_path)
    moved: list[int] = []

    def measure() -> None:
        moved.append(sum(p.stat().st_size for p in tmp_path.iterdir()))

    found = run_steps(model, family, autocast=autocast, before_backward=measure)
    assert differences(found, plain_outcome(family, autocast=autocast)) == []
    assert min(moved) > 0
    replays = 0 if action == Offload() else 2
    pinned = [unit for unit in engine.units if unit.pinned]
    if not pinned:
        assert [engine.ledger.counts.replays[name] for name in family.units] == [replays] * len(
            family.units
        )
    engine.detach()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_tensors_move")
def test_moved_inputs_leave_the_memory(tmp_path: Path) -> None:
    held: dict[Action, int] = {}
    for action in (Recompute(), RecomputeOffload()):
        model = make(LLAMA_SDPA)
        engine = moving(model, action, tmp_path)
        with SimulatedProbe() as probe:
            run_steps(model, LLAMA_SDPA, num_batches=1)  # the first call holds until its end
            model.zero_grad()
            read: list[int] = [probe.allocated_bytes()]
            run_steps(
                model,
                LLAMA_SDPA,
                num_batches=1,
                before_backward=functools.partial(_read, probe, into=read),
            )
            held[action] = read[1] - read[0]
        engine.detach()
    assert held[RecomputeOffload()] < held[Recompute()]


def _read(probe: SimulatedProbe, *, into: list[int]) -> None:
    into.append(probe.allocated_bytes())


@pytest.mark.usefixtures("small_tensors_move")
def test_a_place_without_room_means_that_the_unit_is_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise StashError("no room left in the scratch file")

    monkeypatch.setattr(DiskStash, "put", full)
    model = make(LLAMA_SDPA)
    engine = moving(model, Offload(), tmp_path)
    with caplog.at_level(logging.WARNING, logger="rematic"):
        found = run_steps(model, LLAMA_SDPA)
    assert differences(found, plain_outcome(LLAMA_SDPA)) == []
    assert all(engine.ledger.counts.replays[name] == 2 for name in LLAMA_SDPA.units)
    assert len([r for r in caplog.records if "could not be moved: no room" in r.message]) == len(
        LLAMA_SDPA.units
    )


@pytest.mark.usefixtures("small_tensors_move")
def test_a_place_without_room_is_told_of_once_whatever_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F10: lengths differ from step to step, and so does what a full disk says."""
    sizes = iter(range(1, 1000))

    def full(*_: object) -> None:
        raise StashError(f"cannot move {next(sizes) / 2} KiB: no room left")

    monkeypatch.setattr(DiskStash, "put", full)
    model = make(LLAMA_SDPA)
    moving(model, Offload(), tmp_path)
    with caplog.at_level(logging.WARNING, logger="rematic"):
        for _ in range(10):
            run_steps(model, LLAMA_SDPA)
    assert len([m for m in caplog.messages if "no room left" in m]) == len(LLAMA_SDPA.units)


@pytest.mark.usefixtures("small_tensors_move")
def test_moved_records_can_be_read_twice(tmp_path: Path) -> None:
    model = make(LLAMA_SDPA)
    moving(model, Offload(), tmp_path)
    ids = torch.arange(12).reshape(1, 12) % 5
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss.backward()
    second = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compressed_gradients_are_near_and_the_loss_is_exact(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    model = torch.nn.Sequential(torch.nn.Sequential(block, torch.nn.Sequential(*block)))
    x = torch.randn(512, 64)
    plain = model(x).square().mean()
    plain.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    moving(model, Compress(), tmp_path)
    loss = model(x).square().mean()
    loss.backward()
    assert torch.equal(loss, plain)  # forward is untouched, only backward reads 8 bits
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert not torch.equal(parameter.grad, gradient) or parameter.dim() == 1
        error = (parameter.grad - gradient).norm() / gradient.norm()
        assert error < 0.05

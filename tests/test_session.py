"""The facade: steps, evictions, the report, the state."""

from __future__ import annotations

import pytest
import torch

import rematic
from rematic.memory import MemorySnapshot, SimulatedProbe
from tests.activations.blocks import make_input, make_model
from tests.events import Events


def test_a_step_that_raises_is_closed_and_teaches_nothing() -> None:
    model = make_model()
    session = rematic.attach(model, budget="1GiB", probe=SimulatedProbe(), policy="planned")
    before = session.state_dict()

    def fails(x: torch.Tensor) -> None:
        model(x)
        raise KeyError("user")

    with pytest.raises(KeyError, match="user"):
        session.run(fails, make_input())
    assert session.state_dict() == before
    assert session.num_steps == 0
    assert session.last_step is None
    session.run(lambda x: model(x).backward(), make_input())
    assert session.num_steps == 1
    session.detach()


def test_memory_that_cannot_be_found_stops_with_a_report() -> None:
    model, journal = make_model(), Events()
    probe = SimulatedProbe()
    session = rematic.attach(model, policy="recompute", budget="1GiB", probe=probe, journal=journal)
    session.run(lambda x: model(x).backward(), make_input())
    model.zero_grad()
    probe.budget_bytes, x = 1, make_input()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"), probe:
        session.run(lambda x: model(x).backward(), x)
    (stop,) = journal.of("stop")
    assert stop["step"] == 1
    assert stop["reason"].startswith("there was no room for what a second attempt")
    assert "Simulated device out of memory" in stop["report"]
    assert (stop["batch"], stop["length"]) == (4, 1)
    assert all(p.grad is None for p in model.parameters())
    session.detach()


@pytest.mark.parametrize(("given", "armed"), [(True, False), (False, True)])
def test_a_step_whose_batch_is_not_known_is_armed(given: bool, armed: bool) -> None:
    """The second of two equal steps is known to fit, if it is known to be equal."""
    model, x = make_model(), make_input(10)
    session = rematic.attach(model, policy="keep", budget="1GiB", probe=SimulatedProbe())
    for _ in range(2):
        with session.step(x if given else None):
            model(x).backward()
    assert session.last_step is not None
    assert session.last_step.armed is armed
    session.detach()


def test_ending_a_step_that_was_not_begun_is_refused() -> None:
    session = rematic.attach(make_model(), policy="keep")
    with pytest.raises(RuntimeError, match="no step is open: expected `begin_step` before"):
        session.end_step()
    session.detach()


def test_a_step_that_was_left_open_is_closed_by_the_next() -> None:
    model = make_model()
    session = rematic.attach(model, policy="keep", budget="1GiB", probe=SimulatedProbe())
    session.begin_step(make_input())
    session.begin_step(make_input())
    model(make_input()).backward()
    assert session.end_step().step == 0
    session.detach()


def test_the_mode_of_a_step_is_gone_after_it() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    model = make_model()
    session = rematic.attach(model, policy="keep", budget="1GiB", probe=SimulatedProbe())
    with session.step(make_input()):
        assert len(_get_current_dispatch_mode_stack()) == 1
        model(make_input()).backward()
    assert _get_current_dispatch_mode_stack() == []
    session.detach()


def test_evicting_by_call_returns_measured_bytes() -> None:
    model, probe = make_model(), SimulatedProbe()
    session = rematic.attach(model, policy="keep", probe=probe)
    with session.step(), probe:
        loss = model(make_input(1000))
        before = probe.allocated_bytes()
        assert session.evict(1) == before - probe.allocated_bytes() == 32_000
        before = probe.allocated_bytes()
        assert session.evict(1 << 40) == before - probe.allocated_bytes() == 64_000
        assert session.evict(1) == 0
        loss.backward()
    record = session.last_step
    assert record is not None
    assert (record.evictions, record.evicted_bytes, record.replays) == (3, 96_000, 3)
    session.detach()


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_evicting_no_bytes_is_refused(num_bytes: int) -> None:
    session = rematic.attach(make_model(), policy="keep")
    with pytest.raises(ValueError, match=f"^cannot evict {num_bytes} bytes: expected a number"):
        session.evict(num_bytes)
    session.detach()


def test_the_report_shows_declared_and_measured() -> None:
    model = make_model()
    session = rematic.attach(model, policy="recompute", budget="1GiB", probe=SimulatedProbe())
    assert session.report().splitlines()[-1] == "no step yet"
    session.run(lambda x: model(x).backward(), make_input())
    lines = session.report().splitlines()
    assert lines[0] == "policy recompute"
    assert lines[1].split() == [
        "unit",
        "class",
        "declared",
        "forwards",
        "replays",
        "retries",
        "note",
    ]
    assert lines[3].split() == ["blocks.0", "Block", "recompute", "1", "1", "0"]
    assert lines[6].startswith("last step 0: 4 x 1 tokens, plan recompute 3, peak ")
    assert lines[6].endswith("budget 1.0 GiB")
    session.detach()


def test_without_a_probe_that_can_tell_units_run_on_the_heaviest_policy() -> None:
    class Blind:
        kind = "blind"

        def allocated_bytes(self) -> None:
            return None

        def snapshot(self) -> MemorySnapshot:
            return MemorySnapshot()

    model = make_model()
    session = rematic.attach(model, budget="1GiB", probe=Blind(), policy="planned")
    for _ in range(2):
        session.run(lambda x: model(x).backward(), make_input())
        assert session.last_step is not None
        assert session.last_step.plan == {"recompute": 3}
        assert session.last_step.peak_bytes is None
        assert session.last_step.reason.startswith("memory in use or the budget is unknown")
    session.detach()


def test_the_state_of_another_model_is_refused() -> None:
    session = rematic.attach(make_model(depth=3), policy="keep")
    other = rematic.attach(make_model(depth=2), policy="keep")
    before = other.state_dict()
    message = (
        r"^the saved state is of another model: it has 3 units \(blocks\.0 \.\. blocks\.2\), this "
        r"one 2 \(blocks\.0 \.\. blocks\.1\)\. Resume with the model that was saved"
    )
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(session.state_dict())
    with pytest.raises(ValueError, match=r"^the saved state has version 7: expected 1\. Resume"):
        other.load_state_dict({**before, "version": 7})
    with pytest.raises(ValueError, match=r"^the saved state has version None: expected 1"):
        other.load_state_dict({})
    assert other.state_dict() == before
    session.detach()
    other.detach()


@pytest.mark.parametrize("key", ["history", "costs", "num_steps"])
def test_a_damaged_state_is_refused_and_nothing_of_it_taken(key: str) -> None:
    session = rematic.attach(make_model(), policy="keep")
    before = session.state_dict()
    session.switch("recompute")
    damaged = {name: value for name, value in session.state_dict().items() if name != key}
    session.load_state_dict(before)
    with pytest.raises(ValueError, match=f"^the saved state is damaged .*{key}.*: expected what"):
        session.load_state_dict(damaged)
    assert session.state_dict() == before
    session.detach()


def test_an_empty_state_of_the_controller_is_a_damaged_one() -> None:
    session = rematic.attach(make_model(), policy="keep")
    with pytest.raises(ValueError, match=r"^the saved state is damaged .*: expected what"):
        session.load_state_dict({**session.state_dict(), "control": {}})
    session.detach()

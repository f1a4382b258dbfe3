"""A plan per batch, under a budget that is really kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.memory import MemorySnapshot, SimulatedProbe
from rematic.policy import PLANNED, Policy, Rule, Selective
from rematic.recipes import ControlConfig, PolicyConfig, Recipe
from rematic.stash import DiskStash
from tests.activations.blocks import Block, make_input, make_model
from tests.activations.families import build_llama
from tests.activations.parity import Outcome, differences, read_outcome
from tests.events import Events

VOCABULARY = 50
LENGTHS = [32, 32, 32, 16, 64, 64, 64, 32, 8]
"""Short, shorter, then longer than any before: the first batches of a real run."""


def _llama(depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": depth}
    # a key/value cache keeps what is in no plan
    return build_llama(
        "sdpa", vocab_size=VOCABULARY, max_position_embeddings=128, use_cache=False, **sizes
    )


def _outside_a_step(session: rematic.Session, model: nn.Module) -> None:
    model(make_input()).backward()


def _in_a_step_that_fails(session: rematic.Session, model: nn.Module) -> None:
    with contextlib.suppress(KeyError), session.step(make_input()):
        model(make_input())
        raise KeyError


@pytest.mark.parametrize("first", [_outside_a_step, _in_a_step_that_fails])
def test_units_are_kept_although_nothing_was_learned_from_their_first_forward(
    first: Callable[[rematic.Session, nn.Module], None],
) -> None:
    model, probe = make_model(), SimulatedProbe()
    session = rematic.attach(model, budget="1GiB", probe=probe)
    with probe:
        first(session, model)
        for _ in range(3):
            with session.step(make_input()):
                model(make_input()).backward()
    assert session.last_step is not None
    assert session.last_step.plan == {"keep": 3}


def test_gradients_of_weights_that_were_frozen_at_first_are_expected() -> None:
    model, probe = make_model(), SimulatedProbe()
    model.blocks.requires_grad_(False)
    probe.track(model.parameters())
    session = rematic.attach(model, budget="1GiB", probe=probe)

    def predicted_beyond_what_was_there() -> int:
        with probe, session.step(make_input(1)):
            model(make_input(1)).backward()
        step = session.last_step
        assert step is not None
        assert step.predicted_peak_bytes is not None
        assert step.before.allocated_bytes is not None
        return step.predicted_peak_bytes - step.before.allocated_bytes

    with probe, session.step(make_input(1)):
        model(make_input(1, requires_grad=True)).backward()
    frozen = predicted_beyond_what_was_there()
    model.blocks.requires_grad_(True)
    num_bytes = sum(p.numel() * p.element_size() for p in model.blocks.parameters())
    assert predicted_beyond_what_was_there() >= frozen + num_bytes // 2


def test_a_unit_whose_kept_results_are_useless_does_not_keep_others_from_being_kept() -> None:
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x).add_(1)))

    model, probe = make_model(InPlace), SimulatedProbe()
    policy = Policy(name="mixed", rules=(Rule(pattern="blocks.0", action=Selective()),))
    session = rematic.attach(model, budget="1GiB", probe=probe, policy=policy)
    with probe:
        for _ in range(4):
            with session.step(make_input()):
                model(make_input()).backward()
    assert session.last_step is not None
    assert session.last_step.plan == {"selective": 1, "keep": 2}
    assert session.last_step.predicted_peak_bytes is not None


class SilentProbe(SimulatedProbe):
    """A device that may have less than it says."""

    def snapshot(self) -> MemorySnapshot:
        return replace(super().snapshot(), capacity_bytes=None)


class Training:
    """Trains a small Llama on batches of given lengths, attached or plain."""

    def __init__(
        self, budget_bytes: int | None = None, *, strict: bool = True, **options: Any
    ) -> None:
        self.model = _llama()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.probe = SimulatedProbe() if strict else SilentProbe()
        self.probe.track([*self.model.parameters(), *self.model.buffers()])
        self.journal = Events()
        self.session: rematic.Session | None = None
        if options:
            self.session = rematic.attach(
                self.model,
                self.optimizer,
                budget=budget_bytes,
                probe=self.probe,
                journal=self.journal,
                **options,
            )
        if strict:  # memory really runs out
            self.probe.budget_bytes = budget_bytes
        self.losses: list[torch.Tensor] = []
        self.peaks: list[int] = []
        self.surprise_bytes = 0
        """Bytes that every step holds beside its own."""

    def train(self, lengths: list[int]) -> Outcome:
        generator = torch.Generator().manual_seed(3)
        torch.manual_seed(1)
        for length in lengths:
            ids = torch.randint(0, VOCABULARY, (2, length), generator=generator)
            with self.probe:
                self.probe.reset_peak()
                self.losses.append(self._step(ids))
                self.peaks.append(self.probe.peak_allocated_bytes)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.session is not None:
                self.records = [event for event in self.journal.events if event["event"] == "step"]
        outcome = read_outcome(self.model, self.losses)
        outcome.buffers |= {
            f"weight {name}": p.detach().clone() for name, p in self.model.named_parameters()
        }
        return outcome

    def _step(self, ids: torch.Tensor) -> torch.Tensor:
        def forward_and_backward(batch: torch.Tensor) -> torch.Tensor:
            beside = torch.empty(self.surprise_bytes, dtype=torch.uint8)
            loss = self.model(input_ids=batch, labels=batch).loss
            loss.backward()
            del beside
            return loss.detach()

        if self.session is None:
            return forward_and_backward(ids)
        return self.session.run(forward_and_backward, ids)


@pytest.fixture(scope="module")
def plain() -> tuple[Outcome, int]:
    """What nothing attached gives, and its peak."""
    training = Training()
    return training.train(LENGTHS), max(training.peaks)


@pytest.fixture(scope="module")
def recomputed(plain: tuple[Outcome, int]) -> int:
    """The peak with everything recomputed."""
    training = Training(policy="recompute")
    assert differences(training.train(LENGTHS), plain[0]) == []
    return max(training.peaks)


# --- planned under a budget -----------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.2, 0.7, 0.4, 0.15, 0.02])
def test_a_planned_run_keeps_to_its_budget_and_to_the_bits(
    plain: tuple[Outcome, int], recomputed: int, share: float
) -> None:
    """Budgets from more than everything kept down to little more than everything recomputed."""
    wanted, most = plain
    budget = recomputed + int(share * (most - recomputed))
    training = Training(budget, policy="planned")
    found = training.train(LENGTHS)
    assert differences(found, wanted) == []
    assert max(training.peaks) <= budget
    plans = [record["plan"] for record in training.records]
    assert plans[0] == {"recompute": 4}, "the first batch runs on the heaviest policy"
    kept = [plan.get("keep", 0) for plan in plans]
    assert kept[1] >= 1, "then it relaxes"
    assert kept[1] >= kept[2] - 1
    assert kept[-1] == 4, "the shortest batch fits whole"
    if share > 1:
        assert kept[1:] == [4] * (len(LENGTHS) - 1)
        assert sum(record["replays"] for record in training.records[1:]) == 0
    assert all(record["budget_bytes"] == budget for record in training.records)


def test_kept_units_are_the_last_ones(plain: tuple[Outcome, int], recomputed: int) -> None:
    budget = recomputed + int(0.4 * (plain[1] - recomputed))
    training = Training(budget, policy="planned")
    assert training.session is not None
    training.train([64, 64])
    names = [action.name for action in training.session.plan.actions]
    assert names == sorted(names, reverse=True)
    assert 0 < names.count("keep") < 4


def test_memory_that_others_take_is_recovered_at_the_op(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    """The device holds less than the budget says: plans do not know it, failing ops do."""
    training = Training(1 << 30, policy="keep", strict=False)
    training.probe.budget_bytes = recomputed + int(0.3 * (plain[1] - recomputed))
    found = training.train(LENGTHS)
    assert differences(found, plain[0]) == []
    assert max(training.peaks) <= training.probe.budget_bytes
    retries = training.journal.of("retry")
    assert len(retries) == sum(record["op_retries"] for record in training.records) > 3
    assert {retry["level"] for retry in retries} == {"op"}
    assert all(retry["bytes_freed"] > 0 and retry["units"] for retry in retries)
    assert any(retry["where"].startswith("aten.") for retry in retries)


def test_without_the_retry_at_the_op_units_run_again(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    """Also on the first step, whose every op is watched."""
    recipe = Recipe(policy=PolicyConfig(op_retry="never"))
    training = Training(1 << 30, policy="keep", recipe=recipe, strict=False)
    training.train([32])
    training.probe.budget_bytes = recomputed + int(0.3 * (plain[1] - recomputed))
    with contextlib.suppress(torch.OutOfMemoryError):  # the head does not fit
        training.train([64])
    assert training.session is not None
    num_retries = sum(unit.num_retries for unit in training.session._engine.units)
    retries = [event for event in training.journal.of("retry") if event["level"] == "unit"]
    assert len(retries) == num_retries > 0
    assert all(event["where"].startswith("model.layers.") for event in retries)
    assert all(event["bytes_asked"] > 0 for event in retries)
    assert not any(record["armed"] for record in training.records)


@pytest.mark.parametrize(("op_retry", "recovers"), [("never", False), ("auto", True)])
def test_never_means_that_no_op_is_run_again(op_retry: Any, recovers: bool) -> None:
    """Backward's first op fails in the first step, which is watched in any case."""
    recipe = Recipe(policy=PolicyConfig(op_retry=op_retry), control=ControlConfig(attempts=1))
    x, after_forward = make_input(), []

    def run(probe: SimulatedProbe) -> None:
        model = make_model()

        def step(x: torch.Tensor) -> None:
            loss = model(x)
            after_forward.append(probe.num_ops)
            loss.backward()

        session = rematic.attach(model, policy="keep", budget="1GiB", probe=probe, recipe=recipe)
        try:
            with probe:
                session.run(step, x)
        finally:
            session.detach()

    run(SimulatedProbe())
    failing = SimulatedProbe(fail_at_ops=[after_forward[0] + 1])
    caught = contextlib.nullcontext() if recovers else pytest.raises(torch.OutOfMemoryError)
    with caught:
        run(failing)
    assert failing.num_ooms == 1


@pytest.mark.parametrize("share", [1.08, 1.3])
def test_what_is_about_to_move_is_not_evicted_to_keep_to_the_budget(
    plain: tuple[Outcome, int], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or `offload` becomes `recompute`, which needs more, where memory is short."""
    monkeypatch.setattr(
        "rematic.activations.stash_places.DiskStash", functools.partial(DiskStash, min_bytes=1)
    )
    free = Training(policy="offload")
    assert differences(free.train(LENGTHS), plain[0]) == []
    training = Training(int(share * max(free.peaks)), policy="offload")
    assert differences(training.train(LENGTHS), plain[0]) == []
    assert training.peaks == free.peaks
    assert {(record["evictions"], record["replays"]) for record in training.records} == {(0, 0)}


def test_with_room_to_spare_memory_is_read_once_until_a_step_surprises() -> None:
    training = Training(1 << 30, policy="planned")
    assert training.session is not None
    training.train([32, 32])
    training.surprise_bytes = training.records[-1]["peak_bytes"]
    training.train([32])
    training.surprise_bytes = 0
    training.train([32, 32])
    sources = [record["peak_source"] for record in training.records]
    assert sources == [
        "op ends",
        "start of backward",
        "start of backward",  # the surprise
        "unit ends",
        "start of backward",
    ]
    peaks = [record["peak_bytes"] for record in training.records]
    assert peaks[2] > 1.5 * peaks[1]


def test_the_journal_tells_the_run(plain: tuple[Outcome, int], recomputed: int) -> None:
    budget = recomputed + int(0.4 * (plain[1] - recomputed))
    training = Training(budget, policy="planned")
    training.train(LENGTHS)
    (attach,) = training.journal.of("attach")
    assert attach == {
        "event": "attach",
        "units": [f"model.layers.{i}" for i in range(4)],
        "budget_bytes": budget,
        "capacity_bytes": None,
        "probe": "simulated",
        "policy": "planned",
        "ladder": ["keep", "selective", "recompute", "recompute+offload"],
    }
    assert [record["step"] for record in training.records] == list(range(len(LENGTHS)))
    for record, length, peak in zip(training.records, LENGTHS, training.peaks, strict=True):
        assert (record["batch"], record["length"], record["tokens"]) == (2, length, 2 * length)
        assert record["policy"] == "planned"
        assert record["peak_bytes"] <= peak
        if record["peak_source"] == "op ends":
            assert record["peak_bytes"] == peak
        assert record["before"]["allocated_bytes"] > 0
        assert record["seconds"] > 0
        assert sum(record["plan"].values()) == 4
    assert training.session is not None
    assert training.session.last_step is not None
    last = training.session.last_step.to_event()
    assert last.items() <= training.records[-1].items()
    added = {"pending_gradient_bytes", "learned", "comparison"}
    assert training.records[-1].keys() - last.keys() == added


def test_predictions_are_close_to_the_peaks(plain: tuple[Outcome, int], recomputed: int) -> None:
    """Batches of a known length: never more than the reserve below what is needed."""
    for share in (1.2, 0.4):
        budget = recomputed + int(share * (plain[1] - recomputed))
        training = Training(budget, policy="planned")
        training.train([64, 64, 64, 64])
        as_planned = [
            (record["predicted_peak_bytes"], peak)
            for record, peak in zip(training.records[1:], training.peaks[1:], strict=True)
            if record["evictions"] == 0
        ]
        assert as_planned
        assert all(0.95 * peak <= predicted <= 1.1 * peak for predicted, peak in as_planned)


def test_a_first_step_tells_the_peak_of_keeping_everything(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    """It recomputes, and holds what each unit keeps until its forward ends, to measure it."""
    training = Training(recomputed + int(1.2 * (plain[1] - recomputed)), policy="planned")
    training.train([64, 64])
    assert training.records[0]["evictions"] == 0
    assert training.records[1]["plan"] == {"keep": 4}
    assert training.records[1]["predicted_peak_bytes"] == training.peaks[1]


# --- state ----------------------------------------------------------------------------------------


def test_a_resumed_run_plans_as_the_first_one_did(
    plain: tuple[Outcome, int], recomputed: int, tmp_path: Any
) -> None:
    budget = recomputed + int(0.5 * (plain[1] - recomputed))
    first = Training(budget, policy="planned")
    assert first.session is not None
    first.train([32, 64, 64])
    first.session.switch("keep")
    first.session.rollback()
    first.session.pin("planned", reason="hold")
    torch.save(first.session.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)

    second = Training(budget, policy="keep")
    assert second.session is not None
    second.session.load_state_dict(state)
    assert second.session.state_dict() == first.session.state_dict()
    assert second.session.policy == PLANNED
    assert second.session.history.pinned
    second.train([64])
    (record,) = second.records
    assert record["step"] == 3
    assert record["plan"] == first.records[-1]["plan"]
    assert record["armed"] == first.records[-1]["armed"]
    with pytest.raises(ValueError, match="pinned"):
        second.session.switch("keep")


def test_a_plan_obeys_the_device_where_it_has_less_than_the_budget() -> None:
    def figures(capacity_bytes: int | None) -> list[tuple[int, int, int]]:
        model, probe = _llama(), SimulatedProbe(budget_bytes=capacity_bytes)
        probe.track(model.parameters())
        session = rematic.attach(model, budget="1GiB", probe=probe)
        batch = torch.randint(0, VOCABULARY, (2, 64))
        found = []
        with probe:
            for _ in range(5):
                with session.step(batch):
                    model(input_ids=batch, labels=batch).loss.backward()
                model.zero_grad(set_to_none=True)
                step = session.last_step
                assert step is not None
                found.append((step.peak_bytes or 0, step.evictions, step.op_retries))
        session.detach()
        return found

    peak = max(one for one, *_ in figures(None))
    for _, evictions, op_retries in figures(int(0.8 * peak))[2:]:
        assert (evictions, op_retries) == (0, 0)

"""Sessions whose `planned` asks the planner: the same bits, the same budget, better plans."""

from __future__ import annotations

import functools
import json
import logging
import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rematic
from rematic import model_planner, open_step
from rematic.control import Costs, ForecastErrors, audit
from rematic.cost.devices import Device
from rematic.kind_plans import KindPlans
from rematic.memory import SimulatedProbe
from rematic.policy import Recompute
from rematic.recipes import MemoryConfig, PolicyConfig, Recipe, RecomputeConfig, RuleConfig
from rematic.session_step import SessionStep
from tests.activations.blocks import make_input, make_model
from tests.activations.parity import Outcome, differences
from tests.events import Events
from tests.test_session_planned import LENGTHS, Training

SHORT_OF_ROOM = [64, 64, 64, 64, *LENGTHS]
"""The first three steps teach the session something; the fourth is planned by the model."""

SLOW_ARITHMETIC = Device(
    name="test",
    memory_bytes=None,
    flops_per_second=(("float32", 1e6),),
    bytes_per_second=1e12,
    link_bytes_per_second=1e12,
    attained_share=1.0,
    replay_seconds=0.0,
    selective_seconds=0.0,
    overlaps_host=False,
    source="made up: products are dear and Python is free, so that op sets are worth it",
)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_planner, "live_device", lambda model: SLOW_ARITHMETIC)


@pytest.fixture(scope="module")
def plain() -> tuple[Outcome, int]:
    """What nothing attached gives, and its peak."""
    training = Training()
    return training.train(SHORT_OF_ROOM), max(training.peaks)


@pytest.fixture(scope="module")
def recomputed() -> int:
    """The peak with everything recomputed."""
    training = Training(policy="recompute")
    training.train([64, 64])
    return max(training.peaks)


def _budget(plain: tuple[Outcome, int], recomputed: int, share: float) -> int:
    return recomputed + int(share * (plain[1] - recomputed))


def _by_model(training: Training) -> list[dict[str, Any]]:
    return [record for record in training.records if record["planned_by"] == "model"]


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Counts the arithmetic of matrix products, and keeps nothing."""

    flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name in ("aten::mm", "aten::bmm", "aten::addmm"):
            self.flops += 2 * args[-2].numel() * args[-1].shape[-1]
        return func(*args, **(kwargs or {}))


def _notices(training: Training) -> list[str]:
    return [event["text"] for event in training.journal.of("notice") if event["kind"] == "planner"]


@pytest.mark.parametrize("share", [1.2, 0.7, 0.4, 0.15, 0.02])
def test_op_sets_keep_to_the_budget_and_to_the_bits(
    plain: tuple[Outcome, int], recomputed: int, share: float
) -> None:
    budget = _budget(plain, recomputed, share)
    training = Training(budget, policy="planned")
    assert differences(training.train(SHORT_OF_ROOM), plain[0]) == []
    assert max(training.peaks) <= budget
    assert _notices(training) == []
    report = audit(training.journal.events)
    assert report.differences == ()
    planned = _by_model(training)
    if share > 1:
        assert planned == [], "nothing is traced where everything may stay"
        return
    assert len(planned) >= (1 if share < 0.1 else 4)
    assert report.num_modelled == len(planned)
    if share > 0.1:
        assert any("selective" in record["plan"] for record in planned)
    for record in planned:
        assert record["predicted_seconds"] > 0
        assert record["reason"].startswith("the model's fastest plan")


@pytest.mark.parametrize(
    ("kind", "trace_bytes", "is_traced"),
    [("host", model_planner.TRACE_BYTES, False), ("host", 0, True), ("cuda", 1 << 30, True)],
)
def test_nothing_is_traced_where_the_step_needs_the_memory_itself(
    plain: tuple[Outcome, int],
    recomputed: int,
    kind: str,
    trace_bytes: int,
    is_traced: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The objects of a trace lie in the host's memory, which is what is planned on a CPU."""
    monkeypatch.setattr(SimulatedProbe, "kind", kind)
    monkeypatch.setattr(model_planner, "TRACE_BYTES", trace_bytes)
    training = Training(_budget(plain, recomputed, 0.4), policy="planned")
    assert differences(training.train(SHORT_OF_ROOM), plain[0]) == []
    assert bool(_by_model(training)) == is_traced
    told = [text for text in _notices(training) if "a trace may take 8.0 MiB" in text]
    assert len(told) == (0 if is_traced else 1), _notices(training)


def test_the_model_tells_the_peak(plain: tuple[Outcome, int], recomputed: int) -> None:
    training = Training(_budget(plain, recomputed, 0.5), policy="planned")
    training.train([64] * 8)
    compared = [
        record["predicted_peak_bytes"] / peak
        for record, peak in zip(training.records, training.peaks, strict=True)
        if record["planned_by"] == "model" and not record["evictions"]
    ]
    assert len(compared) >= 4
    assert all(0.98 <= ratio <= 1.02 for ratio in compared)


def test_the_models_plan_runs_less_arithmetic_again(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    """Counted by the products of the last step; whole units cannot be cut as finely."""
    products = []
    for planner in ("measured", "auto"):
        recipe = Recipe(policy=PolicyConfig(planner=planner))  # type: ignore[arg-type]
        training = Training(_budget(plain, recomputed, 0.5), policy="planned", recipe=recipe)
        training.train([64] * 6)
        with _Products() as counted:
            training.train([64])
        products.append(counted.flops)
        assert len(_by_model(training)) == (0 if planner == "measured" else 6)
    assert products[1] < products[0]


def test_a_trace_draws_no_random_number_and_leaves_no_mode(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    training = Training(_budget(plain, recomputed, 0.5), policy="planned")
    training.train([64, 64])
    assert training.session is not None
    ids = torch.ones(2, 64, dtype=torch.int64)
    state, host, num_ops = torch.get_rng_state(), random.getstate(), training.probe.num_ops
    with training.probe:
        training.session.begin_step(ids)
        assert training.session._step is not None
        decision = training.session._step.decision
        training.session.abort_step(None)
    assert decision.planned_by == "model"
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == host
    assert training.probe.num_ops == num_ops, "the probe has seen nothing of it"


def test_a_rule_binds_the_model(plain: tuple[Outcome, int], recomputed: int) -> None:
    rule = RuleConfig(match="model.layers.1", action=RecomputeConfig())
    recipe = Recipe(policy=PolicyConfig(rules=(rule,)))
    training = Training(_budget(plain, recomputed, 0.4), recipe=recipe)
    assert training.session is not None
    training.train([64] * 5)
    assert training.records[-1]["planned_by"] == "model"
    assert training.session.plan.actions[1] == Recompute()


@pytest.mark.parametrize("has_place", [True, False])
def test_tensors_move_only_where_a_place_is_named(
    plain: tuple[Outcome, int], recomputed: int, has_place: bool, tmp_path: Any
) -> None:
    recipe = Recipe(memory=MemoryConfig(scratch_dir=str(tmp_path) if has_place else None))
    training = Training(_budget(plain, recomputed, 0.02), policy="planned", recipe=recipe)
    training.train([64] * 4)
    planner = training.session._model_planner  # type: ignore[union-attr]
    assert planner is not None
    (plans,) = planner._kinds.values()
    assert plans.profile is not None
    actions = [name for name, _ in plans.profile.pieces[0].units[0].actions]
    assert ("offload" in actions) == ("recompute+offload" in actions) == has_place


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ("batch", "a batch is a tuple"),
        ("model", "it holds 0 models of transformers"),
        ("trace", "RuntimeError: no trace today"),
        ("loss", "were predicted"),
    ],
)
def test_what_cannot_be_traced_is_planned_from_measurements(
    spoil: str,
    why: str,
    plain: tuple[Outcome, int],
    recomputed: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "rematic")
    training = Training(_budget(plain, recomputed, 0.5), policy="planned", strict=False)
    assert training.session is not None
    planner = training.session._model_planner
    assert planner is not None
    if spoil == "trace":

        def refuse(*args: object, **options: object) -> None:
            raise RuntimeError("no trace today\nand more")

        monkeypatch.setattr(model_planner, "trace_live", refuse)
    elif spoil == "batch":
        inputs = model_planner.batch_inputs
        monkeypatch.setattr(model_planner, "batch_inputs", lambda batch: inputs((batch,)))
    elif spoil == "model":
        planner._model = make_model()
    else:  # every step holds more than the model itself asks for
        training.surprise_bytes = plain[1]
        monkeypatch.setattr(Costs, "cover", lambda self, **shape: False)
    training.train([64] * 5)
    assert _by_model(training) == []
    (text,) = _notices(training)
    assert why in text
    assert caplog.text.count("plans come from measurements alone") == 1


def _unknown_model() -> tuple[Any, SimulatedProbe, Events, Any, rematic.Session]:
    """Returns a model that is not of transformers, attached where memory is short."""
    model, probe, journal = make_model(), SimulatedProbe(), Events()
    x = make_input()
    probe.track(model.parameters())
    with probe:
        model(x).backward()
        budget = int(0.9 * probe.peak_allocated_bytes)
        model.zero_grad()
    session = rematic.attach(model, budget=budget, probe=probe, journal=journal)
    return model, probe, journal, x, session


def test_units_of_other_models_are_planned_from_measurements() -> None:
    model, probe, journal, x, session = _unknown_model()
    with probe:
        for _ in range(5):
            with session.step(x):
                model(x).backward()
            model.zero_grad()
    texts = [event["text"] for event in journal.of("notice") if event["kind"] == "planner"]
    assert texts == [
        "plans come from measurements alone: a batch's 'input_ids' holds numbers that are not whole"
    ]


def test_a_model_that_cannot_be_traced_is_said_once_and_not_watched_for() -> None:
    model, probe, journal, x, session = _unknown_model()
    assert session._model_planner is not None
    with probe:
        for batch_size in (2, 2, 2, 3, 3, 3):
            ids = torch.ones(batch_size, 8, dtype=torch.int64)
            with session.step({"input_ids": ids, "labels": ids}):
                model(x).backward()
            model.zero_grad()
    (text,) = [event["text"] for event in journal.of("notice") if event["kind"] == "planner"]
    assert text.endswith("it holds 0 models of transformers, not one")
    assert session._model_planner._kinds == {}


def test_after_a_step_that_took_more_than_predicted_plans_leave_more_room(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    training = Training(_budget(plain, recomputed, 0.5), policy="planned")
    training.train([64] * 3)
    training.surprise_bytes = 40_000
    training.train([64] * 4)
    surprised, *after = _by_model(training)[-4:]
    assert surprised["evictions"] > 0, "the end of a unit passed the limit"
    for record in after:
        assert record["evictions"] == 0
        assert record["predicted_peak_bytes"] <= surprised["predicted_peak_bytes"] - 15_000
    assert max(training.peaks) <= surprised["budget_bytes"]


def test_what_was_learned_of_steps_survives_a_resume(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    """F13: a resumed run watches no step for the sake of the model, and believes it as much."""
    budget = _budget(plain, recomputed, 0.5)
    first = Training(budget, policy="planned")
    first.train([64] * 9)
    assert first.session is not None
    state = json.loads(json.dumps(first.session.state_dict()))
    (kind,) = state["planner"]
    assert kind["errors"]["shares"]
    assert kind["num_watched"] == 1
    second = Training(budget, policy="planned")
    assert second.session is not None
    second.session.load_state_dict(state)
    assert second.session.state_dict() == state
    second.train([64] * 2)
    assert [record["planned_by"] for record in second.records] == ["model"] * 2
    assert [record["peak_source"] for record in second.records] == ["unit ends"] * 2
    assert max(second.peaks) <= budget
    state["planner"][0]["kind"] = {"batch": 1}
    with pytest.raises(ValueError, match=r"^the saved state is damaged"):
        second.session.load_state_dict(state)


def test_the_planner_tells_how_long_keeping_everything_would_take(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    """By the speed of the steps that it timed; also for steps that are not short of memory."""
    training = Training(_budget(plain, recomputed, 0.5), policy="planned")
    training.train([64] * 16)
    known = [record["keep_seconds"] for record in training.records]
    assert known[0] is None
    assert known[-1] > 0
    assert training.session is not None
    training.session.switch("keep")
    training.probe.budget_bytes = None
    training.train([64, 32])
    longer, shorter = (record["keep_seconds"] for record in training.records[-2:])
    assert known[-1] / 3 < longer < 3 * known[-1]
    assert shorter < longer
    assert audit(training.journal.events).differences == ()


def test_steps_are_not_armed_once_others_came_as_near_the_budget_unharmed(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    training = Training(_budget(plain, recomputed, 0.5), policy="planned")
    training.train([64] * 12)
    planned = _by_model(training)
    armed = [record["armed"] for record in planned]
    assert armed == [True] * 2 + [False] * (len(planned) - 2), "two proofs"
    sources = [record["peak_source"] for record in planned]
    assert sources == ["op ends"] + ["unit ends"] * (len(planned) - 1), "the first one agreed"
    assert len(planned) >= 6
    highest = max(record["peak_bytes"] for record in planned[:2])
    before = [record["before"]["allocated_bytes"] for record in planned]
    for record, used in zip(planned[2:], before[2:], strict=True):
        assert (record["predicted_peak_bytes"] - used) * 1.02 <= highest - used


def test_a_step_that_only_its_caller_could_repeat_is_armed_near_the_budget(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    """However often it went well: where memory runs out unarmed, its batch would be lost."""
    training = Training(_budget(plain, recomputed, 0.5), policy="planned")
    training._step = functools.partial(_plain_step, training)  # type: ignore[method-assign]
    training.train([64] * 12)
    planned = _by_model(training)
    assert len(planned) >= 6
    assert all(record["armed"] for record in planned)


def test_a_step_that_is_not_armed_tries_the_room_that_it_will_take(
    plain: tuple[Outcome, int], recomputed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, tried, answers = [16] + [64] * 7, [], [False, False, True, True, True, True, True]
    training = Training(_budget(plain, recomputed, 0.5), policy="planned")
    monkeypatch.setattr(training.probe, "kind", "host", raising=False)
    monkeypatch.setattr(model_planner, "TRACE_BYTES", 0)  # more than the whole budget

    def can_allocate(num_bytes: int) -> bool:
        tried.append(num_bytes)
        return answers[len(tried) - 1]

    monkeypatch.setattr(open_step, "_can_allocate", can_allocate)
    outcome = training.train(lengths)
    assert differences(outcome, Training().train(lengths)) == []
    unarmed = [r for r in _by_model(training) if not r["armed"]]
    assert unarmed[0]["evictions"] == 2, "one for each try that failed"
    assert all(record["evictions"] == 0 for record in unarmed[1:])
    assert len(tried) == len(unarmed) + 2
    limit = 0.95 * _budget(plain, recomputed, 0.5)
    assert min(tried) > 0.02 * limit, "beyond what the model says"


def _plain_step(training: Training, ids: torch.Tensor) -> torch.Tensor:
    """Runs a step that only the retry at the op covers."""
    with training.session.step(ids):
        loss: torch.Tensor = training.model(ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@pytest.mark.parametrize(
    ("shares", "watched"),
    [
        ((), True),
        ((0.01,), False),
        ((-0.05,), True),
        ((0.05, 0.01), False),
        ((0.01, 0.05), False),
        ((0.05,) * 3, False),
    ],
    ids=["the-first", "agrees", "too-high", "agrees-later", "agreed", "never"],
)
def test_steps_are_watched_until_one_is_told(shares: tuple[float, ...], watched: bool) -> None:
    errors = ForecastErrors(shares=shares)
    assert KindPlans(num_watched=len(shares), errors=errors).is_watched == watched


def test_a_failure_takes_away_what_was_proven() -> None:
    plans = KindPlans()
    for peak in (300, 200):
        assert plans.proven_bytes(None) is None
        plans.prove(peak, hole_bytes=None, failed=False)
    assert plans.proven_bytes(None) == 300
    plans.prove(250, hole_bytes=None, failed=True)
    assert plans.proven_bytes(None) is None
    for _ in range(2):
        plans.prove(150, hole_bytes=None, failed=False)
    assert plans.proven_bytes(None) == 150


def test_nothing_is_proven_of_memory_that_is_more_broken_up_than_it_was() -> None:
    """In a run, 384 MB in use and 43 MB in pieces failed where 407 MB had worked with 35 MB."""
    plans = KindPlans()
    for holes in (28, 35):
        plans.prove(407, hole_bytes=holes, failed=False)
    assert plans.proven_bytes(35) == 407
    assert plans.proven_bytes(43) is None
    plans.prove(390, hole_bytes=43, failed=False)
    assert plans.proven_bytes(43) == 407
    plans.prove(390, hole_bytes=43, failed=True)
    for _ in range(2):
        plans.prove(300, hole_bytes=10, failed=False)
    assert plans.proven_bytes(28) is None


def test_an_unarmed_step_that_ran_out_is_noted_and_the_next_ones_stay_further_below(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    training = Training(_budget(plain, recomputed, 0.5), policy="planned")
    training.train([64] * 4)
    assert training.session is not None
    assert training.session._model_planner is not None
    (plans,) = training.session._model_planner.kinds.values()
    assert plans.unarmed_share == 0.02
    assert plans.proven_bytes(0) is not None
    attempts = []

    def runs_out_once(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = training.model(ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        attempts.append(training.session._step.armed)  # type: ignore[union-attr]
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return loss.detach()

    session = training.session
    training._step = lambda ids: session.run(runs_out_once, ids)  # type: ignore[method-assign]
    training.train([64])
    assert attempts == [False, True]
    assert plans.unarmed_share == 0.04
    assert plans.proven_bytes(0) is None


def test_a_step_that_is_opened_again_without_a_failure_takes_nothing_away(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    """As a batch does that runs under two policies to compare them."""
    training = Training(_budget(plain, recomputed, 0.5), policy="planned")
    training.train([64] * 4)
    session = training.session
    assert session is not None
    assert session._model_planner is not None
    (plans,) = session._model_planner.kinds.values()
    proven = plans.proven_bytes(0)
    assert proven is not None
    session.begin_step(torch.zeros(1, 64, dtype=torch.long), repeatable=True)
    assert session._step is not None
    assert not session._step.armed
    SessionStep(session).reopen(None)
    assert (plans.unarmed_share, plans.proven_bytes(0)) == (0.02, proven)
    session.abort_step(None)


def test_the_first_long_step_is_planned_by_the_model(
    plain: tuple[Outcome, int], recomputed: int
) -> None:
    """The step that is watched anyway is the sample, however short."""
    training = Training(_budget(plain, recomputed, 0.5), policy="planned")
    training.train([16, 64, 64])
    assert [record["planned_by"] for record in training.records][1:] == ["model"] * 2

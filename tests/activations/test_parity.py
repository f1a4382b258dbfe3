"""Contract 1 over families of models: the same bits as the plain step, whatever is evicted when."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rematic.activations import Engine, ambient, module_state, replay
from rematic.activations.record import Holder
from tests.activations.families import ENCODER, FAMILIES, LLAMA_EAGER, NORMS, Family
from tests.activations.parity import Outcome, attached, differences, make, run_steps

STARTS = {
    "all-kept": [True, True, True],
    "all-recomputed": [False, False, False],
    "outer-kept": [True, False, True],
    "inner-kept": [False, True, False],
}
ACCUMULATED = 3


@functools.cache
def plain_outcome(family: Family, *, autocast: bool = False) -> Outcome:
    """The reference: no rematic, no checkpointing of any kind."""
    return run_steps(make(family), family, num_batches=ACCUMULATED, autocast=autocast)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_default_search_finds_the_blocks(family: Family) -> None:
    with attached(make(family)) as engine:
        assert tuple(unit.name for unit in engine.units) == family.units


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_plain_step_is_deterministic(family: Family) -> None:
    again = run_steps(make(family), family, num_batches=ACCUMULATED)
    assert differences(again, plain_outcome(family)) == []


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16-forward-only"])
@pytest.mark.parametrize("kept", STARTS.values(), ids=STARTS.keys())
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_accumulated_steps_have_the_bits_of_the_plain_ones(
    family: Family, kept: list[bool], autocast: bool
) -> None:
    model = make(family)
    with attached(model, kept=kept) as engine:
        found = run_steps(model, family, num_batches=ACCUMULATED, autocast=autocast)
    assert differences(found, plain_outcome(family, autocast=autocast)) == []
    replays = {name: ACCUMULATED for name, keep in zip(family.units, kept, strict=True) if not keep}
    assert dict(engine.ledger.counts.replays) == replays


class EvictsAtMoments:
    """Evicts the records of given units at given moments of a run.

    Moments are numbered from 0: the end of each unit's forward, each loss, and each time autograd
    asks for a saved tensor.
    """

    def __init__(self, engine: Engine, plan: dict[int, set[int]]) -> None:
        self.num_moments = 0
        self._plan = plan
        self._ledger = engine.ledger
        self._unpack = self._ledger.unpack
        self._ledger.after_forward = lambda record: self.moment()
        self._ledger.unpack = self._unpack_after_moment  # type: ignore[method-assign]

    def _unpack_after_moment(self, holder: Holder) -> torch.Tensor:
        self.moment()
        return self._unpack(holder)

    def moment(self) -> None:
        """Evicts what the plan says for this moment, and goes on to the next."""
        for record in self._ledger.records():
            if record.position in self._plan.get(self.num_moments, ()):
                record.evict()
        self.num_moments += 1


@functools.cache
def number_of_moments(family: Family) -> int:
    model = make(family)
    with attached(model) as engine:
        moments = EvictsAtMoments(engine, {})
        run_steps(model, family, before_backward=moments.moment)
    assert moments.num_moments > 3 * len(family.units), "moments inside backward were not reached"
    return moments.num_moments


@functools.cache
def plain_pair(family: Family) -> Outcome:
    return run_steps(make(family), family)


@settings(max_examples=30)
@given(data=st.data())
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_random_evictions_at_random_moments_leave_the_same_bits(
    family: Family, data: st.DataObject
) -> None:
    last = number_of_moments(family) - 1
    units = st.sets(st.integers(0, 2), min_size=1)
    plan = data.draw(st.dictionaries(st.integers(0, last), units, max_size=12), label="evictions")
    kept = data.draw(st.lists(st.booleans(), min_size=3, max_size=3), label="kept at the start")
    model = make(family)
    with attached(model, kept=kept) as engine:
        moments = EvictsAtMoments(engine, plan)
        found = run_steps(model, family, before_backward=moments.moment)
    assert differences(found, plain_pair(family)) == []


@contextlib.contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


# What breaks the replay, the family that shows it, and what the oracle must name.
Broken = tuple[Callable[[pytest.MonkeyPatch], None], Family, str]
BROKEN: dict[str, Broken] = {
    "generators are not put back": (
        lambda patch: patch.setattr(ambient, "restore_generators", lambda state: None),
        ENCODER,
        "gradient of encoder.layers.0.self_attn.in_proj_weight",
    ),
    "dropout is drawn again": (
        lambda patch: patch.setattr(ambient, "restore_generators", lambda state: None),
        LLAMA_EAGER,
        "gradient of model.layers.0.self_attn.q_proj.weight",
    ),
    "running statistics are updated twice": (
        lambda patch: patch.setattr(module_state.ModuleState, "replayed", _nothing),
        NORMS,
        "buffer blocks.0.norm.num_batches_tracked",
    ),
    "the state around the call is forgotten": (
        lambda patch: patch.setattr(replay, "applied", _nothing),
        ENCODER,
        "RNG state",
    ),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_case_c6_the_oracle_catches_a_broken_replay(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it, family, wanted = broken
    model = make(family)
    plain = plain_outcome(family)
    break_it(monkeypatch)
    with attached(model, kept=False, trusted=True):
        found = run_steps(model, family, num_batches=ACCUMULATED)
    assert wanted in differences(found, plain)

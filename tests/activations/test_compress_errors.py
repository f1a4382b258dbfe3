"""The error of `compress` is in the journal, and nobody gets it who has not asked for it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.activations.compress_errors import MEASURED_EVERY
from rematic.policy import Compress, Keep, Policy, Rule
from tests.events import Events

pytest.importorskip("bitsandbytes", reason="an optional package")


def make() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    return nn.Sequential(*blocks)


def attach(journal: Events | None = None, **options: Any) -> tuple[nn.Module, rematic.Session]:
    model = make()
    return model, rematic.attach(model, journal=journal, **options)


def test_the_error_of_each_unit_is_told_now_and_then() -> None:
    journal = Events()
    model, session = attach(journal, policy="compress")
    for _ in range(MEASURED_EVERY + 1):
        with session.step(torch.randn(64, 64)):
            model(torch.randn(64, 64)).square().mean().backward()
    told = [event for event in journal.of("notice") if event["kind"] == "compress"]
    assert [event["unit"] for event in told] == ["0", "1", "0", "1"]
    assert [event["step"] for event in told] == [0, 0, MEASURED_EVERY, MEASURED_EVERY]
    for event in told:
        figures = event["figures"]
        assert 0.005 < figures["relative_rms"] < 0.02
        assert 0.001 < figures["relative_max"] < 0.0075
        assert figures["num_elements"] == 2 * 64 * 256  # into and out of the GELU
        assert f"{figures['relative_rms']:.2%}" in event["text"]
    session.detach()


def test_a_lossy_policy_is_not_switched_to_unless_it_is_allowed() -> None:
    _, session = attach(policy="recompute")
    lossy = Policy(name="mine", rules=(Rule(pattern="0", action=Compress()),), default=Keep())
    for change in (session.switch, session.pin):
        for policy in ("compress", lossy):
            with pytest.raises(ValueError, match=r"loses precision .*allow_lossy: true"):
                change(policy)
    assert [entry.policy.name for entry in session.history.entries] == ["recompute"]
    session.detach()


WAYS_TO_ASK = pytest.mark.parametrize(
    "options",
    [
        {"recipe": {"policy": {"start": "keep", "allow_lossy": True}}},
        {"policy": "compress"},
        {"recipe": {"policy": {"start": "keep", "rules": [{"match": "*", "action": "compress"}]}}},
    ],
    ids=["a key", "the call", "a rule"],
)


@WAYS_TO_ASK
def test_who_asks_for_it_needs_the_package_before_the_first_step(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ValueError, match="compress needs bitsandbytes, which cannot be imported"):
        attach(**options)


@WAYS_TO_ASK
def test_who_asks_for_it_may_have_it(options: dict[str, Any]) -> None:
    _, session = attach(**options)
    session.switch("keep")
    session.switch("compress")
    assert session.policy.name == "compress"
    session.detach()

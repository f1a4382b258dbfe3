"""Every host of benchmarks/idle_overhead.py trains as it does without rematic."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn

import rematic
from benchmarks import idle_overhead
from benchmarks.idle_hosts import HOSTS

SMALL = {"pairs": 2, "tokens": 16, "hidden_size": 64, "layers": 2}


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that are made, in order."""
    made: list[nn.Module] = []
    make = idle_overhead.make_llama
    monkeypatch.setattr(idle_overhead, "make_llama", lambda a: made.append(make(a)) or made[-1])
    return made


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of the one rank, where the model is sharded."""
    found = model.state_dict().items()
    return {name: t.to_local() if hasattr(t, "to_local") else t for name, t in found}


@pytest.mark.parametrize("host", HOSTS)
def test_pairs_end_in_equal_weights_and_leave_nothing(
    host: str, models: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    end_step = rematic.Session.end_step

    def counted(session: rematic.Session) -> object:
        ended.append(session.num_steps)
        return end_step(session)

    monkeypatch.setattr(rematic.Session, "end_step", counted)
    ratios, seconds = idle_overhead.measure(argparse.Namespace(host=host, **SMALL))
    assert len(ratios) == len(seconds) == 2
    assert ended == [0, 1, 2, 3, 4], "one loop of the two"
    plain, attached = map(weights, models)
    assert all(torch.equal(plain[name], attached[name]) for name in plain)
    before = weights(idle_overhead.make_llama(argparse.Namespace(host=host, **SMALL)))
    assert not all(torch.equal(plain[name], before[name]) for name in plain)
    assert not any("forward" in m.__dict__ for m in models[1].modules())

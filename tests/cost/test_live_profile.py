"""Traces of a model that trains: what can be traced, once for models that are alike, unnoticed."""

from __future__ import annotations

import dataclasses
import linecache
from typing import Any

import pytest
import torch
from torch import nn

from rematic.cost import live_profile
from rematic.cost.live_profile import (
    NotTraceableError,
    StepKind,
    batch_inputs,
    live_device,
    trace_live,
    transformers_model,
)
from rematic.cost.torch_private import FakeTensorMode
from rematic.policy import Keep, Recompute
from tests.activations.families import build_llama
from tests.cost.measured import RealStep, predicted_peak

IDS = torch.ones(2, 48, dtype=torch.int64)
KIND = StepKind(batch=2, padded=False, accumulates=False, inputs=(("input_ids", 2), ("labels", 2)))


def _llama(width: int = 16) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 3}
    return build_llama("sdpa", vocab_size=50, use_cache=False, **sizes)


@pytest.mark.parametrize(
    ("batch", "inputs"),
    [
        (IDS, (("input_ids", 2), ("labels", 2))),
        ({"input_ids": IDS, "labels": IDS, "position_ids": None}, KIND.inputs),
        ({"input_ids": IDS, "labels": IDS[:, 0]}, (("input_ids", 2), ("labels", 1))),
    ],
    ids=["tensor", "mapping", "classes"],
)
def test_batches_of_tokens_are_read(batch: object, inputs: object) -> None:
    assert batch_inputs(batch) == inputs


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ([IDS, IDS], "a batch is a list, not a mapping of tensors"),
        ({"input_ids": IDS}, "a batch has no labels, so the model computes no loss"),
        ({"pixels": torch.ones(2, 3, 4, 4), "labels": IDS}, "'pixels' is no tensor of tokens"),
        ({"x": torch.ones(2, 3), "labels": IDS}, "'x' holds numbers that are not whole"),
        ({"input_ids": "text", "labels": IDS}, "'input_ids' is no tensor of tokens"),
    ],
    ids=["list", "unlabelled", "images", "floats", "text"],
)
def test_other_batches_are_refused(batch: object, why: str) -> None:
    with pytest.raises(NotTraceableError, match=why):
        batch_inputs(batch)


def test_the_model_is_found_inside_another() -> None:
    model = _llama()
    assert transformers_model(nn.Sequential(nn.Linear(2, 2), model)) is model
    with pytest.raises(NotTraceableError, match="holds 0 models"):
        transformers_model(nn.Linear(2, 2))
    with pytest.raises(NotTraceableError, match="holds 2 models"):
        transformers_model(nn.ModuleList([model, _llama()]))


@pytest.mark.parametrize("padded", [False, True])
def test_the_profile_is_that_of_the_real_step(padded: bool) -> None:
    model = _llama()
    inputs = (*KIND.inputs, ("attention_mask", 2)) if padded else KIND.inputs
    kind = dataclasses.replace(KIND, padded=padded, inputs=inputs)
    profile = trace_live(model, kind, actions=(Keep(), Recompute()), patterns=())
    batch = {"input_ids": IDS, "labels": IDS}
    if padded:
        mask = torch.ones_like(IDS)
        mask[0, 40:] = 0
        batch["attention_mask"] = mask
    costs = profile.costs_at(batch=2, length=48, padded=padded)
    real = RealStep(model, batch)
    for actions in ([Keep()] * 3, [Recompute()] * 3):
        predicted = predicted_peak(costs, actions).total - costs.fixed.total
        assert predicted == pytest.approx(real.peak_bytes(batch, actions), rel=0.01)


def test_a_trace_leaves_no_cache_of_the_process_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # the first one imports what torch imports late
        FakeTensorMode.cache_clear()
        linecache.clearcache()
        monkeypatch.setattr(live_profile, "_remembered", type(live_profile._remembered)())
        trace_live(_llama(), KIND, actions=(Keep(), Recompute()), patterns=())
    assert FakeTensorMode.cache_info().size == 0
    assert linecache.cache == {}


def test_models_that_are_alike_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[nn.Module] = []

    def trace(model: nn.Module, settings: Any) -> Any:
        traced.append(model)
        return object()

    monkeypatch.setattr(live_profile, "trace_profile", trace)
    monkeypatch.setattr(live_profile, "_remembered", type(live_profile._remembered)())
    options: dict[str, Any] = {"actions": (Keep(),), "patterns": ()}
    first = trace_live(_llama(), KIND, **options)
    assert trace_live(_llama(), KIND, **options) is first
    assert trace_live(_llama(32), KIND, **options) is not first
    frozen = _llama()
    frozen.model.layers[0].requires_grad_(False)  # type: ignore[union-attr,operator,index]
    assert trace_live(frozen, KIND, **options) is not first
    assert trace_live(_llama(), dataclasses.replace(KIND, batch=3), **options) is not first
    assert len(traced) == 4
    for batch in range(4, 4 + live_profile.MAX_REMEMBERED):
        trace_live(_llama(), dataclasses.replace(KIND, batch=batch), **options)
    assert trace_live(_llama(), KIND, **options) is not first, "the oldest are forgotten"


def test_a_gpu_that_nobody_knows_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_profile, "_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    with pytest.raises(NotTraceableError, match=r"^the speed of a Tesla V100-SXM2-16GB is not"):
        live_device(nn.Linear(2, 2))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert live_device(nn.Linear(2, 2)).name == "t4"


def test_a_failure_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: nn.Module, settings: Any) -> Any:
        torch.rand(3)
        raise KeyError("inside")

    monkeypatch.setattr(live_profile, "trace_profile", fail)
    model, state = _llama(64), torch.get_rng_state()
    with pytest.raises(KeyError, match="inside"):
        trace_live(model, KIND, actions=(Keep(),), patterns=())
    assert torch.equal(torch.get_rng_state(), state)

"""A unit's forward: replaced on the instance, passed through or pinned, given back."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from rematic.activations import Engine
from tests.activations.blocks import Block, gradients, make_input, make_model
from tests.activations.families import FAMILIES, Family, build_llama
from tests.activations.parity import (
    attached,
    make,
    run_steps,
    same_bits,
)

# --- contract 2: same names -----------------------------------------------------------------------


def identity(model: nn.Module) -> dict[str, Any]:
    """Everything by which others know a model."""
    return {
        "state_dict": [(name, id(t.untyped_storage())) for name, t in model.state_dict().items()],
        "parameters": [(name, id(p)) for name, p in model.named_parameters()],
        "buffers": [(name, id(b)) for name, b in model.named_buffers()],
        "modules": [(name, id(m), type(m)) for name, m in model.named_modules()],
        "children": [name for name, _ in model.named_children()],
        "text": repr(model),
        "signatures": [str(inspect.signature(m.forward)) for m in model.modules()],
    }


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    """The attributes of every module, containers copied."""
    return [
        {k: copy.copy(v) if isinstance(v, (dict, list, set)) else v for k, v in vars(m).items()}
        for m in model.modules()
    ]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_attaching_changes_no_name_and_detaching_leaves_nothing(family: Family) -> None:
    model = make(family)
    names, before = identity(model), attributes(model)
    optimizer_names = {name: p for name, p in model.named_parameters() if p.requires_grad}.keys()
    with attached(model, kept=False) as engine:
        assert identity(model) == names
        run_steps(model, family, num_batches=1)
        engine.ledger.evict(1 << 40)
        assert identity(model) | {"text": ""} == names | {"text": ""}
        assert dict(model.named_parameters()).keys() >= optimizer_names
        changed = {
            key
            for present, past in zip(attributes(model), before, strict=True)
            for key in present.keys() ^ past.keys()
        }
        assert changed == {"forward"}
    assert [list(vars(m)) for m in model.modules()] == [list(values) for values in before]
    assert all("forward" not in vars(m) for m in model.modules())


def test_detaching_after_exceptions_restores_every_attribute() -> None:
    class Fails(Block):
        fail_in: str | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fail_in == "forward":
                raise ValueError("in forward")
            out = super().forward(x)
            if self.fail_in == "backward":
                out.register_hook(self._raise)
            return out

        @staticmethod
        def _raise(gradient: torch.Tensor) -> None:
            raise ValueError("in backward")

    model = make_model(Fails)
    before = attributes(model)
    engine = Engine(model)
    try:
        for place in ("forward", "backward"):
            model.blocks[1].fail_in = place
            with pytest.raises(ValueError, match=f"in {place}"):
                model(make_input()).backward()
        del model.blocks[1].fail_in
    finally:
        engine.detach()
    assert attributes(model) == before


def test_a_forward_that_was_replaced_before_is_kept_and_given_back() -> None:
    model, calls = make_model(), Counter[str]()
    own = model.blocks[0].forward

    def patched(x: torch.Tensor) -> torch.Tensor:
        calls["patched"] += 1
        return own(x)

    model.blocks[0].forward = patched
    with attached(model, kept=False, trusted=True):
        model(make_input()).backward()
        assert calls == {"patched": 2}, "once in forward, once in the replay"
    assert model.blocks[0].forward is patched


def test_a_forward_that_was_wrapped_after_goes_silent(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    engine = Engine(model)
    ours = model.blocks[0].forward

    def wrapper(x: torch.Tensor) -> torch.Tensor:
        return ours(x)

    model.blocks[0].forward = wrapper
    engine.detach()
    assert "forward of unit 'blocks.0' was replaced after attach" in caplog.text
    assert model.blocks[0].forward is wrapper
    model(make_input()).backward()
    assert engine.ledger.records() == []
    assert engine.units[0].num_forwards == 0
    Engine(model).detach()  # not taken for another owner


def test_a_graph_that_is_alive_when_detached_still_gives_its_gradients() -> None:
    plain, model = make_model(), make_model()
    plain(make_input()).backward()
    with attached(model, kept=False):
        loss = model(make_input())
    loss.backward()
    assert all(same_bits(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))


# --- units that cannot be replayed ----------------------------------------------------------------


class AddsToItsInput(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x.clone())
        x.add_(1)
        return out


def test_a_unit_that_changes_its_input_is_pinned_once_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = make_model(AddsToItsInput, 2)
    for _ in range(2):
        plain(make_input().clone()).backward()
    model = make_model(AddsToItsInput, 2)
    with caplog.at_level(logging.WARNING, "rematic"), attached(model, kept=False) as engine:
        for _ in range(2):
            loss = model(make_input().clone())
            assert engine.ledger.resident_bytes() == 0
            assert engine.ledger.evict(1 << 40).bytes_freed == 0
            loss.backward()
    assert [unit.pinned for unit in engine.units] == ["it changes its input in place"] * 2
    assert engine.ledger.counts.replays.total() == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"unit 'blocks.{i}' is kept under every policy, since it cannot be replayed: it changes "
        "its input in place. Clone the input inside the unit."
        for i in range(2)
    ]
    assert all(same_bits(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))


def test_a_filled_cache_keeps_the_unit_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = build_llama("sdpa", num_hidden_layers=2)
    ids = torch.randint(0, 11, (2, 5))
    engine = Engine(model, ["model.layers.1"])
    with caplog.at_level(logging.WARNING, "rematic"):
        for _ in range(2):
            with torch.no_grad():
                cache = model(input_ids=ids).cache
            model(input_ids=ids, labels=ids, cache=cache).loss.backward()
    assert engine.ledger.counts.replays.total() == 0
    assert [record.getMessage() for record in caplog.records] == [
        "unit 'model.layers.1': its activations are kept in this call: it was given a filled "
        "key/value cache"
    ]


def test_a_unit_inside_a_transform_is_passed_through(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = make_model(), make_model()
    x = make_input()
    wanted = torch.func.grad(plain)(x)
    with caplog.at_level(logging.WARNING, "rematic"), attached(model, kept=False) as engine:
        found = torch.func.grad(model)(x)
        assert engine.units[0].num_forwards == 0
    assert torch.equal(found, wanted)
    assert "unit 'blocks.0': not managed in this call: torch.func transforms" in caplog.text


def test_a_unit_where_hooks_are_refused_is_passed_through(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = make_model(), make_model()
    plain(make_input()).backward()
    with caplog.at_level(logging.WARNING, "rematic"), attached(model, kept=False) as engine:
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            loss = model(make_input())
        loss.backward()
        assert engine.units[0].num_forwards == 0
    assert all(map(same_bits, gradients(model), gradients(plain)))
    assert "'blocks.0': not managed in this call: disable_saved_tensors_hooks" in caplog.text


def test_a_unit_under_the_hooks_of_others_is_passed_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, model = make_model(), make_model()
    plain(make_input()).backward()
    with caplog.at_level(logging.WARNING, "rematic"), attached(model, kept=False) as engine:
        for _ in range(2):
            model.zero_grad()
            with torch.autograd.graph.save_on_cpu():
                loss = model(make_input())
            loss.backward()
        assert engine.units[0].num_forwards == 0
    assert all(map(same_bits, gradients(model), gradients(plain)))
    assert caplog.text.count("unit 'blocks.0': not managed in this call: other saved-tensor") == 1


def test_without_gradients_units_run_once_and_make_no_record() -> None:
    model = make_model()
    with attached(model, kept=False) as engine:
        with torch.no_grad():
            model(make_input())
        with torch.inference_mode():
            model(make_input())
    assert [unit.num_forwards for unit in engine.units] == [0, 0, 0]
    assert engine.ledger.records() == []


def test_a_model_in_evaluation_mode_with_gradients_is_managed() -> None:
    model = make_model().eval()
    with attached(model, kept=False) as engine:
        model(make_input()).backward()
    assert engine.ledger.counts.replays.total() == 3

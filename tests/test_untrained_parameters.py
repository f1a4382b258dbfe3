"""Parameters that are to be trained and get no gradient are told of once (case B4)."""

from __future__ import annotations

import logging

import pytest
import torch

import rematic
from rematic.untrained_parameters import untrained_parameters
from tests.events import Events
from tests.step_models import make_batches, make_tied_model


def test_they_are_named_after_the_first_step_and_only_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, journal = make_tied_model(), Events()
    session = rematic.attach(model, policy="keep", journal=journal)
    with caplog.at_level(logging.WARNING, "rematic"):
        for batch in make_batches():
            with session.step(batch):
                model(batch).backward()
    told = [event for event in journal.of("notice") if event["kind"] == "no_gradient"]
    assert [(event["unit"], event["step"]) for event in told] == [("", 0)]
    assert told[0]["figures"] == {"parameters": 1}
    (text,) = [m for m in caplog.messages if "got no gradient" in m]
    assert "no gradient in the first micro-batch (1): unused. Where that is not meant" in text
    session.detach()


def test_a_model_whose_parameters_all_get_one_has_none() -> None:
    model = make_tied_model()
    assert untrained_parameters(model) == []  # no backward has run
    model(make_batches(1)[0]).backward()
    assert untrained_parameters(model) == ["unused"]
    model.unused.requires_grad_(False)
    assert untrained_parameters(model) == []


def test_gradients_that_an_optimizer_takes_in_backward_are_not_missed() -> None:
    model = make_tied_model()
    model.unused.requires_grad_(False)

    def take(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.register_post_accumulate_grad_hook(take)
    model(make_batches(1)[0]).backward()
    assert untrained_parameters(model) == []


def test_an_optimizer_that_steps_inside_the_step_hides_them() -> None:
    model, journal = make_tied_model(), Events()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = rematic.attach(model, optimizer, policy="keep", journal=journal)
    with session.step(make_batches(1)[0]):
        model(make_batches(1)[0]).backward()
        optimizer.step()
        model.embed.weight.grad = None
    assert [e for e in journal.of("notice") if e["kind"] == "no_gradient"] == []
    session.detach()

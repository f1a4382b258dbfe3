"""A batch in parts gives the gradients of the whole, where the reduction is declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rematic
from rematic.recipes import ControlConfig, PolicyConfig, Recipe
from rematic.split_batch import num_sequences, run_in_parts, split_batch
from tests.activations.blocks import WIDTH, Block
from tests.events import Events

ALLOWED = Recipe(
    policy=PolicyConfig(op_retry="never"), control=ControlConfig(attempts=5, allow_split=True)
)


class Model(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = norm or nn.Identity()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_batch(size: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (size,), generator=generator)
    labels[1] = -100
    return {"x": torch.randn(size, WIDTH, generator=generator), "labels": labels}


def num_labels(batch: dict[str, Any]) -> float:
    return float((batch["labels"] != -100).sum())


def per_sequence(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels.clamp(min=0), reduction="mean")


LOSSES: dict[str, tuple[Callable[..., torch.Tensor], Any]] = {
    "sum": (lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum"), "sum"),
    "mean": (per_sequence, "mean"),
    "mean over labels": (F.cross_entropy, num_labels),
}


def run(loss_name: str, largest: int, model: nn.Module, **options: Any) -> torch.Tensor:
    """A step that fits for so many sequences at once."""
    loss_of, reduction = LOSSES[loss_name]
    session = rematic.attach(model, policy="keep", **options)

    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = loss_of(model(batch["x"]), batch["labels"])
        loss.backward()
        if len(batch["x"]) > largest:
            raise torch.OutOfMemoryError("injected")
        return loss.detach()

    try:
        return session.run(step, make_batch(), reduction=reduction)
    finally:
        session.detach()


@pytest.mark.parametrize("largest", [2, 3])
@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize("accumulated", [False, True])
def test_parts_add_up_to_the_whole(loss_name: str, largest: int, accumulated: bool) -> None:
    torch.manual_seed(0)
    whole, split, journal = Model(), Model(), Events()
    split.load_state_dict(whole.state_dict())
    if accumulated:
        for p, q in zip(whole.parameters(), split.parameters(), strict=True):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    wanted = run(loss_name, 100, whole)
    found = run(loss_name, largest, split, recipe=ALLOWED, journal=journal)
    torch.testing.assert_close(found, wanted)
    for p, q in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    retries = journal.of("retry")
    assert retries[-1]["lossy"] is True
    assert retries[-1]["next"].endswith("parts, recompute+offload")
    assert [event["lossy"] for event in retries[:-1]].count(True) <= 1


def test_parts_that_fail_after_others_were_added_to_gradients_are_the_end() -> None:
    """What an earlier micro-batch and some parts have summed up cannot be told apart again."""
    torch.manual_seed(0)
    model = Model()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    session = rematic.attach(model, policy="keep", recipe=ALLOWED)

    def step(batch: dict[str, Any]) -> None:
        if len(batch["x"]) == 5 or batch["labels"][0] != make_batch()["labels"][0]:
            raise torch.OutOfMemoryError("injected")
        model(batch["x"]).sum().backward()

    with pytest.raises(rematic.StepOutOfMemoryError, match="cannot be split any more"):
        session.run(step, make_batch(), reduction="sum")
    session.detach()


def test_a_mean_over_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^reduction counted 0 terms in the batch: expected more"):
        run_in_parts(len, make_batch(), num_parts=2, reduction=lambda _: 0, model=Model())


@pytest.mark.parametrize(
    ("recipe", "norm"),
    [
        (Recipe(policy=PolicyConfig(op_retry="never")), None),
        (ALLOWED, nn.BatchNorm1d(WIDTH)),
    ],
    ids=["not allowed", "batch statistics"],
)
def test_parts_are_not_tried_where_they_may_not_be(recipe: Recipe, norm: nn.Module | None) -> None:
    with pytest.raises(rematic.StepOutOfMemoryError) as caught:
        run("sum", 3, Model(norm), recipe=recipe)
    assert not any("parts" in attempt.name for attempt in caught.value.report.attempts)


def test_parts_keep_the_containers() -> None:
    first, second = split_batch(make_batch(), 2)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (len(first["x"]), len(second["labels"])) == (2, 3)
    assert torch.equal(torch.cat([first["x"], second["x"]]), make_batch()["x"])


def test_a_batch_whose_tensors_disagree_is_one() -> None:
    assert num_sequences({"x": torch.ones(3, 2), "y": torch.ones(3)}) == 3
    assert num_sequences({"x": torch.ones(3, 2), "y": torch.ones(2)}) == 1
    assert num_sequences({"x": torch.ones(3, 2), "y": torch.ones(())}) == 1
    assert num_sequences({}) == 1

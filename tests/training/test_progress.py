from __future__ import annotations

import io
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch

from rematic.step_record import StepRecord
from rematic.training.progress import (
    ProgressBar,
    ProgressLines,
    describe_step,
    progress_callback,
)

MIB = 1 << 20


@dataclass
class Step:
    length: int = 1024
    tokens: int = 1024
    seconds: float = 2.0
    policy: str = "planned"
    plan: dict[str, int] = field(default_factory=lambda: {"keep": 5, "recompute": 7})
    peak_bytes: int | None = 612 * MIB
    budget_bytes: int | None = 700 * MIB


def last_step() -> StepRecord:
    return cast("StepRecord", Step())


def trainer(*, is_last: bool = False) -> pl.Trainer:
    fake = SimpleNamespace(
        is_last_batch=is_last,
        callback_metrics={"loss": torch.tensor(2.5)},
        current_epoch=0,
        num_training_batches=79,
        progress_bar_metrics={},
    )
    return cast("pl.Trainer", fake)


def test_describes_a_step_in_a_few_words() -> None:
    assert describe_step(last_step()) == {
        "tokens/s": "512",
        "length": "1,024",
        "memory": "612.0 MiB of 700.0 MiB",
        "policy": "planned (keep 5, recompute 7)",
    }


@pytest.mark.parametrize(
    ("step", "memory"),
    [
        (Step(peak_bytes=None), "unknown of 700.0 MiB"),
        (Step(budget_bytes=None), "612.0 MiB"),
        (Step(seconds=0.0), "612.0 MiB of 700.0 MiB"),
    ],
    ids=["no peak", "no budget", "no time"],
)
def test_says_what_is_unknown(step: Step, memory: str) -> None:
    assert describe_step(cast("StepRecord", step))["memory"] == memory


def test_the_bar_shows_loss_and_step() -> None:
    metrics = ProgressBar(last_step).get_metrics(trainer(), cast("Any", None))
    assert list(metrics) == ["loss", "tokens/s", "length", "memory", "policy"]
    assert metrics["loss"] == "2.500"
    assert list(ProgressBar(lambda: None).get_metrics(trainer(), cast("Any", None))) == ["loss"]


def test_lines_come_now_and_then_and_at_the_end() -> None:
    stream, now = io.StringIO(), [0.0]
    lines = ProgressLines(last_step, stream=stream, clock=lambda: now[0])
    for index in range(12):
        now[0] += 1.0
        lines.on_train_batch_end(trainer(is_last=index == 11), cast("Any", None), None, None, index)
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == [
        "epoch 1, document 5 of 79",
        "epoch 1, document 10 of 79",
        "epoch 1, document 12 of 79",
    ]
    assert (
        stream.getvalue()
        .splitlines()[0]
        .endswith(
            ": loss 2.500, tokens/s 512, length 1,024, memory 612.0 MiB of 700.0 MiB, "
            "policy planned (keep 5, recompute 7)"
        )
    )


@pytest.mark.parametrize(("is_terminal", "kind"), [(True, ProgressBar), (False, ProgressLines)])
def test_a_bar_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, kind: type
) -> None:
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: is_terminal))
    assert type(progress_callback(lambda: None)) is kind

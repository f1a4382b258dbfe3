from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from rematic.hosts.transformers_loss import tiled_evaluation, use_tiled_loss
from rematic.training.data import load_data
from rematic.training.evaluation import evaluating, num_labels
from rematic.training.loss import model_loss
from rematic.training.plain_loop import PlainLoop
from rematic.training.run import train
from tests.training.small import prepare, tiny

HELD_OUT = ("evaluation.holdout=0.25", "data.max_documents=8", "tuning.method=lora")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines(run: str, name: str) -> list[dict[str, float]]:
    text = (Path("runs") / run / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_evaluation_leaves_training_as_it_was_and_is_right() -> None:
    dropout = (*HELD_OUT, "tuning.dropout=0.3")
    train(tiny(*dropout, "run.name=with", "evaluation.every_steps=2"), show_progress=False)
    recipe = tiny(*dropout)
    data = load_data(recipe)
    assert (len(data.loader), len(data.evaluation or ())) == (6, 2)
    # a plain loop that never evaluates, but at the end
    loop = PlainLoop(recipe, max_length=48)
    losses = []
    for number, batch in enumerate(data.loader):
        loop.start_document(number)
        losses.append(float(loop.forward_backward(batch)))
        loop.update()
    assert [line["loss"] for line in lines("with", "metrics.jsonl")] == losses
    total = count = 0.0
    with evaluating(loop.model):
        for batch in data.evaluation or ():
            labels = num_labels(batch, shift=True)
            total += float(model_loss(loop.model, batch)) * labels
            count += labels
    evaluated = lines("with", "evaluation.jsonl")
    assert [line["optimizer_step"] for line in evaluated] == [2, 4, 6]
    assert evaluated[-1]["loss"] == pytest.approx(total / count, rel=1e-6)
    assert evaluated[-1]["labels"] == count
    assert evaluated[-1]["loss"] < evaluated[0]["loss"]


def test_a_resumed_run_evaluates_what_it_trains_again() -> None:
    train(tiny(*HELD_OUT), show_progress=False)
    train(tiny(*HELD_OUT, "training.epochs=2"), resume="runs/tiny-cpu", show_progress=False)
    train(tiny(*HELD_OUT, "training.epochs=2", "run.name=whole"), show_progress=False)
    assert lines("tiny-cpu", "evaluation.jsonl") == lines("whole", "evaluation.jsonl")
    assert (
        lines("tiny-cpu", "metrics.jsonl")[-1]["loss"]
        == (lines("whole", "metrics.jsonl")[-1]["loss"])
    )


def test_documents_of_another_source_are_evaluated_on() -> None:
    Path("eval.txt").write_text("something else")
    train(tiny("evaluation.source=eval.txt"), show_progress=False)
    (line,) = lines("tiny-cpu", "evaluation.jsonl")
    assert line["labels"] == len("something else") + 1


def test_a_share_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves 0 for evaluation and 4 for training"):
        load_data(tiny("evaluation.holdout=0.01"))


def test_every_part_is_afterwards_in_the_mode_it_was_in() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()
    with evaluating(model):
        assert not any(part.training for part in model.modules())
        assert not torch.is_grad_enabled()
    assert [part.training for part in model.modules()] == [True, True, False, False]
    assert torch.is_grad_enabled()


def test_evaluation_tiles_the_loss_where_training_does() -> None:
    _, data, model = prepare()
    batch = next(iter(data.loader))
    switch = use_tiled_loss(model, tile_tokens=8)
    with evaluating(model):
        assert model(**batch).logits is not None
        with tiled_evaluation():
            output = model(**batch)
        plain = model(**batch)
    assert output.logits is None
    assert float(output.loss) == pytest.approx(float(plain.loss), rel=1e-6)
    switch.remove()

"""Every task trains, whole and with an adapter, and its weights are saved for transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from rematic.recipes import load_recipe
from rematic.training.batches import BatchMaker
from rematic.training.run import train
from rematic.training.tokens import ByteTokenizer
from tests.training.small import ENCODER, T5, TINY, examples, tiny

ROWS = ("data.source=rows.jsonl", "data.max_documents=null", "data.batch_size=2")
TASKS = {
    "masked-lm": (*ENCODER, "data.batch_size=2"),
    "seq2seq": (*T5, *ROWS, "data.target_field=answer"),
    "sequence-classification": (
        *ROWS,
        "model.task=sequence-classification",
        "data.label_field=class",
    ),
}
CLASSES = {
    "masked-lm": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "sequence-classification": AutoModelForSequenceClassification,
}


@pytest.fixture(autouse=True)
def in_a_folder_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": "ab" * (n + 1), "answer": "x" * (n + 1), "class": n % 2} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains_pads_and_evaluates(task: str, method: str) -> None:
    recipe = load_recipe(
        "tiny-cpu",
        [
            *TINY,
            *TASKS[task],
            f"tuning.method={method}",
            "training.epochs=3",
            "training.learning_rate=0.01",
            "evaluation.holdout=0.25",
            "evaluation.every_steps=1",
            f"run.save={'full' if method == 'full' else 'merged'}",
        ],
    )
    assert train(recipe, show_progress=False).steps == 6
    run = Path("runs/tiny-cpu")
    losses = [json.loads(x)["loss"] for x in (run / "evaluation.jsonl").read_text().splitlines()]
    if task != "sequence-classification":  # (nothing in these texts tells their class)
        assert losses[-1] < losses[0]
    again = CLASSES[task].from_pretrained(run / ("model" if method == "full" else "merged"))
    assert sum(p.numel() for p in again.parameters()) > 0


def test_a_class_adapter_trains_and_saves_its_new_head() -> None:
    recipe = load_recipe(
        "tiny-cpu",
        [*TINY, *TASKS["sequence-classification"], "tuning.method=lora", "run.save=adapter"],
    )
    train(recipe, show_progress=False)
    from safetensors.torch import load_file

    names = load_file("runs/tiny-cpu/adapter/adapter_model.safetensors")
    assert any("score" in name for name in names)


def test_what_is_masked_is_drawn_anew_each_epoch_and_the_same_again() -> None:
    recipe = tiny(*ENCODER, "data.mask_share=0.3")
    tokenizer = ByteTokenizer()
    maker = BatchMaker(recipe.data, task="masked-lm", tokenizer=tokenizer, seed=1)
    rows = examples([[1, *range(10, 210), 2]])
    first, again, next_epoch = (maker.make([(0,)], rows, epoch=epoch) for epoch in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["labels"], next_epoch["labels"])
    hidden = first["labels"] != -100
    assert 0.2 < float(hidden.float().mean()) < 0.4
    shown, wanted = first["input_ids"][hidden], first["labels"][hidden]
    assert 0.7 < float((shown == tokenizer.mask_id).float().mean()) < 0.9
    assert 0 < float((shown == wanted).float().mean()) < 0.3
    assert not hidden[0, 0] and not hidden[0, -1]  # noqa: PT018 - beginning and end
    assert torch.equal(first["input_ids"][~hidden], torch.tensor(rows[0].ids)[~hidden[0]])

"""A twin of every shipped recipe, the same keys with tiny dimensions, trains two real steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from rematic.journal import read_journal
from rematic.recipes import (
    Recipe,
    format_plain,
    list_recipes,
    load_recipe,
    parse_budget,
    recipe_as_plain,
)
from rematic.training import fit
from rematic.training.environment import training_environment
from rematic.training.run import train
from rematic.training.tasks import TASKS
from tests.training.saved import save_tokenizer

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "num_local_experts": 4,
    "sliding_window": 16,
    "local_attention": 16,
    "query_pre_attn_scalar": 32,
}
MARKS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
PACKED = {"nf4": "Linear4bit", "int8": "Linear8bitLt", "none": None}
NUM_LABELS = 3
WORDS = "hello bye now hello now bye bye now "


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def twin(name: str, *, devices: int = 1) -> Recipe:
    """The recipe with all of its keys, as small as it can be, on data and weights made here."""
    recipe = load_recipe(name)
    data = replace(recipe.data, max_length=64, batch_size=min(recipe.data.batch_size, 2))
    if recipe.data.format == "datasets":
        data = replace(data, source=str(save_data(recipe)), subset=None)
    else:
        data = replace(data, max_documents=6)
    evaluation = recipe.evaluation
    if evaluation.is_on:
        every = None if evaluation.every_steps is None else 1
        evaluation = replace(evaluation, holdout=0.25, every_steps=every)
    training = replace(
        recipe.training,
        max_steps=2,
        epochs=2,
        learning_rate=1e-2,
        warmup_steps=0,
        threads=1,
        accumulate=min(recipe.training.accumulate, 2),
    )
    large = recipe.model.task == "causal-lm" and int(str(recipe.model.config["vocab_size"])) > 32768
    return replace(
        recipe,
        model=small_model(recipe),
        data=data,
        evaluation=evaluation,
        training=training,
        distributed=replace(
            recipe.distributed,
            strategy=recipe.distributed.strategy if devices > 1 else "single",
            devices=devices,
        ),
        memory=replace(recipe.memory, budget=parse_budget("256MiB"), heap_cap=False),
        policy=replace(recipe.policy, tiled_loss="always") if large else recipe.policy,
    )


def small_model(recipe: Recipe) -> Any:
    model = recipe.model
    config = {
        key: SIZES[key] if key in SIZES and value is not None else value
        for key, value in model.config.items()
    }
    attention = "sdpa" if model.attention.startswith("flash") else model.attention
    model = replace(model, config=config, attention=attention)
    if model.id is None:
        return model
    made = AutoConfig.for_model(model.type, **MARKS, **config)
    if recipe.data.label_field is not None:
        made.num_labels = NUM_LABELS
    TASKS[model.task].auto_class.from_config(made).save_pretrained("saved")
    save_tokenizer(Path("saved"))
    return replace(model, id=None, path="saved")


def save_data(recipe: Recipe) -> Path:
    """Eight documents with the columns that the recipe reads."""
    lengths = range(1, 9)
    said = [
        [
            {"role": "user", "content": WORDS},
            {"role": "assistant", "content": WORDS * (1 + n % 3)},
        ]
        for n in lengths
    ]
    columns: dict[str, list[Any]] = {"text": [WORDS * n for n in lengths]}
    if recipe.data.messages_field is not None:
        columns[recipe.data.messages_field] = said
    if recipe.data.label_field is not None:
        columns[recipe.data.label_field] = [n % NUM_LABELS for n in lengths]
    made = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict({recipe.data.split or "train": made}).save_to_disk("data")
    return Path("data")


@pytest.mark.parametrize("name", list_recipes())
def test_a_twin_trains_two_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = twin(name)
    seen: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
    build = fit.prepare_model

    def prepare(*args: Any, **options: Any) -> nn.Module:
        model = build(*args, **options)
        trained = [(n, p.detach().clone()) for n, p in model.named_parameters() if p.requires_grad]
        seen.append((model, dict(trained)))
        return model

    monkeypatch.setattr(fit, "prepare_model", prepare)
    summary = train(recipe, show_progress=False)
    assert summary.status == "finished"
    assert summary.steps > recipe.training.accumulate  # micro-batches, the second step's too
    assert summary.last_loss is not None
    assert 0 < summary.last_loss < 20
    ((model, before),) = seen
    kinds = Counter(type(module).__name__ for module in model.modules())
    packed = PACKED[recipe.weight_format]
    assert {kind for kind in PACKED.values() if kinds[str(kind)]} == ({packed} if packed else set())
    assert any("lora" in key for key in before) is (recipe.tuning.method != "full")
    after = dict(model.named_parameters())
    changed = [key for key, value in before.items() if not torch.equal(after[key], value)]
    assert (
        len(changed) > len(before) / 4
    )  # of a LoRA the half whose other half was zero moves later
    assert bool(list(Path("runs").rglob("*.safetensors")))


SHARDED = [one for one in list_recipes() if load_recipe(one).distributed.strategy == "fsdp2"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_twin_trains_two_steps_in_two_processes(name: str) -> None:
    """As `rematic train` starts them, over gloo; weights in 4 bits where the recipe says so."""
    recipe = twin(name, devices=2)
    Path("twin.yaml").write_text(format_plain(recipe_as_plain(recipe)), encoding="utf-8")
    command = [sys.executable, "-m", "rematic.cli", "train", "./twin.yaml", "--json"]
    done = subprocess.run(
        command, env=training_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    micro_batches = 2 * recipe.training.accumulate
    assert (found["status"], found["steps"]) == ("finished", micro_batches)
    (run,) = Path("runs").iterdir()
    (start,) = [e for e in read_journal(run / "journal.jsonl") if e["event"] == "run_start"]
    packed = any(kind.startswith("packed ") for kind in start["dtypes"])
    assert packed is (recipe.weight_format == "nf4")
    train(replace(recipe, distributed=load_recipe("auto").distributed), show_progress=False)
    two, one = (saved_weights(path) for path in (run, *({*Path("runs").iterdir()} - {run})))
    assert two.keys() == one.keys() != set()
    assert any(not torch.equal(two[key], one[key]) for key in two), "half as many documents"
    losses = [
        [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (run, *({*Path("runs").iterdir()} - {run}))
    ]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.01)  # of the same first document


def saved_weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = run.rglob("*.safetensors")
    return load_file(file)

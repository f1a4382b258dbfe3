"""J4: no key of a recipe is inert. Each is changed, and what the runner builds must differ."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rematic.attachment import attach
from rematic.recipes import Recipe, RecipeError, load_recipe
from rematic.training.data import load_data
from rematic.training.model import name_attention
from rematic.training.model_config import build_config, hub_options, source_of
from rematic.training.optimization import build_optimizer, build_schedule
from rematic.training.ranks import find_ranks
from rematic.training.run import train
from rematic.training.strategies import build_strategy
from rematic.training.tiled import choose_tiled_loss
from tests.training.small import ENCODER, T5, TINY, prepare, tiny

LORA = ("tuning.method=lora",)
QLORA = ("tuning.method=qlora",)
ROWS = ("data.source=rows.jsonl", "data.max_documents=null")


@pytest.fixture(autouse=True)
def in_a_folder_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "text": f"question {n} " * (n + 1),
            "other": f"another {n}",
            "answer": f"answer {n}",
            "class": n % 2,
            "named": ["no", "yes"][n % 2],
            "chat": [
                {"role": "user", "content": f"hello {n}"},
                {"role": "assistant", "content": f"bye {n}"},
            ],
        }
        for n in range(4)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("rows.jsonl", "more.jsonl"):
        (tmp_path / name).write_text(text if name == "rows.jsonl" else text[: text.index("\n") + 1])
    for name, begin in (("a.jinja", "<"), ("b.jinja", "[")):
        (tmp_path / name).write_text(
            "{% for m in messages %}" + begin + "{{ m.role }}:{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}" + begin + "assistant:{% endif %}"
        )


def batches(*overrides: str) -> object:
    """Every batch of two epochs, as plain numbers."""
    loader = load_data(tiny(*overrides)).loader
    made = []
    for epoch in range(2):
        loader.finished = epoch * len(loader)
        made.append([{key: value.tolist() for key, value in batch.items()} for batch in loader])
    return made


def held_out(*overrides: str) -> object:
    """The documents to evaluate on."""
    evaluation = load_data(tiny(*overrides)).evaluation
    return None if evaluation is None else [row.ids for row in evaluation.examples]


def built_model(*overrides: str) -> object:
    """Names, shapes, types and first numbers of all weights, and how layers compute."""
    _, _, model = prepare(*overrides)
    adapters = getattr(model, "peft_config", {}).values()
    layers = [
        (type(m).__name__, getattr(m, "compute_dtype", None), getattr(state, "threshold", None))
        for m in model.modules()
        for state in (getattr(m, "state", None),)
    ]
    weights = [
        (name, tuple(p.shape), p.dtype, p.requires_grad, str(p.flatten()[:3].tolist()))
        for name, p in model.named_parameters()
    ]
    nested = [w.quant_state.nested for w in model.parameters() if hasattr(w, "quant_state")]
    return weights, [str(vars(one)) for one in adapters], layers, nested, name_attention(model)


def built_optimizer(*overrides: str) -> object:
    """The optimizer's class and options, and the rates of eight steps."""
    training = tiny(*overrides).training
    weights = [torch.nn.Parameter(torch.ones(8, 8)), torch.nn.Parameter(torch.ones(8))]
    optimizer = build_optimizer(weights, training)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    factor = build_schedule(optimizer, training, total_steps=8).lr_lambdas[0]
    return type(optimizer).__name__, groups, [factor(step) for step in range(8)]


def attached(*overrides: str) -> object:
    """What a session is told."""
    recipe = tiny(*overrides)
    _, _, model = prepare()
    session = attach(model, recipe=recipe)
    told = dataclasses.replace(session.settings, journal=None)
    facts = session.policy, session.budget_bytes, sorted(session.unit_classes), str(told)
    session.detach()
    return facts


def tiled(*overrides: str) -> object:
    """Whether the loss runs in slices."""
    recipe = tiny(*overrides)
    return choose_tiled_loss(recipe, build_config(recipe.model, max_length=8)).policy.tiled_loss


def finished_run(*overrides: str) -> object:
    """Steps, files, last loss and evaluations of a whole run."""
    summary = train(load_recipe("tiny-cpu", [*TINY, *overrides]), show_progress=False)
    made = [path for path in Path().rglob("*") if path.is_file() and len(path.parts) > 1]
    evaluated = [path.read_text() for path in made if path.name == "evaluation.jsonl"]
    for folder in {path.parts[0] for path in made}:
        shutil.rmtree(folder)
    return summary.steps, sorted(map(str, made)), summary.last_loss, evaluated


Facts = Callable[..., object]
CHANGES: list[tuple[str, Facts, tuple[str, ...], str]] = [
    # key, what shows it, what must be said besides, the other value
    ("model.task", built_model, ROWS, "model.task=sequence-classification data.label_field=class"),
    ("model.type", built_model, (), "mistral"),
    ("model.config.hidden_size", built_model, (), "64"),
    ("model.dtype", built_model, (), "bf16"),
    ("model.attention", built_model, (), "eager"),
    ("tuning.method", built_model, (), "lora"),
    ("tuning.r", built_model, LORA, "4"),
    ("tuning.alpha", built_model, LORA, "4.0"),
    ("tuning.dropout", built_model, LORA, "0.5"),
    ("tuning.targets", built_model, LORA, "[q_proj]"),
    ("tuning.modules_to_save", built_model, LORA, "[lm_head]"),
    ("tuning.rslora", built_model, LORA, "true"),
    ("quantization.format", built_model, LORA, "int8"),
    ("quantization.double", built_model, QLORA, "false"),
    ("quantization.compute_dtype", built_model, QLORA, "fp32"),
    ("quantization.storage_dtype", built_model, QLORA, "bf16"),
    (
        "quantization.outlier_threshold",
        built_model,
        (*LORA, "quantization.format=int8"),
        "3.0",
    ),
    ("quantization.skip", built_model, QLORA, "[o_proj]"),
    ("data.source", batches, (), "rows.jsonl"),
    ("data.text_field", batches, ROWS, "other"),
    ("data.target_field", batches, ROWS, "answer"),
    (
        "data.messages_field",
        batches,
        ROWS,
        "data.messages_field=chat data.chat_template=a.jinja",
    ),
    (
        "data.chat_template",
        batches,
        (*ROWS, "data.messages_field=chat", "data.chat_template=a.jinja"),
        "b.jinja",
    ),
    ("data.answers_only", batches, (*ROWS, "data.target_field=answer"), "false"),
    ("data.max_length", batches, (), "20"),
    ("data.overlong", batches, (), "split"),
    ("data.max_documents", batches, (), "2"),
    ("data.order", batches, (*ROWS,), "longest-first"),
    ("data.batch_size", batches, (), "2"),
    ("data.packing", batches, (), "true"),
    ("data.pad_to_multiple", batches, (), "32"),
    ("data.mask_share", batches, ENCODER, "0.6"),
    ("evaluation.source", held_out, (), "more.jsonl"),
    ("evaluation.holdout", held_out, (), "0.5"),
    ("evaluation.max_documents", held_out, ("evaluation.holdout=0.5",), "1"),
    ("evaluation.every_steps", finished_run, ("evaluation.holdout=0.25",), "1"),
    ("training.optimizer", built_optimizer, (), "adafactor"),
    ("training.learning_rate", built_optimizer, (), "0.5"),
    ("training.weight_decay", built_optimizer, (), "0.5"),
    ("training.schedule", built_optimizer, (), "cosine"),
    ("training.final_share", built_optimizer, ("training.schedule=linear",), "0.5"),
    ("training.warmup_steps", built_optimizer, (), "3"),
    ("training.epochs", finished_run, (), "2"),
    ("training.max_steps", finished_run, (), "1"),
    ("training.clip_norm", finished_run, ("training.optimizer=sgd",), "0.001"),
    ("training.accumulate", finished_run, (), "2"),
    ("training.precision", finished_run, (), "bf16"),
    ("training.seed", built_model, (), "1"),
    ("run.dir", finished_run, (), "elsewhere"),
    ("run.name", finished_run, (), "other"),
    ("run.save", finished_run, (), "full"),
    ("memory.budget", attached, (), "128MiB"),
    ("memory.reserve", attached, (), "0.5"),
    ("policy.start", attached, (), "recompute"),
    ("policy.units", attached, (), "['model.layers.0']"),
    ("policy.op_retry", attached, (), "never"),
    ("policy.allow_lossy", attached, (), "true"),
    ("policy.allow_tile", attached, (), "true"),
    ("policy.tiled_loss", tiled, (), "always"),
    ("control.attempts", attached, (), "2"),
    ("control.allow_split", attached, (), "true"),
    ("control.adapt", attached, (), "false"),
    ("control.probation_steps", attached, (), "3"),
    ("control.cool_down_steps", attached, (), "3"),
    ("control.window_steps", attached, (), "3"),
    ("goals.headroom_min", attached, (), "0.3"),
    ("goals.slowdown_max", attached, (), "1.1"),
    ("goals.loss_tolerance", attached, (), "0.1"),
    ("goals.gradient_tolerance", attached, (), "0.1"),
    ("goals.ooms_max", attached, (), "3"),
    ("goals.switches_max", attached, (), "1"),
    ("goals.throughput_min", attached, (), "1.5"),
]
"""The rest are shown where their effect is: `SHOWN_ELSEWHERE`."""

SHOWN_ELSEWHERE = {
    "model.id": "test_saved_models",
    "model.path": "test_saved_models",
    "model.revision": "test_saved_models",
    "model.trust_remote_code": "test_saved_models",
    "data.format": "test_tables",
    "data.subset": "test_tables",
    "data.split": "test_tables",
    "data.label_field": "test_examples",
    "data.labels": "test_examples",
    "data.tokenizer": "test_tokens",
    "training.threads": "below",
    "distributed.strategy": "below",
    "distributed.devices": "below",
    "memory.probe": "tests/test_attachment.py",
    "memory.heap_cap": "tests/training/test_heap_cap.py",
    "memory.scratch_dir": "tests/activations/test_moving.py",
    "policy.rules": "tests/test_attachment.py",
    "policy.trust": "tests/activations/test_safety.py",
    "policy.routers": "tests/activations/test_routing.py",
    "policy.planner": "tests/test_model_planner.py",
    "control.escalation": "tests/control/test_escalation.py",
    "run.checkpoint_every_steps": "tests/training/test_recorder.py",
    "planned_on": "tests/cli",
    "measured_on": "tests/cli",
}


@pytest.mark.parametrize(("key", "facts", "given", "other"), CHANGES, ids=[c[0] for c in CHANGES])
def test_changing_a_key_changes_what_is_built(
    key: str, facts: Facts, given: tuple[str, ...], other: str
) -> None:
    changed = other.split() if "=" in other else [f"{key}={other}"]
    before = facts(*given)
    if facts is not finished_run:  # (whose losses are the same too, as other tests show)
        assert facts(*given) == before
    assert facts(*given, *changed) != before


def test_every_key_is_in_one_of_the_tables() -> None:
    keys = set()
    for section in dataclasses.fields(Recipe):
        value = getattr(Recipe(), section.name)
        if not dataclasses.is_dataclass(value):
            continue
        if section.name in ("planned_on", "measured_on"):
            keys.add(section.name)
            continue
        keys |= {f"{section.name}.{field.name}" for field in dataclasses.fields(value)}
    shown = {key for key, *_ in CHANGES} | set(SHOWN_ELSEWHERE)
    assert keys - shown - {"model.config"} == set()
    assert shown - keys - {"model.config.hidden_size"} == set()


def test_an_unknown_key_names_the_nearest() -> None:
    for wrong, near in (
        ("tuning.rank=4", "r"),
        ("tuning.dropuot=0.1", "dropout"),
        ("quantization.doubel=true", "double"),
        ("data.packin=true", "packing"),
        ("trainig.epochs=1", "training"),
    ):
        with pytest.raises(RecipeError) as caught:
            tiny(wrong)
        assert "is an unknown key" in str(caught.value)
        if near != "r":
            assert f"did you mean {near}?" in str(caught.value)


def test_the_strategy_and_the_ranks_are_those_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {}
    for strategy, devices in (("single", 1), ("ddp", 2), ("fsdp2", 2)):
        recipe = tiny(f"distributed.strategy={strategy}", f"distributed.devices={devices}")
        names[strategy] = type(build_strategy(recipe, probe=None, journal=None)).__name__
        assert find_ranks(recipe).num_ranks == devices
    assert names == {
        "single": "RecomputeStrategy",
        "ddp": "RecomputeDDPStrategy",
        "fsdp2": "RecomputeModelParallelStrategy",
    }
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="LOCAL_RANK is 1, but REMATIC_RUN_DIRECTORY is not set"):
        find_ranks(tiny("distributed.strategy=ddp", "distributed.devices=2"))
    assert find_ranks(tiny()).is_first


def test_the_threads_are_those_of_the_recipe() -> None:
    before = torch.get_num_threads()
    try:
        train(tiny("training.threads=2", "training.max_steps=1"), show_progress=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_place_of_the_weights_reaches_the_hub() -> None:
    recipe = load_recipe(
        "auto", ["model.id=a/b", "model.revision=v2", "model.trust_remote_code=true"]
    )
    assert source_of(recipe.model) == "a/b"
    assert hub_options(recipe.model) == {"revision": "v2", "trust_remote_code": True}


def test_the_tasks_build_their_models() -> None:
    names = {
        ENCODER: "ModernBertForMaskedLM",
        (*T5, *ROWS, "data.target_field=answer"): "T5ForConditionalGeneration",
    }
    for overrides, name in names.items():
        _, _, model = prepare(*overrides)
        assert type(model).__name__ == name

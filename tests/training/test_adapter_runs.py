"""Whole runs with adapters: resuming, what a checkpoint holds, 8-bit activations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rematic.journal import read_journal
from rematic.recipes import RecipeError, load_recipe
from rematic.training.model_config import build_config
from rematic.training.prepared_model import measure_recipe, prepare_empty_model
from rematic.training.run import train
from tests.training.small import TINY, prepare, tiny

QLORA = ("tuning.method=qlora", "tuning.r=4", "tuning.dropout=0.3", "run.save=adapter")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def losses(run: str) -> list[float]:
    text = (Path("runs") / run / "metrics.jsonl").read_text()
    return [json.loads(line)["loss"] for line in text.splitlines()]


def test_a_resumed_run_draws_the_random_numbers_of_a_whole_one() -> None:
    train(tiny(*QLORA, "training.epochs=2", "run.name=whole"), show_progress=False)
    train(tiny(*QLORA, "run.name=parts"), show_progress=False)
    train(
        tiny(*QLORA, "training.epochs=2", "run.name=parts"),
        resume="runs/parts",
        show_progress=False,
    )
    assert losses("parts") == losses("whole")
    whole, parts = (
        load_file(Path("runs") / name / "adapter" / "adapter_model.safetensors")
        for name in ("whole", "parts")
    )
    assert all(torch.equal(parts[name], value) for name, value in whole.items())
    assert losses("whole")[0] != losses("whole")[4]


@pytest.mark.parametrize("form", ["tuning.method=qlora", "tuning.method=full"])
def test_a_checkpoint_holds_what_is_trained(form: str) -> None:
    train(tiny(form), show_progress=False)
    saved = torch.load("runs/tiny-cpu/last.ckpt", weights_only=True)["state_dict"]
    _, _, model = prepare(form)
    trained = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    assert set(saved) == trained


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("tuning.r=8",), "tuning.r is 8, the run was trained with 4"),
        (("tuning.targets=[q_proj]",), "tuning.targets is ('q_proj',), the run was trained with"),
        (("quantization.double=false",), "quantization.double is False, the run was trained"),
        (("data.pad_to_multiple=16", "data.batch_size=2"), "data.batch_size is 2, the run was"),
    ],
    ids=["rank", "targets", "scales", "batch"],
)
def test_refuses_to_resume_with_another_adapter_or_other_batches(
    changes: tuple[str, ...], message: str
) -> None:
    train(tiny(*QLORA, "training.max_steps=1"), show_progress=False)
    with pytest.raises(ValueError, match=re.escape(message)):
        train(tiny(*QLORA, *changes), resume="runs/tiny-cpu", show_progress=False)


BAD = [
    (
        ("tuning.method=lora", "tuning.targets=[q_prj]"),
        "tuning.targets names 'q_prj', but no module of this model is called so, did you mean "
        "'q_proj'?; expected the end of a module's name, one of ",
    ),
    (
        ("tuning.method=lora", "tuning.modules_to_save=[lm_hed]"),
        "tuning.modules_to_save names 'lm_hed', but no module of this model is called so, did you",
    ),
    (
        ("tuning.method=lora", "tuning.targets=[mlp]"),
        "tuning.targets cannot be adapted (Target module LlamaMLP(",
    ),
    (
        ("tuning.method=qlora", "quantization.skip=[router]"),
        "quantization.skip names 'router', but no linear layer of this model is called so",
    ),
    (
        (
            "tuning.method=lora",
            "quantization.format=int8",
            "model.type=mixtral",
            "model.config.num_local_experts=2",
        ),
        "the experts of this model are fused into tensors that bitsandbytes holds in 4 bits only",
    ),
    (("data.pad_to_multiple=3000", "data.max_length=4000"), "has positions for 4096 tokens"),
    (
        (
            "model.task=masked-lm",
            "model.type=roberta",
            "model.config={vocab_size: 320, hidden_size: 32, num_hidden_layers: 2,"
            " num_attention_heads: 2, max_position_embeddings: 48, pad_token_id: 1}",
        ),
        # of 48 rows one is of padding, and the one before it of no token
        "has 48 tokens, but the model has positions for 46 tokens; write data.max_length=46",
    ),
    (
        ("model.dtype=bf16", "model.attention=flash_attention_2"),
        "is 'flash_attention_2', which has no backward on a CPU, where this recipe is trained",
    ),
    (
        ("data.packing=true", "model.attention=flex_attention"),
        "is 'flex_attention', which has no backward on a CPU, where this recipe is trained",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=[bad[0][-1] for bad in BAD])
def test_what_fits_no_module_is_refused_before_a_weight_is_made(
    overrides: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rematic.training import prepared_model

    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights were made")

    monkeypatch.setattr(prepared_model, "build_model", never)
    with pytest.raises(ValueError, match=re.escape(message)):
        train(tiny(*overrides), show_progress=False)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("method", ["lora", "dora", "qlora"])
def test_measures_an_adapter_without_its_weights(method: str) -> None:
    recipe = tiny(f"tuning.method={method}", "tuning.modules_to_save=[lm_head]")
    config = build_config(recipe.model, max_length=48)
    empty = prepare_empty_model(recipe, config=config)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    vast = tiny(f"tuning.method={method}", "tuning.r=1000000000")
    assert measure_recipe(vast, config=config).num_trainable > 10**12


@pytest.mark.parametrize("save", ["full", "adapter+full"])
def test_a_4_bit_model_is_not_saved_as_a_full_one(save: str) -> None:
    with pytest.raises(RecipeError, match=r"run\.save is "):
        load_recipe("tiny-cpu", [*TINY, "tuning.method=qlora", f"run.save={save}"])


def test_activations_in_8_bits_are_asked_for_and_stay_near_the_lossless_run() -> None:
    # (storages of less than a megabyte are not compressed)
    wide = ("model.config.intermediate_size=1024", "data.max_length=512", "memory.budget=256MiB")
    common = ("tuning.method=qlora", "data.max_documents=6", "training.learning_rate=0.01", *wide)
    with pytest.raises(RecipeError, match="expected a lossless policy, since allow_lossy is false"):
        tiny("policy.start=compress")
    for name, policy in (
        ("exact", ("policy.start=recompute",)),
        ("lossy", ("policy.start=compress", "policy.allow_lossy=true")),
    ):
        train(tiny(*common, *policy, f"run.name={name}"), show_progress=False)
    exact, lossy = losses("exact"), losses("lossy")
    differences = [abs(a - b) / a for a, b in zip(exact, lossy, strict=True)]
    assert 0 < max(differences) < 0.01  # the gate
    assert exact[-1] < 0.97 * exact[0]
    events = read_journal(Path("runs/lossy/journal.jsonl"))
    errors = [e["figures"] for e in events if e.get("kind") == "compress"]
    assert errors
    assert all(0 < one["relative_rms"] < 0.02 for one in errors)

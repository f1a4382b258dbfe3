"""Models by a folder or by their name on the hub, which is faked: nothing is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaForCausalLM,
)

from rematic.recipes import Recipe, load_recipe
from rematic.training.data import load_data
from rematic.training.model_config import build_config
from rematic.training.prepared_model import prepare_model
from rematic.training.run import train
from tests.training.saved import SIZES, save_model, save_tokenizer

TEXT = '{"text": "hello now bye"}\n{"text": "bye hello"}\n'
CHAT = json.dumps(
    {"chat": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "bye now"}]}
)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text(TEXT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "saved")


def recipe_for(*overrides: str) -> Recipe:
    given = ("data.source=d.jsonl", "data.max_length=16", "memory.budget=64MiB", "run.save=none")
    return load_recipe("auto", [*given, *overrides])


def prepared(recipe: Recipe) -> torch.nn.Module:
    data = load_data(recipe)
    config = build_config(
        recipe.model,
        max_length=data.max_length,
        num_tokens=data.num_tokens,
        marks=data.tokenizer.marks(),
    )
    return prepare_model(recipe, config=config)


def test_the_weights_of_a_folder_are_trained(folder: Path) -> None:
    model = prepared(recipe_for(f"model.path={folder}"))
    saved = LlamaForCausalLM.from_pretrained(folder)
    assert model.training
    assert all(map(torch.equal, model.parameters(), saved.parameters()))
    summary = train(recipe_for(f"model.path={folder}"), show_progress=False)
    assert summary.steps == 2


def test_a_model_without_a_pad_token_learns_classes(tmp_path: Path, folder: Path) -> None:
    """The last token that counts is found by it; Llama 3.1's config names none."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("pad_token_id", None)
    (folder / "config.json").write_text(json.dumps(config))
    rows = [{"text": "hello " * (n + 1), "class": n % 2} for n in range(4)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = recipe_for(
        f"model.path={folder}",
        "model.task=sequence-classification",
        "data.label_field=class",
        "data.batch_size=2",
    )
    assert train(recipe, show_progress=False).status == "finished"


def test_the_tokenizer_is_that_of_the_model(folder: Path) -> None:
    data = load_data(recipe_for(f"model.path={folder}"))
    assert [example.ids for example in data.loader.examples] == [(6, 8, 7, 2), (7, 6, 2)]
    bytes_instead = load_data(recipe_for(f"model.path={folder}", "data.tokenizer=bytes"))
    assert len(bytes_instead.loader.examples[0].ids) == 15


def test_a_tokenizer_may_have_a_folder_of_its_own(tmp_path: Path, folder: Path) -> None:
    other = save_tokenizer(tmp_path / "words", mask=True)
    data = load_data(recipe_for(f"model.path={folder}", f"data.tokenizer={other}"))
    assert data.tokenizer.mask_id == 9


def test_a_conversation_is_written_by_the_template_of_the_model(
    tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "d.jsonl").write_text(CHAT)
    (example,) = load_data(
        recipe_for(f"model.path={folder}", "data.messages_field=chat")
    ).loader.examples
    # <s>user hello</s><s>assistant bye now</s>, of which "bye now</s>" is the answer
    answer = [label for label in example.labels if label != -100]
    assert len(answer) < len(example.ids)
    assert answer == list(example.ids[-len(answer) :])


def test_packed_weights_are_loaded_packed(folder: Path) -> None:
    recipe = recipe_for(f"model.path={folder}", "tuning.method=qlora", "model.dtype=bf16")
    model = prepared(recipe)
    kinds = {type(p).__name__ for p in model.parameters()}
    assert "Params4bit" in kinds
    head = model.get_base_model().lm_head  # type: ignore[operator, union-attr]
    assert type(head) is torch.nn.Linear
    assert head.weight.dtype == torch.bfloat16
    assert train(recipe, show_progress=False).status == "finished"


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any, Any]]:
    """The hub holds the folder under the name org/tiny, and notes who asks for what."""
    asked: list[tuple[str, str, Any, Any]] = []
    for kind in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        real = kind.from_pretrained

        def fake(
            name: str, *, kind: Any = kind, real: Callable[..., Any] = real, **options: Any
        ) -> Any:
            if name != "org/tiny":
                return real(name, **options)
            revision, trust = options.pop("revision"), options.pop("trust_remote_code")
            asked.append((kind.__name__, name, revision, trust))
            return real(folder, **options)

        monkeypatch.setattr(kind, "from_pretrained", fake)
    return asked


@pytest.mark.parametrize("trust", [False, True])
def test_a_model_of_the_hub(hub: list[tuple[str, str, Any, Any]], trust: bool) -> None:
    overrides = ["model.id=org/tiny", "model.revision=v2"]
    overrides += ["model.trust_remote_code=true"] if trust else []
    model = prepared(recipe_for(*overrides))
    assert type(model) is LlamaForCausalLM
    assert {(kind, name) for kind, name, *_ in hub} == {
        ("AutoConfig", "org/tiny"),
        ("AutoModelForCausalLM", "org/tiny"),
        ("AutoTokenizer", "org/tiny"),
    }
    assert {(revision, trusted) for *_, revision, trusted in hub} == {("v2", trust)}


def test_a_config_beside_the_name_must_be_that_of_the_weights(
    hub: list[tuple[str, str, Any, Any]],
) -> None:
    written = ["model.id=org/tiny", "model.type=llama"]
    same = recipe_for(*written, f"model.config={json.dumps(SIZES)}")
    # the plan asks nobody
    assert build_config(same.model, max_length=8, num_tokens=1).hidden_size == 32
    assert hub == []
    assert type(prepared(same)) is LlamaForCausalLM
    other = recipe_for(*written, f"model.config={json.dumps({**SIZES, 'hidden_size': 64})}")
    message = (
        "model.config.hidden_size is 64, but model.id 'org/tiny' has 32; write that, or remove"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        prepared(other)
    with pytest.raises(ValueError, match=r"is 'gpt2', but model\.id 'org/tiny' is of type"):
        prepared(recipe_for("model.id=org/tiny", "model.type=gpt2"))


def test_without_a_network_a_name_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = r"the tokenizer of model\.id 'org/absent' cannot be loaded \(.*check the name, this"
    with pytest.raises(ValueError, match=message):
        train(recipe_for("model.id=org/absent"), show_progress=False)
    assert not (tmp_path / "runs").exists()
    bytes_read = recipe_for("model.id=org/absent", "data.tokenizer=bytes")
    with pytest.raises(ValueError, match=r"the config of model\.id 'org/absent' cannot be loaded"):
        train(bytes_read, show_progress=False)
    assert not (tmp_path / "runs").exists()


def test_code_that_comes_with_weights_does_not_run_unless_the_recipe_says_so(
    folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    recipe = recipe_for(f"model.path={folder}", "data.tokenizer=bytes")
    with pytest.raises(ValueError, match=r"write model\.trust_remote_code: true"):
        train(recipe, show_progress=False)
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"the weights of model\.path .* cannot be loaded"):
        prepared(recipe_for(f"model.path={folder}"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path is '.*', where there is no config\.json"):
        prepared(recipe_for(f"model.path={tmp_path}", "data.tokenizer=bytes"))


def test_a_tokenizer_without_template_or_mask_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "plain", template=None)
    (tmp_path / "d.jsonl").write_text(CHAT)
    with pytest.raises(ValueError, match="has no chat template; name a file with one by data"):
        load_data(recipe_for(f"model.path={folder}", "data.messages_field=chat"))
    (tmp_path / "d.jsonl").write_text(TEXT)
    with pytest.raises(ValueError, match="has no mask token; expected one of an encoder"):
        load_data(recipe_for(f"model.path={folder}", "model.task=masked-lm"))


def test_a_vocabulary_that_is_too_small_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.dumps({**SIZES, "vocab_size": 5})
    recipe = recipe_for("model.type=llama", f"model.config={config}", f"data.tokenizer={folder}")
    with pytest.raises(ValueError, match="vocab_size is 5; the tokenizer has 9 tokens: write 9"):
        prepared(recipe)


def test_the_language_model_inside_one_that_also_sees_is_trained(tmp_path: Path) -> None:
    text = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 16}
    seeing = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text,
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            mm_tokens_per_image=4,
        )
    )
    seeing.save_pretrained(tmp_path / "seeing")
    save_tokenizer(tmp_path / "seeing")
    config = ", ".join(f"{key}: {value}" for key, value in text.items())
    model = prepared(
        recipe_for(
            *(f"model.path={tmp_path / 'seeing'}", "model.type=gemma3_text"),
            f"model.config={{{config}}}",
        )
    )
    inner = seeing.model.language_model.state_dict()
    assert all(torch.equal(model.model.state_dict()[key], inner[key]) for key in inner)


def test_weights_that_lack_a_part_are_refused(tmp_path: Path, folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 tensors of a causal-lm model, such as model\.la"):
        prepared(recipe_for(f"model.path={folder}"))

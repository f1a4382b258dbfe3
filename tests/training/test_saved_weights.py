"""Weights are saved whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rematic.training.model import DTYPES
from rematic.training.run import train
from rematic.training.saved_weights import save_weights
from tests.training.small import prepare, tiny


class FullDisk:
    """A tokenizer for which there is no room."""

    def save_pretrained(self, folder: Path) -> None:
        assert list(Path(folder).glob("*.safetensors")), "the weights went first"
        (Path(folder) / "tokenizer.json").write_text("half of it")
        raise OSError("no space left on device")


@pytest.mark.parametrize("save", ["adapter", "merged"])
def test_an_interrupted_save_leaves_what_was_there(save: str, tmp_path: Path) -> None:
    recipe, _, model = prepare("tuning.method=lora", f"run.save={save}")
    with pytest.raises(OSError, match="no space left"):
        save_weights(recipe, model, tmp_path, tokenizer=FullDisk())
    assert list(tmp_path.iterdir()) == []
    recipe, _, model = prepare("tuning.method=lora", f"run.save={save}")
    (folder,) = save_weights(recipe, model, tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert list(tmp_path.iterdir()) == [folder]
    recipe, _, model = prepare("tuning.method=lora", f"run.save={save}", "training.seed=1")
    with pytest.raises(OSError, match="no space left"):
        save_weights(recipe, model, tmp_path, tokenizer=FullDisk())
    assert list(tmp_path.iterdir()) == [folder]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    save_weights(recipe, model, tmp_path)  # as a resumed run does
    assert list(tmp_path.iterdir()) == [folder]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} != before


LORA, DORA, QLORA = (f"tuning.method={name}" for name in ("lora", "dora", "qlora"))
GPT2 = (
    "model.type=gpt2",
    "model.config={vocab_size: 320, n_embd: 32, n_layer: 2, n_head: 2}",
)
EXACT, COARSE = 1e-5, 0.02
"""Over the largest logit: in 32 bits; where weights or products are in 16 or 8 bits."""
MERGES = [
    ((LORA,), EXACT),
    ((LORA, "tuning.rslora=true"), EXACT),
    ((LORA, "tuning.dropout=0.5"), EXACT),
    ((LORA, "tuning.modules_to_save=[lm_head, embed_tokens]"), EXACT),
    (
        (LORA, "tuning.modules_to_save=[embed_tokens]", "model.config.tie_word_embeddings=true"),
        EXACT,
    ),
    ((LORA, "tuning.targets=[embed_tokens, q_proj]"), EXACT),
    ((LORA, *GPT2), EXACT),
    ((LORA, "model.dtype=bf16"), COARSE),
    ((LORA, "quantization.format=int8"), COARSE),
    ((DORA,), EXACT),
    ((DORA, "quantization.format=nf4", "quantization.compute_dtype=fp32"), EXACT),
    ((QLORA, "quantization.compute_dtype=fp32"), EXACT),
    ((QLORA, "quantization.compute_dtype=fp32", "quantization.double=false"), EXACT),
    (
        (
            QLORA,
            "quantization.compute_dtype=fp32",
            "tuning.modules_to_save=[embed_tokens]",
            "model.config.tie_word_embeddings=true",
        ),
        EXACT,
    ),
    ((QLORA, "quantization.format=fp4", "quantization.skip=[o_proj]"), COARSE),
]


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
@pytest.mark.parametrize(("said", "tolerance"), MERGES, ids=lambda value: str(value))
def test_merged_weights_give_the_logits_of_model_and_adapter(
    said: tuple[str, ...], tolerance: float, tmp_path: Path
) -> None:
    """With an adapter that changes much, as a short training would not leave one."""
    recipe, data, model = prepare(*said, "run.save=merged")
    model.eval()
    question = {"input_ids": next(iter(data.loader))["input_ids"], "use_cache": False}
    torch.manual_seed(1)
    with torch.no_grad():
        before = model(**question).logits
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
        wanted = model(**question).logits
        save_weights(recipe, model, tmp_path)
        dtype = DTYPES[recipe.model.dtype]
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype).eval()
        found = merged(**question).logits
    assert float((before - wanted).abs().max()) > 0.1 * float(wanted.abs().max())
    assert float((found - wanted).abs().max()) < tolerance * float(wanted.abs().max())
    assert {parameter.dtype for parameter in merged.parameters()} == {dtype}
    assert getattr(merged.config, "quantization_config", None) is None


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_one_tied_layer_is_not_merged(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tied = ("tuning.method=lora", f"tuning.targets=[{target}, q_proj]")
    recipe = tiny(*tied, "model.config.tie_word_embeddings=true", "run.save=merged")
    with pytest.raises(ValueError, match=f"adapts '{target}', whose weight is that of '"):
        train(recipe, show_progress=False)
    assert not list(tmp_path.iterdir())


def test_a_model_without_linear_layers_is_not_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"a model of type 'gpt2' has no linear layers besides"):
        train(tiny(QLORA, *GPT2), show_progress=False)
    assert not list(tmp_path.iterdir())

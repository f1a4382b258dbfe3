"""Weights in 4 and 8 bits: what they hold, what they keep for backward, what is saved of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematic
from rematic.recipes import QuantizationConfig, Recipe, load_recipe
from rematic.training.data import TrainingData
from rematic.training.dtype_inventory import check_dtypes, take_inventory
from rematic.training.loss import model_loss
from rematic.training.model_config import build_config
from rematic.training.prepared_model import base_model, measure_recipe
from rematic.training.quantize import held_bytes
from rematic.training.run import train
from tests.training.small import prepare, tiny

QLORA = ("tuning.method=qlora", "tuning.r=4")
INT8 = ("tuning.method=lora", "tuning.r=4", "quantization.format=int8")
MIXTRAL = (
    "model.type=mixtral",
    "model.config={vocab_size: 320, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,"
    " num_attention_heads: 2, num_key_value_heads: 2, num_local_experts: 4}",
)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def roles(model: nn.Module) -> dict[tuple[str, bool], set[str]]:
    found: dict[tuple[str, bool], set[str]] = {}
    for held in take_inventory(model):
        found.setdefault((held.role, held.is_trained), set()).add(held.dtype)
    return found


def packed_states(model: nn.Module) -> dict[str, list[Tensor]]:
    """Codes and scales of every packed weight."""
    states: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        weight: Any = parameter
        if type(weight).__name__ == "Params4bit":
            state = weight.quant_state
            nested = [] if state.state2 is None else [state.state2.absmax]
            states[name] = [weight.data.clone(), state.absmax.clone(), *[x.clone() for x in nested]]
    return states


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_head_and_norms_have_the_type_of_the_other_weights(dtype: str) -> None:
    name = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    _, _, model = prepare(*QLORA, f"model.dtype={dtype}")
    assert roles(model) == {
        ("adapter", True): {"float32"},
        ("embedding", False): {name},
        ("head", False): {name},
        ("norm", False): {name},
        ("packed", False): {"uint8"},
    }


def test_what_the_usual_preparation_does_is_found() -> None:
    from peft import prepare_model_for_kbit_training

    recipe = tiny(*QLORA, "model.dtype=bf16")
    config = build_config(recipe.model, max_length=48)
    base = base_model(recipe, config=config)
    base.requires_grad_(False)
    check_dtypes(base, dtype=torch.bfloat16, is_quantized=True)
    prepared = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    with pytest.raises(RuntimeError, match=r"7 frozen weights are not .*embed_tokens"):
        check_dtypes(prepared, dtype=torch.bfloat16, is_quantized=True)


def test_a_model_of_which_nothing_could_be_packed_is_found() -> None:
    _, _, model = prepare("tuning.method=lora")
    with pytest.raises(RuntimeError, match="no weight of the model is quantized although"):
        check_dtypes(model, dtype=torch.float32, is_quantized=True)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("form", ["nf4", "fp4"])
def test_the_bytes_of_packed_weights_are_known_before_there_are_any(
    form: Any, double: bool
) -> None:
    import bitsandbytes

    weight = torch.randn(130, 128)
    packed = bitsandbytes.nn.Params4bit(
        weight, requires_grad=False, compress_statistics=double, quant_type=form
    ).to("cpu")
    state = packed.quant_state
    scales = state.absmax.nbytes
    if double:
        scales += state.state2.absmax.nbytes + state.offset.nbytes
    config = QuantizationConfig(format=form, double=double)
    assert held_bytes(weight.numel(), config, form) == packed.nbytes + scales


@pytest.mark.parametrize("settings", [QLORA, INT8, (*MIXTRAL, *QLORA)], ids=["4", "8", "experts"])
def test_the_size_is_measured_without_weights(settings: tuple[str, ...]) -> None:
    recipe, _, model = prepare(*settings)
    config = build_config(recipe.model, max_length=48)
    size = measure_recipe(recipe, config=config)
    held = sum(p.nbytes for p in model.parameters())
    assert size.num_trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    scales = size.weight_bytes - held
    assert 0 <= scales < 0.05 * held


def one_step(model: nn.Module, data: TrainingData) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    model_loss(model, next(iter(data.loader))).backward()  # type: ignore[no-untyped-call]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("policy", ["keep", "selective", "recompute"])
@pytest.mark.parametrize(
    "settings",
    [
        (*QLORA, "tuning.dropout=0.2"),
        (*QLORA, "model.dtype=bf16", "quantization.double=false"),
        (*MIXTRAL, *QLORA),
        INT8,
    ],
    ids=["nf4", "bf16", "experts", "int8"],
)
def test_j3_gradients_are_those_of_the_plain_step(settings: tuple[str, ...], policy: str) -> None:
    _, data, model = prepare(*settings)
    plain = one_step(model, data)
    before = packed_states(model)
    session = rematic.attach(model, policy=policy, budget="1GiB")
    with session.step(next(iter(data.loader))):
        found = one_step(model, data)
    session.detach()
    assert len(found) == len(plain) > 0
    assert all(map(torch.equal, found, plain))
    after = packed_states(model)
    assert before.keys() == after.keys()
    for name, tensors in before.items():
        assert all(map(torch.equal, tensors, after[name]))


def test_j3_a_copy_keeps_the_state_of_its_packed_weights() -> None:
    _, data, model = prepare(*QLORA)
    plain = one_step(model, data)
    session = rematic.attach(model, policy="recompute", budget="1GiB")
    copied = copy.deepcopy(model)
    session.detach()
    assert packed_states(copied).keys() == packed_states(model).keys() != set()
    assert all(map(torch.equal, one_step(copied, data), plain))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "settings",
    [QLORA, INT8, ("tuning.method=dora", "tuning.r=4"), (*MIXTRAL, *QLORA)],
    ids=["qlora", "int8", "dora", "experts"],
)
def test_a_saved_adapter_gives_the_same_logits_in_plain_peft(settings: tuple[str, ...]) -> None:
    from peft import PeftModel

    recipe = tiny(*settings, "run.save=adapter+merged")
    recipe, trained, logits = _train_and_ask(recipe)
    config = build_config(recipe.model, max_length=48)
    base = base_model(recipe, config=config)
    again = PeftModel.from_pretrained(base, trained / "adapter").eval()
    with torch.no_grad():
        found = again(**_question()).logits
    assert torch.equal(found, logits)
    assert (trained / "adapter" / "adapter_model.safetensors").is_file()


def _question() -> dict[str, Any]:
    return {"input_ids": torch.arange(3, 43)[None], "use_cache": False}


def _train_and_ask(recipe: Recipe) -> tuple[Recipe, Path, Tensor]:
    """Trains, and asks the model itself before it is gone."""
    from rematic.training import fit

    answers: list[Tensor] = []
    save = fit.save_weights

    def ask_first(recipe: Recipe, model: nn.Module, folder: Path, **options: Any) -> list[Path]:
        model.eval()
        with torch.no_grad():
            answers.append(model(**_question()).logits)
        return save(recipe, model, folder, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "save_weights", ask_first)
        summary = train(recipe, show_progress=False)
    assert summary.status == "finished"
    return recipe, Path("runs") / summary.name, answers[0]


@pytest.mark.parametrize("settings", [QLORA, INT8, (*MIXTRAL, *QLORA)], ids=["4", "8", "experts"])
def test_merged_weights_need_no_adapter_and_no_bitsandbytes(settings: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM

    recipe = tiny(*settings, "run.save=merged")
    _, trained, logits = _train_and_ask(recipe)
    merged = AutoModelForCausalLM.from_pretrained(trained / "merged").eval()
    assert not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        found = merged(**_question()).logits
    # weights are the same; 4 bits multiply in bfloat16, 8 bits round activations
    assert float((found - logits).norm() / logits.norm()) < 0.02


def test_full_weights_are_a_model_of_transformers() -> None:
    from transformers import AutoModelForCausalLM

    recipe, trained, logits = _train_and_ask(load_recipe_with_weights())
    again = AutoModelForCausalLM.from_pretrained(trained / "model").eval()
    with torch.no_grad():
        assert torch.equal(again(**_question()).logits, logits)
    assert recipe.saved == ("full",)
    assert again.config.use_cache  # off while it trains


def load_recipe_with_weights() -> Recipe:
    from tests.training.small import TINY

    return load_recipe("tiny-cpu", [*TINY, "run.save=auto"])

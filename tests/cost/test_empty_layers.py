import dataclasses

import pytest
import torch

from rematic.cost import TraceSettings, language_model_batch, trace_profile, trace_recipe
from rematic.cost.fake_model import quantization_tensors
from rematic.cost.recipe_model import empty_recipe_model
from rematic.cost.step_trace import TracedModel
from rematic.recipes import ModelConfig, QuantizationConfig, Recipe, TuningConfig, load_recipe
from rematic.training.model_config import build_config
from rematic.training.prepared_model import prepare_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def recipe(**quantization):
    return Recipe(
        model=ModelConfig(type="llama", config=SIZES, dtype="bf16"),
        tuning=TuningConfig(method="qlora", r=4),
        quantization=QuantizationConfig(**quantization),
    )


def real_model(recipe):
    """The same model, its weights drawn and quantized by bitsandbytes itself."""
    return prepare_model(recipe, config=build_config(recipe.model, max_length=64)).train()


def described(model):
    return {
        name: (tuple(p.shape), p.dtype, p.requires_grad, type(p).__name__,
               [(tuple(t.shape), t.dtype) for t in quantization_tensors(p)])
        for name, p in model.named_parameters()
    }  # fmt: skip


@pytest.mark.parametrize("wanted", [{}, {"double": False}, {"storage_dtype": "bf16"}], ids=str)
def test_an_empty_model_is_the_real_one_without_weights(wanted):
    made = recipe(**wanted)
    empty = empty_recipe_model(made, max_length=64).model
    assert all(p.device.type == "meta" for p in empty.parameters())
    assert described(empty) == described(real_model(made))


def test_it_costs_what_the_real_one_costs():
    made = recipe()
    settings = TraceSettings(
        make_batch=language_model_batch,
        batch=1,
        padded=(False,),
        actions=(),
        autocast=torch.bfloat16,
        loss=lambda model, batch: model(**batch, use_cache=False).loss,
    )
    profiles = [
        trace_profile(model, settings)
        for model in (empty_recipe_model(made, max_length=64).model, real_model(made))
    ]
    assert profiles[0] == profiles[1]


def test_layers_in_8_bits_hold_a_byte_for_each_weight_and_a_scale_for_each_row():
    made = dataclasses.replace(
        recipe(), tuning=TuningConfig(method="lora"), quantization=QuantizationConfig(format="int8")
    )
    layer = empty_recipe_model(made, max_length=64).model.get_submodule(
        "base_model.model.model.layers.0.mlp.down_proj.base_layer"
    )
    assert (layer.weight.dtype, tuple(layer.weight.shape)) == (torch.int8, (64, 176))
    assert tuple(layer.state.SCB.shape) == (64,)


def test_layers_in_8_bits_are_traced_as_on_a_gpu():
    made = dataclasses.replace(
        recipe(),
        tuning=TuningConfig(method="lora", targets=("q_proj",)),
        quantization=QuantizationConfig(format="int8"),
    )
    profile = trace_recipe(made, on_accelerator=True, actions=())
    costs = profile.costs_at(batch=1, length=256)
    packed = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176)
    rest = 2 * (2 * 512 * 64 + 5 * 64)
    assert costs.fixed.weights > packed + rest
    assert costs.fixed.weights < 1.2 * (packed + rest)
    assert "bitsandbytes::int8_scaled_mm" in {op.name for op in costs.classes[0].ops}


@pytest.mark.parametrize("name", ["tiny-cpu-qlora", "tiny-cpu-int8"])
def test_quantized_layers_take_one_path_at_the_shortest_lengths(name, monkeypatch):
    """What engines learn of their scales in the first calls is learned before anything counts."""
    lengths = []
    run = TracedModel.run

    def counted(self, actions, batch, **options):
        lengths.append(batch["input_ids"].shape[1])
        return run(self, actions, batch, **options)

    monkeypatch.setattr(TracedModel, "run", counted)
    trace_recipe(load_recipe(name), on_accelerator=False, actions=())
    assert lengths == [32, 64, 96, 32, 64]

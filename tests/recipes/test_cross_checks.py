from __future__ import annotations

from pathlib import Path

import pytest

from rematic.recipes import Recipe, RecipeError, load_recipe

QLORA = "tuning: {method: qlora}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tuning: {method: qlora}\nquantization: {format: int8}",
            "2:24: quantization.format is 'int8'; expected nf4 or fp4, since tuning.method is qlora"
            "; write auto, or tuning.method: lora",
        ),
        (
            "tuning: {method: lora}\nquantization: {format: nf4}",
            "2:24: quantization.format is 'nf4'; expected none or int8, since tuning.method is lora"
            "; for LoRA over 4-bit weights write tuning.method: qlora",
        ),
        (
            "quantization: {format: int8}",
            "1:24: quantization.format is 'int8'; expected none, since tuning.method is full and"
            " weights in fewer bits cannot be trained; write tuning.method: qlora, or lora for"
            " int8",
        ),
        (
            "tuning: {method: lora}\nquantization: {double: false}",
            "2:24: quantization.double is false; expected nothing, since weights are held as none,"
            " where it has no effect; remove it, or change quantization.format",
        ),
        (
            "tuning: {method: qlora}\nquantization: {outlier_threshold: 5.0}",
            "2:35: quantization.outlier_threshold is 5.0; expected nothing, since weights are held"
            " as nf4, where it has no effect; remove it, or change quantization.format",
        ),
        (
            f"{QLORA}\nrun: {{save: full}}",
            "2:13: run.save is 'full'; expected adapter, merged, adapter+merged or none, since the"
            " weights are held as nf4 and are no full model; write merged for weights in"
            " model.dtype that need no adapter",
        ),
        (
            "tuning: {method: lora}\nrun: {save: full}",
            "2:13: run.save is 'full'; expected adapter, merged, adapter+merged or none, since"
            " tuning.method is lora; write merged for weights that need no adapter",
        ),
        (
            "run: {save: adapter}",
            "1:13: run.save is 'adapter'; expected auto, full or none, since tuning.method is full"
            " and there is no adapter; write auto",
        ),
        (
            "model: {task: sequence-classification}",
            "1:1: data.label_field is null; expected a key of the data, since model.task is"
            " sequence-classification; name the one that holds it, such as data.label_field=label",
        ),
        (
            "data: {label_field: y}",
            "1:21: data.label_field is 'y'; expected null, since model.task is causal-lm; remove"
            " it, or write model.task: sequence-classification",
        ),
        (
            "model: {task: seq2seq}\ndata: {source: x}",
            "2:7: data.target_field is null; expected a key of the data, since model.task is"
            " seq2seq; name the one that holds it, such as data.target_field=target",
        ),
        (
            "data: {mask_share: 0.3}",
            "1:20: data.mask_share is 0.3; expected null, since model.task is causal-lm; remove it,"
            " or write model.task: masked-lm",
        ),
        (
            "model: {task: masked-lm}\ndata: {packing: true}",
            "2:17: data.packing is true; expected false, since model.task is masked-lm; remove it",
        ),
        (
            "model: {attention: flash_attention_3}",
            "1:20: model.attention is 'flash_attention_3'; expected sdpa, eager or flex_attention,"
            " since flash attention takes 16 bits only and neither model.dtype nor"
            " training.precision is bf16; write model.dtype: bf16 or training.precision: bf16",
        ),
        (
            "model: {attention: flash_attention_2, dtype: bf16}\n"
            "data: {packing: true, batch_size: 2}",
            "2:35: data.batch_size is 2; expected 1, since flash attention keeps packed documents"
            " apart in one sequence only; write 1 and raise max_length or training.accumulate, or"
            " model.attention: sdpa",
        ),
        (
            "data: {packing: true, order: longest-first}",
            "1:30: data.order is 'longest-first'; expected shuffled or written, since packed"
            " sequences are about equally long; remove it, or packing",
        ),
        (
            "distributed: {strategy: ddp}",
            "1:14: distributed.devices is 1; expected 1 for the strategy single, and 2 or more for"
            " the others; write both, such as strategy: ddp, devices: 2",
        ),
    ],
)
def test_sections_that_do_not_fit_together(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value) == f"{path}:{message}"


SHARDED = ("tuning.method=qlora", "distributed.strategy=fsdp2", "distributed.devices=2")


def test_j2_sharded_4_bit_weights_must_be_stored_as_the_others_are() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("auto", [*SHARDED, "model.dtype=bf16"])
    assert "quantization.storage_dtype is 'uint8'; expected bf16, the model.dtype" in str(
        caught.value
    )
    assert str(caught.value).endswith("write quantization.storage_dtype: bf16")
    taken = load_recipe("auto", [*SHARDED, "model.dtype=bf16", "quantization.storage_dtype=bf16"])
    assert taken.quantization.storage_dtype == "bf16"
    with pytest.raises(RecipeError, match=r"expected fp32, the model\.dtype"):
        load_recipe("auto", [*SHARDED, "quantization.storage_dtype=bf16"])


LOSSY = ("policy.start=compress", "policy.allow_lossy=true", "goals.gradient_tolerance=0.1")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("control.adapt=false", "control.adapt is false and compress would never be taken back"),
        ("distributed.devices=2", "distributed.devices is 2 and batches run under two policies in"),
    ],
)
def test_compress_that_nobody_could_watch_is_refused(override: str, reason: str) -> None:
    given = [*LOSSY, override, *(["distributed.strategy=ddp"] if "=2" in override else [])]
    with pytest.raises(RecipeError) as caught:
        load_recipe("auto", given)
    assert f"goals.gradient_tolerance is 0.1; expected null, since {reason}" in str(caught.value)
    load_recipe("auto", [*given, "goals.gradient_tolerance=null"])
    load_recipe("auto", [*given, "policy.start=recompute"])


def test_a_recipe_says_what_is_held_and_what_is_saved() -> None:
    assert (Recipe().weight_format, Recipe().saved) == ("none", ("full",))
    qlora = load_recipe("auto", ["tuning.method=qlora"])
    assert (qlora.weight_format, qlora.saved) == ("nf4", ("adapter",))
    both = load_recipe("auto", ["tuning.method=lora", "run.save=adapter+merged"])
    assert both.saved == ("adapter", "merged")
    assert load_recipe("auto", ["run.save=none"]).saved == ()

"""Checks between the sections of a recipe: what one says must fit what the others say."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from rematic.recipes.field_checks import FieldError, spelled

if TYPE_CHECKING:
    from rematic.recipes.schema import Recipe

FOUR_BIT = ("nf4", "fp4")
"""Formats that pack two weights into a byte."""

_ANSWERING_TASKS = ("causal-lm", "seq2seq")
_TILED_TASKS = ("causal-lm", "masked-lm")


def check_sections(recipe: Recipe) -> None:
    """Refuse a recipe whose sections do not fit together.

    Raises:
        FieldError: its field is the path of the value, such as `quantization.format`.
    """
    _check_formats(recipe)
    _check_unused_quantization(recipe)
    _check_sharding(recipe)
    _check_saving(recipe)
    _check_data_for_task(recipe)
    _check_batches(recipe)
    _check_comparison(recipe)


def _require(recipe: Recipe, path: str, ok: bool, *, expected: str, remedy: str) -> None:
    if not ok:
        section, _, key = path.partition(".")
        value = spelled(getattr(getattr(recipe, section), key))
        raise FieldError(f"{path} is {value}; expected {expected}; {remedy}", field=path)


def _check_formats(recipe: Recipe) -> None:
    method, form = recipe.tuning.method, recipe.weight_format
    _require(
        recipe,
        "quantization.format",
        method != "qlora" or form in FOUR_BIT,
        expected="nf4 or fp4, since tuning.method is qlora",
        remedy="write auto, or tuning.method: lora",
    )
    _require(
        recipe,
        "quantization.format",
        method != "lora" or form not in FOUR_BIT,
        expected="none or int8, since tuning.method is lora",
        remedy="for LoRA over 4-bit weights write tuning.method: qlora",
    )
    _require(
        recipe,
        "quantization.format",
        method != "full" or form == "none",
        expected="none, since tuning.method is full and weights in fewer bits cannot be trained",
        remedy="write tuning.method: qlora, or lora for int8",
    )


def _check_unused_quantization(recipe: Recipe) -> None:
    form = recipe.weight_format
    used = {
        "none": (),
        "int8": ("outlier_threshold", "skip"),
    }.get(form, ("double", "compute_dtype", "storage_dtype", "skip"))
    for field in fields(recipe.quantization):
        if field.name != "format" and field.name not in used:
            _require(
                recipe,
                f"quantization.{field.name}",
                getattr(recipe.quantization, field.name) == field.default,
                expected=f"nothing, since weights are held as {form}, where it has no effect",
                remedy="remove it, or change quantization.format",
            )


def _check_sharding(recipe: Recipe) -> None:
    if recipe.distributed.strategy != "fsdp2":
        return
    form, dtype = recipe.weight_format, recipe.model.dtype
    _require(
        recipe,
        "quantization.storage_dtype",
        form not in FOUR_BIT or recipe.quantization.storage_dtype == dtype,
        expected=f"{dtype}, the model.dtype, since fsdp2 shards tensors of one type only (with"
        " uint8 the 4-bit weights are not sharded, or the loss is 0 and gradients are NaN)",
        remedy=f"write quantization.storage_dtype: {dtype}",
    )
    _require(
        recipe,
        "quantization.format",
        form != "int8",
        expected="none or nf4, since fsdp2 cannot shard int8 weights",
        remedy="write tuning.method: qlora, or distributed.strategy: ddp",
    )


def _check_saving(recipe: Recipe) -> None:
    save, method = recipe.run.save, recipe.tuning.method
    has_adapter = method != "full"
    _require(
        recipe,
        "run.save",
        save != "full" or recipe.weight_format == "none",
        expected="adapter, merged, adapter+merged or none, since the weights are held as"
        f" {recipe.weight_format} and are no full model",
        remedy="write merged for weights in model.dtype that need no adapter",
    )
    _require(
        recipe,
        "run.save",
        save != "full" or not has_adapter,
        expected=f"adapter, merged, adapter+merged or none, since tuning.method is {method}",
        remedy="write merged for weights that need no adapter",
    )
    _require(
        recipe,
        "run.save",
        has_adapter or save in ("auto", "none", "full"),
        expected="auto, full or none, since tuning.method is full and there is no adapter",
        remedy="write auto",
    )
    _require(
        recipe,
        "run.save",
        recipe.distributed.strategy != "fsdp2" or "merged" not in save,
        expected="adapter or none, since a sharded model cannot be merged where it is",
        remedy="write adapter, and merge it in one process by PEFT",
    )


def _check_data_for_task(recipe: Recipe) -> None:
    task = recipe.model.task
    wanted = (
        ("label_field", "sequence-classification", ("sequence-classification",)),
        ("target_field", "seq2seq", _ANSWERING_TASKS),
        ("messages_field", None, ("causal-lm",)),
        ("mask_share", None, ("masked-lm",)),
    )
    for key, needed_by, allowed_for in wanted:
        value = getattr(recipe.data, key)
        _require(
            recipe,
            f"data.{key}",
            value is None or task in allowed_for,
            expected=f"null, since model.task is {task}",
            remedy=f"remove it, or write model.task: {allowed_for[0]}",
        )
        _require(
            recipe,
            f"data.{key}",
            value is not None or task != needed_by,
            expected=f"a key of the data, since model.task is {task}",
            remedy=f"name the one that holds it, such as data.{key}={key.partition('_')[0]}",
        )
    _require(
        recipe,
        "policy.tiled_loss",
        recipe.policy.tiled_loss != "always" or task in _TILED_TASKS,
        expected=f"auto or never, since model.task is {task}",
        remedy="remove it",
    )


def _check_batches(recipe: Recipe) -> None:
    data = recipe.data
    _require(
        recipe,
        "data.packing",
        not data.packing or recipe.model.task == "causal-lm",
        expected=f"false, since model.task is {recipe.model.task}",
        remedy="remove it",
    )
    flash = recipe.model.attention.startswith("flash")
    _require(
        recipe,
        "model.attention",
        not flash or "bf16" in (recipe.model.dtype, recipe.training.precision),
        expected="sdpa, eager or flex_attention, since flash attention takes 16 bits only and"
        " neither model.dtype nor training.precision is bf16",
        remedy="write model.dtype: bf16 or training.precision: bf16",
    )
    _require(
        recipe,
        "data.batch_size",
        not (data.packing and flash) or data.batch_size == 1,
        expected="1, since flash attention keeps packed documents apart in one sequence only",
        remedy="write 1 and raise max_length or training.accumulate, or model.attention: sdpa",
    )
    _require(
        recipe,
        "data.order",
        not data.packing or data.order != "longest-first",
        expected="shuffled or written, since packed sequences are about equally long",
        remedy="remove it, or packing",
    )


def _check_comparison(recipe: Recipe) -> None:
    """A lossy policy is watched where the recipe says so, or is not begun with."""
    rules = [rule.action.name for rule in recipe.policy.rules]
    if "compress" not in (recipe.policy.start, *rules):
        return
    tolerance, devices = recipe.goals.gradient_tolerance, recipe.distributed.devices
    _require(
        recipe,
        "goals.gradient_tolerance",
        tolerance is None or recipe.control.adapt,
        expected="null, since control.adapt is false and compress would never be taken back",
        remedy="remove it, or control.adapt",
    )
    _require(
        recipe,
        "goals.gradient_tolerance",
        tolerance is None or devices == 1,
        expected=f"null, since distributed.devices is {devices} and batches run under two "
        "policies in one process only",
        remedy="remove it, or train on one device",
    )

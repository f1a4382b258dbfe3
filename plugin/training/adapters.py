"""Puts an adapter of PEFT onto a model."""

from __future__ import annotations

import contextlib
import difflib
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from rematic.recipes import ModelConfig, TuningConfig
from rematic.recipes.tuning_schema import ALL_LINEAR
from rematic.training.extras import import_extra
from rematic.training.quantize import fused_experts
from rematic.training.tasks import TASKS


def add_adapter(model: nn.Module, tuning: TuningConfig, *, source: ModelConfig) -> nn.Module:
    """The model with an adapter; all other weights are frozen.

    It works on the device `meta` too, where it costs nothing and finds the same faults.

    Args:
        model: A model of transformers.
        tuning: The tuning section of a recipe, its method not `full`.
        source: The model section, whose name the saved adapter carries.

    Raises:
        ValueError: PEFT is missing, a name fits no module, or a module cannot have an adapter.
    """
    peft = import_extra("peft", extra="train", needed_by=f"tuning.method: {tuning.method}")
    _check_names(model, tuning)
    config = peft.LoraConfig(
        r=tuning.r,
        lora_alpha=tuning.alpha,
        lora_dropout=tuning.dropout,
        target_modules=_targets(model, tuning),
        modules_to_save=list(tuning.modules_to_save) or None,
        use_rslora=tuning.rslora,
        use_dora=tuning.method == "dora",
        task_type=TASKS[source.task].peft_name,
        base_model_name_or_path=vars(model).get("name_or_path") or None,  # what PEFT puts there
        revision=source.revision,
    )
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 asks transformers 5.24 for an attribute by its old name.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            # It finds transposed layers, and `check_mergeable` what it says of tied ones.
            for told in ("fan_in_fan_out is set to False", "Model has `tie_word_embeddings=True`"):
                warnings.filterwarnings("ignore", message=told)
            with _where_it_is(model):
                adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:  # such as for a module of a kind that it cannot adapt
        text = " ".join(str(error).split())
        raise ValueError(
            f"tuning.targets cannot be adapted ({text}); name linear layers"
        ) from error
    return adapted.train()


def check_mergeable(model: nn.Module) -> None:
    """Refuses to merge an adapter into weights that another layer has too.

    Args:
        model: The model with its adapter; its weights need not exist.

    Raises:
        ValueError: One layer of a tied pair has an adapter: merged, the other would change too.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, module in model.named_modules():
        base: Any = getattr(module, "base_layer", None)
        weight = getattr(base, "weight", None)
        owners = names.get(id(weight), [])
        if len(owners) > 1 and hasattr(module, "merge"):
            other = next(one for one in owners if not one.startswith(f"{name}."))
            raise ValueError(
                f"run.save asks for merged weights, but tuning.targets adapts "
                f"{name.rpartition('.')[2]!r}, whose weight is that of {other!r} too and would "
                "change there as well; write run.save: adapter, or adapt other layers"
            )


def _where_it_is(model: nn.Module) -> AbstractContextManager[object]:
    """The device `meta` for a model there, since PEFT 0.21 first makes its weights on the CPU."""
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    return torch.device("meta") if is_empty else contextlib.nullcontext()


def _targets(model: nn.Module, tuning: TuningConfig) -> str | list[str]:
    """What PEFT is told to adapt.

    For mixtures PEFT 0.21 takes its word for all linear layers to mean experts and routers too,
    which are no linear layers in transformers 5; there the layers are named.
    """
    if tuning.targets != (ALL_LINEAR,):
        return list(tuning.targets)
    if not any(True for _ in fused_experts(model)):
        return ALL_LINEAR
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    linears = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return sorted(linears)


def _check_names(model: nn.Module, tuning: TuningConfig) -> None:
    names = [name for name, _ in model.named_modules() if name]
    ends = sorted(
        {name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()}
    )
    for key in ("targets", "modules_to_save"):
        for wanted in getattr(tuning, key):
            if wanted == ALL_LINEAR:
                continue
            if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
                near = difflib.get_close_matches(wanted, ends, n=1)
                hint = f", did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"tuning.{key} names {wanted!r}, but no module of this model is called so"
                    f"{hint}; expected the end of a module's name, one of {', '.join(ends)}"
                )

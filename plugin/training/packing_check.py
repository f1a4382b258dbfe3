"""Asks a model whether it keeps packed documents apart."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from typing_extensions import override

from rematic.training.evaluation import evaluating
from rematic.training.model import name_attention
from rematic.training.tasks import accepts

_LENGTH = 4
_TOLERANCES = {torch.float32: (1e-4, 1e-3)}
_COARSE = (0.01, 0.05)
"""How far logits of the second document may be off, over the largest one: by another first
document, and by another shape of the batch, in 32 bits and in fewer.

Kernels give the same bits whatever the masked values are, mixtures (which sort tokens by expert)
nearly the same: 4e-7 of tiny models in 32 bits. Where documents do see each other, models with
random weights of five families are off by 0.01 to 0.02 only."""


class PackingCheck(Callback):
    """Refuses to train on packed documents where the model lets them see each other."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Runs two short documents, after the model has been moved, wrapped or sharded."""
        model = pl_module.model
        assert isinstance(model, nn.Module), "the runner's module has a model"
        with trainer.precision_plugin.val_step_context():
            check_packing(model, device=pl_module.device)


def check_packing(model: nn.Module, *, device: torch.device) -> None:
    """Runs two packed documents of a few tokens, changes the first and compares the second.

    The second must also be what it is alone, so that its positions begin at 0.

    Raises:
        ValueError: The second document depends on the first.
    """
    first, other, second = (
        torch.arange(start, start + _LENGTH, device=device)[None] for start in (8, 16, 24)
    )
    positions = torch.arange(_LENGTH, device=device)[None]
    with evaluating(model):
        alone = _logits(model, second, positions)
        packed = [
            _logits(model, torch.cat([one, second], 1), positions.repeat(1, 2))[:, _LENGTH:]
            for one in (first, other)
        ]
    by_other, by_shape = _TOLERANCES.get(_coarsest(model, alone), _COARSE)
    scale = alone.abs().max().float()
    limits = [(packed[0], packed[1], by_other), (packed[0], alone, by_shape)]
    for found, wanted, tolerance in limits:
        if not bool((found.float() - wanted.float()).abs().max() <= tolerance * scale):
            raise ValueError(
                f"data.packing is true, but {type(model).__name__} with attention "
                f"{name_attention(model)!r} does not keep packed documents apart; expected a model "
                "whose attention goes by position_ids, with sdpa, eager or flash attention: set "
                "data.packing=false, or model.attention"
            )


def _logits(model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    options = {"use_cache": False} if accepts(model, "use_cache") else {}
    if not accepts(model, "position_ids"):
        raise ValueError(
            f"data.packing is true, but {type(model).__name__} takes no position_ids, by which "
            "packed documents are kept apart; set data.packing=false"
        )
    logits: Tensor = model(input_ids=ids, position_ids=positions, **options).logits
    return logits


def _coarsest(model: nn.Module, logits: Tensor) -> torch.dtype:
    """The type with the fewest digits among those that a model computes in."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()} | {logits.dtype}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps)

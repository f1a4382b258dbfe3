"""Finds parameters that are to be trained but get no gradient."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from rematic.activations import Notice, torch_private

_log = logging.getLogger("rematic")
_NAMES_SHOWN = 5


def untrained_parameters(model: nn.Module) -> list[str]:
    """Returns the names of trainable parameters without gradient, after a backward.

    None of them where no parameter has one: whoever keeps gradients elsewhere, or has run no
    backward, tells nothing. Left out are those without elements on this rank and those whose own
    hooks may have taken the gradient.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if all(p.grad is None for _, p in trainable):
        return []
    return [
        name
        for name, p in trainable
        if p.grad is None and p.numel() and not torch_private.has_own_gradient_hooks(p)
    ]


def tell_of_untrained(model: nn.Module, tell: Callable[[Notice], None]) -> None:
    """Warns of such parameters, if there are any, and tells the journal.

    Args:
        model: The model, after the backward of its first micro-batch.
        tell: Takes the notice.
    """
    names = untrained_parameters(model)
    if not names:
        return
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    text = (
        f"trainable parameters that got no gradient in the first micro-batch ({len(names)}): "
        f"{', '.join(names[:_NAMES_SHOWN])}{more}. Where that is not meant (a frozen original, a "
        "head that the loss leaves out), turn `requires_grad` off: DistributedDataParallel waits "
        "for their gradients"
    )
    _log.warning("%s.", text)
    tell(Notice(unit="", kind="no_gradient", text=text, figures={"parameters": len(names)}))

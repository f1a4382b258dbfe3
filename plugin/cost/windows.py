"""At which lengths a model's attention takes another path."""

from __future__ import annotations

from torch import nn

_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Keys of transformers' configs that limit how far a token looks."""


def attention_windows(model: nn.Module) -> list[int]:
    """Returns the widths of all attention windows, ascending.

    Sequences that are shorter need no mask for them (transformers 5.24, `sdpa_mask`).
    """
    found: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        for key in _WINDOWS:
            value = getattr(config, key, None)
            if type(value) is int and value > 0:
                found.add(value)
    return sorted(found)

"""Accelerate's own activation checkpointing: turned off while rematic decides, then given back."""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("rematic")
_KEYS = ("activation_checkpointing", "activation_checkpointing_offload")


class TakenKeys:
    """The keys `fsdp_config.fsdp_activation_checkpointing` and `..._offload` of one Accelerator.

    Args:
        accelerator: The Accelerator, before it prepares a model.
    """

    def __init__(self, accelerator: Any) -> None:  # noqa: ANN401 - accelerate ships no types
        # without FSDP there is no such attribute, or None
        self._plugin = getattr(accelerator.state, "fsdp_plugin", None)
        self._before = {key: getattr(self._plugin, key, False) for key in _KEYS}
        self.is_taken = bool(self._before["activation_checkpointing"])
        """Whether Accelerate would have checkpointed."""
        if self.is_taken:
            self._set(dict.fromkeys(_KEYS, False))
            _log.warning(
                "fsdp_config.fsdp_activation_checkpointing is taken over by rematic: its recipe "
                "decides, and Accelerate's own wrapper, which under FSDP2 does not put random "
                "numbers back (dropout then differs between forward and recomputation), is off."
            )

    def give_back(self) -> None:
        """Turns on again what was on; safe to call twice."""
        if self.is_taken:
            self._set(self._before)
            self.is_taken = False

    def _set(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            setattr(self._plugin, key, value)

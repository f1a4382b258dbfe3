"""A small training that can be read bit by bit, compared, and put back to where it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.fault_models import Workload

LEARNING_RATE = 1e-2
Values = dict[str, torch.Tensor | None]
_ROOM = (("gradient", 0.5), ("weight", 0.2), ("buffer", 0.2), ("loss", 0.2))
"""Relative distances that compressing explains."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Everything that must have the same bits, at one moment of a training."""

    values: Values
    """Weights, gradients, buffers, counters, the last loss, the optimizer's state, the
    generator, each by a name that begins with its kind."""

    def differs_from(self, wanted: Mark, *, lossy: bool = False) -> list[str]:
        """Names what differs, by a bit or by more than compressing explains."""
        found = self.values
        if found.keys() != wanted.values.keys():
            return sorted(found.keys() ^ wanted.values.keys())
        if not lossy:
            return [name for name, value in wanted.values.items() if _differ(found[name], value)]
        exact = [name for name, value in wanted.values.items() if not _is_float(value)]
        wrong = [name for name in exact if _differ(found[name], wanted.values[name])]
        for kind, room in _ROOM:
            if _distance(found, wanted.values, kind) > room:
                wrong.append(f"every {kind}")
        return wrong


class Training:
    """A model and its optimizer.

    Args:
        workload: What trains.
        autocast: Whether forward runs in bfloat16.
    """

    def __init__(self, workload: Workload, *, autocast: bool = False) -> None:
        self._workload = workload
        self._autocast = autocast
        self.model = workload.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, foreach=True)
        self.loss: torch.Tensor | None = None
        torch.manual_seed(9)

    def forward_and_backward(self, batch: Any) -> torch.Tensor:  # noqa: ANN401 - as the model's
        """Runs one micro-batch; returns its loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            loss = self._workload.loss(self.model, batch)
        loss.backward()
        return loss.detach()

    def mark(self) -> Mark:
        """Copies everything."""
        values: Values = {"loss": None if self.loss is None else self.loss.clone()}
        for key, parameter in self.model.named_parameters():
            values[f"weight {key}"] = parameter.detach().clone()
            gradient = parameter.grad
            values[f"gradient {key}"] = None if gradient is None else gradient.clone()
        values |= {f"buffer {key}": b.clone() for key, b in self.model.named_buffers()}
        for key, module in self.model.named_modules():
            calls = getattr(module, "num_calls", None)
            if calls is not None:
                values[f"counter {key}"] = torch.tensor([calls, *module.lengths])
        for key, parameter in self.model.named_parameters():
            for part, tensor in self.optimizer.state.get(parameter, {}).items():
                values[f"optimizer {key} {part}"] = tensor.clone()
        values["generator"] = torch.get_rng_state()
        return Mark(values=values)

    def restore(self, mark: Mark) -> None:
        """Puts everything back."""
        values, model, state = mark.values, self.model, self.optimizer.state
        self.loss = values["loss"]
        state.clear()
        for key, parameter in model.named_parameters():
            parameter.data.copy_(_there(values[f"weight {key}"]))
            gradient = values[f"gradient {key}"]
            parameter.grad = None if gradient is None else gradient.clone()
            prefix = f"optimizer {key} "
            parts = {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
            if parts:
                state[parameter] = {n: _there(v).clone() for n, v in parts.items()}
        for key, buffer in model.named_buffers():
            buffer.data.copy_(_there(values[f"buffer {key}"]))
        for key, module in model.named_modules():
            if f"counter {key}" in values:
                counter: Any = module
                calls, *lengths = _there(values[f"counter {key}"]).tolist()
                counter.num_calls, counter.lengths[:] = calls, lengths
        torch.set_rng_state(_there(values["generator"]))


def _there(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value


def _differ(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is not b
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    return not torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def _is_float(value: torch.Tensor | None) -> bool:
    return value is not None and value.is_floating_point()


def _distance(found: Values, wanted: Values, kind: str) -> float:
    """Returns the relative distance of all tensors of a kind together."""
    pairs = [(found[n], b) for n, b in wanted.items() if n.startswith(kind) and _is_float(b)]
    if any(a is None for a, _ in pairs):
        return float("inf")
    apart = sum(float((a - b).square().sum()) for a, b in pairs if a is not None and b is not None)
    size = sum(float(b.square().sum()) for _, b in pairs if b is not None)
    return (apart / size) ** 0.5 if size else 0.0

"""Modes count in-place changes of lists as torch does without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rematic.activations import OpRetry
from rematic.memory import SimulatedProbe, changed_lists

MODES: dict[str, Callable[[], Any]] = {
    "retry": lambda: OpRetry(lambda *_: 0),
    "probe": SimulatedProbe,
}


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("mode", MODES)
def test_a_graph_over_updated_weights_is_refused_under_a_mode_too(
    mode: str, options: dict[str, bool]
) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, **options)
    loss = weight.pow(2).sum()
    weight.grad = torch.ones(3)
    with MODES[mode]():
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_change_counts_once_under_two_modes() -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    with SimulatedProbe(), OpRetry(lambda *_: 0):
        torch._foreach_add_(tensors, 1)
    assert [t._version for t in tensors] == [1, 1]


def test_only_lists_that_are_changed_count() -> None:
    assert changed_lists(torch.ops.aten._foreach_add_.Scalar) == (0,)
    assert changed_lists(torch.ops.aten._foreach_add.Scalar) == ()
    assert changed_lists(torch.ops.aten.add_.Tensor) == ()
    fused = changed_lists(torch.ops.aten._fused_adamw_.default)
    assert fused == (0, 1, 2, 3, 4)

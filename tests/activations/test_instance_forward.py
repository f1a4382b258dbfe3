"""A module's forward, wrapped on the instance and given back."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rematic.activations.instance_forward import InstanceForward


class Adds(nn.Module):
    """Adds its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return x * factor + self.weight


def doubled(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return 2 * forward(*args, **kwargs)


def test_it_is_called_with_what_forward_was() -> None:
    module = Adds()
    wrapped = InstanceForward(module, doubled)
    assert module(torch.ones(3), factor=2.0).tolist() == [6.0] * 3
    wrapped.remove()
    assert module(torch.ones(3)).tolist() == [2.0] * 3
    assert "forward" not in module.__dict__
    wrapped.remove()


def test_it_shows_the_signature_and_the_name() -> None:
    module, plain = Adds(), inspect.signature(Adds().forward)
    InstanceForward(module, doubled)
    assert inspect.signature(module.forward) == plain
    assert module.forward.__name__ == "forward"


def test_wrappers_are_removed_in_the_reverse_order() -> None:
    module = Adds()
    first = InstanceForward(module, doubled)
    second = InstanceForward(module, doubled)
    assert module(torch.ones(3)).tolist() == [8.0] * 3
    second.remove()
    assert module.forward is first
    first.remove()
    assert module(torch.ones(3)).tolist() == [2.0] * 3


def test_out_of_order_it_goes_silent_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    module = Adds()
    first = InstanceForward(module, doubled)
    second = InstanceForward(module, doubled)
    with caplog.at_level(logging.WARNING, "rematic"):
        first.remove()
    assert "forward of Adds was wrapped by somebody else meanwhile" in caplog.text
    assert module(torch.ones(3)).tolist() == [4.0] * 3
    second.remove()
    assert module(torch.ones(3)).tolist() == [2.0] * 3


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_plain(make_copy: Callable[[nn.Module], nn.Module]) -> None:
    module = Adds()
    InstanceForward(module, doubled)
    copied = make_copy(nn.Sequential(module))[0]
    nn.init.zeros_(copied.weight)
    assert copied(torch.ones(3)).tolist() == [1.0] * 3
    assert module(torch.ones(3)).tolist() == [4.0] * 3


def test_it_keeps_no_module_alive() -> None:
    gc.disable()
    try:
        module = Adds()
        wrapped = InstanceForward(module, doubled)
        alive = weakref.ref(module)
        del module
        assert alive() is None
        wrapped.remove()
    finally:
        gc.enable()

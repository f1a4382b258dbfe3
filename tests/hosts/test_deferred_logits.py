"""What models do with their logits before the loss, remembered or refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rematic.hosts.deferred_logits import DeferredLogits


def make() -> DeferredLogits:
    hidden = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    return DeferredLogits(
        hidden=hidden, head=torch.tanh, shape=torch.Size((2, 3, 11)), dtype=torch.bfloat16
    )


REMEMBERED: dict[str, tuple[Callable[[Any], Any], float, float | None]] = {
    "nothing": (lambda x: x, 1.0, None),
    "a factor": (lambda x: x * 0.5, 0.5, None),
    "a factor on the left": (lambda x: 2 * x, 2.0, None),
    "a factor in place": (lambda x: x.__mul__(3), 3.0, None),
    "a divisor": (lambda x: x / 4.0, 0.25, None),
    "two factors": (lambda x: torch.div(torch.mul(x, 3.0), 2), 1.5, None),
    "a bound": (lambda x: torch.tanh(x / 30.0) * 30.0, 1.0, 30.0),
    "a bound by methods": (lambda x: x.div(7).tanh().mul(7), 1.0, 7.0),
    "a factor and a bound": (lambda x: (x * 0.5 / 30.0).tanh() * 30.0, 0.5, 30.0),
    "casts": (lambda x: (x.float() * 0.5).to(torch.float32).contiguous(), 0.5, None),
}


@pytest.mark.parametrize(("change", "scale", "softcap"), REMEMBERED.values(), ids=REMEMBERED.keys())
def test_factors_bounds_and_casts_are_remembered(
    change: Callable[[Any], Any], scale: float, softcap: float | None
) -> None:
    logits = change(make())
    assert isinstance(logits, DeferredLogits)
    assert (logits.scale, logits.softcap) == (scale, softcap)
    assert not logits.under_tanh


def test_a_tanh_alone_is_remembered() -> None:
    assert make().tanh().under_tanh


def test_it_looks_like_the_logits() -> None:
    logits = make()
    assert logits.shape == logits.size() == (2, 3, 11)
    assert (logits.ndim, logits.size(-1)) == (3, 11)
    assert logits.device == torch.device("cpu")
    assert torch.zeros(1).to(logits.device).device == logits.device
    assert logits.dtype == torch.bfloat16
    assert logits.float().dtype == torch.float32
    assert logits.to("cpu").to(logits.device).to(dtype=torch.float32).dtype == torch.float32
    assert not hasattr(logits, "grad_fn")
    assert copy.copy(logits).shape == logits.shape
    assert pickle.loads(pickle.dumps(logits)).shape == logits.shape


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "index": (lambda x: x[..., :-1, :], ValueError, "does `getitem` with its logits"),
    "assignment": (lambda x: x.__setitem__(0, 1.0), ValueError, "does `setitem`"),
    "sum": (lambda x: x + torch.zeros(11), ValueError, "does `add`"),
    "method": (lambda x: x.view(-1, 11), AttributeError, "wants `view` of its logits"),
    "function": (lambda x: torch.softmax(x, -1), ValueError, "does torch.softmax with"),
    "factor that is a tensor": (
        lambda x: x * torch.ones(11),
        ValueError,
        "a product with a tensor",
    ),
    "function of two": (lambda x: torch.mul(torch.ones(11), x), ValueError, "does torch.mul"),
    "divisor": (lambda x: torch.div(x, torch.ones(1)), ValueError, "a division by a tensor"),
    "two bounds": (lambda x: x.tanh().tanh(), ValueError, "a second tanh"),
    "after the bound": (lambda x: x.tanh() * 2 * 3, ValueError, "a factor after the bound"),
    "another device": (lambda x: x.to("meta"), ValueError, r"to\('meta'\)"),
}


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_everything_else_is_refused(
    change: Callable[[Any], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        change(make())
    assert "`use_tiled_loss` cannot serve this model: remove it." in str(caught.value)

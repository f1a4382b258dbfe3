"""The tiled loss against the plain one: values, every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn import functional as F

from rematic.activations.tiled_loss import (
    DEFAULT_TILE_ELEMENTS,
    tiled_cross_entropy,
    tiled_head_cross_entropy,
    tokens_in_a_tile,
)
from rematic.activations.token_losses import LossForm
from tests.activations.losses import (
    IGNORED,
    PROMISED,
    Inputs,
    assert_near,
    make,
    plain,
    run,
)


def assert_like_plain(inputs: Inputs, **tiles: Any) -> None:
    wanted, wanted_gradients = run(plain, inputs)
    found, gradients = run(tiled_cross_entropy, inputs, **tiles)
    promised = PROMISED[inputs.hidden.dtype]
    assert_near(found, wanted, promised["loss"])
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert_near(gradient, wanted_gradient, promised["gradient"])


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "more tokens than classes": {"tokens": (61,), "vocabulary": 7},
    "batch and sequence": {"tokens": (2, 3, 5)},
    "shifted": {"tokens": (3, 7), "shift": True},
    "one token": {"tokens": (1,), "ignored": "none"},
    "bias": {"bias": True},
    "bias, more tokens than classes": {"bias": True, "tokens": (61,), "vocabulary": 7},
    "scaled": {"logit_scale": 0.25},
    "bounded": {"logit_softcap": 2.0},
    "bounded, scaled, smoothed": {
        "logit_softcap": 2.0,
        "logit_scale": 0.5,
        "label_smoothing": 0.1,
        "bias": True,
    },
    "smoothed": {"label_smoothing": 0.3},
    "another label ignored": {"ignore_index": 4},
    "a whole tile ignored": {"ignored": "first tile"},
    "frozen weight": {"needs": "hidden", "bias": True},
    "frozen weight, trained bias": {"needs": "hidden bias", "bias": True},
    "frozen hidden states": {"needs": "weight"},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none", "tokens": (2, 9)},
    "number of items": {"num_items": 50},
    "number of items in a tensor": {"num_items": torch.tensor(50), "reduction": "sum"},
}


@pytest.mark.parametrize("dtype", PROMISED, ids=["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_values_and_gradients_are_the_promised_ones(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    inputs = make(**{"dtype": dtype, **case})
    if case.get("ignore_index") == 4:
        inputs.labels.masked_fill_(inputs.labels < 0, 4)
    assert_like_plain(inputs, tile_tokens=5)


@settings(max_examples=60, derandomize=True)
@given(
    tokens=st.integers(1, 12),
    vocabulary=st.integers(1, 12),
    tile_tokens=st.integers(1, 14),
    hidden=st.integers(1, 4),
    ignored=st.lists(st.booleans(), min_size=12, max_size=12),
    needs=st.sampled_from(["hidden weight", "hidden", "weight", "hidden weight bias", "bias"]),
    softcap=st.sampled_from([None, 1.5]),
    smoothing=st.sampled_from([0.0, 0.2, 1.0]),
    reduction=st.sampled_from(["sum", "mean", "none"]),
)
def test_any_shape_tile_and_pattern_of_ignored_labels(
    tokens: int,
    vocabulary: int,
    tile_tokens: int,
    hidden: int,
    ignored: list[bool],
    needs: str,
    softcap: float | None,
    smoothing: float,
    reduction: str,
) -> None:
    inputs = make(
        (tokens,),
        hidden=hidden,
        vocabulary=vocabulary,
        dtype=torch.float64,
        needs=needs,
        bias="bias" in needs,
        ignored="none",
        logit_softcap=softcap,
        label_smoothing=smoothing,
        reduction=reduction,
    )
    inputs.labels[torch.tensor(ignored[:tokens])] = IGNORED
    wanted, wanted_gradients = run(plain, inputs)
    found, gradients = run(tiled_cross_entropy, inputs, tile_tokens=tile_tokens)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    torch.testing.assert_close(gradients, wanted_gradients)


def test_no_tokens_at_all() -> None:
    inputs = make((0,))
    loss, gradients = run(tiled_cross_entropy, inputs)
    assert loss.isnan()
    assert float(gradients[1].abs().sum()) == 0.0


@pytest.mark.parametrize("loss_of", [plain, tiled_cross_entropy])
def test_a_weight_tied_to_an_embedding(loss_of: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(23, 8)
    labels = torch.randint(0, 23, (2, 9))
    loss_of(embedding(labels).tanh(), embedding.weight, labels, shift=True).backward()
    tied = embedding.weight.grad.clone()
    embedding.weight.grad = None
    plain(embedding(labels).tanh(), embedding.weight, labels, shift=True).backward()
    assert_near(tied, embedding.weight.grad, 2e-6)


def test_each_token_may_weigh_differently() -> None:
    inputs = make(reduction="none")
    weights = torch.linspace(0, 1, 19)
    _, wanted = run(lambda *a, **k: plain(*a, **k) * weights, inputs)
    _, found = run(lambda *a, **k: tiled_cross_entropy(*a, **k) * weights, inputs)
    assert_near(found[0], wanted[0], 2e-6)
    assert_near(found[1], wanted[1], 2e-6)


# --- what is refused ------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shape of labels": (
        {"labels": torch.zeros(4, dtype=torch.int64)},
        r"labels have the shape \(4,\), the hidden states \(19, 8\): expected one label for each",
    ),
    "labels are probabilities": ({"labels": torch.zeros(19)}, "labels are torch.float32: expected"),
    "shape of weight": (
        {"weight": torch.zeros(8, 23)},
        r"the weight has the shape \(8, 23\), the hidden states \(19, 8\): expected \(vocab",
    ),
    "shape of bias": ({"bias": torch.zeros(1)}, r"the bias has the shape \(1,\): expected \(23,\)"),
    "dtype": (
        {"weight": torch.zeros(23, 8, dtype=torch.bfloat16)},
        "the weight is torch.bfloat16, the hidden states are torch.float32: expected the same",
    ),
    "device": (
        {"weight": torch.zeros(23, 8, device="meta")},
        "the weight is on meta, the hidden states are on cpu: expected the same device",
    ),
    "reduction": (
        {"reduction": "median"},
        "reduction is 'median': expected 'mean', 'sum' or 'none'",
    ),
    "both sizes": (
        {"tile_tokens": 2, "num_tiles": 3},
        "tile_tokens is 2 and num_tiles is 3: expected one of the two",
    ),
    "no tokens in a tile": ({"tile_tokens": 0}, "tile_tokens is 0: expected 1 or more"),
    "no tiles": ({"num_tiles": -1}, "num_tiles is -1: expected 1 or more"),
    "bound": ({"logit_softcap": 0.0}, "logit_softcap is 0.0: expected more than 0, or None"),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing is 1.5: expected 0 to 1"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    inputs = make()
    given_ = {"hidden": inputs.hidden, "weight": inputs.weight, "labels": inputs.labels, **changes}
    with pytest.raises(ValueError, match=message):
        tiled_cross_entropy(**given_)


def test_a_sharded_weight_is_refused() -> None:
    inputs = make()
    inputs.weight.device_mesh = "what a DTensor has"
    with pytest.raises(ValueError, match="the head's weight is a DTensor, sharded over ranks"):
        tiled_cross_entropy(inputs.hidden, inputs.weight, inputs.labels)


@pytest.mark.parametrize("label", [23, -1], ids=["above", "below"])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    inputs = make()
    inputs.labels[1] = label
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
        tiled_cross_entropy(inputs.hidden, inputs.weight, inputs.labels)


SIZES: dict[str, tuple[dict[str, int | None], int]] = {
    "given": ({"tile_tokens": 7, "num_tiles": None}, 7),
    "by number": ({"tile_tokens": None, "num_tiles": 3}, 34),
    "more tiles than tokens": ({"tile_tokens": None, "num_tiles": 1000}, 1),
    "by default": ({"tile_tokens": None, "num_tiles": None}, DEFAULT_TILE_ELEMENTS // 128_256),
}


@pytest.mark.parametrize(("sizes", "wanted"), SIZES.values(), ids=SIZES.keys())
def test_the_size_of_a_tile(sizes: dict[str, int | None], wanted: int) -> None:
    assert tokens_in_a_tile(100, 128_256, **sizes) == wanted


def test_a_vocabulary_beyond_the_default_tile_still_has_one_token_in_it() -> None:
    assert tokens_in_a_tile(100, 1 << 30, tile_tokens=None, num_tiles=None) == 1


# --- heads that are modules -----------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "bounded, scaled, smoothed", "number of items"])
def test_any_head_in_slices_under_checkpoint(case: str) -> None:
    options = dict(CASES[case])
    inputs = make((2, 9), bias=options.pop("bias", False), **options)
    hidden, weight, bias = inputs.fresh()
    form = LossForm(
        scale=options.pop("logit_scale", 1.0),
        softcap=options.pop("logit_softcap", None),
        label_smoothing=options.pop("label_smoothing", 0.0),
    )
    loss = tiled_head_cross_entropy(
        lambda rows: F.linear(rows, weight, bias),
        hidden,
        inputs.labels,
        form=form,
        tile_tokens=4,
        **options,
    )
    loss.backward()
    wanted, wanted_gradients = run(plain, inputs)
    assert_near(loss.detach(), wanted, 1e-6)
    for tensor, gradient in zip((hidden, weight, bias), wanted_gradients, strict=True):
        assert_near(None if tensor is None else tensor.grad, gradient, 2e-6)

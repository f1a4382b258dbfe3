"""The tiled loss against the plain one: values, every gradient, and the bytes that it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn import functional as F

from rematic.activations import OpRetry
from rematic.activations.tiled_loss import (
    DEFAULT_TILE_ELEMENTS,
    tiled_cross_entropy,
    tiled_head_cross_entropy,
    tokens_in_a_tile,
)
from rematic.activations.token_losses import LossForm
from rematic.memory import SimulatedProbe

IGNORED = -100
PROMISED = {
    torch.float64: {"loss": 1e-13, "gradient": 1e-13},
    torch.float32: {"loss": 1e-6, "gradient": 2e-6},
    torch.bfloat16: {"loss": 1e-6, "gradient": 1e-2},
    torch.float16: {"loss": 1e-6, "gradient": 2e-3},
}
"""The table of the docstring: norm of the difference over the norm."""


@dataclass(kw_only=True)
class Inputs:
    """What a head is given, with what needs a gradient."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def fresh(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        parts = (self.hidden, self.weight, self.bias)
        hidden, weight, bias = (
            None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in parts
        )
        assert hidden is not None
        assert weight is not None
        return hidden, weight, bias


def make(
    tokens: tuple[int, ...] = (19,),
    *,
    hidden: int = 8,
    vocabulary: int = 23,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    ignored: str = "third",
    needs: str = "hidden weight bias",
    **options: Any,
) -> Inputs:
    torch.manual_seed(3)
    labels = torch.randint(0, vocabulary, tokens)
    flat = labels.view(-1)
    if ignored == "third":
        flat[::3] = IGNORED
    elif ignored == "first tile":
        flat[:5] = IGNORED
    elif ignored == "all":
        flat[:] = IGNORED
    return Inputs(
        hidden=torch.randn(*tokens, hidden).to(dtype).requires_grad_("hidden" in needs),
        weight=torch.randn(vocabulary, hidden).to(dtype).requires_grad_("weight" in needs),
        bias=torch.randn(vocabulary).to(dtype).requires_grad_("bias" in needs) if bias else None,
        labels=labels,
        options=options,
    )


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    shift: bool = False,
    num_items: Any = None,
    reduction: str = "mean",
    **options: Any,
) -> torch.Tensor:
    """What causal language models of transformers do."""
    logits = F.linear(hidden, weight, bias)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if logit_softcap is not None:
        logits = torch.tanh(logits / logit_softcap) * logit_softcap
    if shift:
        labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    reduction = reduction if num_items is None else "sum"
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction, **options)
    loss = loss if num_items is None else loss / num_items
    return loss.view(labels.shape) if reduction == "none" else loss


Gradients = list[torch.Tensor | None]


def run(
    loss_of: Callable[..., torch.Tensor], inputs: Inputs, **more: Any
) -> tuple[torch.Tensor, Gradients]:
    hidden, weight, bias = inputs.fresh()
    loss = loss_of(hidden, weight, inputs.labels, bias=bias, **inputs.options, **more)
    # the mean's gradients are too small for float16 without a scale
    scaled = loss.sum() * (1024 if hidden.dtype == torch.float16 else 1)
    scaled.backward()
    return loss.detach(), [None if t is None else t.grad for t in (hidden, weight, bias)]


def assert_near(found: torch.Tensor | None, wanted: torch.Tensor | None, limit: float) -> None:
    if found is None or wanted is None:
        assert found is wanted
        return
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    difference = (found.double() - wanted.double()).norm()
    assert difference <= limit * wanted.double().norm()


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


@settings(max_examples=60, deadline=None, derandomize=True)
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


@pytest.mark.parametrize("vocabulary", [7, 101], ids=["by tokens", "by vocabulary"])
def test_with_every_label_ignored_the_mean_is_nan_and_the_gradients_are_zero(
    vocabulary: int,
) -> None:
    inputs = make((50,), vocabulary=vocabulary, ignored="all")
    for loss_of in (plain, tiled_cross_entropy):
        loss, gradients = run(loss_of, inputs)
        assert loss.isnan()
        assert [float(g.abs().max()) for g in gradients if g is not None] == [0.0, 0.0]


def test_no_tokens_at_all() -> None:
    inputs = make((0,))
    loss, gradients = run(tiled_cross_entropy, inputs)
    assert loss.isnan()
    assert float(gradients[1].abs().sum()) == 0.0


@pytest.mark.parametrize("vocabulary", [7, 101], ids=["by tokens", "by vocabulary"])
def test_under_autocast(vocabulary: int) -> None:
    """Backward runs outside autocast, and then inside; both in the dtype of forward."""
    inputs = make((50,), vocabulary=vocabulary, bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, wanted_gradients = run(plain, inputs)
        found, gradients = run(tiled_cross_entropy, inputs, tile_tokens=8)
        hidden, weight, bias = inputs.fresh()
        loss = tiled_cross_entropy(hidden, weight, inputs.labels, bias=bias, tile_tokens=8)
    assert found.dtype == torch.float32
    assert_near(found, wanted, 1e-6)
    loss.backward()
    for outside, inside, plain_one in zip(
        (hidden.grad, weight.grad, bias.grad), gradients, wanted_gradients, strict=True
    ):
        assert outside.dtype == torch.float32
        assert torch.equal(outside, inside)
        assert_near(outside, plain_one, 1e-2)


def test_backward_ignores_the_autocast_around_it() -> None:
    hidden, weight, _ = make().fresh()
    labels = make().labels
    loss = tiled_cross_entropy(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    _, gradients = run(tiled_cross_entropy, make())
    assert torch.equal(hidden.grad, gradients[0])
    assert torch.equal(weight.grad, gradients[1])


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


@pytest.mark.parametrize("vocabulary", [7, 101], ids=["by tokens", "by vocabulary"])
def test_used_twice_and_backward_twice(vocabulary: int) -> None:
    inputs = make((50,), vocabulary=vocabulary)
    found = []
    for loss_of in (plain, tiled_cross_entropy):
        hidden, weight, _ = inputs.fresh()
        loss = loss_of(hidden, weight, inputs.labels) + 2 * loss_of(
            hidden * 2, weight, inputs.labels.flip(0)
        )
        loss.backward(retain_graph=True)
        loss.backward()
        found.append((hidden.grad, weight.grad))
    for tiled, wanted in zip(found[1], found[0], strict=True):
        assert_near(tiled, wanted, 2e-6)


def test_each_token_may_weigh_differently() -> None:
    inputs = make(reduction="none")
    weights = torch.linspace(0, 1, 19)
    _, wanted = run(lambda *a, **k: plain(*a, **k) * weights, inputs)
    _, found = run(lambda *a, **k: tiled_cross_entropy(*a, **k) * weights, inputs)
    assert_near(found[0], wanted[0], 2e-6)
    assert_near(found[1], wanted[1], 2e-6)


def test_small_gradients_survive_in_float16_under_a_scaled_loss() -> None:
    """Gradients made in forward, before the scale is known, would vanish."""
    inputs = make((64,), dtype=torch.float16, num_items=1e7)
    for loss_of in (plain, tiled_cross_entropy):
        hidden, weight, _ = inputs.fresh()
        (loss_of(hidden, weight, inputs.labels, num_items=1e7) * 2.0**16).backward()
        assert float(hidden.grad.abs().mean()) > 1e-3, loss_of
    hidden, weight, _ = inputs.fresh()
    tiled_cross_entropy(hidden, weight, inputs.labels, num_items=1e7).backward()
    assert float(hidden.grad.abs().mean()) < 1e-6, "without the scale there is little left"


def test_the_inputs_are_left_as_they_were() -> None:
    inputs = make(bias=True, logit_softcap=2.0)
    hidden, weight, bias = inputs.fresh()
    labels = inputs.labels.clone()
    loss = tiled_cross_entropy(hidden, weight, labels, bias=bias, logit_softcap=2.0)
    loss += 1.0  # mixtures of experts add the router's loss in place
    loss.backward()
    for tensor in (hidden, weight, bias, labels):
        assert tensor._version == 0


@pytest.mark.parametrize("vocabulary", [3, 101], ids=["by tokens", "by vocabulary"])
def test_memory_may_run_out_at_any_op(vocabulary: int) -> None:
    """Every op can be run again: none of them has changed what it reads before it allocates."""
    inputs = make((7,), vocabulary=vocabulary, bias=True, logit_softcap=2.0, label_smoothing=0.1)
    with SimulatedProbe() as probe:
        wanted = run(tiled_cross_entropy, inputs, tile_tokens=4)
    assert probe.num_ops > 50
    for position in range(1, probe.num_ops + 1):
        asked: list[str] = []

        def relieve(num_bytes: int, where: str, asked: list[str] = asked) -> int:
            asked.append(where)
            return 1

        with SimulatedProbe(fail_at_ops=[position]), OpRetry(relieve):
            found = run(tiled_cross_entropy, inputs, tile_tokens=4)
        assert len(asked) == 1
        assert torch.equal(found[0], wanted[0]), position
        assert all(torch.equal(*pair) for pair in zip(found[1], wanted[1], strict=True)), position


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, _ = make().fresh()
    loss = tiled_cross_entropy(hidden, weight, make().labels)
    with pytest.raises(RuntimeError, match="a tiled loss has no second derivative: expected back"):
        torch.autograd.grad(loss, hidden, create_graph=True)


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


# --- bytes ----------------------------------------------------------------------------------------

TOKENS, HIDDEN, VOCABULARY, FLOAT = 512, 16, 32_000, 4
LOGITS = TOKENS * VOCABULARY * FLOAT
"""Case F17: 62.5 MiB above blocks that hold less than one."""
VECTORS = 64 * TOKENS * FLOAT
"""More than all vectors of one number a token, an index or a mask."""


def measured(loss_of: Callable[..., torch.Tensor], dtype: torch.dtype) -> tuple[int, int, int]:
    """Peak of forward, bytes held between, peak of backward, all over the inputs."""
    inputs = make((TOKENS,), hidden=HIDDEN, vocabulary=VOCABULARY, dtype=dtype, ignored="none")
    probe = SimulatedProbe()
    probe.track([inputs.hidden, inputs.weight, inputs.labels])
    before = probe.allocated_bytes()
    with probe:
        loss = loss_of(inputs.hidden, inputs.weight, inputs.labels)
        forward, held = probe.peak_allocated_bytes - before, probe.allocated_bytes() - before
        probe.reset_peak()
        loss.backward()
    return forward, held, probe.peak_allocated_bytes - before


@pytest.mark.parametrize("num_tiles", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_logits_never_exist_whole(dtype: torch.dtype, num_tiles: int) -> None:
    tile = LOGITS // num_tiles
    narrow_tile = tile // 2 if dtype is torch.bfloat16 else 0
    gradients = (VOCABULARY + 3 * TOKENS) * HIDDEN * FLOAT
    forward, held, backward = measured(
        lambda *args: tiled_cross_entropy(*args, num_tiles=num_tiles), dtype
    )
    # two numbers a token and the loss (in one buffer of three), labels without ignored ones, a mask
    assert held == TOKENS * (3 * FLOAT + 8 + 1) + FLOAT + 8
    assert tile < forward <= tile + narrow_tile + VECTORS
    assert tile < backward <= tile + narrow_tile + gradients + VECTORS


def test_the_plain_loss_holds_them_twice() -> None:
    """What the figures above are compared with: float logits, their softmax, its gradient."""
    forward, held, backward = measured(plain, torch.float32)
    assert forward >= 2 * LOGITS
    assert held >= LOGITS
    assert backward >= 3 * LOGITS


def test_the_default_tile_bounds_the_peak_for_any_number_of_tokens() -> None:
    peaks = []
    for tokens in (1200, 2400):
        inputs = make((tokens,), hidden=2, vocabulary=VOCABULARY, needs="hidden")
        probe = SimulatedProbe()
        with probe:
            tiled_cross_entropy(inputs.hidden, inputs.weight, inputs.labels).backward()
        peaks.append(probe.peak_allocated_bytes)
    assert max(peaks) < 1.1 * DEFAULT_TILE_ELEMENTS * FLOAT

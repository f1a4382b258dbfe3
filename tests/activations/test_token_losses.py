"""The tiled loss as autograd and the allocator see it: gradients, dtypes, and bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rematic.activations import OpRetry
from rematic.activations.tiled_loss import DEFAULT_TILE_ELEMENTS, tiled_cross_entropy
from rematic.memory import SimulatedProbe
from tests.activations.losses import assert_near, make, plain, run


@pytest.mark.parametrize("vocabulary", [7, 101], ids=["by tokens", "by vocabulary"])
def test_with_every_label_ignored_the_mean_is_nan_and_the_gradients_are_zero(
    vocabulary: int,
) -> None:
    inputs = make((50,), vocabulary=vocabulary, ignored="all")
    for loss_of in (plain, tiled_cross_entropy):
        loss, gradients = run(loss_of, inputs)
        assert loss.isnan()
        assert [float(g.abs().max()) for g in gradients if g is not None] == [0.0, 0.0]


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


@pytest.mark.parametrize(
    ("tokens", "vocabulary"), [(600, 30), (30, 600)], ids=["by tokens", "by vocabulary"]
)
def test_gradients_are_added_up_in_32_bits(tokens: int, vocabulary: int) -> None:
    """Over 200 and 30 tiles; in 16 bits the sum would be off by 1.3 and 0.6 per cent."""
    inputs = make((tokens,), vocabulary=vocabulary, dtype=torch.bfloat16, ignored="none")
    _, wanted = run(plain, inputs)
    _, found = run(tiled_cross_entropy, inputs, tile_tokens=3 if tokens == 600 else 1)
    assert_near(found[0], wanted[0], 5e-3)
    assert_near(found[1], wanted[1], 5e-3)


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

"""Modules that a few positions show to be token-wise, and a whole sequence does not."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import rematic
from rematic.activations.tile_values import objection_at_length
from rematic.activations.token_wise import objection_to_tiles
from rematic.memory import SimulatedProbe
from rematic.policy import Tile
from tests.activations.test_tiling import attach
from tests.events import Events

WIDTH, LENGTH = 8, 64


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16 * WIDTH)
        self.down = nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)).pow(2))


class Dilated(MLP):
    """A convolution whose taps lie further apart than a few positions reach."""

    distance = 12

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=self.distance, dilation=self.distance)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.mix(x.transpose(1, 2)).transpose(1, 2).contiguous())


class FarDilated(Dilated):
    distance = 40


class Shifted(MLP):
    """Rolls by twelve positions, which is none where there are six."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.roll(x, 12, 1)


class Windows(MLP):
    """Adds the mean of every whole window."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        whole = y.shape[1] // 16 * 16
        windows = y[:, :whole].unflatten(1, (-1, 16)) if whole else y[:, :0, None]
        moved = windows + windows.mean(2, keepdim=True) if whole else windows
        return torch.cat([moved.flatten(1, 2), y[:, whole:]], 1)


class LongOnly(MLP):
    """Takes another branch where the sequence is long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y - y.mean(1, keepdim=True) if x.shape[1] > 8 else y


class Capacity(MLP):
    """Drops all but the tokens with the highest scores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x[..., 0].flatten()
        kept = torch.zeros_like(scores)
        kept[scores.topk(min(16, scores.numel())).indices] = 1.0
        return super().forward(x) * kept.view(*x.shape[:2], 1)


def divided(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / (1e-3 + gradient.norm())


def centred(gradient: torch.Tensor) -> torch.Tensor:
    return gradient - gradient.mean(1, keepdim=True) if gradient.shape[1] > 8 else gradient


def shifted(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + gradient.roll(12, 1)


class Backward(MLP):
    """Its forward is token-wise, its backward is not."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.hook = hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if hidden.requires_grad:
            hidden.register_hook(self.hook)
        return self.down(hidden)


class Block(nn.Module):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x).cumsum(1) / LENGTH
        return x + self.mlp(x)


FAR = [Dilated, FarDilated, Shifted, Windows, LongOnly, Capacity]


def make(block: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(block(), block())


def x(length: int = LENGTH, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(2))


def trained(
    block: Callable[[], nn.Module], budget: int | None, batch: torch.Tensor, *, autocast: bool
) -> tuple[rematic.StepOutOfMemoryError | None, list[torch.Tensor | None], Events, int]:
    """Returns the error of one step under a budget, its gradients, its journal and its peak."""
    model, probe, journal, error = make(block), SimulatedProbe(), Events(), None
    recipe = {"policy": {"op_retry": "never", "allow_tile": True}, "control": {"attempts": 8}}
    session = rematic.attach(model, policy="keep", probe=probe, journal=journal, recipe=recipe)

    def step(batch: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch).float().pow(2).mean()
        loss.backward()

    with probe:
        probe.track(model.parameters())
        probe.reset_peak()
        probe.budget_bytes = budget
        try:
            session.run(step, batch)
        except rematic.StepOutOfMemoryError as caught:
            error = caught
    session.detach()
    gradients = [parameter.grad for parameter in model.parameters()]
    return error, gradients, journal, probe.peak_allocated_bytes


@pytest.mark.parametrize("part", FAR)
def test_what_looks_far_away_is_not_trained_in_slices(part: Callable[[], nn.Module]) -> None:
    """A few positions of it show nothing of that; the attempt in slices runs it whole."""
    assert objection_to_tiles(part(), (x(),)) is None
    block = functools.partial(Block, part)
    _, wanted, _, peak = trained(block, None, x(), autocast=False)
    for share in (0.4, 0.5, 0.7):
        error, found, journal, _ = trained(block, int(peak * share), x(), autocast=False)
        slices = [e["text"] for e in journal.of("notice") if e["kind"] == "tile"]
        assert not any("runs in slices" in text for text in slices)
        if error is None:
            assert all(map(torch.equal, found, wanted))  # type: ignore[arg-type]


@pytest.mark.parametrize("hook", [divided, centred, shifted])
def test_a_backward_that_mixes_positions(
    hook: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """With the gradient of one position at a time, or of a few, none of them shows it."""
    block = functools.partial(Block, functools.partial(Backward, hook))
    _, wanted, _, peak = trained(block, None, x(), autocast=False)
    for share in (0.4, 0.5, 0.6):
        error, found, journal, _ = trained(block, int(peak * share), x(), autocast=False)
        assert "tile" not in [e["kind"] for e in journal.of("notice")]
        if error is None:
            assert all(map(torch.equal, found, wanted))  # type: ignore[arg-type]


@pytest.mark.parametrize("part", FAR)
def test_units_that_look_far_away_run_whole(part: Callable[[], nn.Module]) -> None:
    model, plain, journal = make(part), make(part), Events()
    session = attach(model, Tile(num_tiles=5), journal)
    for network in (model, plain):
        network(x()).pow(2).mean().backward()
    session.detach()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)
    texts = [event["text"] for event in journal.of("notice") if event["kind"] == "tile"]
    assert texts
    assert all("whole and not in slices: slices of the whole sequence" in text for text in texts)


def test_a_longer_sequence_is_asked_again() -> None:
    """The branch on the length is not taken by the first batches."""
    model, plain = make(LongOnly), make(LongOnly)
    session = attach(model, Tile(num_tiles=2))
    for length in (8, 7, 40, 8):
        outputs = [network(x(length)) for network in (model, plain)]
        torch.testing.assert_close(*outputs)
    session.detach()


def test_values_that_are_not_finite_decide_nothing() -> None:
    """An infinite one would make every difference look like rounding."""
    model, journal = make(LongOnly), Events()
    session = attach(model, Tile(num_tiles=2), journal)
    overflows = x()
    overflows[:, 20] = torch.inf
    for batch in (overflows, x()):
        model(batch)
    session.detach()
    texts = [event["text"] for event in journal.of("notice") if event["unit"] == "0"]
    assert "not finite" in texts[0]
    assert "depends on the length" in texts[1]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("autocast", [False, True])
def test_weights_keep_their_gradients(batch: int, autocast: bool) -> None:
    """Autocast must not remember weights that it cast without gradients."""
    block = functools.partial(Block, MLP)
    _, wanted, _, peak = trained(block, None, x(batch=batch), autocast=autocast)
    error, found, journal, _ = trained(block, peak // 2, x(batch=batch), autocast=autocast)
    assert error is None
    assert [e["next"] for e in journal.of("retry") if e["level"] == "step"][-1] == "tile"
    room = {"rtol": 2e-2, "atol": 1e-3} if autocast else {}
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, **room)


class Limited(nn.Module):
    """Finds no memory for more than so many tokens at once."""

    def __init__(self, part: nn.Module, most_tokens: int) -> None:
        super().__init__()
        self.part, self.most_tokens = part, most_tokens
        self.seen: list[tuple[int, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] * x.shape[1] > self.most_tokens:
            raise torch.OutOfMemoryError("injected")
        return self.part(x)


def fails_if_long(gradient: torch.Tensor) -> None:
    if gradient.shape[1] > 8:
        raise ValueError("too long")


def test_a_backward_that_fails_is_an_objection() -> None:
    """Training fails by itself, if at all."""
    assert "its backward fails on slices" in str(answer(Backward(fails_if_long), 256))


class TakesViews(MLP):
    """Expects that its input is contiguous."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(-1, WIDTH)).view(x.shape)


@pytest.mark.parametrize("most_tokens", [64, 256])
def test_parts_of_a_contiguous_input_are_contiguous(most_tokens: int) -> None:
    assert answer(TakesViews(), most_tokens) is None


def answer(part: nn.Module, most_tokens: int, *, may_be_partial: bool = True) -> str | None:
    limited = Limited(part, most_tokens)
    found = objection_at_length(
        limited,
        limited.forward,
        ((x(batch=4),), {}),
        num_tiles=8,
        dim=1,
        may_be_partial=may_be_partial,
    )
    return None if found is None else found.text


def test_where_there_is_no_memory_for_the_whole() -> None:
    """Two slices of all sequences are, and the whole of one sequence where that fits."""
    assert answer(MLP(), 64) is None
    assert "looks far away" in str(answer(Dilated(), 64))
    assert "looks far away" in str(answer(FarDilated(), 64)), "one sequence shows it"
    assert "depends on the length" in str(answer(LongOnly(), 64))
    for most_tokens, may_be_partial in ((63, True), (64, False)):
        with pytest.raises(torch.OutOfMemoryError):
            answer(MLP(), most_tokens, may_be_partial=may_be_partial)

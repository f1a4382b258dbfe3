"""Token-wise modules in slices: the values and gradients of the whole call."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

from rematic.activations.tile import join_tiles, run_in_tiles, sequence_length, tile_calls
from rematic.memory import SimulatedProbe


class MLP(nn.Module):
    """The token-wise half of a block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def two_inputs(x: torch.Tensor, *, gate: dict[str, torch.Tensor], scale: float) -> Any:
    """Nested arguments, a scalar tensor, several outputs, one of them no tensor."""
    y = x * gate["values"].sigmoid() * gate["temperature"] * scale
    return {"y": y, "parts": (y.sum(-1), None, "name")}


@settings(max_examples=40, derandomize=True)
@given(length=st.integers(1, 9), num_tiles=st.integers(1, 12), dim=st.sampled_from([1, -2]))
def test_any_length_and_number_of_tiles(length: int, num_tiles: int, dim: int) -> None:
    torch.manual_seed(0)
    module = MLP().double()
    x = torch.randn(2, length, 8, dtype=torch.float64)
    found = []
    for tiled in (False, True):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        tiles = {"num_tiles": num_tiles, "dim": dim}
        output = run_in_tiles(module, (leaf,), {}, **tiles) if tiled else module(leaf)
        (output * torch.arange(output.numel()).view(output.shape).cos()).sum().backward()
        found.append([output.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_nested_arguments_and_outputs() -> None:
    x = torch.randn(2, 5, 3)
    gate = {"values": torch.randn(2, 5, 3), "temperature": torch.tensor(2.0)}
    whole = two_inputs(x, gate=gate, scale=0.5)
    tiled = run_in_tiles(two_inputs, (x,), {"gate": gate, "scale": 0.5}, num_tiles=3, dim=1)
    assert torch.equal(tiled["y"], whole["y"])
    assert torch.equal(tiled["parts"][0], whole["parts"][0])
    assert tiled["parts"][1:] == (None, "name")


LENGTHS = {
    "even": (6, 3, [2, 2, 2]),
    "uneven": (7, 3, [3, 3, 1]),
    "fewer than asked": (4, 3, [2, 2]),
    "more tiles than positions": (2, 5, [1, 1]),
    "nothing": (0, 2, [0]),
}


@pytest.mark.parametrize(("length", "num_tiles", "wanted"), LENGTHS.values(), ids=LENGTHS.keys())
def test_the_slices_are_views_in_order(length: int, num_tiles: int, wanted: list[int]) -> None:
    x = torch.randn(1, length, 3)
    calls = list(tile_calls((x,), {"mask": x[..., 0]}, num_tiles=num_tiles, dim=1))
    assert [sequence_length(*call, dim=1) for call in calls] == wanted
    for (part,), kwargs in calls:
        assert part._base is x
        assert kwargs["mask"].shape == part.shape[:2]
    assert torch.equal(join_tiles([args[0] for args, _ in calls], wanted, dim=1), x)


def test_slices_of_several_sequences_can_be_viewed_like_the_whole() -> None:
    """A copy, made when its turn comes; of a tensor that cannot be viewed itself there is none."""
    x = torch.randn(2, 6, 4)
    for (part, turned), _ in tile_calls((x, x.transpose(0, 2)), {}, num_tiles=3, dim=1):
        assert part.view(-1, 4).shape == (4, 4)
        assert turned._base is x


def test_each_slice_can_be_its_own_record() -> None:
    """Whoever runs the slices decides: under checkpoint only one slice is in memory at a time."""
    peaks = {}
    module = MLP(16)
    for num_tiles in (1, 8):
        x = torch.randn(1, 512, 16, requires_grad=True)
        piece = functools.partial(checkpoint, module, use_reentrant=False)
        probe = SimulatedProbe()
        with probe:
            run_in_tiles(piece, (x,), {}, num_tiles=num_tiles, dim=1).sum().backward()
        peaks[num_tiles] = probe.peak_allocated_bytes
    one = 512 * 64 * 4
    # in one slice: the inner activation before and after tanh, and its gradient
    assert peaks[1] >= 2 * one
    assert peaks[1] - peaks[8] >= 1.5 * one
    assert peaks[8] < 1.5 * one, "what is left is the input, the output and their gradients"


def test_a_module_that_changes_its_input_is_refused_by_autograd() -> None:
    x = torch.randn(1, 4, 3, requires_grad=True) * 1.0
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        run_in_tiles(lambda t: t.mul_(2.0), (x,), {}, num_tiles=2, dim=1)


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "another length": (
        (torch.zeros(2, 4, 3), torch.zeros(2, 5)),
        r"shape \(2, 5\), the first one \(2, 4, 3\): expected the same length along dimension 1",
    ),
    "too few dimensions": ((torch.zeros(2, 4), torch.zeros(4)), r"has the shape \(4,\)"),
    "no tensor": ((3, None), "the call has no tensor to slice"),
    "only a scalar": ((torch.tensor(1.0),), "the call has no tensor to slice"),
}


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_arguments_without_one_sequence_are_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_in_tiles(lambda *given_: given_[0], args, {}, num_tiles=2, dim=1)


def test_the_number_of_tiles_is_checked() -> None:
    with pytest.raises(ValueError, match="num_tiles is 0: expected 1 or more"):
        tile_calls((torch.zeros(1, 2),), {}, num_tiles=0, dim=1)


def test_outputs_of_another_length_are_refused() -> None:
    x = torch.zeros(1, 4, 3)
    with pytest.raises(RuntimeError, match=r"a slice of 2 positions returned .* \(1, 1, 3\)"):
        run_in_tiles(lambda t: t.sum(1, keepdim=True), (x,), {}, num_tiles=2, dim=1)
    with pytest.raises(RuntimeError, match=r"returned a tensor of shape \(\)"):
        run_in_tiles(lambda t: t.sum(), (x,), {}, num_tiles=2, dim=1)


def test_outputs_of_another_structure_are_refused() -> None:
    x = torch.arange(4.0).view(1, 4)
    with pytest.raises(RuntimeError, match=r"the slices returned \[1, 2\] tensors"):
        run_in_tiles(lambda t: [t] * (1 if t[0, 0] == 0 else 2), (x,), {}, num_tiles=2, dim=1)

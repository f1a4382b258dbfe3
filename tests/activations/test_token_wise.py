"""What is token-wise is accepted, what is not is refused with the reason, and nothing is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rematic.activations.token_wise import is_token_wise, objection_to_tiles
from tests.activations.families import build_llama

WIDTH = 8


def x(length: int = 9, **options: Any) -> torch.Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1), **options)


def mixtral_experts() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=11,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    return MixtralForCausalLM(config).model.layers[0].mlp.train()


def norm(model: nn.Module) -> nn.Module:
    nn.init.uniform_(model.model.norm.weight)
    return model.model.norm


ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    "linear head": lambda: nn.Linear(WIDTH, 11),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "llama mlp": lambda: build_llama("sdpa").model.layers[0].mlp,
    "llama norm": lambda: norm(build_llama("sdpa")),
    "mixture of experts": mixtral_experts,
    "dropout in evaluation": lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout(0.5)).eval(),
    "dropout of nothing": lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout(0.0)),
    "pieces of one result": lambda: Pieces(),
    "zeros that stay zero": lambda: nn.Linear(WIDTH, 3, bias=False).requires_grad_(False),
    "softmax over features": lambda: nn.Softmax(dim=-1),
    "spectral norm in evaluation": lambda: nn.utils.parametrizations.spectral_norm(
        nn.Linear(WIDTH, WIDTH)
    ).eval(),
}


@pytest.mark.parametrize("build", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_token_wise_modules_are_accepted(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = build()
    assert objection_to_tiles(module, (x(),)) is None
    assert is_token_wise(module, (x(2),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_in_every_dtype(dtype: torch.dtype) -> None:
    module = build_llama("sdpa").model.layers[0].mlp.to(dtype)
    assert objection_to_tiles(module, (x().to(dtype),)) is None


def test_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert is_token_wise(nn.Linear(WIDTH, 3), (x(),))


class Function(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Attention(nn.Module):
    """Attention that sees the past, or everything."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=self.causal)


class Convolution(nn.Conv1d):
    """A convolution along the sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Counts(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


class Remembers(nn.Module):
    """Keeps what it has seen in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Size] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape)
        return x * 2


class FillsABuffer(nn.Module):
    """Changes a buffer, and not by an in-place op that raises its version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest.data.copy_(x.detach().abs().max())
        return x * 2


def value_equal_but_gradient_leaks(t: torch.Tensor) -> torch.Tensor:
    shifted = t.roll(1, 1)
    return t + (shifted - shifted.detach())


def gradient_zero_but_value_depends(t: torch.Tensor) -> torch.Tensor:
    return t + torch.cumsum((t.detach() > 0).float(), 1)


def positions(t: torch.Tensor) -> torch.Tensor:
    return t + torch.arange(t.shape[1])[:, None]


def far_positions(t: torch.Tensor) -> torch.Tensor:
    """Right in two halves and in the whole, wrong in single positions."""
    return t + (0.0 if t.shape[1] > 2 else 1.0)


class KeepsItsOutput(nn.Module):
    """Leaves its output on itself, with its graph, for others to add to their loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.auxiliary = x.square().mean()
        return x * 2


class KeepsALength(nn.Module):
    """Leaves a number on itself that it sets anew in each call."""

    def __init__(self, length: int = 0) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.length = x.shape[1]
        return x * 2


class Pieces(nn.Linear):
    """Returns pieces of one result, which share no element."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).chunk(3, -1)


def twice(t: torch.Tensor) -> Any:
    return (t * 2,) * 2


def overlapping(t: torch.Tensor) -> Any:
    doubled = t * 2
    return doubled, doubled[..., 1:]


OTHER_VALUES = "slices give other values"
SHARED = "its outputs share memory"
MOVES = "changing position 0 of its input changes other positions"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (lambda: Attention(causal=False), OTHER_VALUES),
    "causal attention": (lambda: Attention(causal=True), OTHER_VALUES),
    "convolution": (lambda: Convolution(WIDTH, WIDTH, 3, padding=1), OTHER_VALUES),
    "positions": (lambda: Function(positions), OTHER_VALUES),
    "length": (lambda: Function(far_positions), OTHER_VALUES),
    "only its gradient leaks": (
        lambda: Function(value_equal_but_gradient_leaks),
        "the gradient of position 0 reaches other positions",
    ),
    "only its value depends": (lambda: Function(gradient_zero_but_value_depends), OTHER_VALUES),
    "mean over the sequence": (
        lambda: Function(lambda t: t.mean(1)),
        "it fails on a part of the sequence: a slice of 3 positions returned a tensor of shape",
    ),
    "a scalar beside": (
        lambda: Function(lambda t: (t * 2, t.sum())),
        "it fails on a part of the sequence",
    ),
    "a fixed length": (
        lambda: nn.LayerNorm([6, WIDTH]),
        "it fails on a part of the sequence: Given normalized_shape",
    ),
    "no tensor": (lambda: Function(lambda t: None), "its output holds no tensor"),
    "another dtype": (
        lambda: Function(lambda t: t * 2 if t.shape[1] > 3 else t.double()),
        "slices give outputs of another shape or type",
    ),
    "dropout": (lambda: nn.Dropout(0.5), "it draws random numbers"),
    "batch norm": (
        lambda: Function(nn.BatchNorm1d(6)),
        "its forward changes its buffer 'function.running_mean'",
    ),
    "a counter": (Counts, "its forward changes its attribute 'calls'"),
    "a list": (Remembers, "its forward changes its attribute 'seen'"),
    "a buffer": (FillsABuffer, "its forward changes its buffer 'largest'"),
    "in place": (lambda: nn.ReLU(inplace=True), "it changes its input in place"),
    "its input": (nn.Identity, SHARED),
    "a view of its input": (lambda: Function(lambda t: t[..., :3]), SHARED),
    "an output twice": (lambda: Function(twice), SHARED),
    "outputs that overlap": (lambda: Function(overlapping), SHARED),
    "its length": (
        lambda: Function(lambda t: (t * 2, {"length": t.shape[1]})),
        "it returns something that is no tensor",
    ),
    "a loss of its own": (KeepsItsOutput, "its forward changes its attribute 'auxiliary'"),
    "a length of its own": (KeepsALength, "its forward changes its attribute 'length'"),
    "a length that is that of the example": (
        lambda: KeepsALength(6),
        "its forward changes its attribute 'length'",
    ),
}


@pytest.mark.parametrize(("build", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_others_are_refused_with_the_reason(build: Callable[[], nn.Module], reason: str) -> None:
    torch.manual_seed(0)
    module = build()
    found = objection_to_tiles(module, (x(),))
    assert found is not None
    assert reason in found.text
    assert not is_token_wise(module, (x(),))


def test_a_dependence_that_slices_do_not_show() -> None:
    """Equal in slices of the example, but it looks at others when one of them is large."""

    def looks(t: torch.Tensor) -> torch.Tensor:
        return t + (t.detach().max() > 2.5).float()

    example = x().clamp(-1.2, 0.5)
    found = objection_to_tiles(Function(looks), (example,))
    assert found is not None
    assert found.text.startswith("changing position")


def test_other_arguments_are_sliced_with_it() -> None:
    class Gated(nn.Module):
        def forward(self, x: torch.Tensor, *, gate: torch.Tensor, mask: torch.Tensor) -> Any:
            return (x * gate[..., None]).masked_fill(mask[..., None], 0.0), gate * 2

    kwargs = {"gate": torch.randn(2, 9), "mask": torch.rand(2, 9) > 0.5}
    assert is_token_wise(Gated(), (x(),), kwargs)


class Given(nn.Module):
    """Calls a function with all that it is given."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> torch.Tensor:
        return self.function(*given)


def test_a_list_that_it_is_given_and_fills_is_refused() -> None:
    """Slices would fill lists of their own."""

    def fills(t: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        losses.append(t.detach())
        return t * 2

    losses: list[torch.Tensor] = []
    found = objection_to_tiles(Given(fills), (x(), losses))
    assert found is not None
    assert found.text == "it changes a list, a dictionary or a dataclass that it is given"
    assert losses == []


def test_a_generator_that_it_is_given_stays_where_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()

    def draws(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return t * torch.rand(t.shape[-1], generator=generator)

    found = objection_to_tiles(Given(draws), (x(), generator))
    assert found is not None
    assert found.text.startswith("it draws random numbers")
    assert torch.equal(generator.get_state(), before)


def test_token_ids_need_no_gradient() -> None:
    assert is_token_wise(nn.Embedding(11, 4), (torch.randint(0, 11, (2, 9)),))


@pytest.mark.parametrize("dim", [0, -1], ids=["first", "last"])
def test_along_another_dimension(dim: int) -> None:
    module = Function(lambda t: t.softmax(1))
    assert is_token_wise(module, (torch.randn(9, 5, 7),), dim=dim)
    assert not is_token_wise(module, (torch.randn(5, 9, 7),), dim=1)


def test_nothing_is_left_behind() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Dropout(0.5), Counts(), Remembers(), FillsABuffer())
    module.add_module("batch", nn.BatchNorm1d(9))
    seen: list[object] = []
    module.register_forward_hook(lambda *args: seen.append(args))
    example = x().requires_grad_()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    generator, keys = torch.get_rng_state(), [set(m.__dict__) for m in module.modules()]
    assert objection_to_tiles(module, (example,)) is not None
    assert objection_to_tiles(module[3], (example,)) is not None
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [set(m.__dict__) for m in module.modules()] == keys
    assert module[1].calls == 0
    assert module[2].seen == []
    assert example.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())
    assert seen == [], "the hooks of the module itself do not see the check"


def test_what_is_called_can_be_given() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    assert objection_to_tiles(module, (x(),), forward=lambda t: t.flip(1)) is not None


def test_running_out_of_memory_is_no_answer() -> None:
    def fails(t: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError):
        objection_to_tiles(Function(fails), (x(),))


def test_one_position_proves_nothing() -> None:
    with pytest.raises(ValueError, match="the example has 1 position: expected 2 or more"):
        is_token_wise(nn.Identity(), (x(1),))


class Scan(nn.Module):
    """Looks at earlier positions, of those that a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            return self.proj(x.cumsum(1))
        kept = mask[..., None].to(x.dtype)
        return self.proj((x * kept).cumsum(1)) * kept


class ZeroedScan(Scan):
    """Its residual branch ends in zeros, which hide it until they are trained."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x + super().forward(x, mask)


class GatedScan(Scan):
    """A gate that opens in training."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.gate * super().forward(x, mask)


def _padded(*places: slice, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.ones(2, 24, dtype=dtype)
    for place in places:
        mask[:, place] = 0
    return mask


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "places",
    [[slice(0, 8)], [slice(8, None)], [slice(0, 7), slice(20, None)]],
    ids=["left", "right", "both"],
)
def test_padding_hides_nothing(places: list[slice], dtype: torch.dtype) -> None:
    found = objection_to_tiles(Scan(), (x(24), _padded(*places, dtype=dtype)))
    assert found is not None
    assert found.is_final
    assert OTHER_VALUES in found.text


@pytest.mark.parametrize("block", [ZeroedScan, GatedScan])
def test_parameters_that_are_zero_hide_nothing(block: type[Scan]) -> None:
    module = block()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    found = objection_to_tiles(module, (x(),))
    assert found is not None
    assert OTHER_VALUES in found.text
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())


def _only_padding() -> tuple[torch.Tensor, ...]:
    return x(24), torch.zeros(2, 24)


SHOW_NOTHING: dict[str, tuple[nn.Module, Callable[[], tuple[torch.Tensor, ...]]]] = {
    "only padding": (Scan(), _only_padding),
    "an empty batch": (Scan(), lambda: (x(24)[:0],)),
    "undefined values": (Scan(), lambda: (x(24) * math.nan,)),
    "tokens that are all the same": (nn.Embedding(3, 2), lambda: (torch.ones(2, 9).long(),)),
}


@pytest.mark.parametrize(("module", "example"), SHOW_NOTHING.values(), ids=SHOW_NOTHING.keys())
def test_an_example_that_shows_nothing_decides_nothing(
    module: nn.Module, example: Callable[[], tuple[torch.Tensor, ...]]
) -> None:
    found = objection_to_tiles(module, example())
    assert found is not None
    assert not found.is_final
    assert found.text.startswith("the batch shows nothing")


def test_what_is_made_once_is_no_final_objection() -> None:
    module = Function(lambda t: (setattr(module, "table", torch.ones(3)), t * 2)[1])
    found = objection_to_tiles(module, (x(),))
    assert found is not None
    assert not found.is_final
    assert found.text == "its forward changes its attribute 'table'"
    assert not hasattr(module, "table")

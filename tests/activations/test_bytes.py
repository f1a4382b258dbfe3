"""Contract 6: what is held, what an eviction frees, and where the peak of a step lies. Exact."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rematic.activations import find_units
from rematic.memory import SimulatedProbe
from tests.activations.blocks import WIDTH, Block, make_input, make_model
from tests.activations.families import FAMILIES, Encoder, Family, build_llama
from tests.activations.parity import attached, batches, make

ROWS = 1000
FLOAT = 4
ONE = ROWS * WIDTH * FLOAT
"""Bytes of one activation `(ROWS, WIDTH)`."""


class Frozen(Block):
    """Weights that need no gradient: their inputs are not saved, the low-rank part's are."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.low = nn.Linear(WIDTH, 2, bias=False)
        self.high = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.high(self.low(x))))


class Views(Block):
    """Saves views of one storage, and the same tensor twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.up(x).chunk(2, dim=1)
        product = left * right
        return x + torch.cat([product * product, product], dim=1)


class OutputIsSaved(Block):
    """Its output is what it saves, so that evicting it frees nothing while the output lives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.up(x))


class SparseTimes(Block):
    """A sparse tensor of its own has no storage to count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eye = torch.eye(len(x)).to_sparse()
        return x + torch.sparse.mm(eye, torch.tanh(self.up(x)))


# By hand: what one block holds of its own at the end of its forward, and what evicting it frees.
HELD: dict[str, tuple[type[Block], int, int]] = {
    # the output of tanh, once: tanh and the second linear both save it
    "block": (Block, ONE, ONE),
    # the output of tanh, and the low-rank activation of two columns
    "frozen weights": (Frozen, ONE + ROWS * 2 * FLOAT, ONE + ROWS * 2 * FLOAT),
    # the linear's output, of which left and right are views; the product
    "views": (Views, ONE + ONE // 2, ONE + ONE // 2),
    "output is saved": (OutputIsSaved, ONE, 0),
}


@pytest.mark.parametrize(("block", "held", "freed"), HELD.values(), ids=HELD.keys())
def test_a_block_holds_and_frees_the_bytes_of_the_arithmetic(
    block: type[Block], held: int, freed: int
) -> None:
    model = make_model(block)
    with attached(model) as engine, SimulatedProbe() as probe:
        outputs = [make_input(ROWS)]
        for part in model.blocks:
            outputs.append(part(outputs[-1]))
        assert [record.own_bytes() for record in engine.ledger.records()] == [held] * 3
        assert engine.ledger.resident_bytes() == 3 * held
        for record in engine.ledger.records():
            before = probe.allocated_bytes()
            assert record.evict() == before - probe.allocated_bytes() == freed
            assert record.own_bytes() == 0
            assert record.evict() == 0, "there is nothing to free twice"


def test_a_sparse_tensor_is_no_obstacle() -> None:
    model = make_model(SparseTimes)
    with attached(model) as engine:
        loss = model(make_input(ROWS))
        assert engine.ledger.resident_bytes() >= 3 * ONE
        assert engine.ledger.evict(1 << 40).bytes_freed >= 3 * ONE
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "half-frozen"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_claimed_bytes_are_the_freed_ones(family: Family, frozen: bool, dtype: torch.dtype) -> None:
    """Apart from what something outside holds as well, such as a unit's output."""
    model = make(family).to(dtype)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name or "norm" in name or "ln" in name)
    (batch,) = batches(family, 1)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    with attached(model) as engine, SimulatedProbe() as probe:
        loss = family.loss(model, batch)
        claimed = engine.ledger.resident_bytes()
        before = probe.allocated_bytes()
        eviction = engine.ledger.evict(1 << 40)
        assert claimed > 0
        assert eviction.bytes_freed == before - probe.allocated_bytes()
        assert sorted(eviction.units) == sorted(family.units)
        saved_outside = claimed - eviction.bytes_freed
        assert 0 <= saved_outside < 0.2 * claimed
        loss.backward()


def test_inside_autocast_measured_bytes_are_returned_not_claimed_ones() -> None:
    """The cast cache holds copies of the weights, which the records saved."""
    model = make_model()
    with attached(model) as engine, SimulatedProbe() as probe:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(make_input(16))
            claimed, before = engine.ledger.resident_bytes(), probe.allocated_bytes()
            freed = engine.ledger.evict(1 << 40).bytes_freed
            assert freed == before - probe.allocated_bytes()
            assert 0 < freed < claimed
        loss.backward()


def test_parameters_buffers_and_inputs_are_never_counted() -> None:
    class OnlyExternal(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.rand(WIDTH))
            self.offset = torch.rand(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.up.weight.t()) * 1.0

    model = make_model(OnlyExternal)
    with attached(model, kept=False) as engine:
        loss = model(make_input())
        assert engine.ledger.resident_bytes() == 0
        loss.backward()
        assert engine.ledger.counts.replays.total() == 0, "nothing was missing"


# --- peaks ----------------------------------------------------------------------------------------


def _peak(model: nn.Module, step: Callable[[nn.Module], Any]) -> int:
    """The peak of the second step, gradients of the first gone: weights, buffers, everything."""
    step(model)
    model.zero_grad()
    probe = SimulatedProbe()
    probe.track([*model.parameters(), *model.buffers()])
    with probe:
        step(model)
    return probe.peak_allocated_bytes


def _llama_step(model: nn.Module, *, autocast: bool = False) -> None:
    ids = torch.randint(0, 50, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # without a cache: under torch's checkpoint the cache would be written twice
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()


def _encoder_step(model: nn.Module) -> None:
    ids = torch.randint(0, 11, (4, 64), generator=torch.Generator().manual_seed(1))
    model(ids, torch.zeros(4, 64, dtype=torch.bool)).sum().backward()


def _block_step(model: nn.Module) -> None:
    model(make_input(ROWS)).backward()


def _llama(attention: str) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6}
    return build_llama(attention, vocab_size=50, max_position_embeddings=128, **sizes)


Build = Callable[[], nn.Module]
Step = Callable[[nn.Module], Any]
LONG: dict[str, tuple[Build, Step]] = {
    "blocks": (lambda: make_model(depth=6), _block_step),
    "encoder": (lambda: Encoder(), _encoder_step),
    "llama-eager": (lambda: _llama("eager"), _llama_step),
    "llama-sdpa": (lambda: _llama("sdpa"), _llama_step),
    "llama-sdpa-bf16": (lambda: _llama("sdpa"), functools.partial(_llama_step, autocast=True)),
}


@pytest.mark.parametrize(("build", "step"), LONG.values(), ids=LONG.keys())
def test_a_recomputed_step_peaks_where_torchs_checkpoint_does(build: Build, step: Step) -> None:
    reference = build()
    for _, block in find_units(reference):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    model = build()
    with attached(model, kept=False):
        found = _peak(model, step)
    assert found <= 1.02 * _peak(reference, step)
    assert found < 0.8 * _peak(build(), step), "and far below the plain step"


class NeedsNoInput(Block):
    """Plain autograd does not keep its input: dropout saves its mask alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1) + self.down(torch.tanh(self.up(F.dropout(x, 0.1))))


def _at_the_loss(block: type[Block], *, kept: bool) -> int:
    """Live bytes when the loss is reached; the input of the first unit is the caller's."""
    model, x = make_model(block, 6), make_input(ROWS)
    probe = SimulatedProbe()
    probe.track([*model.parameters(), x])
    with attached(model) if kept else contextlib.nullcontext(), probe:
        loss = model(x)
        live = probe.allocated_bytes()
    del loss
    return live


@pytest.mark.parametrize(
    ("block", "inputs_that_plain_frees"),
    [(Block, 0), (NeedsNoInput, 5)],
    ids=["input is saved anyway", "input is not saved"],
)
def test_a_kept_step_holds_the_plain_bytes_and_the_inputs(
    block: type[Block], inputs_that_plain_frees: int
) -> None:
    """Of six units five have an input that another unit made."""
    plain, kept = _at_the_loss(block, kept=False), _at_the_loss(block, kept=True)
    assert kept - plain == inputs_that_plain_frees * ONE


@pytest.mark.parametrize(("build", "step"), LONG.values(), ids=LONG.keys())
def test_a_kept_step_peaks_at_the_plain_peak_and_the_inputs(build: Build, step: Step) -> None:
    plain, model = _peak(build(), step), build()
    inputs: dict[int, int] = {}
    with attached(model) as engine:

        def note_inputs(record: Any) -> None:
            for argument in record.arguments.tensors():
                storage = argument.tensor().untyped_storage()
                inputs[storage._cdata] = storage.nbytes()

        kept = _peak(model, step)
        engine.ledger.after_forward = note_inputs
        step(model)
    assert plain <= kept <= plain + sum(inputs.values())
    assert kept <= 1.05 * plain


def test_memory_falls_through_backward() -> None:
    """Live bytes each time backward comes to a unit: never above the ones before it."""
    model = make_model(depth=6)
    with attached(model) as engine, SimulatedProbe() as probe:
        falling: list[int] = []
        engine.ledger.at_backward = lambda record: falling.append(probe.allocated_bytes())
        loss = model(make_input(ROWS))
        at_loss = probe.allocated_bytes()
        loss.backward()
    assert len(falling) == 6
    assert falling == sorted(falling, reverse=True)
    gradients = sum(p.numel() * FLOAT for p in model.blocks[0].parameters())
    assert falling[0] - falling[-1] == 5 * (2 * ONE - gradients), "of each: tanh and its input"
    assert engine.ledger.records() == []
    assert probe.allocated_bytes() < at_loss - 6 * ONE

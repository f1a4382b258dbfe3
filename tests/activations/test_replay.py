"""A replay does what forward did, or says what it did instead; it leaves nothing behind."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rematic.activations import Engine, ReplayError, replaying
from rematic.memory import SimulatedProbe
from tests.activations.blocks import WIDTH, Block, gradients, make_input, make_model
from tests.activations.parity import Outcome, attached, differences, read_outcome, same_bits


class Unsteady(Block):
    """Does something else when it is replayed, driven by nothing that torch knows of."""

    change: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda x: x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return x + self.down(torch.tanh(self.change(h) if replaying() else h))


CHANGES = {
    "shape": (
        lambda h: h[:2],
        r"the replay of unit 'blocks\.2' made another tensor at position \d+: forward saved "
        r"torch\.float32 \(4, 8\) on cpu, the replay torch\.float32 \(2, 8\) on cpu\. Its forward "
        r"does not do the same twice: .* guard it with `rematic\.replaying\(\)`, or keep this unit",
    ),
    "dtype": (
        lambda h: h.double(),
        r"the replay of unit 'blocks\.2' made another tensor at position \d+: forward saved "
        r"torch\.float32 \(4, 8\) on cpu, the replay torch\.float64",
    ),
    "fewer tensors": (
        lambda h: h.detach(),
        r"the replay of unit 'blocks\.2' ",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_replay_that_does_something_else_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unsteady, "change", staticmethod(change))
    model = make_model(Unsteady)
    with attached(model, kept=False, trusted=True):
        loss = model(make_input())
        with pytest.raises(ReplayError, match=message):
            loss.backward()
    assert not replaying()


class LosesItsEnd(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return x if replaying() else out.exp().exp()


def test_a_replay_that_ends_early_says_how_many_tensors_it_saved() -> None:
    model = make_model(LosesItsEnd)
    with attached(model, kept=False, trusted=True):
        loss = model(make_input())
        message = r"the replay of unit 'blocks\.2' saved \d+ tensors where its forward saved \d+\."
        with pytest.raises(ReplayError, match=message):
            loss.backward()


def test_a_replay_that_goes_on_after_the_last_tensor_is_refused() -> None:
    class NeverStops(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(BaseException):  # even that all is there
                x = torch.tanh(super().forward(x))
            for _ in range(9 * replaying()):
                x = torch.tanh(x)
            return x

    model = make_model(NeverStops)
    with attached(model, kept=False):
        loss = model(make_input())
        message = (
            r"the replay of unit 'blocks\.2' saved more than the \d+ tensors its forward saved\."
        )
        with pytest.raises(ReplayError, match=message):
            loss.backward()


# --- changed in place between forward and backward ------------------------------------------------


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "recomputed"])
def test_a_parameter_changed_before_backward_is_refused(kept: bool) -> None:
    model = make_model()
    with attached(model, kept=kept):
        loss = model(make_input())
        with torch.no_grad():
            model.blocks[1].down.weight.add_(1)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
    if kept:
        assert re.search(
            r"inplace operation: saved tensor \d+ \(torch\.float32 \(8, 8\) on cpu\) of unit "
            r"'blocks\.1', saved at version \d+\. Plain PyTorch refuses this as well",
            str(caught.value),
        )
    else:
        assert str(caught.value).startswith(
            "cannot replay unit 'blocks.1': its parameter of shape (8, 8) was changed in place "
            "between forward and backward (an optimizer step before backward?). Run backward first"
        )


def test_a_large_buffer_changed_before_backward_is_refused() -> None:
    class Table(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(20_000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.table[:WIDTH]

    model = make_model(Table)
    with attached(model, kept=False):
        model(make_input()).backward()
        loss = model(make_input())
        model.blocks[0].table.zero_()
        with pytest.raises(ReplayError, match=r"unit 'blocks\.0': its buffer 'table' was changed"):
            loss.backward()


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "recomputed"])
def test_an_input_changed_before_backward_is_refused_as_in_plain_torch(kept: bool) -> None:
    plain, x = make_model(), make_input().clone()
    loss = plain(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    model, x = make_model(), make_input().clone()
    message = (
        "modified by an inplace operation"
        if kept
        else (
            r"cannot replay unit 'blocks\.0': tensor argument 0 was changed in place after its "
            r"forward\. Clone it before the in-place operation, or keep this unit"
        )
    )
    with attached(model, kept=kept):
        loss = model(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match=message):
            loss.backward()


def test_a_record_whose_input_has_changed_is_not_evicted() -> None:
    """`x += unit(x)`, where plain autograd needs nothing of x, fails under no eviction either."""

    class Adds(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * 2)

    def run(model: nn.Module) -> torch.Tensor:
        x = make_input().clone()
        for block in model.blocks:
            x += block(x)
        return x.pow(2).sum()

    plain, model = make_model(Adds), make_model(Adds)
    run(plain).backward()
    with attached(model, kept=True) as engine:
        loss = run(model)
        held = engine.ledger.resident_bytes()
        eviction = engine.ledger.evict(1 << 40)
        assert (eviction.bytes_freed, held) == (0, 0)
        loss.backward()
    assert all(map(same_bits, gradients(model), gradients(plain)))


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "recomputed"])
def test_a_tensor_found_outside_and_changed_before_backward_is_refused(kept: bool) -> None:
    positions = make_input()

    class FindsOutside(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * positions

    model = make_model(FindsOutside)
    message = (
        "modified by an inplace operation"
        if kept
        else (
            r"cannot replay unit 'blocks\.2': the tensor it saved at position \d+ \(torch\.float32 "
            r"\(4, 8\) on cpu\) was changed in place after its forward\."
        )
    )
    with attached(model, kept=kept):
        model(make_input())  # the last unit of a first step waits for what becomes of its input
        loss = model(make_input())
        positions.add_(1)
        with pytest.raises(RuntimeError, match=message):
            loss.backward()


def test_an_output_changed_before_its_eviction_is_refused_as_if_it_had_been_kept() -> None:
    class Sigmoid(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(super().forward(x))

    model = make_model(Sigmoid)
    with attached(model, kept=True) as engine:
        x = make_input()
        for block in model.blocks:
            x = block(x)
        loss = x.mul_(2).sum()
        engine.ledger.evict(1 << 40)
        with pytest.raises(
            RuntimeError, match=r"inplace operation: saved tensor \d+ .* 'blocks\.2'"
        ):
            loss.backward()


# --- failures inside replays ----------------------------------------------------------------------


def test_an_error_inside_a_replay_restores_everything_and_can_be_tried_again() -> None:
    class Fails(Block):
        armed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(nn.functional.dropout(x, 0.5))
            if replaying() and Fails.armed:
                self.training, self.extra = False, 1
                torch.set_default_dtype(torch.float64)
                torch.rand(3)
                raise KeyError("not torch's fault")
            return torch.tanh(out)

    plain = make_model(Fails)
    torch.manual_seed(1)
    plain(make_input()).backward()

    model = make_model(Fails)
    torch.manual_seed(1)
    with attached(model, kept=False):
        loss = model(make_input())
        generator = torch.get_rng_state()
        attributes = [dict(block.__dict__) for block in model.blocks]
        Fails.armed = True
        with pytest.raises(KeyError, match="not torch's fault"):
            loss.backward(retain_graph=True)
        assert torch.get_default_dtype() == torch.float32
        assert torch.equal(torch.get_rng_state(), generator)
        assert [dict(block.__dict__) for block in model.blocks] == attributes
        assert not replaying()
        assert torch.is_grad_enabled()
        Fails.armed = False
        model.zero_grad()
        loss.backward()
    assert all(same_bits(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))


class Stateful(Block):
    """Draws random numbers and updates running statistics before it saves its last tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(nn.functional.dropout(self.norm(x), 0.5)))


def _stateful_steps(probe: SimulatedProbe) -> tuple[Outcome, Engine, int]:
    """Two steps, only the second one under the probe: the first unit kept, the others evicted."""
    model = make_model(Stateful)
    torch.manual_seed(1)
    with attached(model, kept=[True, False, False]) as engine:
        model(make_input()).backward()
        with probe:
            loss = model(make_input())
            num_forward_ops = probe.num_ops
            loss.backward()
    return read_outcome(model, [loss]), engine, num_forward_ops


def test_memory_that_runs_out_inside_a_replay_is_answered_by_evicting_others() -> None:
    whole = SimulatedProbe()
    plain, _, num_forward_ops = _stateful_steps(whole)
    recovered = stopped = 0
    for position in range(num_forward_ops + 1, whole.num_ops + 1):
        try:
            found, engine, _ = _stateful_steps(SimulatedProbe(fail_at_ops=[position]))
        except torch.OutOfMemoryError:
            stopped += 1  # backward's own ops, which the retry at the op answers
            continue
        recovered += 1
        assert engine.ledger.counts.num_evictions == 1
        assert engine.ledger.counts.replays == {f"blocks.{i}": 2 if i else 1 for i in range(3)}
        assert differences(found, plain) == [], f"wrong after a failure at op {position}"
    assert recovered >= 20
    assert stopped >= 20


def test_a_model_released_before_backward_can_still_be_replayed() -> None:
    plain, x = make_model(), make_input(requires_grad=True)
    plain(x).backward()
    wanted, x = x.grad, make_input(requires_grad=True)

    def forward() -> torch.Tensor:
        model = make_model()
        with attached(model, kept=False):
            return model(x)

    forward().backward()
    assert wanted is not None
    assert torch.equal(x.grad, wanted)

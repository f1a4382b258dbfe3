"""The action `tile`: token-wise units in slices, each a record; others whole, with the reason."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.memory import SimulatedProbe
from rematic.policy import Action, Policy, Recompute, Rule, Tile
from tests.activations.families import build_llama
from tests.activations.parity import Outcome, differences, read_outcome
from tests.events import Events

WIDTH = 16
LENGTH = 24


class Mix(nn.Module):
    """Looks at earlier positions, which no slice could."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(x.cumsum(1))


class MLP(nn.Module):
    """Token-wise."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


def make(block: Callable[[], nn.Module] = MLP) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(block(), block(), nn.Linear(WIDTH, 3))


def x(batch: int = 2, *, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, LENGTH, WIDTH, generator=generator, requires_grad=requires_grad)


def step(model: nn.Module, batch: torch.Tensor) -> Outcome:
    torch.manual_seed(9)
    loss = model(batch).pow(2).mean()
    loss.backward()
    return read_outcome(model, [loss])


def attach(model: nn.Module, action: Action, journal: Events | None = None) -> rematic.Session:
    policy = Policy(name="mine", rules=(Rule(pattern="*", action=action),), default=Recompute())
    recipe = {"policy": {"units": ["0", "1"]}}
    return rematic.attach(model, recipe=recipe, policy=policy, journal=journal)


def close(found: Outcome, wanted: Outcome) -> None:
    for a, b in zip(found.losses, wanted.losses, strict=True):
        torch.testing.assert_close(a, b)
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient)
    assert torch.equal(found.generator, wanted.generator)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("action", [Tile(num_tiles=4), Tile(tile_tokens=7)], ids=str)
def test_a_unit_in_slices_differs_by_the_order_of_sums_alone(action: Tile, batch: int) -> None:
    wanted = step(make(), x(batch))
    model, journal = make(), Events()
    session = attach(model, action, journal)
    for _ in range(2):
        model.zero_grad()
        with session.step(x(batch)):
            found = step(model, x(batch))
        close(found, wanted)
    assert [unit.num_forwards for unit in session._engine.units] == [8, 8]
    assert [(e["unit"], e["kind"]) for e in journal.of("notice")] == [("0", "tile"), ("1", "tile")]
    assert "gradients of its weights are summed by slice" in journal.of("notice")[0]["text"]
    session.detach()


def test_a_sequence_that_fits_one_slice_has_the_bits_of_the_plain_step() -> None:
    wanted = step(make(), x())
    model = make()
    session = attach(model, Tile(tile_tokens=LENGTH))
    assert differences(step(model, x()), wanted) == []
    session.detach()


def _peak_and_held(action: Action) -> tuple[int, int]:
    model = make()
    session = attach(model, action)
    step(model, x())
    model.zero_grad()
    with SimulatedProbe() as probe:
        loss = model(x(requires_grad=True)).pow(2).mean()
        held = probe.allocated_bytes()
        loss.backward()
    session.detach()
    assert held is not None
    peak = probe.snapshot().peak_allocated_bytes
    assert peak is not None
    return peak, held


def test_slices_need_less_memory_and_hold_no_copies_of_their_input() -> None:
    whole_peak, whole_held = _peak_and_held(Recompute())
    tiled_peak, tiled_held = _peak_and_held(Tile(num_tiles=4))
    hidden = 2 * LENGTH * 8 * WIDTH * 4  # bytes of `up`
    assert tiled_held == whole_held
    # of what a whole unit needs in backward (the result of tanh, a gradient or two of that size)
    # slices save three quarters
    assert whole_peak - tiled_peak > hidden


def _hooked() -> nn.Module:
    mlp = MLP()
    mlp.up.register_forward_hook(lambda *_: None)
    return mlp


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "other positions": (Mix, "it depends on the position or on other positions"),
    "dropout": (lambda: MLP(0.5), "it draws random numbers"),
    "hooks": (_hooked, "hooks on its part 'up' would see every slice"),
}


@pytest.mark.parametrize(("block", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_unit_that_must_not_run_in_slices_is_recomputed_whole(
    block: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = step(make(block), x())
    model, journal = make(block), Events()
    with caplog.at_level(logging.WARNING, "rematic"):
        session = attach(model, Tile(num_tiles=4), journal)
        assert differences(step(model, x()), wanted) == []
    text = "is recomputed whole and not in slices"
    assert [text in r.message and reason in r.message for r in caplog.records] == [True, True]
    assert all(reason in event["text"] for event in journal.of("notice"))
    assert session.report().count(reason.split("'")[0].strip()) == 2
    assert session._engine.ledger.counts.replays.total() == 2
    session.detach()


def test_arguments_without_the_sequence_are_a_reason_too(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(MLP):
        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x) * (torch.ones(3).mean() if scale is None else scale[0])

    mlp = nn.Sequential(Scaled())
    session = rematic.attach(mlp, recipe={"policy": {"units": ["0"]}}, policy="recompute")
    session.switch(Policy(name="t", default=Tile(num_tiles=2)))
    with session.step(x()):
        mlp[0](x(), torch.ones(5)).sum().backward()
    assert "expected the same length along dimension 1 in every tensor" in caplog.text
    session.detach()


def test_a_reason_is_told_of_once_whatever_the_lengths(caplog: pytest.LogCaptureFixture) -> None:
    """F10: shapes stand in the reason, and lengths differ from step to step."""

    class Scaled(MLP):
        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x) * (1.0 if scale is None else scale.mean())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Scaled(), Scaled()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, torch.ones(1, 2, 3 * x.shape[1]))
            return x

    model, journal = Model(), Events()
    session = rematic.attach(
        model, policy=Policy(name="t", default=Tile(num_tiles=2)), journal=journal
    )
    for length in range(8, 28):
        with session.step(torch.ones(1)):
            model(torch.ones(1, length, WIDTH)).sum().backward()
    assert len([m for m in caplog.messages if "not in slices" in m]) == len(model.blocks)
    assert len(journal.of("notice")) == len(model.blocks)
    session.detach()


def test_the_mlp_of_a_language_model_runs_in_slices() -> None:
    def run(model: nn.Module) -> Outcome:
        ids = torch.arange(14).view(2, 7) % 11
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return read_outcome(model, [loss])

    def build() -> Any:
        torch.manual_seed(0)
        return build_llama("sdpa")

    wanted = run(build())
    model = build()
    recipe = {
        "policy": {
            "start": "recompute",
            "units": ["*.mlp", "*.self_attn"],
            "rules": [{"match": "*.mlp", "action": {"name": "tile", "tile_tokens": 3}}],
        }
    }
    session = rematic.attach(model, recipe=recipe)
    close(run(model), wanted)
    assert session._engine.units[1].num_forwards == 3
    session.detach()


def test_evaluation_is_judged_by_itself() -> None:
    model = make(lambda: MLP(0.5))
    session = attach(model, Tile(num_tiles=4))
    step(model, x())
    assert [unit.num_forwards for unit in session._engine.units] == [1, 1]
    model.eval()
    step(model, x())
    assert [unit.num_forwards for unit in session._engine.units] == [5, 5]
    session.detach()


def test_a_mixture_of_experts_in_slices_keeps_its_decisions() -> None:
    from tests.activations.test_routing import mixtral

    def run(model: Any) -> Outcome:
        model.config.output_router_logits = False  # (collected by hooks on the routers)
        for layer in model.model.layers:
            layer.mlp.jitter_noise = 0.0
        ids = torch.arange(14).view(2, 7) % 11
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return read_outcome(model, [loss])

    wanted = run(mixtral())
    model = mixtral()
    rules = [{"match": "*.mlp", "action": {"name": "tile", "num_tiles": 3}}]
    recipe = {"policy": {"start": "recompute", "units": ["*.mlp"], "rules": rules}}
    session = rematic.attach(model, recipe=recipe)
    for _ in range(2):
        model.zero_grad()
        close(run(model), wanted)
    assert [unit.num_forwards for unit in session._engine.units] == [6, 6]
    session.detach()


class Scan(nn.Module):
    """Looks at earlier positions, of those that a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = mask[..., None].to(x.dtype)
        return self.proj((x * kept).cumsum(1)) * kept


def _one_unit(unit: nn.Module) -> tuple[nn.Sequential, rematic.Session]:
    model = nn.Sequential(unit)
    policy = Policy(name="mine", default=Tile(num_tiles=4))
    return model, rematic.attach(model, recipe={"policy": {"units": ["0"]}}, policy=policy)


def _in_turn(*calls: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Outcome]:
    """Returns what runs the calls one after the other, each a step."""

    def run(model: nn.Module) -> Outcome:
        torch.manual_seed(9)
        losses = []
        for call in calls:
            output = call(model)
            loss = output.square().sum()
            loss.backward()
            losses.append(loss)
        return read_outcome(model, losses)

    return run


def _masked(*, kept: slice) -> Callable[[nn.Module], torch.Tensor]:
    mask = torch.zeros(2, LENGTH)
    mask[:, kept] = 1
    return lambda model: model[0](x(), mask)


class Switched(MLP):
    """Its dropout is turned on in the middle of training."""

    def drop_from_now_on(self, batch: torch.Tensor) -> torch.Tensor:
        self.drop.p = 0.5
        return self(batch)


def _dense(model: nn.Module) -> torch.Tensor:
    return model[0](x())


NOT_FOR_EVER: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Outcome], str]] = {
    "padding alone at first": (
        Scan,
        _in_turn(_masked(kept=slice(0)), _masked(kept=slice(None)), _masked(kept=slice(9, 21))),
        "slices give other values",
    ),
    "an empty batch at first": (
        Mix,
        _in_turn(lambda model: model[0](x()[:0]), _dense, _dense),
        "slices give other values",
    ),
    "dropout that is turned on": (
        Switched,
        _in_turn(lambda model: model[0].drop_from_now_on(x()), _dense),
        "it draws random numbers",
    ),
    "jagged": (
        MLP,
        _in_turn(
            lambda model: model[0](
                torch.nested.nested_tensor(list(x()[0].split([20, 4])), layout=torch.jagged)
            ).values()
        ),
        "the layout torch.jagged",
    ),
}


@pytest.mark.parametrize(("unit", "run", "reason"), NOT_FOR_EVER.values(), ids=NOT_FOR_EVER.keys())
def test_a_first_batch_that_shows_nothing_does_not_decide(
    unit: Callable[[], nn.Module],
    run: Callable[[nn.Module], Outcome],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    wanted = run(nn.Sequential(unit()))
    torch.manual_seed(0)
    model, session = _one_unit(unit())
    assert differences(run(model), wanted) == []
    assert reason in caplog.text
    session.detach()


def test_dropout_that_is_turned_on_after_slices_have_run() -> None:
    """The slices that drew are given up: the whole call draws what the plain one would have."""
    run = _in_turn(_dense, lambda model: model[0].drop_from_now_on(x()), _dense)
    torch.manual_seed(0)
    wanted = run(nn.Sequential(Switched()))
    torch.manual_seed(0)
    model, session = _one_unit(Switched())
    found = run(model)
    close(found, wanted)
    assert torch.equal(found.losses[1], wanted.losses[1]), "the same elements are dropped"
    assert session._engine.units[0].num_forwards == 4 + (4 + 1) + 1
    session.detach()


def test_hooks_that_come_later_see_whole_calls() -> None:
    torch.manual_seed(0)
    model, session = _one_unit(MLP())
    seen: list[torch.Size] = []

    def look(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        if not rematic.replaying():
            seen.append(output.shape)

    _dense(model).sum().backward()
    hook = model[0].up.register_forward_hook(look)
    _dense(model).sum().backward()
    hook.remove()
    for_all = nn.modules.module.register_module_forward_hook(look)
    _dense(model).sum().backward()
    for_all.remove()
    _dense(model).sum().backward()
    assert seen == [(2, LENGTH, 8 * WIDTH)] * 2 + [(2, LENGTH, WIDTH)] * 3
    assert session._engine.units[0].num_forwards == 4 + 1 + 1 + 4, "and slices run again"
    session.detach()


class SetsUp(MLP):
    """Makes something for good in its first call, as layers of quantized weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.is_set_up = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_set_up = True
        return super().forward(x)


def test_what_sets_itself_up_runs_in_slices_from_its_second_call_on() -> None:
    torch.manual_seed(0)
    model, session = _one_unit(SetsUp())
    for _ in range(3):
        _dense(model).sum().backward()
    assert session._engine.units[0].num_forwards == 1 + 4 + 4
    session.detach()


def test_strided_inputs_stay_strided_where_the_whole_call_had_them_so() -> None:
    strides: list[tuple[int, ...]] = []

    class Looks(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not rematic.replaying():
                strides.append(x.is_contiguous())
            return super().forward(x)

    torch.manual_seed(0)
    model, session = _one_unit(Looks())
    model[0](x()).sum().backward()
    model[0](x().transpose(0, 1).contiguous().transpose(0, 1)).sum().backward()
    assert strides == [True] * 4 + [False] * 4
    session.detach()


def test_four_bit_layers_run_in_slices() -> None:
    bnb = pytest.importorskip("bitsandbytes")

    class Quantized(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.up = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32)
            self.down = nn.Linear(64, 64)

    def run(model: nn.Module) -> Outcome:
        losses = []
        for _ in range(3):
            loss = model[0](torch.ones(2, 8, 64) * torch.arange(1, 9)[:, None]).square().sum()
            loss.backward()
            losses.append(loss)
        return read_outcome(model, losses)

    torch.manual_seed(0)
    unit = Quantized().to("cpu")
    wanted = run(nn.Sequential(copy.deepcopy(unit)))
    model, session = _one_unit(unit)
    close(run(model), wanted)
    assert session._engine.units[0].num_forwards > 3
    session.detach()

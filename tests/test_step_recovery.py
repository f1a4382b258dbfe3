"""A step that ran out of memory runs again on the same batch, and nothing else changes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate.utils import find_executable_batch_size

import rematic
from rematic.memory import SimulatedProbe
from rematic.recipes import ControlConfig, PolicyConfig, Recipe
from tests.activations.families import build_llama
from tests.events import Events
from tests.step_models import TiedModel, different, everything, make_batches, make_tied_model

Step = Callable[[Any], torch.Tensor]
STEP_ALONE = PolicyConfig(op_retry="never")


class Faults:
    """Runs out of memory where a step asks, so many times in all."""

    def __init__(self, *left: int) -> None:
        self.left = list(left)

    def point(self) -> None:
        if self.left:
            self.left[0] -= 1
            if self.left[0] == 0:
                self.left.pop(0)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


class Point(torch.autograd.Function):
    """A place in backward where memory may run out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, faults: Faults) -> torch.Tensor:
        ctx.faults = faults
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.faults.point()
        return gradient, None


def with_points(model: TiedModel, faults: Faults) -> None:
    """Memory may run out before each block and, in backward, after it."""
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda module, args: (faults.point(), (Point.apply(args[0], faults),))[1]
        )


def single(model: TiedModel) -> Step:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        return loss.detach()

    return step


def several(model: TiedModel) -> Step:
    def step(ids: torch.Tensor) -> torch.Tensor:
        first = model(ids)
        first.backward()
        second = model(ids.flip(0))
        second.backward()
        return (first + second).detach()

    return step


def scaled(model: TiedModel) -> Step:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids)
        scaler.scale(loss).backward()
        return loss.detach()

    return step


def train(make_step: Callable[[TiedModel], Step], faults: Faults, **options: Any) -> dict[str, Any]:
    """Three micro-batches, accumulated; the faults lie in the second and third."""
    model = make_tied_model()
    with_points(model, faults)
    left, faults.left = faults.left, []
    session = rematic.attach(model, **{"policy": "keep", "budget": "1GiB", **options})
    torch.manual_seed(9)
    losses, step = [], make_step(model)
    for i, batch in enumerate(make_batches()):
        if i == 1:
            faults.left = left
        losses.append(session.run(step, batch))
    assert not faults.left
    session.detach()
    return everything(model, losses)


def plain(make_step: Callable[[TiedModel], Step]) -> dict[str, Any]:
    model = make_tied_model()
    with_points(model, Faults())
    torch.manual_seed(9)
    step = make_step(model)
    return everything(model, [step(batch) for batch in make_batches()])


@pytest.mark.parametrize("make_step", [single, several, scaled])
def test_failures_in_accumulated_steps_change_no_bit(make_step: Any) -> None:
    """Case F3: gradients of earlier micro-batches stay, those of the failed one count once."""
    wanted = plain(make_step)
    recipe = Recipe(policy=STEP_ALONE, control=ControlConfig(attempts=6))
    for left in ([1], [2], [3], [4], [2, 4], [4, 3], [3, 1, 4], [4, 4, 4]):
        found = train(make_step, Faults(*left), recipe=recipe, probe=SimulatedProbe())
        assert different(found, wanted) == [], left


@pytest.mark.parametrize("reverse", [False, True])
def test_a_batch_that_the_step_takes_apart_is_whole_again(reverse: bool) -> None:
    model = make_tied_model()
    session = rematic.attach(model, policy="keep", recipe=Recipe(policy=STEP_ALONE))
    (ids,) = make_batches(1)
    batch: dict[str, Any] = {"ids": [ids.clone()], "scale": torch.ones(1)}
    given = []

    def step(batch: dict[str, Any]) -> torch.Tensor:
        batch["scale"].mul_(2)
        given.append((batch["ids"][0].tolist(), batch["scale"].item()))
        loss = model(batch["ids"].pop()) * batch.pop("scale")
        loss.sum().backward()
        if len(given) == 1:
            raise torch.OutOfMemoryError("injected")
        return loss.detach()

    session.run(step, batch)
    assert given[0] == given[1] == (ids.tolist(), 2.0)
    assert batch == {"ids": []}  # as the plain step leaves it
    session.detach()


def test_a_failed_attempt_is_freed_before_the_next_begins() -> None:
    """Case F2."""
    model, refs, alive = make_tied_model(), [], []
    session = rematic.attach(model, policy="keep", recipe=Recipe(policy=STEP_ALONE))

    def step(ids: torch.Tensor) -> torch.Tensor:
        alive.append([ref() is not None for ref in refs])
        hidden = model.embed(ids)
        logits = model.blocks[0](hidden)
        refs.extend(weakref.ref(t) for t in (hidden, logits))
        loss = logits.sum()
        loss.backward()
        if len(alive) < 3:
            raise torch.OutOfMemoryError("injected")
        return loss

    session.run(step, make_batches(1)[0])
    assert alive == [[], [False] * 2, [False] * 4]
    session.detach()


@contextlib.contextmanager
def always_fails() -> Iterator[tuple[rematic.Session, TiedModel, Events, Step]]:
    model, journal = make_tied_model(), Events()
    session = rematic.attach(model, policy="keep", budget="1GiB", journal=journal)
    session.run(single(model), make_batches(1)[0])

    def step(ids: torch.Tensor) -> torch.Tensor:
        model(ids).backward()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    yield session, model, journal, step
    session.detach()


def test_a_step_that_never_fits_stops_with_a_report() -> None:
    """Case F4: so many attempts, one event each, nothing skipped."""
    with always_fails() as (session, model, journal, step):
        model.zero_grad()
        before = everything(model, [])
        with pytest.raises(rematic.StepOutOfMemoryError) as caught:
            session.run(step, make_batches(1)[0])
        assert different(everything(model, []), before) == []
        assert session.num_steps == 1
    assert caught.value.__context__ is None
    report = caught.value.report
    names = ["as planned", "recompute", "recompute+offload", "offload"]
    assert [attempt.name for attempt in report.attempts] == names
    assert all((attempt.needed_bytes or 0) > 2 << 30 for attempt in report.attempts)
    assert dict(report.resident_bytes)["weights"] == sum(4 * p.numel() for p in model.parameters())
    assert [event["next"] for event in journal.of("retry")] == names[1:]
    (stop,) = journal.of("stop")
    assert [attempt["name"] for attempt in stop["attempts"]] == names
    (text,) = caught.value.args
    assert text.startswith("a batch of 3 x 5 tokens ran out of memory. Tried: as planned (needed ")
    assert "test_step_recovery.py" in text
    assert stop["report"] == text


def test_the_final_error_composes_with_smaller_batches() -> None:
    """`find_executable_batch_size` knows it by its words."""
    with always_fails() as (session, model, _, fails):
        tried = []

        def train(batch_size: int) -> int:
            tried.append(batch_size)
            step = fails if batch_size > 2 else single(model)
            session.run(step, make_batches(1)[0][:batch_size])
            return batch_size

        assert (
            find_executable_batch_size(train, starting_batch_size=4, reduce_batch_size_fn=None)()
            <= 2
        )
        assert tried[0] == 4


@pytest.mark.parametrize(("attempts", "number"), [(1, 1), (2, 2), (3, 3)])
def test_the_recipe_says_how_often(attempts: int, number: int) -> None:
    model = make_tied_model()
    recipe = Recipe(control=ControlConfig(attempts=attempts))
    session = rematic.attach(model, policy="keep", recipe=recipe)
    calls = []

    def step(ids: torch.Tensor) -> None:
        calls.append(ids)
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(rematic.StepOutOfMemoryError):
        session.run(step, make_batches(1)[0])
    assert len(calls) == number
    session.detach()


def test_other_errors_pass_and_leave_no_hook() -> None:
    model = make_tied_model()
    session = rematic.attach(model, policy="keep")

    def step(ids: torch.Tensor) -> None:
        raise KeyError("user")

    with pytest.raises(KeyError, match="user"):
        session.run(step, make_batches(1)[0])
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    session.detach()


def test_a_step_that_has_updated_its_weights_is_not_repeated() -> None:
    """Manual optimization (case L1): recovered only while no optimizer has stepped."""
    model, calls = make_tied_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = rematic.attach(model, optimizer, policy="keep")

    def step(ids: torch.Tensor) -> None:
        calls.append(ids)
        model(ids).backward()
        optimizer.step()
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(
        rematic.StepOutOfMemoryError, match="an optimizer has stepped inside the step"
    ):
        session.run(step, make_batches(1)[0])
    assert len(calls) == 1
    session.detach()


def test_a_step_that_changes_a_weight_by_itself_is_not_repeated() -> None:
    model = make_tied_model()
    session = rematic.attach(model, policy="keep")

    def step(ids: torch.Tensor) -> None:
        model(ids).backward()
        with torch.no_grad():
            model.embed.weight.add_(1)
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(rematic.StepOutOfMemoryError, match="were changed inside the step, by"):
        session.run(step, make_batches(1)[0])
    session.detach()


@pytest.mark.parametrize("wrap", [iter, lambda batches: {"from": iter(batches)}])
def test_a_batch_that_the_step_fetches_is_not_lost(wrap: Callable[[Any], Any]) -> None:
    """A second attempt would take the next one."""
    model = make_tied_model()
    session = rematic.attach(model, policy="keep")
    batches = wrap(make_batches())

    def step(source: Any) -> None:
        model(next(source["from"] if isinstance(source, dict) else source)).backward()
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(rematic.StepOutOfMemoryError, match="the batch is or holds an iterator"):
        session.run(step, batches)
    session.detach()


def test_an_attempt_that_fails_otherwise_says_that_it_is_the_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`unscale_` may be called once for each update, and clipping after it may need memory."""
    model = make_tied_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    session = rematic.attach(model, policy="keep", recipe=Recipe(policy=STEP_ALONE))

    def step(ids: torch.Tensor) -> None:
        scaler.scale(model(ids)).backward()
        scaler.unscale_(optimizer)
        raise torch.OutOfMemoryError("injected while clipping")

    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        session.run(step, make_batches(1)[0])
    (message,) = [m for m in caplog.messages if m.startswith("the step was repeated (recompute)")]
    assert "a scaler whose `unscale_` it calls" in message
    session.detach()


def test_a_budget_that_a_heavier_plan_meets() -> None:
    """No injected failure: memory is really short for `keep`, and no op is run again."""
    batch = make_batches(1)[0].repeat(20, 20)

    def with_large_head(model: TiedModel) -> Step:
        def step(ids: torch.Tensor) -> torch.Tensor:
            loss = (model(ids) * torch.linspace(0, 1, 1_000_000)).exp().mean()
            loss.backward()
            return loss.detach()

        return step

    def peak(policy: str) -> tuple[int, dict[str, Any]]:
        model, probe = make_tied_model(), SimulatedProbe()
        session = rematic.attach(model, policy=policy, probe=probe)
        torch.manual_seed(9)
        with probe:
            loss = session.run(with_large_head(model), batch)
            loss2 = session.run(with_large_head(model), batch)
        session.detach()
        return probe.peak_allocated_bytes, everything(model, [loss, loss2])

    (kept, wanted), (recomputed, _) = peak("keep"), peak("recompute")
    assert recomputed < kept
    model, probe, journal = make_tied_model(), SimulatedProbe(), Events()
    session = rematic.attach(
        model, policy="keep", probe=probe, journal=journal, recipe=Recipe(policy=STEP_ALONE)
    )
    torch.manual_seed(9)
    with probe:
        losses = [session.run(with_large_head(model), batch)]
        probe.budget_bytes = recomputed + (kept - recomputed) // 2
        losses.append(session.run(with_large_head(model), batch))
    assert different(everything(model, losses), wanted) == []
    levels = [event["level"] for event in journal.of("retry")]
    assert "step" in levels
    session.detach()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapters_with_saved_modules_have_every_gradient() -> None:
    """Case B4: the kept original of a saved module is no trainable parameter."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(
        build_llama("sdpa"),
        LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2),
    )
    session = rematic.attach(model, policy="keep", recipe=Recipe(policy=STEP_ALONE))
    ids, calls = torch.arange(8).view(1, 8), []

    def step(ids: torch.Tensor) -> None:
        calls.append(ids)
        model(input_ids=ids, labels=ids).loss.backward()
        if len(calls) == 1:
            raise torch.OutOfMemoryError("injected")

    session.run(step, ids)
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    session.detach()

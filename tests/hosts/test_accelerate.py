"""A loop of Accelerate with the plugin is the loop without it, whatever fails in between."""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType, find_executable_batch_size
from torch import nn

import rematic
from tests.activations.families import build_llama
from tests.hosts.accelerate_loops import (
    STEP_ALONE,
    Faults,
    Net,
    Trained,
    fresh_accelerator,
    plugin_for,
    state_folder,
    train,
)
from tests.hosts.lightning_fits import Recorded

FAULTS: dict[str, dict[str, set[int]]] = {
    "forward": {"forward": {1, 3, 4, 11}},
    "loss": {"loss": {2, 9, 10, 11}},
    "backward": {"backward": {1, 4, 5, 12}},
    "everywhere": {"forward": {3, 17}, "loss": {6, 15}, "backward": {4, 5, 13}},
}


@pytest.fixture(scope="module")
def plain() -> dict[Any, Trained]:
    return {}


def reference(plain: dict[Any, Trained], **options: Any) -> Trained:
    key = tuple(sorted(options.items()))
    if key not in plain:
        plain[key] = train(**options)
    return plain[key]


@pytest.mark.parametrize("policy", ["planned", "keep", "selective", "recompute"])
@pytest.mark.parametrize(
    ("accumulate", "precision"), [(1, "no"), (1, "bf16"), (4, "no"), (4, "bf16")]
)
def test_twenty_steps_end_in_the_same_weights(
    plain: dict[Any, Trained], accumulate: int, precision: str, policy: str
) -> None:
    options: dict[str, Any] = {"accumulate": accumulate, "precision": precision}
    plugin = plugin_for(policy=policy, recipe="auto")
    train(plugin, **options).is_same_as(reference(plain, **options))
    assert plugin.session is not None
    assert plugin.session.num_steps == 20


@pytest.mark.parametrize("inside", [False, True], ids=["accumulate around", "accumulate inside"])
@pytest.mark.parametrize("place", FAULTS)
def test_a_retry_leaves_accumulation_and_learning_rates_alone(
    plain: dict[Any, Trained], place: str, inside: bool
) -> None:
    options: dict[str, Any] = {"accumulate": 3, "inside": inside}
    faults = Faults(**FAULTS[place])
    trained = train(plugin_for(policy="keep"), faults=faults, **options)
    assert faults.num_fired == sum(map(len, FAULTS[place].values()))
    trained.is_same_as(reference(plain, **options))


def test_what_never_fits_leaves_all_as_it_was_and_asks_for_a_smaller_batch() -> None:
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    plugin = plugin_for(policy="keep").attach(accelerator)
    seen: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def fit(batch_size: int) -> rematic.Session:
        accelerator.free_memory()
        model = Net(Faults())
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-2))

        @plugin.step
        def step(x: torch.Tensor) -> None:
            with accelerator.accumulate(model):
                seen.append(accelerator.step)
                if len(x) > 7:
                    raise torch.OutOfMemoryError("injected")
                accelerator.backward(model(x).sum())

        step(torch.ones(batch_size, 16))
        optimizer.step()
        assert plugin.session is not None
        return plugin.session

    session = fit()
    assert seen == [1] * 5, "four attempts with 8, one with 7"
    assert session.last_step is not None
    assert session.last_step.batch == 7
    assert fresh_forwards(session.model) != [], "attached to the second model"
    plugin.detach()
    assert fresh_forwards(session.model) == []


def test_memory_that_is_freed_holds_no_model() -> None:
    accelerator = fresh_accelerator()
    plugin = plugin_for(policy="recompute").attach(accelerator)
    model = Net(Faults())
    known = weakref.ref(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-2))
    plugin.step(lambda x: accelerator.backward(known()(x).sum()))(torch.ones(4, 16))
    optimizer.step()
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert known() is None
    assert plugin.session is None


@pytest.mark.parametrize("width", [16, 24], ids=["the same", "another"])
def test_only_the_same_model_goes_on_with_what_was_learned(width: int) -> None:
    """Both have the same names of units."""
    accelerator = fresh_accelerator()
    plugin = plugin_for(policy="keep", recipe="auto").attach(accelerator)
    num_steps = []
    for size in (16, width):
        accelerator.free_memory()
        raw = nn.Sequential(*[nn.Sequential(nn.Linear(size, size), nn.Tanh()) for _ in range(2)])
        model = accelerator.prepare(raw)
        call = functools.partial(lambda model, x: accelerator.backward(model(x).sum()), model)
        plugin.step(call)(torch.ones(2, size))
        assert plugin.session is not None
        num_steps.append(plugin.session.num_steps)
    assert num_steps == ([1, 2] if width == 16 else [1, 1])


def test_what_transformers_saves_is_the_same(tmp_path: Path) -> None:
    """Case H1, with a policy that was switched and rolled back."""
    files = []
    for plugin in (None, plugin_for(policy="recompute", recipe="auto")):
        accelerator = fresh_accelerator()
        torch.manual_seed(0)
        model = build_llama("eager")
        if plugin is not None:
            plugin.attach(accelerator)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for number in range(3):
            ids = torch.arange(14).view(2, 7) % 11
            call = functools.partial(one_step, accelerator, model)
            (call if plugin is None else plugin.step(call))({"input_ids": ids, "labels": ids})
            optimizer.step()
            optimizer.zero_grad()
            if plugin is not None and plugin.session is not None and number == 0:
                plugin.session.switch("offload")
            elif plugin is not None and plugin.session is not None and number == 1:
                plugin.session.rollback()
        folder = tmp_path / str(plugin is None)
        accelerator.unwrap_model(model).save_pretrained(folder)
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1]


def one_step(accelerator: Any, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    accelerator.backward(model(**batch).loss)


def test_a_batch_whose_losses_are_compared_counts_once(plain: dict[Any, Trained]) -> None:
    """It runs under the previous policy first."""
    journal = Recorded()
    recipe = {"goals": {"loss_tolerance": 0.01}, "policy": {"trust": ["*"]}}
    plugin = plugin_for(policy="keep", recipe=recipe, journal=journal)

    def switch(accelerator: Any, number: int) -> None:
        if number == 4:
            assert plugin.session is not None
            plugin.session.switch("recompute")

    options: dict[str, Any] = {"accumulate": 3, "inside": True}
    trained = train(plugin, after_step=switch, **options)
    trained.is_same_as(reference(plain, **options))
    compared = [event["difference"] for event in journal.events if event["event"] == "compare"]
    assert compared == [0.0]


SPLIT = {"policy": {"op_retry": "never", "trust": ["*"]}, "control": {"allow_split": True}}


@pytest.mark.parametrize("reduction", ["mean", None])
def test_a_batch_is_split_where_the_reduction_is_told(
    reduction: Any, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    plugin = plugin_for(policy="keep", recipe=SPLIT).attach(accelerator)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    whole = copy.deepcopy(model)
    model = accelerator.prepare(model)
    sizes: list[tuple[int, int]] = []

    @plugin.step(reduction=reduction)
    def step(x: torch.Tensor) -> torch.Tensor:
        with accelerator.accumulate(model):
            sizes.append((len(x), accelerator.step))
            if len(x) > 2:
                raise torch.OutOfMemoryError("injected")
            loss = model(x).square().mean()
            accelerator.backward(loss)
            return loss.detach()

    x = torch.randn(4, 4)
    line = "control.allow_split has no effect here"
    if reduction is None:
        with pytest.raises(rematic.StepOutOfMemoryError):
            step(x)
        assert line in caplog.text
        return
    loss = step(x)
    assert sizes[-3:] == [(4, 1), (2, 1), (2, 1)]
    assert accelerator.step == 1
    assert line not in caplog.text
    expected = whole(x).square().mean()
    (expected / 2).backward()
    torch.testing.assert_close(loss, expected.detach())
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def fresh_forwards(model: nn.Module) -> list[str]:
    """Names of the modules whose `forward` is replaced on the instance."""
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def test_detach_gives_everything_back() -> None:
    accelerator = fresh_accelerator()
    before = dict(accelerator.__dict__)
    plugin = plugin_for(policy="recompute")
    trained = train(plugin, accelerator=accelerator, num_batches=2)
    assert len(fresh_forwards(trained.model)) == 4
    plugin.detach()
    assert fresh_forwards(trained.model) == []
    assert set(accelerator.__dict__) == set(before)
    assert not accelerator._save_model_state_pre_hook
    assert not accelerator._load_model_state_pre_hook
    assert not plugin.is_attached
    plugin.detach()


def test_detach_leaves_the_autocast_of_accelerate() -> None:
    accelerator = fresh_accelerator(mixed_precision="bf16")
    plugin = plugin_for(policy="keep")
    trained = train(plugin, accelerator=accelerator, num_batches=2)
    wrapped = trained.model.forward
    plugin.detach()
    assert trained.model.forward is wrapped
    assert fresh_forwards(trained.model) == [""]
    assert trained.model(torch.ones(2, 16)).dtype == torch.float32


class Tracker(GeneralTracker):
    name = "listed"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    @property
    def tracker(self) -> Tracker:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, float], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append((step, values))


def test_trackers_get_the_figures_of_the_journal() -> None:
    tracker, journal = Tracker(), Recorded()
    accelerator = fresh_accelerator(log_with=tracker)
    accelerator.init_trackers("run")

    def log(accelerator: Any, number: int) -> None:
        if number % 2:
            accelerator.log({"loss": 1.0}, step=number)

    plugin = plugin_for(policy="recompute", journal=journal)
    faults = Faults(forward={2})
    train(plugin, accelerator=accelerator, faults=faults, num_batches=4, after_step=log)
    accelerator.log({"accuracy": 0.5})
    steps = [event for event in journal.events if event["event"] == "step"]
    assert [step for step, _ in tracker.logged] == [1, 3, None]
    assert tracker.logged[2][1] == {"accuracy": 0.5}, "no step since"
    for (_, values), pair in zip(tracker.logged, (steps[:2], steps[2:]), strict=False):
        assert values["loss"] == 1.0
        assert values["rematic/steps"] == 2
        assert values["rematic/seconds"] == sum(step["seconds"] for step in pair)
        assert values["rematic/peak_bytes"] == max(step["peak_bytes"] for step in pair)
        assert values["rematic/replays"] == sum(step["replays"] for step in pair) > 0
        units = {k: v for k, v in values.items() if k.startswith("rematic/units/")}
        assert units == {f"rematic/units/{k}": v for k, v in pair[-1]["plan"].items()}
    retries = [event for event in journal.events if event["event"] == "retry"]
    assert [values["rematic/step_retries"] for _, values in tracker.logged[:2]] == [1, 0]
    assert len(retries) == 1


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """Saved after four steps, with the plugin and without."""
    plugin = plugin_for(policy="keep", recipe="auto")

    def save(accelerator: Any, number: int) -> None:
        assert plugin.session is not None
        if number == 2:
            plugin.session.switch("recompute", reason="to be saved")
        if number == 3:
            accelerator.save_state(str(tmp_path / "managed"))

    train(plugin, num_batches=4, after_step=save)
    train(
        num_batches=4,
        after_step=lambda a, n: a.save_state(str(tmp_path / "plain")) if n == 3 else None,
    )
    return str(tmp_path / "managed"), str(tmp_path / "plain")


def test_save_state_writes_the_same_files_and_one_more(folders: tuple[str, str]) -> None:
    managed, plain = folders
    assert set(os.listdir(managed)) - set(os.listdir(plain)) == {"rematic.json"}
    for name in ("model.safetensors", "optimizer.bin", "scheduler.bin"):
        assert Path(managed, name).read_bytes() == Path(plain, name).read_bytes(), name


def test_a_saved_state_goes_on_with_and_without_the_plugin(folders: tuple[str, str]) -> None:
    managed, plain = folders
    plugin = plugin_for(policy="keep", recipe="auto")
    weights = [
        resume(folder, fresh_accelerator(), entry).state_dict()
        for folder, entry in ((managed, plugin), (managed, None), (plain, plugin_for()))
    ]
    assert plugin.session is not None
    assert plugin.session.policy.name == "recompute"
    assert plugin.session.num_steps == 4
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
        assert torch.equal(value, weights[2][name]), name


def resume(folder: str, accelerator: Any, plugin: rematic.RecomputePlugin | None) -> nn.Module:
    model = Net(Faults())
    if plugin is not None:
        plugin.attach(accelerator)
    rates = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, rates, torch.optim.lr_scheduler.StepLR(rates, 2))
    accelerator.load_state(folder)
    return model


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    folder = state_folder(tmp_path)
    train(plugin_for(), num_batches=1, after_step=lambda a, n: a.save_state(folder))
    path = Path(folder) / "rematic.json"
    assert json.loads(path.read_text())["num_steps"] == 1
    path.write_text("{")
    with pytest.raises(ValueError, match=r"rematic.json is damaged .*: expected the file that was"):
        resume(folder, fresh_accelerator(), plugin_for())


def test_a_disabled_plugin_does_nothing(plain: dict[Any, Trained]) -> None:
    accelerator = fresh_accelerator()
    before = dict(accelerator.__dict__)
    plugin = plugin_for(enabled=False)
    trained = train(plugin, accelerator=accelerator)
    trained.is_same_as(reference(plain, accumulate=1, precision="no"))
    assert plugin.session is None
    assert accelerator.__dict__.keys() == before.keys()


def test_a_step_before_prepare_is_refused() -> None:
    plugin = plugin_for().attach(fresh_accelerator())
    with pytest.raises(RuntimeError, match=r"no model is attached: expected `plugin.attach"):
        plugin.step(lambda batch: None)({})


def test_attaching_after_prepare_is_refused() -> None:
    accelerator = fresh_accelerator()
    accelerator.prepare(Net(Faults()))
    with pytest.raises(ValueError, match=r"`accelerator.prepare` was called before"):
        plugin_for().attach(accelerator)


def test_another_accelerator_is_refused() -> None:
    plugin = plugin_for().attach(fresh_accelerator())
    with pytest.raises(ValueError, match="attached to another Accelerator"):
        plugin.attach(fresh_accelerator())


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_engines_that_own_backward_are_refused(kind: str) -> None:
    """Case E4: whatever such an engine would do to frozen parameters, it is not tried."""
    accelerator = types.SimpleNamespace(distributed_type=DistributedType(kind))
    with pytest.raises(ValueError, match=f"runs {kind}, whose engine does backward"):
        plugin_for().attach(accelerator)  # type: ignore[arg-type]


def test_a_second_model_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = fresh_accelerator()
    plugin = plugin_for().attach(accelerator)
    first, second = Net(Faults()), Net(Faults())
    accelerator.prepare(first, second)
    assert "Net is prepared beside the model that rematic manages" in caplog.text
    assert fresh_forwards(second) == []
    assert plugin.session is not None
    assert plugin.session.model is first


def test_under_fsdp_the_budget_is_that_of_the_device_where_the_wrapper_puts_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = fresh_accelerator()
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = types.SimpleNamespace(fsdp_version=1)
    accelerator.state.device = torch.device("meta")  # where no weight is yet, as on a GPU
    monkeypatch.setattr(accelerator, "prepare_model", lambda model, **_: model)
    plugin = plugin_for(budget="1KiB").attach(accelerator)
    accelerator.prepare(Net(Faults()))
    assert plugin.is_attached, "not refused as too small for weights on the CPU"
    plugin.detach()


def test_a_failing_prepare_leaves_the_model_as_it_was() -> None:
    accelerator = fresh_accelerator()
    plugin_for().attach(accelerator)
    model = Net(Faults())
    with pytest.raises(ValueError, match="should be a list with 1 elements"):
        accelerator.prepare(model, device_placement=[True, True])
    assert fresh_forwards(model) == []


def test_overrides_need_a_recipe_that_is_read() -> None:
    with pytest.raises(ValueError, match="overrides only over a recipe that is read here"):
        rematic.RecomputePlugin(recipe=STEP_ALONE, overrides=["memory.budget=1GiB"])


@pytest.mark.parametrize(
    ("change", "words"),
    [({"version": 0}, "has version 0: expected 1"), ({"units": ["x"]}, "is of another model")],
    ids=["old", "foreign"],
)
def test_an_old_or_foreign_state_loads_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], words: str
) -> None:
    """F13."""
    folder, journal = state_folder(tmp_path), Recorded()
    train(plugin_for(), num_batches=1, after_step=lambda a, n: a.save_state(folder))
    path = Path(folder) / "rematic.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    plugin = plugin_for(policy="keep", journal=journal)
    with caplog.at_level(logging.WARNING, "rematic"):
        resume(folder, fresh_accelerator(), plugin)
    assert plugin.session is not None
    assert (plugin.session.policy.name, plugin.session.num_steps) == ("keep", 0)
    (notice,) = [event for event in journal.events if event.get("kind") == "resume"]
    assert words in notice["text"]
    assert notice["text"] in caplog.messages

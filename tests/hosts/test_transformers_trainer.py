"""A Trainer with the plugin trains as it does without it, whatever fails in between."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback

import rematic
from tests.activations.families import build_llama
from tests.hosts.accelerate_loops import Faults, plugin_for
from tests.hosts.lightning_fits import Recorded
from tests.hosts.trainer_fits import Trained, fit, make

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated",
    "ignore:`gradient_checkpointing` is deprecated",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[Any, Trained] = {}

    def get(**options: Any) -> Trained:
        key = tuple(sorted(options.items()))
        if key not in known:
            known[key] = fit(tmp_path_factory.mktemp("plain"), **options)
        return known[key]

    return get


def replaced(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.parametrize(
    ("accumulate", "bf16", "policy"),
    [
        (1, False, "planned"),
        (1, True, "recompute"),
        (4, False, "selective"),
        (4, True, "recompute"),
    ],
)
def test_twenty_steps_end_in_the_same_weights(
    plain: Any, tmp_path: Path, accumulate: int, bf16: bool, policy: str
) -> None:
    options = {"gradient_accumulation_steps": accumulate, "bf16": bf16, "max_steps": 20}
    plugin = plugin_for(policy=policy, recipe="auto")
    fit(tmp_path, plugin=plugin, **options).is_same_as(plain(**options))
    assert plugin.session is not None
    assert plugin.session.num_steps == 20 * accumulate
    assert not plugin.is_attached


@pytest.mark.parametrize("accumulate", [1, 3])
def test_failures_are_not_seen_and_nothing_counts_twice(
    plain: Any, tmp_path: Path, accumulate: int
) -> None:
    faults = Faults(loss={1, 4, 9}, backward={2, 8, 9})
    options = {"gradient_accumulation_steps": accumulate}
    trained = fit(tmp_path, faults=faults, plugin=plugin_for(policy="keep"), **options)
    assert faults.num_fired == 6
    trained.is_same_as(plain(**options))
    figures = [logs.get("rematic/step_retries", 0) for logs in trained.logged.logs]
    assert sum(figures) == 6


def test_a_training_and_its_end_leave_the_model_as_it_was(tmp_path: Path) -> None:
    plugin = plugin_for(policy="recompute")
    trained = make(tmp_path, plugin=plugin)
    attributes = set(vars(trained.trainer))
    trained.trainer.train()
    assert replaced(trained.model) == []
    plugin.detach()
    seams = {"train", "training_step", "evaluation_loop", "log", "save_model"}
    assert not seams & set(vars(trained.trainer))
    assert attributes - seams <= set(vars(trained.trainer))
    assert "prepare" not in vars(trained.trainer.accelerator)
    names = [type(c).__name__ for c in trained.trainer.callback_handler.callbacks]
    assert "_SavesSession" not in names


def test_an_exception_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    trained = make(tmp_path, plugin=plugin_for(policy="recompute"))
    trained.trainer.compute_loss = lambda *args, **kwargs: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        trained.trainer.train()
    assert replaced(trained.model) == []


def test_report_to_receives_the_figures_and_metrics_do_not(tmp_path: Path) -> None:
    journal = Recorded()
    plugin = plugin_for(policy="recompute", journal=journal)
    trained = make(tmp_path, plugin=plugin, eval_strategy="steps", eval_steps=3, max_steps=6)
    output = trained.trainer.train()
    steps = [event for event in journal.events if event["event"] == "step"]
    reported = [logs for logs in trained.logged.logs if "rematic/peak_bytes" in logs]
    assert [logs["rematic/steps"] for logs in reported] == [2, 2, 2]
    assert reported[0]["rematic/peak_bytes"] == max(s["peak_bytes"] for s in steps[:2])
    assert sum(logs["rematic/replays"] for logs in reported) == sum(s["replays"] for s in steps)
    assert not any("rematic/steps" in logs for logs in trained.logged.logs if "eval_loss" in logs)
    assert not any(name.startswith("rematic") for name in output.metrics)
    assert output.metrics["epoch"] == trained.trainer.state.epoch


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_checkpointing_of_the_trainer_is_taken_over(
    plain: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Cases A2 and E2: each block runs as often as the policy says, and never three times."""
    plugin = plugin_for(policy="recompute", recipe={"policy": {"trust": ["*"]}})
    trained = make(tmp_path, plugin=plugin, **{name: True})
    calls: list[str] = []
    for layer in trained.model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: calls.append("mlp"))
    trained.trainer.train()
    trained.is_same_as(plain())
    assert "activation_checkpointing of the TrainingArguments is taken over" in caplog.text
    assert len(calls) in (3 * 10, 2 * 3 * 10), "hooks that look on may be left out of replays"
    assert not trained.model.is_activation_checkpointing
    plugin.detach()
    assert trained.trainer.args.activation_checkpointing
    assert trained.trainer.args.gradient_checkpointing


def test_use_cache_is_as_before_when_training_ends_and_in_what_is_saved(tmp_path: Path) -> None:
    """Case C2, with padding and eager attention."""
    model = build_llama("eager")
    assert model.config.use_cache
    seen: list[bool] = []
    plugin = plugin_for(policy="recompute")
    trained = make(
        tmp_path, model=model, plugin=plugin, save_strategy="steps", save_steps=5, max_steps=5
    )
    model.register_forward_pre_hook(lambda module, args: seen.append(module.config.use_cache))
    trained.trainer.train()
    assert seen == [False] * 5
    assert model.config.use_cache
    assert json.loads((tmp_path / "checkpoint-5" / "config.json").read_text())["use_cache"]
    generated = model.generate(
        torch.ones(1, 3, dtype=torch.long), min_new_tokens=2, max_new_tokens=2
    )
    assert generated.shape == (1, 5)


def test_a_checkpoint_goes_on_with_and_without_the_plugin(plain: Any, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 5}

    first = make(
        tmp_path,
        plugin=plugin_for(policy="recompute"),
        lr_scheduler_type="constant",
        max_steps=5,
        **saving,
    )
    first.trainer.train()
    whole = plain(lr_scheduler_type="constant")
    for plugin in (plugin_for(policy="keep"), None):
        again = fit(tmp_path, plugin=plugin, resume=True, lr_scheduler_type="constant", **saving)
        mine, theirs = again.model.state_dict(), whole.model.state_dict()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
        if plugin is not None:
            assert plugin.session is not None
            policies = [entry.policy.name for entry in plugin.session.history.entries]
            assert policies == ["recompute", "keep"], "of the checkpoint, and what is configured"
            assert plugin.session.num_steps == 10
        for path in tmp_path.glob("checkpoint-10/*"):
            path.unlink()
        (tmp_path / "checkpoint-10").rmdir()


def test_auto_find_batch_size_is_left_in_peace(tmp_path: Path) -> None:
    """What fits in no way ends in an error that it answers."""
    plugin = plugin_for(policy="keep")
    trained = make(
        tmp_path,
        plugin=plugin,
        auto_find_batch_size=True,
        max_steps=2,
        per_device_train_batch_size=4,
    )
    sizes: list[int] = []
    inner = trained.trainer.compute_loss

    def compute_loss(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 3:
            raise torch.OutOfMemoryError("injected")
        return inner(model, inputs, *args, **kwargs)

    trained.trainer.compute_loss = compute_loss  # type: ignore[method-assign]
    trained.trainer.train()
    assert sizes == [4, 4, 4, 4, 3, 3]
    assert plugin.session is not None
    assert plugin.session.num_steps == 2
    assert replaced(trained.model) == []


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_adapters_are_trained_and_saved_the_same(tmp_path: Path, dora: bool) -> None:
    """Cases A1 and H1."""
    files = []
    for plugin in (None, plugin_for(policy="recompute")):
        torch.manual_seed(2)
        model = get_peft_model(
            build_llama("eager"), LoraConfig(target_modules=["q_proj", "v_proj"], use_dora=dora)
        )
        folder = tmp_path / str(plugin is None)
        trained = fit(
            folder, model=model, plugin=plugin, activation_checkpointing=plugin is not None
        )
        trained.trainer.save_model(str(folder))
        files.append((folder / "adapter_model.safetensors").read_bytes())
        weights = [p for n, p in trained.model.named_parameters() if "lora_B" in n]
        assert all(weight.abs().sum() > 0 for weight in weights)
    assert files[0] == files[1]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_adapters_over_four_bit_weights(tmp_path: Path) -> None:
    build_llama("sdpa", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    found = []
    for plugin in (None, plugin_for(policy="recompute", recipe="auto")):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", quantization_config=quantization, dtype=torch.float32
        )
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=plugin is not None
        )
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
        trained = fit(tmp_path, model=model, plugin=plugin, max_steps=3)
        found.append([p for n, p in trained.model.named_parameters() if "lora" in n])
    assert plugin is not None
    assert plugin.session is not None
    assert plugin.session.last_step is not None
    assert plugin.session.last_step.replays == 3
    assert all(map(torch.equal, *found))


class Generates(TrainerCallback):
    """As trainers of reinforcement learning do between two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"].eval()
        model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, use_cache=True)
        model.train()


def test_generation_inside_training_is_not_disturbed_and_does_not_disturb(
    plain: Any, tmp_path: Path
) -> None:
    trained = make(tmp_path, plugin=plugin_for(policy="recompute"))
    trained.trainer.add_callback(Generates())
    trained.trainer.train()
    trained.is_same_as(plain())


def test_evaluation_alone_attaches_nothing(tmp_path: Path) -> None:
    plugin = plugin_for(policy="recompute")
    trained = make(tmp_path, plugin=plugin)
    trained.trainer.accelerator.prepare(trained.model)  # as Trainer does under FSDP
    trained.trainer.evaluate()
    assert plugin.session is None
    assert replaced(trained.model) == []


class FailsInEvaluation(TrainerCallback):
    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("injected")


def test_memory_that_runs_out_in_evaluation_gets_advice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case F6."""
    journal = Recorded()
    plugin = plugin_for(policy="keep", journal=journal)
    trained = make(tmp_path, plugin=plugin, eval_strategy="steps", eval_steps=2)
    trained.trainer.add_callback(FailsInEvaluation())
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        trained.trainer.train()
    (message,) = [m for m in caplog.messages if m.startswith("memory ran out in")]
    assert message.startswith("memory ran out in evaluation, where no gradients are kept")
    assert not {"switch", "stop", "retry"} & {event["event"] for event in journal.events}


def test_a_batch_that_is_given_up_is_not_told_to_split(tmp_path: Path) -> None:
    """A Trainer has no place for how its loss combines sequences."""
    plugin = plugin_for(policy="keep")
    with pytest.raises(rematic.StepOutOfMemoryError, match="take fewer in a batch") as caught:
        fit(tmp_path, plugin=plugin, faults=Faults(loss=set(range(100))))
    assert "allow_split" not in str(caught.value)


def test_offloading_of_trl_is_recognised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = make(tmp_path)
    offloading = torch.autograd.graph.save_on_cpu()
    trained.trainer.maybe_activation_offload_context = offloading  # type: ignore[attr-defined]
    plugin = plugin_for().attach_trainer(trained.trainer)
    held = trained.trainer.maybe_activation_offload_context  # type: ignore[attr-defined]
    assert isinstance(held, contextlib.nullcontext)
    assert "activation_offloading of TRL is turned off" in caplog.text
    plugin.detach()
    assert trained.trainer.maybe_activation_offload_context is offloading  # type: ignore[attr-defined]


def test_data_parallel_is_refused(tmp_path: Path) -> None:
    trained = make(tmp_path)
    trained.trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match=r"2 GPUs by nn.DataParallel"):
        plugin_for().attach_trainer(trained.trainer)


def test_a_second_training_starts_with_what_the_first_has_learned(tmp_path: Path) -> None:
    plugin = plugin_for(policy="keep", recipe="auto")
    trained = make(tmp_path, plugin=plugin, max_steps=2)
    trained.trainer.train()
    first = plugin.session
    trained.trainer.train()
    assert plugin.session is not first
    assert plugin.session is not None
    assert plugin.session.num_steps == 4


def test_a_disabled_plugin_leaves_the_trainer_alone(plain: Any, tmp_path: Path) -> None:
    plugin = plugin_for(enabled=False)
    trained = fit(tmp_path, plugin=plugin)
    trained.is_same_as(plain())
    assert "training_step" not in vars(trained.trainer)
    assert isinstance(plugin, rematic.RecomputePlugin)

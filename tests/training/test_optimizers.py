"""The optimizers that a recipe can name, and the code that it may not."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rematic.recipes import TrainingConfig, load_recipe, parse_budget
from rematic.training.optimization import build_optimizer, check_optimizer, create_optimizer_state
from rematic.training.optimizer_memory import optimizer_state_bytes
from rematic.training.rates import rate_factor
from rematic.training.run import train
from tests.training.small import tiny

NAMES = {
    "adamw": "torch.optim.adamw.AdamW",
    "adamw-8bit": "bitsandbytes.optim.adamw.AdamW8bit",
    "paged-adamw": "bitsandbytes.optim.adamw.PagedAdamW",
    "paged-adamw-8bit": "bitsandbytes.optim.adamw.PagedAdamW8bit",
    "adafactor": "torch.optim.Adafactor",
    "{name: sgd, momentum: 0.9, nesterov: true}": "torch.optim.sgd.SGD",
    "{name: target, _target_: torch.optim.RMSprop, options: {alpha: 0.5}}": (
        "torch.optim.rmsprop.RMSprop"
    ),
    "{name: target, _target_: bitsandbytes.optim.Lion8bit}": "bitsandbytes.optim.lion.Lion8bit",
}


def training(optimizer: str) -> TrainingConfig:
    return load_recipe("auto", [f"training.optimizer={optimizer}"]).training


@pytest.mark.parametrize(("written", "name"), NAMES.items(), ids=[n.split(",")[0] for n in NAMES])
def test_each_is_built_trains_and_has_the_state_that_was_predicted(written: str, name: str) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 1))
    config = training(written)
    predicted = optimizer_state_bytes(model.parameters(), config)
    optimizer = build_optimizer(model.parameters(), config)
    assert f"{type(optimizer).__module__}.{type(optimizer).__name__}" == name
    before = [p.detach().clone() for p in model.parameters()]
    for i in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        if i == 0:  # a second update by sign can take a lone bias back to where it was
            assert not any(map(torch.equal, before, model.parameters()))
    tensors = {
        value.untyped_storage().data_ptr(): value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    if written != "paged-adamw":
        # (tables that all states of bitsandbytes share are counted here once for each device)
        assert predicted == pytest.approx(sum(tensors.values()), rel=0.05)


def test_state_made_ahead_starts_at_the_first_step() -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = build_optimizer([weight], training("adamw-8bit"))
    create_optimizer_state(optimizer)
    assert torch.equal(weight, torch.ones(64, 64))
    assert optimizer.state[weight]["step"] == 0


def test_state_made_ahead_of_momentum_is_empty() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = build_optimizer([weight], training("{name: sgd, momentum: 0.9}"))
    decay = optimizer.param_groups[0]["weight_decay"] = 0.1
    create_optimizer_state(optimizer)
    assert torch.equal(weight, torch.ones(4, 4))
    assert not optimizer.state[weight]["momentum_buffer"].any()
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_options_reach_the_optimizer() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    adam = build_optimizer([weight], training("{name: adamw, betas: [0.5, 0.6], eps: 0.1}"))
    assert (adam.defaults["betas"], adam.defaults["eps"]) == ((0.5, 0.6), 0.1)
    factor = build_optimizer(
        [weight], training("{name: adafactor, beta2_decay: -0.5, clip_threshold: 2.0}")
    )
    assert (factor.defaults["beta2_decay"], factor.defaults["d"]) == (-0.5, 2.0)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("_target_: os.system", "'os.system', which is outside torch.optim and bitsandbytes.optim"),
        ("_target_: torch.optim.AdamWW", "'torch.optim.AdamWW', which is no Optimizer, did you"),
        ("_target_: torch.optim.lr_scheduler.StepLR", "which is outside torch.optim and"),
        (
            "_target_: torch.optim.SGD, options: {speed: 3}",
            "torch.optim.SGD with the options {'speed': 3} cannot train this recipe (TypeError: ",
        ),
        ("_target_: torch.optim.AdamW, options: {fused: true, foreach: true}", "(RuntimeError: `f"),
        ("_target_: torch.optim.LBFGS", "(ValueError: LBFGS doesn't support per-parameter options"),
        ("_target_: torch.optim.SparseAdam", "(RuntimeError: SparseAdam does not support dense"),
        ("_target_: torch.optim.AdamW, options: {differentiable: true}", "(RuntimeError: a leaf"),
        ("_target_: bitsandbytes.optim.GlobalOptimManager", "is no Optimizer; expected the import"),
        ("_target_: torch.optim.Muon", "(ValueError: Muon only supports 2D parameters"),
    ],
    ids=lambda text: text[10:40],
)
def test_a_target_that_cannot_be_used_is_refused(written: str, message: str) -> None:
    config = training(f"{{name: target, {written}}}")
    with pytest.raises(ValueError, match=re.escape(message)):
        check_optimizer(config, allow_code=False)


def test_adapters_may_be_trained_by_what_takes_matrices_alone(tmp_path: Path) -> None:
    muon = "training.optimizer={name: target, _target_: torch.optim.Muon}"
    recipe = tiny("tuning.method=lora", muon, f"run.dir={tmp_path}")
    assert train(recipe, show_progress=False).steps == 4


def test_code_of_ones_own_runs_only_where_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_optimizer.py").write_text(
        "import torch\nopen('imported', 'w').close()\nclass Own(torch.optim.Adam): pass\n"
    )
    recipe = tiny(
        "training.optimizer={name: target, _target_: own_optimizer.Own}", "training.max_steps=1"
    )
    with pytest.raises(ValueError, match="rematic train --allow-code"):
        train(recipe, show_progress=False)
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "runs").exists()
    assert train(recipe, show_progress=False, allow_code=True).steps == 1
    sys.modules.pop("own_optimizer")
    tight = dataclasses.replace(recipe.memory, budget=parse_budget("400KiB"))
    with pytest.raises(ValueError, match=r"smaller than weights, gradients and optimizer state"):
        train(dataclasses.replace(recipe, memory=tight), show_progress=False, allow_code=True)
    absent = training("{name: target, _target_: nowhere.Own}")
    with pytest.raises(ValueError, match="nowhere cannot be imported"):
        check_optimizer(absent, allow_code=True)


def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ValueError, match=r"adamw-8bit needs bitsandbytes.*'rematic\[bitsandbytes"):
        check_optimizer(training("adamw-8bit"), allow_code=False)


def rates(schedule: str, *, total: int = 10, warmup: int = 2, final: float = 0.0) -> list[float]:
    return [
        rate_factor(
            step, schedule=schedule, warmup_steps=warmup, total_steps=total, final_share=final
        )
        for step in range(total)
    ]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_falls_from_warm_up_to_its_last_share(schedule: str) -> None:
    found = rates(schedule, final=0.1)
    assert found[:3] == [1 / 3, 2 / 3, 1.0]
    assert all(a > b for a, b in itertools.pairwise(found[2:]))
    assert found[-1] == pytest.approx(0.1)


def test_the_middle_of_a_cosine_is_half_way() -> None:
    assert rates("cosine", total=9, warmup=0)[4] == pytest.approx(0.5)
    assert rates("cosine", total=9, warmup=0)[2] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_a_schedule_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    monkeypatch.chdir(tmp_path)
    train(
        tiny("training.schedule=linear", "training.accumulate=2", "training.epochs=2"),
        show_progress=False,
    )
    text = Path("runs/tiny-cpu/metrics.jsonl").read_text()
    found = [json.loads(line)["learning_rate"] for line in text.splitlines()]
    assert found == pytest.approx([3e-4, 3e-4, 2e-4, 2e-4, 1e-4, 1e-4, 0.0, 0.0], abs=1e-9)

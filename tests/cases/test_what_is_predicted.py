"""Cases of memory that is told before it is needed: E6, F13, F17 and G2, of the planner."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rematic.cost import (
    StepProfile,
    TraceSettings,
    language_model_batch,
    trace_profile,
    trace_recipe,
)
from rematic.planner import (
    Pace,
    StepCosts,
    Terms,
    advice_of,
    forecast_step,
    longest_length,
    peak_of,
    problem_of,
    where_of,
)
from rematic.policy import Keep, Recompute, Selective
from rematic.recipes import load_recipe
from tests.cost.measured import RealStep, predicted_peak

ARITHMETIC = Pace(
    op_seconds=lambda op: op.flops / 1e10,
    moved_bytes_per_second=1e9,
    replay_seconds=0.0,
    selective_seconds=0.0,
    overlaps_host=False,
)
"""Only products take time."""


def llama(attention: str = "sdpa", **changes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    config = LlamaConfig(**{**sizes, **changes}, use_cache=False, attn_implementation=attention)
    return LlamaForCausalLM(config).train()


@functools.cache
def profile_with(attention: str) -> StepProfile:
    return profile_of(llama(attention))


def profile_of(model: LlamaForCausalLM) -> StepProfile:
    settings = TraceSettings(
        make_batch=language_model_batch,
        actions=(Keep(), Selective(), Recompute()),
        batch=1,
        padded=(False,),
        on_accelerator=False,
    )
    return trace_profile(model, settings)


def kept_bytes(costs: StepCosts, action: str) -> int:
    return dict(costs.classes[1].actions)[action].kept


def test_attention_that_saves_little_is_not_what_is_recomputed() -> None:
    """E6: bytes are those that were measured, and fused attention keeps no scores."""
    saved = {}
    for attention in ("eager", "sdpa"):
        costs = profile_with(attention).costs_at(batch=1, length=1024)
        saved[attention] = kept_bytes(costs, "keep") - kept_bytes(costs, "recompute")
    scores = 4 * 1024 * 1024 * 4
    assert saved["eager"] - saved["sdpa"] > 0.99 * scores
    # Byte for byte, the planner's first wish is to keep attention's output: recomputing it frees
    # next to nothing, and takes longest.
    costs = profile_with("sdpa").costs_at(batch=1, length=1024)
    options = problem_of(costs, ARITHMETIC).units[1]
    (recompute,) = [option for option in options if option.action.name == "recompute"]
    best = max(
        (option for option in options if option.action.name == "selective"),
        key=lambda option: (
            (recompute.seconds - option.seconds) / (option.kept_bytes - recompute.kept_bytes)
        ),
    )
    assert isinstance(best.action, Selective)
    assert any("attention" in op for op in best.action.save), best.action


def test_the_optimizers_state_is_reserved_before_it_exists() -> None:
    """F13: what fits a first step fits a resumed one, whose state is there from the start."""
    small = ["model.config.num_hidden_layers=3", "model.config.max_position_embeddings=4096"]
    found = {}
    for optimizer in ("adamw", "sgd"):
        recipe = load_recipe("tiny-cpu", [*small, f"training.optimizer={optimizer}"])
        profile = trace_recipe(recipe, on_accelerator=False, actions=(), max_length=4096)

        def costs_at(length: int, profile: StepProfile = profile) -> StepCosts:
            return profile.costs_at(batch=1, length=length)

        costs = costs_at(512)
        longest = longest_length(
            costs_at,
            ARITHMETIC,
            Terms(budget_bytes=150_000_000),
            policy="recompute all",
            max_length=4096,
        )
        found[optimizer] = (costs.fixed, longest)
    (with_state, shorter), (without, longer) = found["adamw"], found["sgd"]
    assert with_state.weights == without.weights
    assert with_state.optimizer >= 2 * with_state.weights - 1_000_000  # buffers have no state
    assert without.optimizer == 0
    assert 0 < shorter < longer


def test_logits_hold_the_peak_and_no_plan_of_the_blocks_lowers_it() -> None:
    """F17: the report says where the peak is, and what would lower it."""
    costs = profile_of(llama(vocab_size=32_000, hidden_size=32)).costs_at(batch=1, length=512)
    forecast = forecast_step(costs, ARITHMETIC, Terms(budget_bytes=1))
    assert where_of(forecast.planned.peak) == "head and loss"
    assert not forecast.planned.fits
    (advice,) = [line for line in advice_of(forecast) if "logits" in line]
    assert "recomputing more blocks does not lower it" in advice
    assert "use_tiled_loss" in advice
    lightest, kept = forecast.policies[1].peak, forecast.policies[0].peak
    assert lightest.working == kept.working > 10 * (kept.kept - lightest.kept)


@pytest.mark.parametrize("action", [Keep(), Selective(), Recompute()], ids=lambda a: a.name)
def test_predictions_follow_policy_and_length(action: Keep | Selective | Recompute) -> None:
    """G2: never below what is measured by more than 0.1 %, at lengths that were never seen."""
    model = llama()
    profile = profile_with("sdpa")
    step = RealStep(model, language_model_batch(1, 24, False))
    predicted = []
    for length in (128, 512, 1000):  # the long one comes after short ones, judged by itself
        peak = predicted_peak(profile.costs_at(batch=1, length=length), [action] * 3)
        measured = step.peak_bytes(language_model_batch(1, length, False), [action] * 3)
        predicted.append(peak.total - peak.fixed)
        assert 0.999 * measured <= predicted[-1] <= 1.001 * measured
    assert predicted == sorted(predicted)
    assert predicted[2] > 7 * predicted[0] - 6 * 1_000_000
    step.engine.detach()


def test_predictions_differ_between_policies() -> None:
    """G2: no one number stands for all policies."""
    costs = profile_with("sdpa").costs_at(batch=1, length=512)
    problem = problem_of(costs, ARITHMETIC, allowed=("keep", "recompute"))
    peaks = [peak_of(problem, [choice] * 3).total for choice in range(2)]
    assert peaks[0] > 1.3 * peaks[1]
    assert dataclasses.replace(costs, length=513) != costs

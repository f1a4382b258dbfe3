"""Control inside Lightning: changes at boundaries, and a stop that can be gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rematic.recipes import ControlConfig, GoalsConfig, PolicyConfig, Recipe
from rematic.supervisor import RunStoppedError
from tests.hosts.lightning_fits import Net, Recorded, Runner
from tests.test_supervisor import CRAMPED, PaperProbe

ENTRIES = ("strategy", "callback")


def cramped() -> PaperProbe:
    probe = PaperProbe()
    probe.says = CRAMPED
    return probe


def recipe(**control: Any) -> Recipe:
    return Recipe(
        policy=PolicyConfig(trust=("*",)),
        control=ControlConfig(**control),
        goals=GoalsConfig(slowdown_max=1e9),  # a toy's seconds are noise
    )


@pytest.mark.parametrize("entry", ENTRIES)
def test_policies_change_after_the_optimizer_and_bits_do_not(runner: Runner, entry: str) -> None:
    """H3: the third micro-batch is troubled too, and lies inside an accumulation."""
    plain = runner.fit(Net, accumulate_grad_batches=2)
    journal = Recorded()
    arguments = {"recipe": recipe(), "policy": "keep", "probe": cramped(), "journal": journal}
    fitted = runner.fit(Net, accumulate_grad_batches=2, **runner.entry(entry, **arguments))
    fitted.is_same_as(plain)
    first = next(event for event in journal.events if event["event"] == "switch")
    assert (first["from"], first["to"], first["step"]) == ("keep", "selective", 4)
    steps = [event["policy"] for event in journal.events if event["event"] == "step"]
    assert steps[:5] == [*["keep"] * 4, "selective"]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_stop_leaves_a_checkpoint_between_batches(
    runner: Runner, tmp_path: Path, entry: str
) -> None:
    plain = runner.fit(Net)
    arguments = {"policy": "recompute+offload", "probe": cramped()}
    stopping = recipe(escalation="checkpoint_and_stop")
    trainer = runner.trainer(
        default_root_dir=tmp_path, **runner.entry(entry, recipe=stopping, **arguments)
    )
    with pytest.raises(RunStoppedError, match="nothing heavier is taken"):
        runner.fit(Net, trainer=trainer)
    assert trainer.global_step == 10
    path = tmp_path / "rematic-emergency.ckpt"
    resumed = runner.fit(
        Net, ckpt_path=path, **runner.entry(entry, recipe=recipe(), policy="recompute+offload")
    )
    assert resumed.trainer.global_step == plain.trainer.global_step == 14


@pytest.mark.parametrize("entry", ENTRIES)
def test_loggers_get_the_figures_as_often_as_the_users(runner: Runner, entry: str) -> None:
    journal = Recorded()
    arguments = {"recipe": recipe(), "policy": "recompute", "journal": journal}
    fitted = runner.fit(
        Net,
        accumulate_grad_batches=2,
        log_every_n_steps=3,
        **runner.entry(entry, **arguments),
    )
    steps = [event for event in journal.events if event["event"] == "step"]
    assert [step for step, _ in fitted.figures] == [2, 5]
    first = fitted.figures[0][1]
    assert first["rematic/steps"] == 6
    assert first["rematic/seconds"] == sum(step["seconds"] for step in steps[:6])
    assert first["rematic/policy_level"] == 2
    assert first["rematic/peak_bytes"] == max(step["peak_bytes"] for step in steps[:6])
    assert fitted.logged == runner.fit(Net, accumulate_grad_batches=2, log_every_n_steps=3).logged


@pytest.mark.parametrize("entry", ENTRIES)
def test_loggers_get_the_last_figures_when_a_fit_ends_where_they_are_due(
    runner: Runner, entry: str
) -> None:
    arguments = runner.entry(entry, recipe=recipe(), policy="recompute")
    fitted = runner.fit(Net, accumulate_grad_batches=2, log_every_n_steps=8, **arguments)
    ((step, figures),) = fitted.figures
    assert (step, figures["rematic/steps"]) == (7, 14)

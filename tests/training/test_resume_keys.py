"""J4, A2: no key that is changed for a resumed run is inert without a word."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rematic.journal import read_journal
from rematic.recipes import Recipe
from rematic.training.resume import MUST_AGREE, WITHOUT_EFFECT
from rematic.training.run import train
from tests.training.small import tiny

Events = list[dict[str, Any]]
RESUMED = Path("runs/tiny-cpu")


@pytest.fixture(autouse=True)
def a_run_of_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(tiny("training.max_steps=2"), show_progress=False)


def go_on(*changes: str) -> Events:
    """What the resumed run writes to its journal."""
    before = sum(1 for _ in read_journal(RESUMED / "journal.jsonl"))
    train(tiny(*changes), resume=RESUMED, show_progress=False)
    return [dict(event) for event in list(read_journal(RESUMED / "journal.jsonl"))[before:]]


def of(kind: str, events: Events) -> Events:
    return [event for event in events if event["event"] == kind]


def policies(events: Events) -> object:
    return [(event["policy"], event["plan"]) for event in of("step", events)]


def budget(events: Events) -> object:
    return [event["budget_bytes"] for event in of("attach", events)]


def rules(events: Events) -> object:
    found = [event["rules"] for event in of("control", events)]
    return [(one["goals"], one["pace"], one["adapt"]) for one in found]


def reserve(events: Events) -> object:
    return [event["reserve"] for event in of("control", events)]


def escalation(events: Events) -> object:
    return [event["escalation"] for event in of("control", events)]


def notices(events: Events) -> object:
    return [event["kind"] for event in of("notice", events)]


def units(events: Events) -> object:
    return [event["units"] for event in of("attach", events)]


def losses(_: Events) -> object:
    lines = (RESUMED / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def files(_: Events) -> object:
    return sorted(path.name for path in RESUMED.iterdir())


def checkpoints(events: Events) -> object:
    return len(of("checkpoint", events))


EFFECTS: list[tuple[str, Callable[[Events], object]]] = [
    ("policy.start=recompute", policies),
    ("policy.start=keep", policies),
    ("policy.rules=[{match: '*', action: recompute}]", policies),
    ("policy.units=['*.layers.0']", units),
    ("policy.tiled_loss=always", notices),
    ("memory.budget=48MiB", budget),
    ("memory.reserve=0.3", reserve),
    ("control.adapt=false", rules),
    ("control.probation_steps=3", rules),
    ("control.cool_down_steps=3", rules),
    ("control.window_steps=3", rules),
    ("control.escalation=checkpoint_and_stop", escalation),
    ("goals.headroom_min=0.3", rules),
    ("goals.slowdown_max=1.5", rules),
    ("training.clip_norm=0.001", losses),
    ("training.weight_decay=500.0", losses),
    ("training.epochs=2", losses),
    ("model.attention=eager", lambda e: [event["attention"] for event in of("run_start", e)]),
    ("run.checkpoint_every_steps=1", checkpoints),
    ("run.save=full", files),
]


@pytest.mark.parametrize(("change", "shown_by"), EFFECTS, ids=[change for change, _ in EFFECTS])
def test_a_changed_key_has_its_effect(
    change: str,
    shown_by: Callable[[Events], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = shown_by(go_on(change))
    (tmp_path / "as before").mkdir()
    monkeypatch.chdir(tmp_path / "as before")
    train(tiny("training.max_steps=2"), show_progress=False)
    assert shown_by(go_on()) != changed


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("run.dir=elsewhere", "run.dir is 'elsewhere' and was 'runs', which has no effect"),
        ("run.name=other", "run.name is 'other' and was null, which has no effect"),
    ],
)
def test_a_changed_key_without_effect_is_told(
    change: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on()
    assert "has no effect" not in capsys.readouterr().err
    go_on(change)
    assert f"{text} on a run that is resumed: it goes on in {RESUMED}" in capsys.readouterr().err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["tiny-cpu"]


OTHERS = {
    "model": {"attention", "trust_remote_code"},  # of how the model is made
    "tuning": {"dropout"},
    "quantization": {"compute_dtype", "storage_dtype", "outlier_threshold"},
    # of documents: other ones are refused by their hash
    "data": {
        *("source", "format", "subset", "split", "text_field", "target_field", "messages_field"),
        *("label_field", "labels", "max_documents", "pad_to_multiple"),
    },
    "evaluation": {"every_steps", "max_documents"},
    "training": {
        *("epochs", "max_steps", "learning_rate", "weight_decay", "schedule", "final_share"),
        *("warmup_steps", "clip_norm", "threads"),
    },
    "memory": {"budget", "probe", "heap_cap", "scratch_dir", "reserve"},
    "policy": {
        *("start", "units", "rules", "trust", "routers", "planner", "op_retry", "allow_lossy"),
        *("allow_tile", "tiled_loss"),
    },
    "control": {
        *("attempts", "allow_split", "adapt", "probation_steps", "cool_down_steps"),
        *("window_steps", "escalation"),
    },
    "goals": {
        *("headroom_min", "slowdown_max", "loss_tolerance", "gradient_tolerance", "ooms_max"),
        *("switches_max", "throughput_min"),
    },
    "run": {"checkpoint_every_steps", "save"},
}
"""Keys that the parts of a resumed run are built from anew, so that a change has its effect."""


def test_what_a_resumed_run_makes_of_a_key_is_known_of_every_key() -> None:
    known = {*MUST_AGREE, *WITHOUT_EFFECT}
    known |= {(section, key) for section, keys in OTHERS.items() for key in keys}
    sections = [(f.name, getattr(Recipe(), f.name)) for f in dataclasses.fields(Recipe)]
    keys = {
        (name, field.name)
        for name, section in sections
        if dataclasses.is_dataclass(section) and name not in ("planned_on", "measured_on")
        for field in dataclasses.fields(section)
    }
    assert known == keys


def test_a_resume_that_fails_before_its_first_step_leaves_the_recipe_of_the_run() -> None:
    before = (RESUMED / "recipe.yaml").read_text()
    with pytest.raises(ValueError, match=r"pattern 'nothing\.\*' matches none"):
        go_on("policy.units=['nothing.*']")
    assert (RESUMED / "recipe.yaml").read_text() == before
    assert not (RESUMED / "traceback.txt").exists()
    go_on("memory.reserve=0.1")
    assert "reserve: 0.1" in (RESUMED / "recipe.yaml").read_text()

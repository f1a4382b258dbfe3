"""Every example runs, with rematic off and on, to the same losses."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

from rematic.cli.accelerate_file import load_accelerate_file, section_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated",
    "ignore:'pin_memory' argument is set as true but no accelerator is found",
)

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {
    "accelerate_loop": ["--documents", "4", "--longest", "64"],
    "transformers_trainer": ["--steps", "4", "--longest", "64"],
}
LOSS = re.compile(r"loss(?:'?: '?| )([0-9.]+)")


def run(
    name: str,
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    monkeypatch.setattr(sys, "argv", [name, *OPTIONS[name]])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_listed_and_short() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(OPTIONS)
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text("utf-8").splitlines()) < 80, path.name
        assert path.with_suffix(".yaml").is_file()


@pytest.mark.parametrize("name", OPTIONS)
def test_runs_off_and_on(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / f"{name}.yaml"
    section = section_of(load_accelerate_file(path), path=path)
    assert section is not None
    off = run(name, {}, monkeypatch, capsys)
    on = run(name, section.environment(), monkeypatch, capsys)
    assert LOSS.findall(off) == LOSS.findall(on) != []
    assert "planned" in on
    assert "planned" not in off

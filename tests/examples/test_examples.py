"""Every example runs, with rematic off and on, to the same losses."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch.strategies import SingleDeviceStrategy

import rematic
from rematic.cli.accelerate_file import load_accelerate_file, section_of
from tests.ranks import free_port

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated",
    "ignore:'pin_memory' argument is set as true but no accelerator is found",
    # bitsandbytes, and TRL 1.16 in the ways in which it calls transformers and datasets:
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
)

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {
    "accelerate_loop": ["--documents", "4", "--longest", "64"],
    "transformers_trainer": ["--steps", "4", "--longest", "64"],
    "sft_lora": ["--steps", "4", "--longest", "64"],
    "qlora": ["--documents", "4", "--longest", "64"],
}
LOOPS = ("plain_loop", "own_policy", "rollback_by_hand", "fabric_loop")
FITS = ("lightning_fit", "lightning_cli")
RANKED = ("ddp_loop", "fsdp2_loop")
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
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*OPTIONS, *LOOPS, *FITS, *RANKED}
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text("utf-8")
        assert len(text.splitlines()) < 80, path.name
        assert f"examples/{path.name}" in text.split('"""')[1]
    assert all((EXAMPLES / f"{name}.yaml").is_file() for name in OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_runs_off_and_on(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "sft_lora":
        pytest.importorskip("trl")
    path = EXAMPLES / f"{name}.yaml"
    section = section_of(load_accelerate_file(path), path=path)
    assert section is not None
    off = run(name, {}, monkeypatch, capsys)
    on = run(name, section.environment(), monkeypatch, capsys)
    assert LOSS.findall(off) == LOSS.findall(on) != []
    assert "planned" in on
    assert "planned" not in off


class AsItIs:
    """Stands in for rematic: runs what it is given."""

    def run(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        return fn(batch)

    def report(self) -> str:
        return ""


def run_loop(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...] = ("--longest", "64"),
) -> str:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Those of the plain loop without rematic."""
    with monkeypatch.context() as patch:
        patch.setattr(rematic, "attach", lambda *_, **__: AsItIs())
        found = LOSS.findall(run_loop("plain_loop", patch, capsys))
    assert len(set(found)) == 8
    return found


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_has_the_losses_of_the_plain_one(
    name: str,
    losses: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = run_loop(name, monkeypatch, capsys)
    assert LOSS.findall(found) == losses
    if name == "rollback_by_hand":
        assert re.findall("under (.*)", found)[2:5] == ["keep", "recompute", "keep"]
    else:
        assert "blocks.0  TransformerEncoderLayer" in found


class OneDevice(SingleDeviceStrategy):
    session = AsItIs()


def test_a_fit_of_lightning_has_the_losses_without_rematic(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_loop("lightning_fit", monkeypatch, capsys)
    assert "blocks.0  TransformerEncoderLayer" in found
    monkeypatch.setattr(rematic, "RecomputeStrategy", lambda **_: OneDevice("cpu"))
    assert LOSS.findall(run_loop("lightning_fit", monkeypatch, capsys)) == LOSS.findall(found)
    assert len(set(LOSS.findall(found))) == 8


@pytest.mark.filterwarnings(
    # Lightning 2.6 calls jsonargparse in ways that its newest releases deprecate.
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)
def test_the_command_line_of_lightning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ("fit", "--config", str(EXAMPLES / "lightning_cli.yaml"))
    more = ("--model.longest", "64", "--trainer.strategy.policy")
    one, other = (
        LOSS.findall(run_loop("lightning_cli", monkeypatch, capsys, (*config, *more, policy)))
        for policy in ("keep", "recompute")
    )
    assert one == other
    assert len(set(one)) == 8


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPModel. returned a view tensor")
@pytest.mark.parametrize("name", RANKED)
def test_a_loop_of_ranks_in_a_world_of_one(
    name: str,
    losses: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(key, value)
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    try:
        found = run_loop(name, monkeypatch, capsys)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert LOSS.findall(found) == losses
    assert "blocks.0" in found

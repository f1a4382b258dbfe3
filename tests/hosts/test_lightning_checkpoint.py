"""Checkpoints: the session's state travels with them, and a stock Trainer never minds."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import rematic
from tests.hosts.lightning_fits import Net, Runner, ValidatedNet, session_of

ENTRIES = ("plain", "strategy", "callback")
ROOMY = "64GiB"
BALLAST_BYTES = 32 << 20


def saved_by(runner: Runner, entry: str, path: Path, **arguments: Any) -> Any:
    arguments = {"policy": "recompute", "budget": ROOMY, **arguments}
    fitted = runner.fit(max_epochs=1, **runner.entry(entry, **arguments))
    fitted.trainer.save_checkpoint(path)
    return fitted


@pytest.mark.parametrize("resumes", ENTRIES)
@pytest.mark.parametrize("saves", ENTRIES)
def test_every_pair_resumes_bit_for_bit(
    runner: Runner, tmp_path: Path, saves: str, resumes: str
) -> None:
    saved_by(runner, "plain", tmp_path / "plain.ckpt")
    saved_by(runner, saves, tmp_path / "saved.ckpt")
    reference = runner.fit(max_epochs=3, ckpt_path=tmp_path / "plain.ckpt", seed=11)
    arguments = runner.entry(resumes, policy="recompute", budget=ROOMY)
    fitted = runner.fit(max_epochs=3, ckpt_path=tmp_path / "saved.ckpt", seed=11, **arguments)
    fitted.is_same_as(reference)
    if resumes != "plain":
        assert fitted.session.num_steps == (21 if saves != "plain" else 14)


@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_the_state_is_plain_and_of_one_form(runner: Runner, tmp_path: Path, entry: str) -> None:
    fitted = saved_by(runner, entry, tmp_path / "saved.ckpt")
    saved_by(runner, "plain", tmp_path / "plain.ckpt")
    checkpoint = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    plain = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert checkpoint["rematic"] == fitted.session.state_dict()
    assert set(checkpoint) - set(plain) == {"rematic"}
    assert checkpoint["callbacks"] == plain["callbacks"]


@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_a_file_of_weights_alone_is_that_of_a_stock_trainer(
    runner: Runner, tmp_path: Path, entry: str
) -> None:
    fitted = saved_by(runner, entry, tmp_path / "all.ckpt")
    fitted.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "rematic" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


class PolicyAtStart(pl.Callback):
    """Notes the session's policy before the first forward."""

    policy: str | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.policy = self.policy or session_of(trainer).policy.name


@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_a_resumed_fit_starts_with_the_policy_it_had(
    runner: Runner, tmp_path: Path, entry: str
) -> None:
    fitted = saved_by(runner, entry, tmp_path / "saved.ckpt")
    fitted.session.switch("keep", reason="to be remembered")
    fitted.trainer.save_checkpoint(tmp_path / "switched.ckpt")
    noted = PolicyAtStart()
    arguments = runner.entry(entry, policy="recompute", budget=ROOMY)
    arguments["callbacks"] = [noted, *arguments.get("callbacks", ())]
    resumed = runner.fit(ckpt_path=tmp_path / "switched.ckpt", **arguments)
    assert noted.policy == "keep"
    assert resumed.session.history.entries[-1].reason == "to be remembered"
    assert all(block.calls.replays == 7 * [False] for block in resumed.module.blocks)


@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_a_checkpoint_without_state_loads_with_a_notice(
    runner: Runner, tmp_path: Path, entry: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved_by(runner, "plain", tmp_path / "plain.ckpt")
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        runner.fit(ckpt_path=tmp_path / "plain.ckpt", **runner.entry(entry, budget=ROOMY))
    assert "holds no state of rematic: its controller starts afresh" in caplog.text


@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_the_state_of_another_model_is_left_with_a_notice(
    runner: Runner, tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: str
) -> None:
    """F13: weights and optimizer are resumed all the same."""
    saved_by(runner, entry, tmp_path / "saved.ckpt")
    checkpoint = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    checkpoint["rematic"]["units"].append("blocks.4")
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with caplog.at_level(logging.WARNING, "rematic"):
        resumed = runner.fit(
            ckpt_path=tmp_path / "other.ckpt", **runner.entry(entry, policy="keep", budget=ROOMY)
        )
    assert resumed.trainer.global_step == 14
    assert resumed.session is not None
    assert (resumed.session.policy.name, resumed.session.num_steps) == ("keep", 7)
    told = [text for text in caplog.messages if "the controller starts afresh" in text]
    assert len(told) == 1
    assert "it has 5 units (blocks.0 .. blocks.4), this one 4" in told[0]


@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_a_damaged_state_is_refused(runner: Runner, tmp_path: Path, entry: str) -> None:
    fitted = saved_by(runner, entry, tmp_path / "saved.ckpt")
    checkpoint = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    del checkpoint["rematic"]["costs"]
    torch.save(checkpoint, tmp_path / "other.ckpt")
    module = Net()
    with pytest.raises(ValueError, match="the saved state is damaged"):
        runner.fit(module, ckpt_path=tmp_path / "other.ckpt", **runner.entry(entry, budget=ROOMY))
    assert "forward" not in vars(module.blocks[0])
    assert "log" not in vars(module)
    assert fitted.session.num_steps == 7


@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_a_fit_that_failed_leaves_no_state_for_the_next(
    runner: Runner, tmp_path: Path, entry: str
) -> None:
    saved_by(runner, entry, tmp_path / "saved.ckpt")
    trainer = runner.trainer(**runner.entry(entry, policy="keep", budget="1KiB"))
    with pytest.raises(ValueError, match="weights and buffers alone"):
        runner.fit(trainer=trainer, ckpt_path=tmp_path / "saved.ckpt")
    assert session_of(trainer) is None
    part = next(p for p in (trainer.strategy, *trainer.callbacks) if hasattr(p, "session"))
    assert part._driver._restored is None


@pytest.mark.parametrize("saves", ENTRIES)
@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_validating_takes_and_misses_no_state(
    runner: Runner, tmp_path: Path, entry: str, saves: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved_by(runner, saves, tmp_path / "saved.ckpt")
    trainer = runner.trainer(**runner.entry(entry, budget=ROOMY))
    loader = torch.utils.data.DataLoader([(torch.ones(16), torch.ones(1))])
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer.validate(ValidatedNet(), loader, ckpt_path=tmp_path / "saved.ckpt")
    assert session_of(trainer) is None
    assert "rematic" not in caplog.text


class Ballasted(Net):
    """A net with 32 MiB beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.zeros(BALLAST_BYTES // 4))


class InUseAtStart(pl.Callback):
    """Reads the bytes in use before the first step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.num_bytes = session_of(trainer).probe.allocated_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="the heap is read through glibc")
@pytest.mark.parametrize("entry", ["strategy", "callback"])
def test_the_loaded_checkpoint_is_not_taken_for_overhead(runner: Runner, entry: str) -> None:
    first = runner.fit(Ballasted, max_epochs=1)
    first.trainer.save_checkpoint(runner.folder / "ballast.ckpt")
    in_use = InUseAtStart()
    arguments = runner.entry(entry, policy="recompute", budget=ROOMY, probe="host")
    arguments["callbacks"] = [in_use, *arguments.get("callbacks", ())]
    runner.fit(Ballasted, ckpt_path=runner.folder / "ballast.ckpt", **arguments)
    # the ballast is in use once; with the copy in the checkpoint taken for overhead, not at all
    assert in_use.num_bytes == pytest.approx(BALLAST_BYTES, rel=0.1)


def test_the_key_is_the_name_of_the_package() -> None:
    from rematic.hosts.lightning_driver import CHECKPOINT_KEY

    assert rematic.__name__ == CHECKPOINT_KEY

"""The callback: which Trainers it takes, and its seams on the strategy.

Fits, checkpoints and exceptions are tested together with the strategy in tests/hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import rematic
from rematic.callbacks import AdaptiveRecompute

ROOMY = "64GiB"


def step_of(module: Any, batch: Tensor, batch_idx: int) -> Tensor:
    return module.blocks(batch).square().mean()


def make_module(base: type[Any] = pl.LightningModule) -> Any:
    torch.manual_seed(0)
    module = type(
        "Small",
        (base,),
        {
            "training_step": step_of,
            "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), 1e-2),
        },
    )()
    module.blocks = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(3))
    )
    return module


def make_trainer(path: Path, base: type[Any] = pl.Trainer, **options: Any) -> Any:
    defaults = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False}
    quiet = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return base(**{**defaults, **quiet, **options}, default_root_dir=path)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 8, generator=generator) for _ in range(3)]


def fitted_weights(module: Any, trainer: Any) -> list[Tensor]:
    torch.manual_seed(5)
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    return [parameter.detach().clone() for parameter in module.parameters()]


class Seams(Callback):
    """Notes what hangs on the strategy during a fit."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.found = {"training_step", "backward"} & set(vars(trainer.strategy))


def test_the_strategy_is_wrapped_during_the_fit_only(tmp_path: Path) -> None:
    seams = Seams()
    callback = AdaptiveRecompute(policy="recompute")
    trainer = make_trainer(tmp_path, callbacks=[callback, seams])
    before = set(vars(trainer.strategy))
    fitted_weights(make_module(), trainer)
    assert seams.found == {"training_step", "backward"}
    assert set(vars(trainer.strategy)) == before
    assert callback.session is not None
    assert callback.session.num_steps == 3


def test_one_callback_serves_several_trainers(tmp_path: Path) -> None:
    callback = AdaptiveRecompute(policy="recompute")
    first = fitted_weights(make_module(), make_trainer(tmp_path, callbacks=[callback]))
    second = fitted_weights(make_module(), make_trainer(tmp_path, callbacks=[callback]))
    plain = fitted_weights(make_module(), make_trainer(tmp_path))
    for one, other, reference in zip(first, second, plain, strict=True):
        assert torch.equal(one, reference)
        assert torch.equal(other, reference)


def test_beside_the_strategy_it_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        strategy=rematic.RecomputeStrategy(policy="keep"),
        callbacks=[AdaptiveRecompute(policy="keep")],
    )
    with pytest.raises(ValueError, match="Trainer with RecomputeStrategy: expected one of the two"):
        fitted_weights(make_module(), trainer)


def test_twice_it_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    module = make_module()
    callbacks = [AdaptiveRecompute(policy="keep"), AdaptiveRecompute(policy="keep")]
    trainer = make_trainer(tmp_path, callbacks=callbacks)
    with pytest.raises(ValueError, match="is already managed by a session"):
        fitted_weights(module, trainer)
    assert "forward" not in vars(module.blocks[0])
    assert "training_step" not in vars(trainer.strategy)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves no process group and none of the variables that Lightning makes one from."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_over_ddp_of_one_process(tmp_path: Path) -> None:
    def weights_after(*callbacks: Callback) -> list[Tensor]:
        ddp = DDPStrategy(process_group_backend="gloo")
        trainer = make_trainer(tmp_path, strategy=ddp, callbacks=[*callbacks])
        return fitted_weights(make_module(), trainer)

    plain = weights_after()
    for policy in ("keep", "recompute", "planned"):
        callback = AdaptiveRecompute(policy=policy, budget=ROOMY)
        found = weights_after(callback)
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
        assert callback.session is not None
        assert callback.session.num_steps == 3


def test_a_trainer_of_the_other_package_is_refused(tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")
    trainer = make_trainer(tmp_path, other.Trainer, callbacks=[AdaptiveRecompute(policy="keep")])
    with pytest.raises(ValueError, match="given to a pytorch_lightning Trainer") as error:
        fitted_weights(make_module(other.LightningModule), trainer)
    assert "from lightning.pytorch import Trainer" in str(error.value)


def test_the_strategy_tells_the_other_package_what_it_is_for(tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match=r"for a Trainer of lightning\.pytorch, not of pyt"):
        make_trainer(tmp_path, other.Trainer, strategy=rematic.RecomputeStrategy(policy="keep"))

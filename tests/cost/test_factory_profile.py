import json

import pytest

from rematic.cli import main

MADE = """
import torch
from torch import nn
import lightning.pytorch as pl


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def make_batch(batch, length):
    return torch.zeros(batch, length, 32)


def stack():
    return Stack(), make_batch


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.stack = Stack()

    def training_step(self, batch, batch_idx):
        loss = self.stack(batch)
        self.log("loss", loss)
        return {"loss": loss}


def module():
    return Module(), make_batch


def text():
    return "no model"


def no_loss():
    stack = nn.Sequential(nn.Sequential(nn.Linear(32, 8)), nn.Sequential(nn.Linear(8, 8)))
    return stack, make_batch


NUMBER = 1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "made_here.py").write_text(MADE, "utf-8")
    monkeypatch.chdir(tmp_path)


def plan(name, capsys, *options):
    argv = ["plan", f"made_here:{name}", "--device", "t4", "--lengths", "64,256", *options]
    status = main([*argv, "--json"])
    output = capsys.readouterr()
    return json.loads(output.out) if status == 0 else output.err


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_a_factory_is_planned_like_a_recipe(capsys):
    reports = [plan(name, capsys, "training.optimizer=sgd") for name in ("stack", "module")]
    assert reports[0]["recipe"] == "made_here:stack"
    weights = 3 * (32 * 64 + 64 + 64 * 32 + 32) * 4
    for report in reports:
        assert [one["weights_bytes"] for one in report["lengths"]] == [weights] * 2
        rows = {row["policy"]: row for row in report["lengths"][1]["policies"]}
        kept = {name: row["peak"]["kept_bytes"] for name, row in rows.items()}
        # per block: its input, what GELU reads and what it returns
        assert kept["keep all"] >= 3 * 256 * (32 + 64 + 64) * 4 > kept["recompute all"]
    assert reports[0]["lengths"] == reports[1]["lengths"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("text", "returned a str; expected an nn.Module"),
        ("no_loss", "returned no loss of one number"),
        ("missing", "cannot be imported"),
        ("NUMBER", "is a int; expected a function or a class"),
    ],
)
def test_what_cannot_be_planned_is_refused(name, text, capsys):
    assert text in plan(name, capsys)

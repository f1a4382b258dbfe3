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


def broken():
    raise KeyError("width")


def wants(width):
    return Stack()


def three():
    return Stack(), make_batch, 3


def text_batch():
    return Stack(), lambda batch, length: "text"


def failing_batch():
    return Stack(), lambda batch: None


def frozen():
    made = Stack()
    return made.requires_grad_(False), make_batch


def tower():
    made = Stack()
    made.blocks[0].requires_grad_(False)
    made.blocks[1].requires_grad_(False)
    return made, make_batch


class Alone(Module):
    def training_step(self, batch, batch_idx):
        return self.stack(batch) * self.trainer.current_epoch


def alone():
    return Alone(), make_batch


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
        ("missing", "cannot be imported (AttributeError: module 'made_here' has no attribute"),
        ("broken", "failed when it was called with nothing: KeyError: 'width' ("),
        ("wants", "failed when it was called with nothing: TypeError: wants() missing 1 required"),
        ("three", "returned a tuple of (Stack, function, int); expected an nn.Module, or a pair"),
        ("text_batch", "a batch of made_here:text_batch holds a str; expected a tensor, or a list"),
        ("failing_batch", "failed when it made a batch of 1 x 32: TypeError: "),
        ("frozen", "the loss of the model of made_here:frozen needs no gradient; expected weights"),
        ("alone", "failed in a step: RuntimeError: Alone"),
        ("NUMBER", "is a int; expected a function or a class"),
    ],
)
def test_what_cannot_be_planned_is_refused(name, text, capsys):
    assert text in plan(name, capsys)


def test_blocks_that_are_frozen_from_the_first_on_are_planned(capsys):
    (step, _) = plan("tower", capsys)["lengths"]
    rows = {row["policy"]: row["plan"] for row in step["policies"]}
    assert rows["op list"] == {"selective": 3}
    assert rows["keep all"] == {"keep": 3}


def test_an_error_in_a_users_code_is_told_with_its_line(capsys):
    lines = MADE.splitlines()
    number = 1 + lines.index("        return self.stack(batch) * self.trainer.current_epoch")
    assert f"made_here.py, line {number}); expected an nn.Module" in plan("alone", capsys)


@pytest.mark.parametrize("text", ["def f(:", "raise ZeroDivisionError", "import not_there_at_all"])
def test_a_module_that_does_not_load_is_refused(text, tmp_path, capsys):
    (tmp_path / "not_loading.py").write_text(text, "utf-8")
    assert main(["plan", "not_loading:model", "--device", "t4"]) == 2
    assert "not_loading:model cannot be imported (" in capsys.readouterr().err


def test_its_model_is_sharded_as_the_recipe_says(capsys):
    sharded = ["distributed.strategy=fsdp2", "distributed.devices=3"]
    whole, part = plan("stack", capsys), plan("stack", capsys, *sharded)
    weights = [one["lengths"][0]["weights_bytes"] for one in (whole, part)]
    rows = 3 * (22 * 32 + 22 + 11 * 64 + 11) * 4  # the first of three holds 22 of 64, 11 of 32
    assert weights == [3 * (32 * 64 + 64 + 64 * 32 + 32) * 4, rows]
    assert part["notes"] == ["figures are those of each of 3 devices (fsdp2)"]


@pytest.mark.parametrize("value", ["tuning.method=lora", "model.type=llama"])
def test_what_it_would_not_read_is_refused(value, capsys):
    section = value.partition(".")[0]
    assert f"{section} says how the model of a recipe is made, and made_here:stack" in plan(
        "stack", capsys, value
    )


def test_its_tensors_move_only_where_a_place_is_named(capsys, tmp_path):
    small = ["--lengths", "64,2048", "--budget", "100KiB", "training.optimizer=sgd"]
    stays = plan("stack", capsys, *small)["lengths"][1]["policies"][-1]["plan"]
    moves = plan("stack", capsys, *small, f"memory.scratch_dir={tmp_path}")
    assert set(stays) <= {"keep", "selective", "recompute"}
    assert "recompute+offload" in moves["lengths"][1]["policies"][-1]["plan"]

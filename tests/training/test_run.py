from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rematic.journal import read_journal
from rematic.recipes import load_recipe
from rematic.training import prepared_model, trained_module
from rematic.training.batches import Batch
from rematic.training.data import load_data
from rematic.training.plain_loop import PlainLoop
from rematic.training.run import train
from tests.training.small import tiny


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def weights(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(path / "last.ckpt", weights_only=True)
    return dict(checkpoint["state_dict"])


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_all_that_explains_it(tmp_path: Path) -> None:
    summary = train(tiny(), show_progress=False)
    run = tmp_path / "runs" / "tiny-cpu"
    assert sorted(path.name for path in run.iterdir()) == [
        "journal.jsonl",
        "last.ckpt",
        "metrics.jsonl",
        "recipe.yaml",
    ]
    assert (summary.status, summary.steps, summary.batches_lost) == ("finished", 4, 0)
    assert summary.checkpoint == "runs/tiny-cpu/last.ckpt"
    kinds = [event["event"] for event in read_journal(run / "journal.jsonl")]
    assert [kind for kind in kinds if kind not in ("evict", "retry")] == [
        "attach",
        "run_start",
        "control",
        *["step"] * 4,
        "checkpoint",
        "run_end",
    ]
    assert dataclasses.replace(load_recipe(run / "recipe.yaml")) == tiny()
    assert "rematic" in torch.load(run / "last.ckpt", weights_only=True)


def test_the_journal_holds_neither_documents_nor_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, secret = "a quick brown fox ", "hf_of_somebody"
    monkeypatch.setenv("HF_TOKEN", secret)
    (tmp_path / "fox.txt").write_text(words * 4)
    summary = train(tiny("data.source=fox.txt"), show_progress=False)
    assert summary.steps == 1
    journal = tmp_path / "runs" / "tiny-cpu" / "journal.jsonl"
    text = journal.read_text()
    assert words not in text
    assert secret not in text
    ids = load_data(tiny("data.source=fox.txt")).loader.examples[0].ids[2:8]
    assert ",".join(map(str, ids)) not in text


def test_trains_like_a_plain_loop(tmp_path: Path) -> None:
    recipe = tiny("model.config.attention_dropout=0.0")
    train(recipe, show_progress=False)
    loader = load_data(recipe).loader
    loop = PlainLoop(recipe, max_length=loader.max_length)
    plain = []
    for batch in loader:
        plain.append(float(loop.forward_backward(batch)))
        loop.update()
    assert losses(tmp_path / "runs" / "tiny-cpu") == plain


def test_a_resumed_run_is_the_run_it_would_have_been(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny("training.epochs=2", "run.name=whole"), show_progress=False)
    train(tiny("run.name=parts"), show_progress=False)
    summary = train(
        tiny("training.epochs=2", "run.name=parts"),
        resume=tmp_path / "runs" / "parts",
        show_progress=False,
    )
    whole, parts = (tmp_path / "runs" / name for name in ("whole", "parts"))
    assert f"rematic: {parts} goes on after step 3\n" in capsys.readouterr().err
    assert (summary.status, summary.steps) == ("finished", 8)
    assert losses(parts) == losses(whole)
    assert all(torch.equal(weights(whole)[key], value) for key, value in weights(parts).items())
    steps = [
        event["step"] for event in read_journal(parts / "journal.jsonl") if event["event"] == "step"
    ]
    assert steps == list(range(8))


def test_a_finished_run_says_that_there_is_nothing_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(), show_progress=False)
    before = losses(tmp_path / "runs" / "tiny-cpu")
    summary = train(tiny(), resume="runs/tiny-cpu", show_progress=False)
    assert "runs/tiny-cpu had finished; raise training.epochs" in capsys.readouterr().err
    assert (summary.steps, summary.last_loss) == (4, before[-1])
    assert losses(tmp_path / "runs" / "tiny-cpu") == before


@pytest.mark.parametrize("accumulate", [1, 2])
def test_forward_holds_no_gradients_of_the_step_before(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those that micro-batches of the same step have left, as in a plain loop."""
    held = []
    loss_of = trained_module.model_loss

    def noted(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        held.append(sum(p.grad is not None for p in model.parameters()))
        return loss_of(model, batch)

    monkeypatch.setattr(trained_module, "model_loss", noted)
    train(tiny(f"training.accumulate={accumulate}"), show_progress=False)
    assert held == ([0, 0, 0, 0] if accumulate == 1 else [0, 21, 0, 21])


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("training.max_steps=2",), 2),
        (("training.precision=bf16", "training.max_steps=2"), 2),
        (("training.accumulate=2",), 4),
        (("training.clip_norm=null", "training.warmup_steps=2"), 4),
        (("memory.probe=simulated", "training.max_steps=2"), 2),
        (("policy.start=recompute",), 4),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_every_way_to_train_runs(overrides: tuple[str, ...], steps: int) -> None:
    summary = train(tiny(*overrides), show_progress=False)
    assert (summary.status, summary.steps) == ("finished", steps)


def test_lines_of_progress_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(
        r"epoch 1, document 4 of 4: loss \d\.\d{3}, tokens/s .*policy planned \(", captured.err
    )


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    train(tiny())
    shown = terminal.getvalue()
    assert "4/4" in shown
    assert re.search(r"loss=\d\.\d{3}, tokens/s=.*memory=.* of 64\.0 MiB, policy=planned", shown)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("memory.budget=100KiB",),
            "memory.budget is 100.0 KiB, which is smaller than the model's",
        ),
        (("memory.budget=400KiB",), "smaller than weights, gradients and optimizer state"),
        (("memory.budget=0.00001",), "smaller than"),
        (("memory.budget=auto",), "budget"),
        (("memory.budget=auto", "memory.heap_cap=true"), "a cap needs a size, or a fraction"),
        (("data.source=nowhere",), "data.source 'nowhere' does not exist"),
        (("data.source=empty.txt",), "empty.txt is an empty document"),
        (("data.source=binary.txt",), "binary.txt is binary (a NUL byte at position 0)"),
        (("policy.units=['nothing.*']",), "nothing.*"),
        (("data.text_field=body",), "data.text_field is 'body', but pydoc_topics is plain text"),
        (("data.text_field=body", "data.source=a.txt"), "is 'body', but a.txt is plain text"),
        (("run.dir=empty.txt/runs",), "run.dir 'empty.txt/runs' cannot be written"),
        (("model.config.hiden_size=3",), "did you mean 'hidden_size'?"),
        (("data.max_length=5000",), "has positions for 4096 tokens"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_bad_input_leaves_nothing_behind(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\0\1")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=re.escape(message)):
        train(tiny(*overrides), show_progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "binary.txt", "empty.txt"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the probe has a device to read")
def test_a_probe_without_its_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"memory\.probe is cuda, but this machine has no such dev"
    ):
        train(tiny("memory.probe=cuda"), show_progress=False)
    assert not list(tmp_path.iterdir())


def test_an_epoch_that_is_shorter_than_a_step_is_told_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(tiny("training.accumulate=4", "run.name=all"), show_progress=False)
    assert "training.accumulate" not in capsys.readouterr().err
    train(tiny("training.accumulate=5", "run.name=few"), show_progress=False)
    text = "training.accumulate is 5, but an epoch has 4 micro-batches: each epoch is one step"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("overlong", ["cut", "skip"])
def test_documents_that_fall_away_unasked_are_told_of(
    overlong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": "q" * length, "answer": "a"} for length in (4, 5, 300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = ("data.source=rows.jsonl", "data.target_field=answer", f"data.overlong={overlong}")
    train(tiny(*said), show_progress=False)
    text = "1 of 3 documents are left out, since nothing in them that has a loss lies within"
    assert (text in capsys.readouterr().err) == (overlong == "cut")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.config.hidden_size=64",),
            "runs/tiny-cpu cannot go on with recipe 'tiny-cpu': model.config.hidden_size is 64, "
            "the run was trained with 32; expected the same model and data order: resume with "
            "runs/tiny-cpu/recipe.yaml, or train anew without --resume",
        ),
        (("training.seed=1",), "training.seed is 1, the run was trained with 0"),
        (("data.max_documents=3",), "the run was trained on"),
    ],
    ids=["model", "seed", "data"],
)
def test_refuses_to_resume_with_something_else(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    train(tiny(), show_progress=False)
    run = tmp_path / "runs" / "tiny-cpu"
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(ValueError, match=re.escape(message)):
        train(tiny(*overrides), resume="runs/tiny-cpu", show_progress=False)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-cpu"]


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        (("training.learning_rate=0.1",), [0.1, 0.1]),
        (("training.warmup_steps=4",), [3e-4 * 3 / 5, 3e-4 * 4 / 5]),
        (("training.schedule=linear", "training.learning_rate=0.1"), [0.1 / 3, 0.0]),
    ],
    ids=["rate", "warm-up", "schedule"],
)
def test_a_resumed_run_has_the_rates_of_its_recipe(
    tmp_path: Path, changes: tuple[str, ...], rates: list[float]
) -> None:
    train(tiny("training.max_steps=2"), show_progress=False)
    train(tiny("training.weight_decay=0.5", *changes), resume="runs/tiny-cpu", show_progress=False)
    run = tmp_path / "runs" / "tiny-cpu"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["learning_rate"] for line in lines]
    assert found == pytest.approx([3e-4, 3e-4, *rates])
    saved = torch.load(run / "last.ckpt", weights_only=True)["optimizer_states"][0]
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.5, 0.0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[: len(content) // 2], "cannot be resumed from (RuntimeError: "),
        (lambda content: b"", "cannot be resumed from (RuntimeError: mmap"),
        (lambda content: b"hello", "cannot be resumed from ("),
        (lambda content: packed({"state_dict": {}}), "cannot be resumed from (it has no loops)"),
        (lambda content: packed(print), "cannot be resumed from (UnpicklingError: Weights only"),
        (
            lambda content: packed(of_another()),
            "is not of this model: it has (320, 64) for",
        ),
        (
            lambda content: packed({**of_another(), "state_dict": {}}),
            "is not of this model: it l",
        ),
    ],
    ids=["torn", "empty", "no checkpoint", "parts missing", "code", "other sizes", "no weights"],
)
def test_refuses_a_checkpoint_that_is_not_one_before_a_weight_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[bytes], bytes],
    message: str,
) -> None:
    train(tiny("training.max_steps=2"), show_progress=False)
    run = tmp_path / "runs" / "tiny-cpu"
    path = run / "last.ckpt"
    path.write_bytes(damage(path.read_bytes()))
    before = {file.name: file.read_bytes() for file in run.iterdir()}

    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights were made")

    monkeypatch.setattr(prepared_model, "build_model", never)
    with pytest.raises(ValueError, match=re.escape(message)):
        train(tiny(), resume="runs/tiny-cpu", show_progress=False)
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before


def packed(checkpoint: object) -> bytes:
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.getvalue()


def of_another() -> dict[str, object]:
    parts: dict[str, object] = {"optimizer_states": [], "lr_schedulers": [], "loops": {}}
    return {**parts, "state_dict": {"model.model.embed_tokens.weight": torch.zeros(320, 64)}}


def test_a_failed_run_keeps_its_journal_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rematic.training.trained_module import TrainedModule

    step = TrainedModule.training_step

    def fail(module: TrainedModule, batch: object, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise ValueError("a bug in the middle")
        return step(module, batch, batch_idx)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainedModule, "training_step", fail)
    with pytest.raises(RuntimeError, match="training failed: a bug in the middle"):
        train(tiny(), show_progress=False)
    run = tmp_path / "runs" / "tiny-cpu"
    last = list(read_journal(run / "journal.jsonl"))[-1]
    assert (last["event"], last["status"], last["reason"]) == (
        "run_end",
        "failed",
        "a bug in the middle",
    )
    assert "raise ValueError" in (run / "traceback.txt").read_text()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_patterns_are_over_the_names_of_the_model_alone(tmp_path: Path, method: str) -> None:
    """As in `rematic plan`, which has no host around it."""
    rules = "[{match: 'model.layers.*', first: 1, action: recompute}]"
    recipe = tiny(
        f"tuning.method={method}",
        f"policy.rules={rules}",
        "policy.units=['model.layers.*']",
        "policy.trust=['model.layers.1']",
        "policy.start=keep",
        "training.max_steps=1",
    )
    train(recipe, show_progress=False)
    events = list(read_journal(tmp_path / "runs" / "tiny-cpu" / "journal.jsonl"))
    plans = [event["plan"] for event in events if event["event"] == "step"]
    assert plans == [{"recompute": 1, "keep": 1}]

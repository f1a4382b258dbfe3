from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import transformers

from rematic.cli import main, new_recipe
from rematic.cli.recipe_forecast import forecast_recipe
from rematic.cost import calibrate
from rematic.cost.devices import gpu_named
from rematic.recipes import load_recipe

SMALL = """\
model:
  type: llama
  config: {vocab_size: 320, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 3,
    num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 4096}
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to work in, and a CPU that is the same on every machine."""
    rates = {"float32": 5e10, "bfloat16": 1e11, "bytes": 1e10, "replay": 1e-3, "selective": 3e-3}
    monkeypatch.setattr(calibrate, "_read", lambda: rates)
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)
    return tmp_path


def new(*argv: str) -> int:
    return main(["recipes", "new", *argv])


def test_writes_the_first_way_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "small.yaml", "--device", "t4", "--length", "256", "--budget", "3.2MiB"]
    assert new(*argv, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    tried = [(one["method"], one["optimizer"], one["fits"]) for one in found["tried"]]
    assert tried == [("full", "adamw", False), ("full", "paged-adamw-8bit", True)]
    path = Path(found["file"])
    assert path.name == "llama-full-256-t4.yaml"
    recipe = load_recipe(f"./{path}")
    assert (recipe.model.dtype, recipe.data.max_length) == ("bf16", 256)
    again = forecast_recipe(recipe)
    assert again.device == gpu_named("t4")
    assert again.own.fits
    assert again.own.peak.total == found["tried"][-1]["peak_bytes"]
    assert f"# Run:      rematic train ./{path}" in path.read_text()


def test_what_is_there_is_replaced_only_by_force(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "small.yaml", "--device", "cpu", "--length", "64", "--budget", "1GiB"]
    argv += ["--method", "full", "--output", "mine.yaml"]
    assert new(*argv) == 0
    assert "wrote mine.yaml: rematic train ./mine.yaml" in capsys.readouterr().out
    recipe = load_recipe("mine.yaml")
    assert (recipe.name, recipe.tuning.method, recipe.training.precision) == (
        "mine",
        "full",
        "fp32",
    )
    Path("mine.yaml").write_text("# mine\n")
    assert new(*argv) == 2
    assert "mine.yaml exists already; name another file by --output" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "# mine\n"
    assert new(*argv, "--force") == 0
    assert load_recipe("mine.yaml") == recipe


def test_names_the_smallest_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "small.yaml", "--device", "t4", "--length", "4k", "--budget", "2MiB"]
    assert new(*argv, "--method", "lora") == 2
    text = capsys.readouterr().err
    assert (
        "nothing fits sequences of 4,096 tokens into the 1.9 MiB that plans may use on t4" in text
    )
    assert "the smallest of these is lora. What would fit: --length " in text
    assert text.rstrip().endswith("or --device t4")
    assert not list(Path().glob("llama*"))


def test_a_model_is_read_from_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    transformers.Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=512,
    ).save_pretrained("model")  # fmt: skip
    argv = ["--model", "model", "--device", "l4", "--length", "256", "--method", "lora"]
    assert new(*argv) == 0
    recipe = load_recipe("model-lora-256-l4.yaml")
    assert (recipe.model.path, recipe.model.type, recipe.model.dtype) == ("model", "qwen3", "bf16")
    assert recipe.model.config["intermediate_size"] == 96
    assert "architectures" not in recipe.model.config


def test_a_model_of_the_hub_that_a_recipe_knows_needs_no_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rematic.cli.named_model import model_named

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", _no_network)
    found = model_named("Qwen/Qwen3-8B")
    assert (found.id, found.type) == ("Qwen/Qwen3-8B", "qwen3")
    assert found.config["num_hidden_layers"] == 36
    with pytest.raises(ValueError, match=r"without a network these are known: .*, Qwen/Qwen3-8B"):
        model_named("Qwen/Qwen3-9B")


def _no_network(*_: object, **__: object) -> None:
    raise OSError("We couldn't connect to 'https://huggingface.co'")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cpu", "--length", "64"], "needs a budget"),
        (["--device", "rtx-4091", "--length", "64"], "did you mean rtx-4090"),
        (["--device", "t4", "--length", "4k,8k"], "expected one length"),
        (
            ["--device", "t4", "--length", "8k"],
            "--length is 8,192 tokens, but the model has positions for 4,096 tokens; write at most",
        ),
        (["--device", "t4", "--length", "64", "--output", "x!.yaml"], "'x!.yaml' cannot name a"),
        (
            ["--device", "t4", "--length", "64", "--output", f"{'x' * 300}.yaml"],
            "x.yaml' cannot name a recipe (name is 'xxx",
        ),
        (["--device", "t4", "--length", "64", "--output", "x"], "ends in .yaml"),
        (["--device", "t4", "--length", "64", "--output", "a/x.yaml"], "there is no folder a"),
        (["--device", "t4", "--length", "64", "--model", "smal.yaml"], "did you mean small.yaml"),
        (
            ["--device", "t4", "--length", "64", "--model", "modernbert-large-full-8k"],
            "a model for sequence-classification; expected one for causal-lm or masked-lm",
        ),
    ],
    ids=[
        "budget",
        "device",
        "lengths",
        "positions",
        "name",
        "long",
        "suffix",
        "folder",
        "model",
        "task",
    ],
)
def test_says_what_cannot_be_asked(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new("--model", "small.yaml", *argv) == 2
    assert message in capsys.readouterr().err


def saved_config(name: str, kind: str, **sizes: int) -> str:
    config = transformers.BertConfig(vocab_size=320, **sizes)
    config.architectures = [kind]
    config.save_pretrained(name)
    return name


BERT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("BertForMaskedLM", "masked-lm"),
        ("BertModel", "masked-lm"),
        ("BertLMHeadModel", "causal-lm"),
        ("BertForSequenceClassification", None),
    ],
)
def test_the_task_is_that_of_the_weights(
    kind: str, task: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_config("bert", kind, **BERT)
    code = new("--model", "bert", "--device", "t4", "--length", "64", "--output", "b.yaml")
    if task is None:
        assert code == 2
        assert "a model for sequence-classification; expected" in capsys.readouterr().err
        return
    assert code == 0
    assert load_recipe("./b.yaml").model.task == task


def test_a_folder_of_any_name_gives_a_recipe_of_one_that_can_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("my model (2)", "x" * 120, "-odd"):
        saved_config(name, "BertForMaskedLM", **BERT)
        assert new("--model", f"./{name}", "--device", "t4", "--length", "64") == 0
        command = capsys.readouterr().out.splitlines()[-1].partition(": rematic train ")[2]
        (path,) = shlex.split(command)
        assert load_recipe(path).model.path == f"./{name}"
    monkeypatch.chdir("my model (2)")
    assert new("--model", ".", "--device", "t4", "--length", "64") == 0
    assert Path("my model -2--full-64-t4.yaml").is_file()
    capsys.readouterr()


def test_a_file_that_appears_while_it_plans_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = new_recipe.first_that_fits

    def slow(wish: new_recipe.Wish) -> object:
        Path("mine.yaml").write_text("somebody's")
        return plan(wish)

    monkeypatch.setattr(new_recipe, "first_that_fits", slow)
    argv = ["--model", "small.yaml", "--device", "t4", "--length", "64", "--output", "mine.yaml"]
    assert new(*argv) == 2
    assert "mine.yaml cannot be written (File exists)" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "somebody's"

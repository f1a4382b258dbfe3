"""The README shows code that runs, links that lead somewhere, and the versions that are tested."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippet(word: str) -> str:
    (found,) = [text for text in SNIPPETS if word in text]
    return found


def causal_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes))


def causal_batches() -> list[dict[str, torch.Tensor]]:
    tokens = torch.arange(24).remainder(32)
    return [
        {"input_ids": tokens[None, :length], "labels": tokens[None, :length]} for length in (8, 24)
    ]


class CausalModule(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = causal_model()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_plainly() -> dict[str, torch.Tensor]:
    model = causal_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in causal_batches():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_trained_like_plain(model: LlamaForCausalLM) -> None:
    expected, found = train_plainly(), model.state_dict()
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_plain_loop_trains_like_a_loop_without_rematic() -> None:
    model = causal_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "loader": causal_batches()}
    exec(f"import rematic\n{snippet('rematic.attach')}\nsession.detach()", names)
    assert_trained_like_plain(model)


def test_lightning_trains_like_a_loop_without_rematic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = CausalModule()
    loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(causal_batches(), batch_size=None)
    exec(snippet("RecomputeStrategy"), {"module": module, "loader": loader})
    assert_trained_like_plain(module.model)


@pytest.mark.parametrize("recipe", ["tiny-cpu", None])
def test_accelerate_trains_like_a_loop_without_rematic(
    recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recipe is not None:
        monkeypatch.setenv("REMATIC_RECIPE", recipe)
    model = causal_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(causal_batches(), batch_size=None)
    names = {"model": model, "optimizer": optimizer, "loader": loader}
    imports = "import rematic\nfrom accelerate import Accelerator"
    exec(f"{imports}\n{snippet('from_config')}", names)
    assert (names["plugin"].session is not None) is (recipe is not None)  # type: ignore[attr-defined]
    names["plugin"].detach()  # type: ignore[attr-defined]
    assert_trained_like_plain(model)


def test_a_trainer_trains_like_one_without_rematic(tmp_path: Path) -> None:
    rows = [{name: tensor[0] for name, tensor in batch.items()} for batch in causal_batches()]
    states = []
    for text in (snippet("attach_trainer"), "trainer.train()"):
        model = causal_model()
        args = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=1
        )
        names = {"model": model, "args": args, "dataset": rows}
        if "attach_trainer" not in text:
            text = f"trainer = Trainer(model=model, args=args, train_dataset=dataset)\n{text}"
        exec(f"import rematic\nfrom transformers import Trainer\n{text}", names)
        states.append(model.state_dict())
    first, second = states
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert not torch.equal(first["lm_head.weight"], causal_model().state_dict()["lm_head.weight"])


def test_the_page_of_lightning_makes_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "lightning.md").read_text("utf-8")
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    assert isinstance(names["trainer"], Trainer)


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page, made of its headings as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and (
            not target.exists() or (anchor and anchor not in headings(target))
        ):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_exist(page: Path) -> None:
    files = {"rematic.json"}
    names = set(re.findall(r"\brematic\.[A-Za-z]\w*(?:\.[A-Za-z]\w*)*", page.read_text("utf-8")))
    missing = []
    for name in sorted(names - files):
        try:
            resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize(
    ("row", "package"),
    [
        ("PyTorch", "torch"),
        ("OmegaConf", "omegaconf"),
        ("Lightning", "lightning"),
        ("Transformers", "transformers"),
        ("Accelerate", "accelerate"),
    ],
)
def test_tested_versions_are_the_pinned_ones(row: str, package: str) -> None:
    (tested,) = re.findall(rf"^\| {row}\b.*\| ([0-9.]+) \|$", README, re.MULTILINE)
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    newest = [pin for pin in pins if pin.startswith(f"{package}==") and "<" not in pin]
    assert newest[0].split(";")[0] == f"{package}=={tested}"

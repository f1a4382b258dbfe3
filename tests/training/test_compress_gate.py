"""A recipe that begins with 8-bit activations keeps them only if its gradients stay near."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rematic import attachment
from rematic.control import audit
from rematic.journal import read_journal
from rematic.stash import compress
from rematic.training import fit
from rematic.training.run import train
from tests.training.small import tiny

pytest.importorskip("bitsandbytes")

# (storages of less than a megabyte are not compressed)
COMMON = (
    "model.config.intermediate_size=1024",
    "data.max_length=512",
    "data.max_documents=7",
    "memory.budget=256MiB",
    "control.probation_steps=3",
    "goals.slowdown_max=1000.0",
)
TAKEN_BACK = ["recompute", "compress", "compress", *["recompute"] * 4]
LOSSY = (*COMMON, "policy.start=compress", "policy.allow_lossy=true")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, *overrides: str) -> Sequence[dict[str, Any]]:
    train(tiny(*overrides, f"run.name={name}"), show_progress=False)
    return [dict(event) for event in read_journal(Path(f"runs/{name}/journal.jsonl"))]


def of(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def losses(name: str) -> list[float]:
    lines = Path(f"runs/{name}/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes 8-bit activations come back at half their size: forward does not see them."""
    decode = compress._Codec.decode

    def halved(self: Any, block: Any) -> torch.Tensor:
        return decode(self, block).mul_(0.5)

    monkeypatch.setattr(compress._Codec, "decode", halved)


def gate_of(decision: dict[str, Any]) -> dict[str, Any]:
    (gate,) = [gate for gate in decision["gates"] if gate["name"] == "gradient"]
    return gate


def test_gradients_that_stay_near_keep_the_policy() -> None:
    events = run("lossy", *LOSSY, "goals.gradient_tolerance=0.05")
    policies = [step["policy"] for step in of(events, "step")]
    assert policies == ["recompute"] + ["compress"] * 6
    (switch,) = of(events, "switch")
    assert switch["reason"] == "what the run is to begin with, on probation"
    (compared,) = of(events, "compare")
    assert compared["difference"] == 0.0
    assert 0 < compared["gradient_difference"] < 0.05
    assert compared["gradient_cosine"] > 0.999
    assert compared["gradient_norm"] == pytest.approx(compared["previous_gradient_norm"], rel=0.05)
    (decision,) = [e for e in of(events, "decision") if e["gates"]]
    assert gate_of(decision)["passed"] is True
    assert gate_of(decision)["measured"] == compared["gradient_difference"]
    assert audit(events).differences == ()


def test_gradients_that_do_not_take_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    events = run("spoiled", *LOSSY, "goals.gradient_tolerance=0.05", "goals.loss_tolerance=0.0")
    policies = [step["policy"] for step in of(events, "step")]
    assert policies == TAKEN_BACK
    (compared,) = of(events, "compare")
    assert compared["difference"] == 0.0, "the loss is computed before anything is read back"
    assert compared["gradient_difference"] > 0.1
    (decision,) = [e for e in of(events, "decision") if e["gates"]]
    assert (decision["change"], decision["policy"]) == ("rollback", "recompute")
    assert decision["rule"] == "compress has not met its goals (gradient)"
    assert gate_of(decision)["passed"] is False
    (rollback,) = of(events, "rollback")
    assert (rollback["from"], rollback["to"]) == ("compress", "recompute")
    assert audit(events).differences == ()


def test_without_the_goal_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    events = run("unwatched", *LOSSY)
    assert {step["policy"] for step in of(events, "step")} == {"compress"}
    assert of(events, "compare") == []


def test_a_resumed_run_goes_on_with_the_policy_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as spoiled:
        spoil(spoiled)
        given = (*LOSSY, "goals.gradient_tolerance=0.05", "training.max_steps=4")
        run("stopped", *given)
    again = tiny(*LOSSY, "goals.gradient_tolerance=0.05", "run.name=stopped")
    train(again, resume=Path("runs/stopped"), show_progress=False)
    events = [dict(event) for event in read_journal(Path("runs/stopped/journal.jsonl"))]
    policies = [step["policy"] for step in of(events, "step")]
    assert policies == TAKEN_BACK


def test_what_compress_imports_is_there_before_memory_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or it would count as tensors of the training: 17 MB of 448 MiB in tiny-cpu-compress."""
    order = []
    for room, reader in ((fit, "HostProbe"), (attachment, "make_probe")):
        read = getattr(room, reader)

        def noted(*args: Any, read: Any = read, reader: str = reader, **options: Any) -> Any:
            order.append(reader)
            return read(*args, **options)

        monkeypatch.setattr(room, reader, noted)
        monkeypatch.setattr(room, "load_quantization", lambda: order.append("loaded"))
    run("noted", *LOSSY, "training.max_steps=1")
    assert order == ["loaded", "HostProbe", "loaded", "make_probe"]

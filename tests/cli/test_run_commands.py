"""`rematic status | explain | audit | rollback | pin | unpin` on the directory of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rematic
from rematic.cli import main
from rematic.cli.exit_codes import DONE, FAILED, USER_ERROR
from rematic.cli.explain_command import _Search
from rematic.journal import FILE_NAME, JournalWriter, read_journal
from rematic.operator_requests import FILE_NAME as REQUESTS_NAME
from rematic.operator_requests import append_request
from rematic.recipes import GoalsConfig, Recipe
from tests.activations.blocks import make_input, make_model
from tests.test_supervisor import CRAMPED, QUIET, PaperProbe


class Job:
    """A training that goes on in a thread until it is told to stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = JournalWriter(folder / FILE_NAME)
        self.probe, self.model = PaperProbe(), make_model()
        self.session = rematic.attach(
            self.model,
            policy="keep",
            recipe=Recipe(goals=GoalsConfig(slowdown_max=1e9)),  # a toy's seconds are noise
            probe=self.probe,
            journal=self.journal,
        )
        self._end = threading.Event()

    def steps(self, number: int) -> None:
        for _ in range(number):
            with self.session.step(make_input()):
                self.model(make_input()).backward()

    def until_told(self) -> None:
        while not self._end.wait(0.002):
            self.steps(1)

    def close(self) -> None:
        self._end.set()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr("rematic.operator_requests.POLL_SECONDS", 0.0)
    job = Job(tmp_path)
    yield job
    job.session.detach()
    job.journal.close()


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: object) -> tuple[int, str]:
        code = main([str(argument) for argument in arguments])
        return code, capsys.readouterr().out

    return run


Read = Callable[..., tuple[int, str]]


def test_a_rollback_from_another_terminal_takes_effect(job: Job, read: Read) -> None:
    job.steps(2)
    job.session.switch("recompute")
    thread = threading.Thread(target=job.until_told)
    thread.start()
    try:
        code, text = read("rollback", job.folder, "--reason", "too slow", "--wait", "30")
    finally:
        job.close()
        thread.join()
    assert code == DONE
    assert text.startswith("accepted before step ")
    assert "by an operator: too slow" in text
    assert job.session.policy.name == "keep"
    code, text = read("status", job.folder)
    assert code == DONE
    assert "policy    keep\n" in text
    assert "request   rollback accepted: by an operator: too slow" in text


def test_what_is_refused_fails(job: Job, read: Read) -> None:
    job.steps(1)
    thread = threading.Thread(target=job.until_told)
    thread.start()
    try:
        code, text = read("pin", job.folder, "nonsense", "--wait", "30", "--json")
    finally:
        job.close()
        thread.join()
    assert code == FAILED
    answer: dict[str, Any] = json.loads(text)["answer"]
    assert answer["status"] == "refused"
    assert answer["reason"].startswith("unknown policy 'nonsense': expected one of")


def test_a_job_that_does_not_answer(job: Job, read: Read) -> None:
    code, text = read("unpin", job.folder, "--wait", "0")
    assert code == FAILED
    assert "no answer from" in text
    assert "Does it run?" in text


@pytest.mark.parametrize("request_", [("rollback",), ("pin", "recompute"), ("unpin",)], ids=str)
def test_a_run_that_has_ended_is_not_waited_for(
    request_: tuple[str, ...], job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.steps(1)
    job.journal.write({"event": "run_end", "status": "finished", "reason": None, "last_loss": 1.0})
    command, *policy = request_
    assert main([command, str(job.folder), *policy]) == USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(f"rematic: {job.folder} has ended (finished); expected a running job: ")
    assert not (job.folder / REQUESTS_NAME).exists()


def test_a_run_that_goes_on_after_its_end_is_waited_for(job: Job, read: Read) -> None:
    job.journal.write({"event": "run_end", "status": "finished", "reason": None, "last_loss": 1.0})
    job.steps(1)
    code, text = read("unpin", job.folder, "--wait", "0")
    assert code == FAILED
    assert "no answer from" in text


def test_a_request_that_cannot_be_written(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a run directory that others may only read; said in a line, without a traceback."""
    (job.folder / REQUESTS_NAME).mkdir()
    assert main(["unpin", str(job.folder), "--wait", "0"]) == FAILED
    said = capsys.readouterr().err
    assert said == f"rematic: Is a directory: {job.folder / REQUESTS_NAME}\n"


def test_a_reason_of_any_bytes_is_printed(job: Job) -> None:
    """What a shell hands over need not be UTF-8."""
    job.steps(1)
    append_request(job.folder, "pin", policy="recompute", reason="\udcff")
    job.steps(1)
    for command in ("status", "explain"):
        done = subprocess.run(
            [sys.executable, "-m", "rematic.cli", command, job.folder],
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            check=True,
        )
        assert b"by an operator: \\udcff" in done.stdout


def test_a_damaged_event_is_named(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.steps(3)
    path = job.folder / FILE_NAME
    path.write_text(path.read_text().replace('"policy":"keep"', '"politics":"keep"'))
    for command in ("status", "explain", "audit"):
        assert main([command, str(job.folder)]) == USER_ERROR
        assert "is damaged (KeyError: 'policy')" in capsys.readouterr().err


def test_steps_behind_missing_ones_are_not_explained(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.steps(4)
    path = job.folder / FILE_NAME
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"step":1,' not in line))
    assert main(["explain", str(job.folder), "--step", "3"]) == USER_ERROR
    assert "step 3 cannot be explained: the journal lacks" in capsys.readouterr().err
    assert main(["audit", str(job.folder)]) == FAILED
    said = capsys.readouterr().out
    assert "2 steps could not be audited" in said
    assert "step 2, step: the journal says 2, the figures lead to 1" in said


def test_parts_that_are_gone_are_told_of(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.steps(2)
    (job.folder / "journal.0003.jsonl").touch()
    for command in ("status", "report", "explain", "audit"):
        main([command, str(job.folder)])
        said = capsys.readouterr()
        assert "lacks its parts journal.0001.jsonl, journal.0002.jsonl: what is" in said.err
        assert said.out


def test_a_step_that_was_trained_twice_is_explained_as_it_was_last(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []
    with JournalWriter(tmp_path / FILE_NAME) as journal:
        for policy in ("keep", "recompute"):
            model = make_model()
            session = rematic.attach(model, policy=policy, probe=PaperProbe(), journal=journal)
            if states:
                session.load_state_dict({**states[0], "history": session.state_dict()["history"]})
            for _ in range(3):
                session.run(lambda x, model=model: model(x).backward(), make_input())
                states.append(session.state_dict())
            session.detach()
    events = list(read_journal(tmp_path / FILE_NAME))
    assert [e["step"] for e in events if e["event"] == "step"] == [0, 1, 2, 1, 2, 3]
    for number, policy in ((0, "keep"), (2, "recompute"), (None, "recompute")):
        search = _Search(number)
        for event in events:
            search.take(event)
        assert search.found().event["policy"] == policy
        assert search.found().event["step"] == (3 if number is None else number)


@pytest.mark.parametrize("command", ["status", "explain", "audit", "unpin"])
def test_a_run_that_does_not_exist(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "none")]) == USER_ERROR
    assert "is not a run: there is no such file or directory" in capsys.readouterr().err


def test_a_troubled_step_is_explained(job: Job, read: Read) -> None:
    job.steps(3)
    job.probe.says = CRAMPED
    job.steps(3)
    job.probe.says = QUIET
    job.steps(2)
    code, text = read("explain", job.folder, "--step", 5)
    assert code == DONE
    assert "step 5: 4 x 1 tokens under policy keep" in text
    assert "plan       keep 3" in text
    assert "rule       every unit's action is given by the policy" in text
    assert "verdict    pressure: the peak is above 97% of the limit" in text
    assert "           peak_bytes 1,038,090,240" in text
    assert "remedy     a heavier policy" in text
    assert "keep (in force)" in text
    assert "decision: pressure in 3 steps in a row" in text
    assert "switch to selective" in text
    rows = {line.split()[0] for line in text.splitlines() if line}
    assert {"selective", "recompute", "recompute+offload", "planned"} <= rows


def test_a_step_that_ran_twice_is_explained(tmp_path: Path, read: Read) -> None:
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def fn(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        if session.num_steps == 3 and failures:
            raise failures.pop()
        loss.backward()
        return loss.detach()

    model, goals = make_model(), {"loss_tolerance": 0.01, "slowdown_max": 1e9}
    with JournalWriter(tmp_path / FILE_NAME) as journal:
        session = rematic.attach(
            model, policy="keep", recipe={"goals": goals}, probe=PaperProbe(), journal=journal
        )
        for number in range(6):
            session.run(fn, make_input())
            if number == 3:
                session.switch("recompute")
        session.detach()
    code, text = read("explain", tmp_path, "--step", 3)
    assert code == DONE
    assert "ran out of memory at test_run_commands.py:" in text
    assert ", then came recompute" in text
    code, text = read("explain", tmp_path, "--step", 5)
    assert code == DONE
    assert "compare: loss " in text
    assert "under keep; gradients 0 apart (no batch under recompute was compared yet)" in text


def test_an_explanation_in_json(job: Job, read: Read) -> None:
    job.steps(3)
    code, text = read("explain", job.folder, "--json")
    explained = json.loads(text)
    assert code == DONE
    assert explained["step"]["step"] == 2
    assert explained["alternatives"][0]["is_chosen"] is True
    assert explained["alternatives"][0]["seconds"] > 0


def test_a_step_that_is_not_there(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.steps(3)
    assert main(["explain", str(job.folder), "--step", "9"]) == USER_ERROR
    assert "there is no step 9 in the journal: expected one from 0 to 2" in capsys.readouterr().err


def test_an_audit(job: Job, read: Read) -> None:
    job.steps(3)
    code, text = read("audit", job.folder)
    assert code == DONE
    assert text.startswith("3 steps and 0 decisions were decided again from their figures, 0 diff")


def test_an_audit_of_a_journal_that_was_changed(job: Job, read: Read) -> None:
    job.steps(3)
    path = job.folder / FILE_NAME
    path.write_text(path.read_text().replace("every unit's action", "some unit's action", 1))
    code, text = read("audit", job.folder)
    assert code == FAILED
    assert "1 differences" in text
    assert "step 0, reason: the journal says \"some unit's action" in text
    code, text = read("audit", job.folder, "--json")
    assert [one["field"] for one in json.loads(text)["differences"]] == ["reason"]


def test_the_status_of_a_run(job: Job, read: Read) -> None:
    job.steps(1)
    job.session.pin("recompute", reason="night")
    job.steps(1)
    code, text = read("status", job.folder, "--json")
    status = json.loads(text)
    assert code == DONE
    assert (status["policy"], status["pinned"], status["last_step"]) == ("recompute", True, 1)
    assert status["state"] == "running, or killed"
    assert status["last_change"] == {
        "event": "pin",
        "to": "recompute",
        "step": 1,
        "reason": "night",
    }

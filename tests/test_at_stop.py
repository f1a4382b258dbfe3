"""What goes wrong while a training is saved before it stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rematic
from tests.step_models import different, everything, make_batches
from tests.test_step_recovery import always_fails


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (OSError, rematic.StepOutOfMemoryError),
        (torch.OutOfMemoryError, rematic.StepOutOfMemoryError),
        (KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_what_goes_wrong_while_it_is_saved_does_not_hide_the_stop(
    kind: type[BaseException],
    wanted: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An interrupt is one: who sends it does not want to wait. Other ranks are told in any case."""
    aborted: list[bool] = []
    monkeypatch.setattr("rematic.step_recovery.abort_ranks", lambda: aborted.append(True))
    with always_fails() as (session, model, journal, step):
        model.zero_grad()
        before = everything(model, [])

        def save(report: Any) -> str:
            raise kind("disk full")

        session.at_stop = save
        with pytest.raises(wanted) as caught:
            session.run(step, make_batches(1)[0])
        assert different(everything(model, []), before) == []
        assert aborted == [True]
        (stop,) = journal.of("stop")
        assert stop["attempts"][0]["name"] == "as planned"
    if isinstance(caught.value, rematic.StepOutOfMemoryError):
        reason = f"{kind.__name__}: disk full"
        assert caught.value.report.not_saved == stop["not_saved"] == reason
        assert f"The training could not be saved ({reason})." in str(caught.value)
        assert any(reason in message for message in caplog.messages)

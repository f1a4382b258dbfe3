"""Saves a Trainer that is about to stop, into a folder that it resumes from."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from rematic.activations.host_generators import save_generators
from rematic.at_stop import UNFINISHED, NotSavedError, refuse_to_save
from rematic.control import StopReport
from rematic.hosts.accelerate_checkpoint import FOLDER_NAME
from rematic.hosts.accelerate_step import HostState
from rematic.hosts.instance_method import InstanceMethod
from rematic.hosts.session_file import write_session
from rematic.hosts.trainer_counters import TrainerCounters
from rematic.session import Session
from rematic.whole_files import replaced_when_whole

_STATE_NAME = "trainer_state.json"
"""The file that a Trainer writes last."""
_RESUMABLE = {"save_only_model": False, "push_to_hub": False}
"""Arguments while it is saved."""


class TrainerSaves:
    """Makes the emergency checkpoints of one Trainer.

    They lie in a folder of their own, where `save_total_limit` and a Trainer without rematic do not
    look.

    Args:
        trainer: The Trainer.
        folder: The folder; None for `rematic-emergency` in its `output_dir`.
    """

    def __init__(self, trainer: Trainer, folder: Path | None) -> None:
        self._trainer = trainer
        self._output = Path(str(trainer.args.output_dir))
        self._folder = folder or self._output / FOLDER_NAME
        self._before: HostState | None = None
        self._num_updates = 0
        self._put_epoch: Callable[[], None] | None = None
        self.callback = _NotesEpochs(self)
        """To be added to the Trainer."""

    def begin_window(self, state: HostState) -> None:
        """Takes what the Trainer has counted before the first micro-batch of an update."""
        self._before, self._num_updates = state, self._trainer.state.global_step

    def end_step(self) -> None:
        """Takes no note: what the Trainer counts between its steps is before the next window."""

    def begin_epoch(self) -> None:
        """Takes the generators from before an epoch draws its order, where a Trainer reads them."""
        self._put_epoch = save_generators(with_devices=True)

    def end_update(self) -> None:
        """Forgets them: from now on a Trainer reads them behind the batches that it skips."""
        self._put_epoch = None

    def settle(self, session: Session) -> str | None:
        """Makes ready to save a training that stops outside of a step.

        Returns:
            Why it must not be saved as it is, None if it can.
        """
        if not session.is_behind_update:
            return None
        if self._trainer.state.global_step == self._num_updates:
            return UNFINISHED
        self._before = None
        session.begin_window()
        return None

    def save(self, session: Session, report: StopReport) -> str:
        """Saves weights, optimizer, schedule, scaler, generators and the session's state.

        Args:
            session: The session.
            report: Why the training stops.

        Returns:
            The folder, for `train(resume_from_checkpoint=...)`.

        Raises:
            NotSavedError: If it should not be saved.
        """
        trainer = self._trainer
        refuse_to_save(session, num_ranks=trainer.args.world_size)
        if trainer.args.auto_find_batch_size and (trainer.state.train_batch_size or 2) > 1:
            raise NotSavedError("auto_find_batch_size goes on with smaller batches")
        now, put_generators = TrainerCounters(trainer), save_generators(with_devices=True)
        try:
            if self._before is not None:
                self._before.restore()
            if self._put_epoch is not None:
                self._put_epoch()
            return self._save(session)
        finally:
            put_generators()
            now.restore()

    def newest(self) -> Path | None:
        """Returns the emergency checkpoint if no other one was saved after it."""
        saved, other = _last(self._folder), _last(self._output)
        if saved is None or not (saved / _STATE_NAME).is_file():
            return None
        return saved if other is None or _age(saved) >= _age(other) else None

    def _save(self, session: Session) -> str:
        trainer = self._trainer
        # private in transformers 5.24; trainers of TRL and of users add to it what they need
        saved = self._folder / f"checkpoint-{trainer.state.global_step}"
        with replaced_when_whole(saved) as unfinished, _changed(trainer.args, **_RESUMABLE):
            around = functools.partial(_other_folder, unfinished)
            seam = InstanceMethod(trainer, "_get_output_dir", around)
            try:
                trainer._save_checkpoint(trainer.model_wrapped, None)
            finally:
                seam.remove()
            write_session(session, unfinished / saved.name)
        self._prune()
        return str(saved)

    def _prune(self) -> None:
        """Keeps as many as the Trainer keeps of its own."""
        limit = self._trainer.args.save_total_limit or 0
        if limit > 0:
            for old in sorted(self._folder.glob("checkpoint-*"), key=_age)[:-limit]:
                shutil.rmtree(old, ignore_errors=True)


class _NotesEpochs(TrainerCallback):
    def __init__(self, saves: TrainerSaves) -> None:
        self._saves = saves

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._saves.begin_epoch()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._saves.end_update()


def _other_folder(folder: Path, get: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    return str(folder)


@contextlib.contextmanager
def _changed(owner: Any, **values: object) -> Iterator[None]:  # noqa: ANN401 - any arguments
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


def _last(folder: Path) -> Path | None:
    if not folder.is_dir():
        return None
    last: str | None = get_last_checkpoint(str(folder))  # type: ignore[no-untyped-call] # transformers 5.24
    return None if last is None else Path(last)


def _age(checkpoint: Path) -> float:
    path = checkpoint / _STATE_NAME
    return path.stat().st_mtime if path.is_file() else 0.0

"""Runs the children of `variable_length.py`: measures the table, then the epochs."""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.variable_length_child import LIST_SAVED, action_of, make_model, serve
from benchmarks.variable_length_data import Workload
from benchmarks.variable_length_table import Choices, Table, best_mixes, table_of
from rematic.cost.calibrate import local_cpu
from rematic.cost.live_profile import StepKind, trace_live
from rematic.cost.profile import StepProfile
from rematic.cost.roofline import pace_of
from rematic.planner import problem_of, propose, rise_of
from rematic.policy import Keep, Recompute, Selective
from rematic.training.environment import training_environment

PRELOADED = ["torch", "transformers.models.llama.modeling_llama", "rematic.model_planner"]
SLACK = 0.01
"""Share of the room that searched plans leave free: the heap is a little above the tensors."""

MAX_SETS = 6
"""Most op sets of rematic that are measured."""

WAYS = (
    "nothing",
    "hugging face",
    "recompute",
    "every second",
    "op list",
    "static list",
    "static own",
    "optimum",
    "rematic",
)

State = dict[str, Any]
Save = Callable[[], None]


class Child:
    """One way to train, in a process of its own."""

    def __init__(self, settings: State) -> None:
        self._settings = settings
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def run(self, tokens: Sequence[int], assignment: Sequence[Any] | None = None) -> State:
        """Trains one document; one whose process dies is lost, and the next finds a new one."""
        if self._process is None:
            self._start()
        row = self._asked({"tokens": list(tokens), "assignment": assignment})
        if row is None:
            self.close()
            return {"cpu": None, "wall": None, "peak": None, "lost": True, "died": True}
        return row

    def _start(self) -> None:
        here, there = _processes().Pipe()
        process = _processes().Process(target=serve, args=(self._settings, there))
        process.start()
        there.close()
        self._process, self._pipe = process, here
        if self._answer() is None:
            raise RuntimeError(f"the child for {self._settings} ended: see its messages above.")

    def _asked(self, question: State) -> State | None:
        assert self._pipe is not None
        try:
            self._pipe.send(question)
        except BrokenPipeError:
            return None
        return self._answer()

    def _answer(self) -> State | None:
        assert self._pipe is not None
        try:
            return dict(self._pipe.recv())
        except EOFError:
            return None

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None and self._pipe is not None:
            self._pipe.close()
            self._process.join()
            self._process, self._pipe = None, None


@functools.cache
def _processes() -> ForkServerContext:
    """Returns what makes processes: copies of one that has imported everything, and no more."""
    os.environ.update(training_environment())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Bench:
    """The whole comparison.

    Args:
        options: The command line.
        deadline: When to stop, by `time.monotonic`.
    """

    def __init__(self, options: argparse.Namespace, *, deadline: float) -> None:
        self._options = options
        self._deadline = deadline
        self._model = {"layers": options.layers, "hidden_size": options.hidden_size}
        self._sets: list[tuple[str, ...]] = []
        self._table = Table(lengths=(), extra={})

    @cached_property
    def profile(self) -> StepProfile:
        """What steps of the model cost in bytes, traced."""
        inputs = (("input_ids", 2), ("labels", 2))
        kind = StepKind(batch=1, padded=False, accumulates=False, inputs=inputs)
        model = make_model(self._model)
        return trace_live(model, kind, actions=(Keep(), Recompute()), patterns=())

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._deadline

    def measure_table(self, state: State, save: Save) -> None:
        """Measures the seconds of every action at some lengths, and the two peaks of the budget."""
        longest = self._options.longest
        most = 2 if self._options.quick else MAX_SETS
        self._sets = _own_sets(self.profile, longest)[:most]
        if "table" not in state:
            state["table"] = self._measured_rows()
            state["peaks"] = {
                action: max(
                    row["peak"]
                    for row in state["table"]
                    if row["action"] == action and row["length"] == longest
                )
                for action in ("keep", "recompute")
            }
            save()
        state["predicted_peaks"] = self._predicted_peaks(longest)
        self._table = table_of(state["table"], num_units=self._options.layers)
        state["extra_seconds"] = {
            name: dict(zip(self._table.lengths, values, strict=True))
            for name, values in self._table.extra.items()
        }
        state["op_sets"] = {_set_name(i): list(kept) for i, kept in enumerate(self._sets)}

    def _predicted_peaks(self, length: int) -> dict[str, int]:
        costs = self.profile.costs_at(batch=1, length=length)
        pace = pace_of(local_cpu())
        found = {}
        for action in (Keep(), Recompute()):
            problem = problem_of(costs, pace, given=[action] * self._options.layers)
            found[action.name] = rise_of(problem)
        return found

    def _measured_rows(self) -> list[State]:
        longest = self._options.longest
        parts = (6, 1) if self._options.quick else (16, 6, 2, 1)
        lengths = sorted({max(8, longest // part) for part in parts})
        torch_child = Child({**self._model, "kind": "torch"})
        own_child = Child({**self._model, "kind": "engine"})
        steps = [(torch_child, name, name) for name in ("keep", "list", "recompute")]
        steps += [(own_child, f"own {name}", name) for name in ("keep", "recompute")]
        steps += [(own_child, _set_name(i), kept) for i, kept in enumerate(self._sets)]
        rows = []
        for length in lengths:
            rounds = self._options.rounds * (2 if length * 2 < longest else 1)
            for number in range(-1 if length == lengths[0] else 0, rounds):  # the first warms up
                for child, name, action in steps:
                    tokens = [65 + i % 26 for i in range(length)]
                    row = child.run(tokens, [action] * self._options.layers)
                    row |= {"length": length, "round": number, "action": name}
                    row |= {"is_keep": action == "keep", "baseline": child is torch_child}
                    rows += [row] if number >= 0 else []
        torch_child.close(), own_child.close()
        return rows

    def cap_bytes(self, state: State, share: float) -> int:
        """Returns the budget over idle."""
        low, high = state["peaks"]["recompute"], state["peaks"]["keep"]
        return int(low + share * (high - low))

    def run_epoch(
        self, state: State, workload: Workload, *, share: float, epoch: int, save: Save
    ) -> None:
        """Runs one epoch of one workload under one budget, unless it is there already."""
        cap = self.cap_bytes(state, share)
        key = {"workload": workload.name, "budget": share, "epoch": epoch}
        known = [row for row in state["rows"] if all(row[k] == v for k, v in key.items())]
        row = known[0] if known else {**key, "cap_bytes": cap, "documents": [], "finished": False}
        if row["finished"] or self.is_over:
            return
        row["documents"] = []  # children have no past: a cut epoch begins anew
        if not known:
            row["sha256"] = workload.sha256
            state["rows"].append(row)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ways = self._ways(workload, cap, folder)
            for way in ways:
                stack.callback(way.close)
            row["mixes"] = {way.name: way.survive(workload) for way in ways if way.searched}
            for number, position in enumerate(workload.order(epoch)):
                if self.is_over:
                    return
                document = workload.documents[position]
                turn = number % len(ways)
                found = {way.name: way.run(document) for way in (*ways[turn:], *ways[:turn])}
                row["documents"].append({"length": len(document), "ways": found})
                save()
        row["finished"] = True
        save()

    def _ways(self, workload: Workload, cap: int, folder: str) -> list[Way]:
        layers = self._options.layers
        base = {**self._model, "cap": cap, "folder": folder}
        torch_base, own_base = {**base, "kind": "torch"}, {**base, "kind": "engine"}
        second = ["recompute" if i % 2 == 0 else "keep" for i in range(layers)]
        room = int(cap * (1 - SLACK))
        own = Search(self, self._own_choices(), room_bytes=room)
        listed = Search(self, _list_choices(), room_bytes=room)
        ways = [
            Way("nothing", Child(torch_base), ["keep"] * layers),
            Way("hugging face", Child({**base, "kind": "hf"}), None),
            Way("recompute", Child(torch_base), ["recompute"] * layers),
            Way("every second", Child(torch_base), second),
            Way("op list", Child(torch_base), ["list"] * layers),
            StaticWay("static list", Child(torch_base), listed, self._options.longest),
            StaticWay("static own", Child(own_base), own, self._options.longest),
            PerLengthWay("optimum", Child(own_base), own),
            Way("rematic", Child({**base, "kind": "rematic"}), None),
        ]
        return [way for way in ways if way.name in self._options.ways]

    def _own_choices(self) -> Choices:
        written = ["keep", "recompute", *self._sets]
        names = ["own keep", "own recompute", *(_set_name(i) for i in range(len(self._sets)))]
        return Choices(names=tuple(names), actions=tuple(map(action_of, written)))

    def seconds(self, choices: Choices, lengths: Sequence[int]) -> list[float]:
        """Returns what each action adds to one block over documents of these lengths."""
        return [
            sum(self._table.seconds(name, length) for length in lengths) for name in choices.names
        ]


class Search:
    """Finds the best mixes of some actions by exhaustive search."""

    def __init__(self, bench: Bench, choices: Choices, *, room_bytes: int) -> None:
        self._bench = bench
        self._choices = choices
        self._room_bytes = room_bytes

    def mixes(
        self, lengths: Sequence[int], *, longest: int, room: float = 1.0
    ) -> Iterator[list[Any]]:
        """Yields the fastest mixes over `lengths` that hold `longest`, the best first."""
        found = best_mixes(
            self._choices,
            self._bench.profile,
            length=longest,
            room_bytes=int(room * self._room_bytes),
            seconds=self._bench.seconds(self._choices, lengths),
        )
        for mix in found:
            yield [_written(self._choices.actions[choice]) for choice in mix]


class Way:
    """One way to train, always with the same actions."""

    searched = False

    def __init__(self, name: str, child: Child, assignment: list[Any] | None) -> None:
        self.name = name
        self._child = child
        self._assignment = assignment

    def run(self, document: bytes) -> State:
        """Trains one document."""
        return self._child.run(document, self._assignment)

    def survive(self, workload: Workload) -> Any:  # noqa: ANN401 - JSON
        """Looks for the actions, if they are to be searched; returns them."""
        return self._assignment

    def close(self) -> None:
        """Ends its process."""
        self._child.close()


class StaticWay(Way):
    """The fastest mix that survives the longest document."""

    searched = True

    def __init__(self, name: str, child: Child, search: Search, longest: int) -> None:
        super().__init__(name, child, None)
        self._search = search
        self._longest = longest

    def survive(self, workload: Workload) -> Any:  # noqa: ANN401 - JSON
        """Tries the best mix on the longest document, for real; if it fails, with 1 % less room."""
        longest = max(workload.documents, key=len)
        for percent in range(100, 50, -1):
            mixes = self._search.mixes(workload.lengths, longest=len(longest), room=percent / 100)
            self._assignment = next(mixes, None)
            if self._assignment is not None and _fits(self.run(longest)):
                return self._assignment
        raise RuntimeError(f"no mix of {self.name} holds {len(longest)} tokens.")


class PerLengthWay(Way):
    """The fastest mix for each length."""

    searched = True

    def __init__(self, name: str, child: Child, search: Search) -> None:
        super().__init__(name, child, None)
        self._search = search
        self._rooms: dict[int, float] = {}

    def run(self, document: bytes) -> State:
        """Trains one document; a plan that does not fit for real is passed over."""
        room = self._rooms.get(len(document), 1.0)
        while True:
            mixes = self._search.mixes([len(document)], longest=len(document), room=room)
            mix = next(mixes, None)
            if mix is None:
                raise RuntimeError(f"no plan holds {len(document)} tokens.")
            row = self._child.run(document, mix)
            if _fits(row):
                self._rooms[len(document)] = room
                return {**row, "room": room, "mix": mix}
            room -= 0.02


def _fits(row: State) -> bool:
    """Returns whether a plan went as it was made: where blocks evict it becomes another one."""
    return not row["lost"] and not row["evictions"]


def _list_choices() -> Choices:
    names = ("keep", "list", "recompute")
    return Choices(names=names, actions=tuple(map(action_of, names)))


def _written(action: Any) -> Any:  # noqa: ANN401 - an action, a name or op names
    if isinstance(action, Selective):
        return "list" if action.save == LIST_SAVED else list(action.save)
    return action.name


def _set_name(position: int) -> str:
    return f"own set {position}"


def _own_sets(profile: StepProfile, longest: int) -> list[tuple[str, ...]]:
    """Returns the op sets that the planner takes most often, over lengths and budgets."""
    pace = pace_of(local_cpu())
    counts: dict[tuple[str, ...], int] = {}
    for part in (1.0, 0.85, 0.7, 0.55, 0.4):
        costs = profile.costs_at(batch=1, length=int(part * longest))
        problem = problem_of(costs, pace, allowed=("keep", "selective", "recompute"))
        for share in (0.125, 0.25, 0.5, 0.75):
            low, high = (
                propose(costs, problem, pace, room_bytes=room).peak_bytes for room in (0, 2**50)
            )
            room = int(low + share * (high - low))
            for action in propose(costs, problem, pace, room_bytes=room).plan.actions:
                if isinstance(action, Selective):
                    counts[action.save] = counts.get(action.save, 0) + 1
    ranked = sorted(counts, key=lambda save: (-counts[save], save))
    return ranked

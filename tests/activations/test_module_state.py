"""What forward can change on its modules: read before it, shown to a replay, put back."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import torch
from torch import nn

from rematic.activations.kept_values import CLONED_BUFFER_BYTES, version_of
from rematic.activations.module_state import ModuleState


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("small", torch.zeros(2))
        self.register_buffer("large", torch.zeros(CLONED_BUFFER_BYTES))
        self.register_buffer("nothing", None)
        self.calls = 0
        self.flag: bool | None = None
        self.mode = "a"
        self.total = torch.zeros(2)
        self.seen: list[int] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.recent: collections.deque[int] = collections.deque([1], maxlen=2)
        self.names: set[str] = set()
        self.nested: dict[str, list[int]] = {"a": []}


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()


def spoil(whole: Whole) -> None:
    """Changes everything that can be changed."""
    part = whole.part
    whole.eval()
    part.calls, part.flag, part.mode = 5, True, "b"
    part.fresh = "new"
    part.total += 1
    part.seen.append(1)
    part.counts["x"] += 1
    part.recent.append(2)
    part.names.add("x")
    part.nested["a"].append(1)
    part.small.data.fill_(1)  # without raising the version, as running statistics change
    part.nothing = torch.ones(1)


def snapshot(whole: Whole) -> dict[str, Any]:
    part = whole.part
    plain = {
        name: getattr(part, name)
        for name in (
            "training",
            "calls",
            "flag",
            "mode",
            "seen",
            "counts",
            "recent",
            "names",
            "nested",
        )
    }
    values = {name: str(value) for name, value in plain.items()}
    values |= {"nested": str(part.nested)}
    values |= {n: b.tolist() for n, b in part.named_buffers() if b.numel() < 10}
    values |= {"total": part.total.tolist(), "nothing": part.nothing, "new": hasattr(part, "fresh")}
    return values


def test_a_replay_sees_what_forward_saw_and_leaves_what_is_there() -> None:
    whole = Whole()
    before = snapshot(whole)
    state = ModuleState(whole, frozenset())
    spoil(whole)
    after, attributes = snapshot(whole), dict(vars(whole.part))
    buffers = dict(whole.part._buffers)
    assert before != after
    for _ in range(2):
        with state.replayed():
            shown = snapshot(whole)
            assert {**shown, "new": False} == before
            spoil(whole)
        assert snapshot(whole) == after
        assert dict(vars(whole.part)) == attributes
        assert all(whole.part._buffers[name] is buffer for name, buffer in buffers.items())
    with contextlib.suppress(KeyError), state.replayed():
        spoil(whole)
        raise KeyError
    assert snapshot(whole) == after


def test_a_failed_forward_is_undone_in_place() -> None:
    whole = Whole()
    part = whole.part
    kept = (part.small, part.total, part.seen, part.counts, part.recent, part.names)
    before = snapshot(whole)
    state = ModuleState(whole, frozenset())
    spoil(whole)
    state.restore()
    assert {**snapshot(whole), "new": False} == before
    now = (part.small, part.total, part.seen, part.counts, part.recent, part.names)
    assert all(a is b for a, b in zip(now, kept, strict=True))
    assert part.recent.maxlen == 2


def test_large_buffers_are_cloned_once_it_is_known_that_they_change() -> None:
    whole = Whole()
    first = ModuleState(whole, None)
    whole.part.large.data.fill_(1)
    assert first.changed_names() == {"part.large"}
    known = ModuleState(whole, frozenset({"part.large"}))
    with known.replayed():
        assert whole.part.large is not known.tensors()[-1]
        whole.part.large.fill_(7)
    assert whole.part.large.unique().tolist() == [1.0]
    unknown = ModuleState(whole, frozenset())
    with unknown.replayed():
        assert any(whole.part.large is tensor for tensor in unknown.tensors())


def test_what_was_changed_in_place_is_named() -> None:
    whole = Whole()
    state = ModuleState(whole, frozenset())
    assert state.changed_tensor() is None
    whole.part.small.add_(1)  # cloned: replays have their own
    assert state.changed_tensor() is None
    whole.part.large.add_(1)
    assert state.changed_tensor() == "buffer 'part.large'"
    with torch.no_grad():
        whole.part.scale.add_(1)
    assert state.changed_tensor() == "parameter of shape (2,)"


def test_parameters_buffers_and_attributes_are_external() -> None:
    whole = Whole()
    part = whole.part
    tensors = ModuleState(whole, frozenset()).tensors()
    assert {id(t) for t in tensors} == {
        id(t) for t in (part.scale, part.small, part.large, part.total)
    }


def test_a_tensor_with_a_graph_is_shown_without_it() -> None:
    whole = Whole()
    whole.part.total = first = whole.part.scale * 2
    state = ModuleState(whole, frozenset())
    assert any(tensor is first for tensor in state.tensors())
    whole.part.total = second = whole.part.scale * 3
    state.leave_graphs()
    with state.replayed():
        shown = whole.part.total
        assert shown.tolist() == first.tolist()
        assert shown.requires_grad
        assert shown.is_leaf
    assert whole.part.total is second
    assert state.changed_tensor() is None
    first.detach().add_(1)
    assert state.changed_tensor() == "attribute 'total'"


class Tally:
    def __init__(self) -> None:
        self.calls = 0
        self.sizes: list[int] = []
        self.total = torch.zeros(())
        self.made: torch.Tensor | None = None

    def count(self) -> None:
        self.calls += 1
        self.sizes.append(1)
        self.total += 1
        self.made = torch.ones(1)

    def values(self) -> tuple[int, int, float]:
        return self.calls, len(self.sizes), self.total.item()


def test_objects_that_the_first_forward_changes_are_shown_as_they_were() -> None:
    whole = Whole()
    whole.part.tally, whole.part.config = tally, config = Tally(), Tally()
    first = ModuleState(whole, None)
    tally.count()
    changed = first.changed_names()
    assert changed == {"part.tally"}
    first.leave_graphs()
    with first.replayed():
        assert whole.part.tally.values() == (0, 0, 0)
        assert whole.part.tally.made is tally.made, "it was made from what may be gone"
        assert whole.part.config is config
        whole.part.tally.count()
    assert whole.part.tally is tally
    assert tally.values() == (1, 1, 1)
    second = ModuleState(whole, changed)
    tally.count()
    second.restore()
    assert tally.values() == (1, 1, 1)


def test_submodules_that_were_exchanged_are_shown_again() -> None:
    whole = Whole()
    state, old = ModuleState(whole, frozenset()), whole.part
    whole.part = new = Part()
    with state.replayed():
        assert whole.part is old
    assert whole.part is new


def test_generators_of_modules_are_listed() -> None:
    whole = Whole()
    whole.part.noise = torch.Generator()
    assert ModuleState(whole, frozenset()).generators == [whole.part.noise]


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        tensor = torch.ones(1)
    assert version_of(tensor) == -1
    assert version_of(torch.ones(1).add_(1)) == 1

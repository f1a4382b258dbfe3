"""What forward can change on its modules: read before it, shown to a replay, put back."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import torch
from torch import nn

from rematic.activations.module_state import CLONED_BUFFER_BYTES, ModuleState, version_of


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
    part.small.data.fill_(1)  # without raising the version, as running statistics change
    part.nothing = torch.ones(1)


def snapshot(whole: Whole) -> dict[str, Any]:
    part = whole.part
    plain = {
        name: getattr(part, name)
        for name in ("training", "calls", "flag", "mode", "seen", "counts", "recent", "names")
    }
    values = {name: str(value) for name, value in plain.items()}
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
    assert first.mutated_tensors() == {"part.large"}
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


def test_tensors_that_need_a_gradient_are_left_to_the_replay() -> None:
    whole = Whole()
    whole.part.total = whole.part.scale * 2
    assert all(t is not whole.part.total for t in ModuleState(whole, frozenset()).tensors())


def test_generators_of_modules_are_listed() -> None:
    whole = Whole()
    whole.part.noise = torch.Generator()
    assert ModuleState(whole, frozenset()).generators == [whole.part.noise]


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        tensor = torch.ones(1)
    assert version_of(tensor) == -1
    assert version_of(torch.ones(1).add_(1)) == 1

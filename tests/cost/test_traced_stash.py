"""The place that stands in for a disk while a step is traced."""

from __future__ import annotations

import torch

from rematic.cost.torch_private import make_fake_mode
from rematic.cost.traced_stash import TracedPlaces
from rematic.policy import Offload


def test_what_comes_back_is_told_apart_from_what_moved_before_it() -> None:
    """Python gives the `id` of a storage that has moved to the next one."""
    places, gone = TracedPlaces(takes_memory=False), list[int]()
    places.min_bytes = 1
    places.on_return_death = gone.append
    stash = places.of(Offload())
    assert stash is not None
    handles = []
    with make_fake_mode():
        for _ in range(5):  # each dies when it has moved
            handles += stash.put([torch.empty(8)])
    keys = [one.key for one in places.offered]
    assert len(set(keys)) == 5
    for handle in reversed(handles):
        assert handle is not None
        handle.get()
    assert gone == list(reversed(keys))

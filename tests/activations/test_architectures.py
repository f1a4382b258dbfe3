"""Contract 1 over architectures of transformers: a slice of `benchmarks/architectures.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from benchmarks.architectures import Batch, judge, prepare
from rematic.activations import Unit, ambient
from rematic.stash import DiskStash

# An architecture, its attention, and the way that its units take.
SLICE = {
    "albert, one layer that runs several times": ("albert", "eager", "mixed"),
    "bamba, state space and attention": ("bamba", "eager", "selective"),
    "deepseek-v3, latent attention and experts": ("deepseek_v3", "sdpa", "mixed"),
    "falcon-mamba, state space": ("falcon_mamba", "eager", "evicted"),
    "poolformer, lists of lists": ("poolformer", "eager", "mixed"),
    "resnet, running statistics": ("resnet", "eager", "evicted"),
    "t5, encoder and decoder": ("t5", "eager", "recompute+offload"),
    "whisper, speech": ("whisper", "sdpa", "offload"),
    "xlnet, two streams": ("xlnet", "eager", "recompute"),
}


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    disk = functools.partial(DiskStash, min_bytes=1)
    monkeypatch.setattr("rematic.activations.stash_places.DiskStash", disk)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SLICE.values(), ids=SLICE.keys())
def test_an_architecture_trains_bit_for_bit(case: tuple[str, str, str]) -> None:
    model_type, attention, way = case
    model, batches = prepare(model_type, attention, left=True)
    (row,) = judge(model_type, model, batches, [way], autocast=False)
    assert (row.way, row.result, row.why) == (way, "equal", "")
    assert row.num_units > 0
    assert (row.num_replays > 0) == (way != "offload")


def test_a_replay_that_draws_other_numbers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ambient, "restore_generators", lambda state: None)
    monkeypatch.setattr(
        Unit, "trusted", property(lambda unit: True, lambda unit, yes: None), raising=False
    )
    model, batches = prepare("albert", "eager", left=True, number=2)
    (row,) = judge("albert", model, batches, ["recompute"], autocast=False)
    assert row.result == "wrong"
    assert "gradient albert.embeddings.word_embeddings.weight" in row.why


def test_a_step_that_cannot_be_compared_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = prepare("albert", "eager", left=True, number=2)
    forward = type(model).forward

    def draws(self: torch.nn.Module, **batch: Batch) -> object:
        return forward(self, **batch).loss * torch.rand((), generator=generator)

    generator = torch.Generator()
    monkeypatch.setattr(type(model), "forward", draws)
    (row,) = judge("albert", model, batches, ["recompute"], autocast=False)
    assert (row.way, row.result, row.why) == ("plain", "left out", "it is not deterministic")

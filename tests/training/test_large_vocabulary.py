"""Over a large vocabulary head and loss run in slices without being asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rematic import use_tiled_loss
from rematic.journal import read_journal
from rematic.training.loss import model_loss
from rematic.training.run import train
from rematic.training.tiled import LARGE_VOCABULARY
from tests.training.small import prepare, tiny

VOCABULARY = 128 * 1024
LARGE = (f"model.config.vocab_size={VOCABULARY}", "model.config.hidden_size=16")
NUM_TILES = 6


def measured(model: nn.Module, batch: dict[str, Tensor]) -> tuple[int, float, list[Tensor]]:
    """Bytes that autograd keeps, each storage once; the loss; its gradients."""
    kept: dict[int, int] = {}
    holders: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        holders.append(tensor)
        return tensor

    model.zero_grad(set_to_none=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model_loss(model, batch)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    num_bytes = sum(size for place, size in kept.items() if place not in weights)
    holders.clear()
    loss.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return num_bytes, float(loss.detach()), grads


def test_a_vocabulary_of_128k_keeps_less_by_what_the_logits_take() -> None:
    _, data, model = prepare(*LARGE, "data.max_length=24")
    batch = next(iter(data.loader))
    plain_bytes, plain_loss, plain = measured(model, batch)
    switch = use_tiled_loss(model, tile_tokens=24 // NUM_TILES)
    tiled_bytes, tiled_loss, tiled = measured(model, batch)
    switch.remove()
    assert tiled_loss == pytest.approx(plain_loss, rel=1e-6)
    for one, other in zip(tiled, plain, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5
    # plain keeps a number in 32 bits for every logit; tiled keeps the hidden states, as plain does
    # too, and two numbers a token
    tokens = batch["input_ids"].numel()
    predicted_bytes = tokens * VOCABULARY * 4
    assert plain_bytes - tiled_bytes == pytest.approx(predicted_bytes, rel=1e-3)


@pytest.mark.parametrize(("over", "tiles"), [(0, 0), (1, 1)], ids=["not over", "over"])
def test_the_size_decides_unless_the_recipe_does(
    over: int, tiles: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, said in (("auto", None), ("always", 1), ("never", 0)):
        train(
            tiny(
                f"model.config.vocab_size={LARGE_VOCABULARY + over}",
                f"policy.tiled_loss={name}",
                f"run.name={name}",
                "training.max_steps=1",
                "memory.budget=256MiB",
            ),
            show_progress=False,
        )
        events = read_journal(Path("runs") / name / "journal.jsonl")
        notices = [e for e in events if e.get("kind") == "tiled_loss"]
        assert len(notices) == (tiles if said is None else said)

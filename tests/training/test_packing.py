"""Packed documents are trained as they are alone, and do not see one another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from rematic.recipes import DataConfig
from rematic.training.evaluation import num_labels
from rematic.training.loader import BatchLoader
from rematic.training.loss import model_loss
from rematic.training.packing import pack_documents
from rematic.training.packing_check import check_packing
from rematic.training.run import train
from tests.training.small import examples, maker, prepare, tiny

DOCUMENTS = [[1, *range(10, 10 + length), 2] for length in (30, 9, 14, 3, 22, 5)]
CAPACITY = 48
PACKING = DataConfig(packing=True, max_length=CAPACITY)


def packed_loader(data: DataConfig = PACKING, batch_size: int = 1) -> BatchLoader:
    return BatchLoader(
        examples(DOCUMENTS), maker(data), order="written", batch_size=batch_size, capacity=CAPACITY
    )


def gradients(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[float, list[Tensor]]:
    """Sum of the losses of all labels, and its gradients."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        loss = model_loss(model, batch) * num_labels(batch, shift=True)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 30))
def test_every_document_is_in_one_sequence_that_holds_it(lengths: list[int], capacity: int) -> None:
    sequences = pack_documents(lengths, capacity=capacity)
    assert sorted(at for sequence in sequences for at in sequence) == list(range(len(lengths)))
    filled = [sum(lengths[at] for at in sequence) for sequence in sequences]
    assert max(filled) <= capacity
    # no two could have been one, or a better packing were trivial
    assert all(a + b > capacity for i, a in enumerate(filled) for b in filled[i + 1 :])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch_size", [1, 2], ids=["one row", "rows of two lengths"])
def test_loss_and_gradients_are_those_of_the_documents_alone(
    attention: str, batch_size: int
) -> None:
    _, _, model = prepare(f"model.attention={attention}")
    alone = list(BatchLoader(examples(DOCUMENTS), maker(), order="written"))
    data = DataConfig(packing=True, max_length=CAPACITY, pad_to_multiple=32)
    packed = list(packed_loader(data, batch_size))
    assert sum(len(batch["input_ids"]) for batch in packed) < len(alone)
    (wanted, wanted_grads), (found, found_grads) = (gradients(model, b) for b in (alone, packed))
    assert sum(num_labels(b, shift=True) for b in packed) == sum(
        num_labels(b, shift=True) for b in alone
    )
    # in 32 bits; sums over tokens are taken in another order
    assert found == pytest.approx(wanted, rel=1e-6)
    assert len(found_grads) == len(wanted_grads) == 21
    for one, other in zip(found_grads, wanted_grads, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_document_does_not_see_the_others_in_its_row(attention: str) -> None:
    _, _, model = prepare(f"model.attention={attention}")
    model.eval()
    batch = next(iter(packed_loader()))
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 1
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, starts[0] : starts[1]] += 100
    with torch.no_grad():
        before, after = (model(**one, use_cache=False).logits for one in (batch, changed))
    assert not torch.equal(before[0, : starts[1]], after[0, : starts[1]])
    assert torch.equal(before[0, starts[1] :], after[0, starts[1] :])


def test_no_document_is_asked_for_the_first_token_of_the_next() -> None:
    batch = next(iter(packed_loader()))
    starts = batch["position_ids"][0] == 0
    assert bool((batch["labels"][0, starts] == -100).all())
    rest = ~starts
    assert torch.equal(batch["labels"][0, rest], batch["input_ids"][0, rest])
    assert "attention_mask" not in batch


class DeafLlama(LlamaForCausalLM):
    """Takes positions and forgets them, as code of one's own may."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **others: object):  # type: ignore[no-untyped-def, override]
        return super().forward(input_ids, **others)


def test_a_model_that_mixes_packed_documents_is_refused_before_the_first_step() -> None:
    _, _, model = prepare()
    check_packing(model, device=torch.device("cpu"))
    assert model.training
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    deaf = DeafLlama(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
    with pytest.raises(
        ValueError, match="DeafLlama with attention 'sdpa' does not keep packed documents apart"
    ):
        check_packing(deaf, device=torch.device("cpu"))
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ValueError, match=re.escape("MambaForCausalLM takes no position_ids")):
        check_packing(recurrent, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "openai-gpt"])
def test_a_model_that_mixes_them_a_little_is_refused(kind: str, dtype: torch.dtype) -> None:
    """With random weights another document moves the logits by 1 or 2 % only."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, vocab_size=320, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with pytest.raises(ValueError, match="does not keep packed documents apart"):
        check_packing(model, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "gemma3_text", "gpt2", "qwen3_moe", "mixtral"]
)
def test_a_model_that_keeps_them_apart_may_pack(
    kind: str, attention: str, dtype: torch.dtype
) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, vocab_size=320, **sizes, **FEW.get(kind, {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    check_packing(model, device=torch.device("cpu"))


FEW = {
    "llama": {"intermediate_size": 64},
    "mistral": {"intermediate_size": 64, "sliding_window": 16, "num_key_value_heads": 2},
    "gemma3_text": {"intermediate_size": 64, "sliding_window": 16, "head_dim": 16},
    "gpt2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"intermediate_size": 64, "num_local_experts": 4, "num_key_value_heads": 2},
}


def test_a_whole_run_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "".join(f'{{"text": "document number {n}"}}\n' for n in range(6))
    (tmp_path / "d.jsonl").write_text(text)
    packed = tiny("data.source=d.jsonl", "data.packing=true", "data.max_documents=null")
    assert train(packed, show_progress=False).steps == 3

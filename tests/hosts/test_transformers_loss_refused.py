"""Models into which the tiled loss does not go, and what they are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rematic.hosts.transformers_loss import use_tiled_loss
from tests.hosts.language_models import SIZES, batch, llama, transformers


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(
        ValueError, match="found no language model of transformers with a head in L"
    ):
        use_tiled_loss(llama().model)
    with pytest.raises(ValueError, match="For a model of your own, call `tiled_cross_entropy`"):
        use_tiled_loss(nn.Linear(2, 2))


def test_a_model_that_computes_its_own_loss_is_refused() -> None:
    config = transformers.T5Config(
        vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2
    )
    with pytest.raises(ValueError, match="T5ForConditionalGeneration computes its loss inside its"):
        use_tiled_loss(transformers.T5ForConditionalGeneration(config))


def test_another_loss_is_refused() -> None:
    def my_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return logits.sum()

    model = llama()
    model.loss_function = my_loss
    with pytest.raises(ValueError, match="the model's loss_function is my_loss: expected one of"):
        use_tiled_loss(model)
    assert "forward" not in model.__dict__


def test_a_second_switch_is_refused() -> None:
    model = llama()
    use_tiled_loss(model)
    with pytest.raises(ValueError, match="LlamaForCausalLM has a tiled loss already"):
        use_tiled_loss(model)


def test_the_size_of_a_tile_is_checked_at_once() -> None:
    with pytest.raises(ValueError, match="tile_tokens is 0: expected 1 or more"):
        use_tiled_loss(llama(), tile_tokens=0)


def test_a_forward_that_another_library_replaced_is_refused() -> None:
    model = llama()

    def own_loss(input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = model.model(input_ids).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutput(loss=hidden.sum())

    model.forward = own_loss
    use_tiled_loss(model)
    with pytest.raises(RuntimeError, match="did not ask its `loss_function` for the loss"):
        model(**batch())


def test_a_forward_that_does_more_with_its_logits_is_refused() -> None:
    class Shifts(transformers.LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            return self.loss_function(logits[:, :-1], labels[:, 1:], self.vocab_size)

    model = Shifts(transformers.LlamaConfig(**SIZES)).train()
    use_tiled_loss(model)
    with pytest.raises(ValueError, match="does `getitem` with its logits before the loss"):
        model(**batch())


@pytest.mark.parametrize("plain", [True, False], ids=["plain head", "other head"])
def test_a_sharded_head_is_refused(plain: bool) -> None:
    model = llama()
    model.lm_head.weight.device_mesh = "what a DTensor has"
    if not plain:
        forward = model.lm_head.forward
        model.lm_head.forward = lambda hidden: forward(hidden)
    use_tiled_loss(model)
    with pytest.raises(ValueError, match="the head's weight is a DTensor, sharded over ranks"):
        model(**batch())


def test_a_vocabulary_that_is_not_the_heads_is_refused() -> None:
    model = llama()
    model.config.vocab_size = 39
    use_tiled_loss(model)
    with pytest.raises(ValueError, match="vocab_size is 39, but the head has 40 rows"):
        model(**batch())

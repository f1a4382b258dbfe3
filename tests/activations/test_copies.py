"""A copy of an attached model is plain."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.activations.blocks import gradients, make_model
from tests.activations.families import LLAMA_SDPA
from tests.activations.parity import (
    attached,
    make,
    run_steps,
    same_bits,
)


def _pickled(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES = {"deepcopy": copy.deepcopy, "pickle": _pickled, "torch.save": _saved}


@pytest.mark.parametrize("copied_by", COPIES.values(), ids=COPIES.keys())
def test_a_copy_of_an_attached_model_is_plain(copied_by: Any) -> None:
    plain = make(LLAMA_SDPA)
    model = make(LLAMA_SDPA)
    with attached(model, kept=False) as engine:
        copied = copied_by(model)
        run_steps(copied, LLAMA_SDPA, num_batches=1)
        assert engine.units[0].num_forwards == 0, "the copy calls its own forward"
        for name, module in copied.named_modules():
            assert module.forward.__func__ is type(module).forward, name
            assert module.forward.__self__ is module, name
        run_steps(model, LLAMA_SDPA, num_batches=1)
        assert engine.units[0].num_forwards == 1
    run_steps(plain, LLAMA_SDPA, num_batches=1)
    for other in (copied, model):
        assert all(map(same_bits, gradients(other), gradients(plain)))
    with attached(copied, kept=False) as engine:
        run_steps(copied, LLAMA_SDPA, num_batches=1)
        assert engine.ledger.counts.replays.total() == 3


def test_a_deep_copy_of_one_block_is_plain() -> None:
    model = make_model()
    with attached(model, kept=False):
        block = copy.deepcopy(model.blocks[1])
        assert block.forward.__self__ is block
        state = copy.deepcopy(model.state_dict())
    assert list(state) == list(model.state_dict())

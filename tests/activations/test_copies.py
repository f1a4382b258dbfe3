"""A copy of an attached model is plain."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from rematic.activations import Engine
from rematic.policy import Plan, Recompute
from tests.activations.blocks import Block, gradients, make_input, make_model
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


def _replica(module: nn.Module) -> nn.Module:
    """Does for one module what `torch.nn.parallel.replicate` does, which needs several devices."""
    replica: nn.Module = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _replica(child)
    for name, parameter in module._parameters.items():
        copied = None if parameter is None else parameter.detach().clone().requires_grad_()
        replica._parameters[name] = copied
    for name, buffer in module._buffers.items():
        replica._buffers[name] = None if buffer is None else buffer.clone()
    return replica


def _shallow(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    copied.__dict__["_modules"] = {n: m and _shallow(m) for n, m in module._modules.items()}
    copied.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(p.detach().clone())
        for name, p in module._parameters.items()
    }
    return copied


class Gated(nn.Module):
    """Has a router inside, whose `forward` is replaced as well."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate(x).softmax(-1)[:, :1] * torch.tanh(self.up(x))


def _parameters(module: nn.Module) -> list[torch.Tensor]:
    """Those of a replica too, which are no `nn.Parameter`."""
    found = [p for part in module.modules() for p in part._parameters.values() if p is not None]
    return list({id(p): p for p in found}.values())


@pytest.mark.parametrize("when", ["attached", "detached", "gone"])
@pytest.mark.parametrize("copied_by", [_replica, _shallow])
@pytest.mark.parametrize("block", [Block, Gated])
def test_a_shallow_copy_runs_its_own_weights(block: Any, copied_by: Any, when: str) -> None:
    model, x = make_model(block), make_input()
    wanted = model(x)
    wanted.backward()
    gradients_wanted = [p.grad.clone() for p in _parameters(model) if p.grad is not None]
    engine = Engine(model)
    engine.apply(Plan(actions=tuple(Recompute() for _ in engine.units)))
    copied = copied_by(model)
    with torch.no_grad():  # the model itself is another one from now on
        for parameter in model.parameters():
            parameter.mul_(3.0)
    if when != "attached":
        engine.detach()
    if when == "gone":
        del model
        gc.collect()
    for _ in range(2):
        for parameter in _parameters(copied):
            parameter.grad = None
        found = copied(x)
        found.backward()
        assert torch.equal(found, wanted)
        grads = [parameter.grad for parameter in _parameters(copied)]
        assert all(map(same_bits, grads, gradients_wanted))
        for part in copied.modules():  # with hooks, another function of torch calls `forward`
            part._forward_hooks = OrderedDict({0: lambda *_: None})
    assert [unit.num_forwards for unit in engine.units] == [0] * len(engine.units)
    if when != "gone":
        assert not torch.equal(model(x), wanted)

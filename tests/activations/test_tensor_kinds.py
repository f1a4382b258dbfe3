"""Tensors out of the ordinary: jagged, distributed, four bits, inference; and captured graphs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from rematic.activations import Engine
from rematic.memory import SimulatedProbe
from rematic.policy import Action, Keep, Offload, Plan, Recompute, RecomputeOffload, Selective
from tests.activations.blocks import make_input, make_model
from tests.ranks import free_port

WIDTH = 8
ACTIONS = [Keep(), Recompute(), Selective(), Offload(), RecomputeOffload()]


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class MakesJagged(Block):
    """Makes a jagged tensor of its own: each one has a length that equals no other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(jagged(x)).values()


def jagged(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 7, 10]))


def stack(block: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*[block() for _ in range(3)]))


def attached(model: nn.Module, action: Action) -> Engine:
    engine = Engine(model)
    engine.apply(Plan(actions=tuple(action for _ in engine.units)))
    return engine


def gradients(
    model: nn.Module, prepare: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    found = []
    for seed in range(2):
        values = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(seed))
        output = model(prepare(values.requires_grad_()))
        (output.values() if output.is_nested else output).square().sum().backward()
        found.append(values.grad)
    whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
    return [*found, *whole]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
def test_jagged_inputs_are_replayed(action: Action) -> None:
    wanted = gradients(stack(Block), jagged)
    model = stack(Block)
    engine = attached(model, action)
    assert all(map(torch.equal, gradients(model, jagged), wanted))
    assert [unit.pinned for unit in engine.units] == [None] * 3
    engine.detach()


def test_a_unit_that_makes_jagged_tensors_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    wanted = gradients(stack(MakesJagged), lambda x: x)
    model = stack(MakesJagged)
    with caplog.at_level(logging.WARNING, "rematic"):
        engine = attached(model, Recompute())
        assert all(map(torch.equal, gradients(model, lambda x: x), wanted))
    assert caplog.text.count("is kept under every policy, since it cannot be replayed") == 3
    assert engine.ledger.counts.replays.total() == 0
    engine.detach()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model[0]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _fully_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model[0]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
@pytest.mark.parametrize("distribute", [_tensor_parallel, _fully_sharded])
def test_distributed_parameters(
    distribute: Callable[[nn.Module, DeviceMesh], None], action: Action, mesh: DeviceMesh
) -> None:
    plain, model = stack(Block), stack(Block)
    distribute(plain, mesh)
    distribute(model, mesh)
    wanted = gradients(plain, lambda x: x)
    engine = attached(model, action)
    assert all(map(torch.equal, gradients(model, lambda x: x), wanted))
    assert [unit.pinned for unit in engine.units] == [None] * 3
    replayed = isinstance(action, (Recompute, Selective, RecomputeOffload))
    assert engine.ledger.counts.replays.total() == (6 if replayed else 0)
    engine.detach()


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_case_c4_sharded_units_in_mixed_precision(inside: bool, mesh: DeviceMesh) -> None:
    """Inputs are cast by a hook of the sharded module, whether that is the unit or holds it."""
    wanted, found = (stack(Block) for _ in range(2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for model in (wanted, found):
        for block in model[0]:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    plain = gradients(wanted, lambda x: x)
    engine = Engine(found, ["*.up", "*.norm"] if inside else [])
    engine.apply(Plan(actions=tuple(Recompute() for _ in engine.units)))
    assert all(map(torch.equal, gradients(found, lambda x: x), plain))
    assert engine.ledger.counts.replays.total() > 0
    engine.detach()


class FourBitBlock(nn.Module):
    """A frozen weight of four bits with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        bnb = pytest.importorskip("bitsandbytes", reason="an optional package")
        self.base = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4")
        self.base.weight.requires_grad_(False)
        self.a = nn.Linear(64, 4, bias=False)
        self.b = nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


@pytest.mark.parametrize("action", [Recompute(), Selective(), Offload()], ids=lambda a: a.name)
def test_case_j3_four_bits_with_an_adapter(action: Action) -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
        model(x).square().sum().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    wanted = step(stack(FourBitBlock).to("cpu"))
    model = stack(FourBitBlock).to("cpu")
    weight = model[0][0].base.weight
    packed, state = weight.data.clone(), weight.quant_state
    engine = attached(model, action)
    for _ in range(2):
        model.zero_grad()
        assert all(map(torch.equal, step(model), wanted))
    assert [unit.pinned for unit in engine.units] == [None] * 3
    assert weight is model[0][0].base.weight
    assert weight.quant_state is state
    assert torch.equal(weight.data, packed)
    copied = copy.deepcopy(model)[0][0].base.weight
    assert torch.equal(copied.quant_state.absmax, state.absmax)
    engine.apply(Plan(actions=(Keep(),) * 3))
    output = model(torch.randn(32, 64))
    held = {record.name: record.own_bytes() for record in engine.ledger.records()}
    # the results of the first adapter and of tanh; the packed weight (2 KiB) is no activation
    assert set(held.values()) == {32 * 4 * 4 + 32 * 64 * 4}
    del output
    engine.detach()


def test_inference_mode_runs_as_if_rematic_were_not_there() -> None:
    model = make_model()
    with torch.inference_mode():
        wanted = model(make_input())
    engine = attached(model, Recompute())
    with torch.inference_mode(), SimulatedProbe() as probe:
        assert torch.equal(model(make_input()), wanted)
    assert probe.allocated_bytes() <= 2 * make_input().nbytes
    assert [unit.num_forwards for unit in engine.units] == [0] * 3
    with torch.inference_mode():
        given = make_input()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        model(given)  # as in plain torch
    engine.detach()


def test_a_cuda_graph_is_captured_without_rematic(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    engine = attached(model, Recompute())
    monkeypatch.setattr("rematic.activations.torch_private._HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model(make_input()).backward()
    assert [unit.num_forwards for unit in engine.units] == [0] * 3
    assert "not managed in this call: a CUDA graph is being captured" in caplog.text
    monkeypatch.undo()
    model(make_input()).backward()
    assert [unit.num_forwards for unit in engine.units] == [1] * 3
    engine.detach()


def test_create_graph_and_retain_graph_through_an_eviction() -> None:
    def second_derivatives(evict: Callable[[], Any]) -> list[torch.Tensor]:
        x = make_input(requires_grad=True)
        (first,) = torch.autograd.grad(model(x).square(), [x], create_graph=True)
        evict()
        first.square().sum().backward(retain_graph=True)
        evict()
        first.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model = make_model()
    wanted = [gradient.clone() for gradient in second_derivatives(lambda: None)]
    model.zero_grad()
    for action in (Keep(), Recompute()):
        engine = attached(model, action)
        found = second_derivatives(lambda e=engine: e.ledger.evict(1 << 30))
        assert all(map(torch.equal, found, wanted))
        assert engine.ledger.counts.replays.total() > 0
        engine.detach()
        model.zero_grad()

"""FSDP2 in one of four processes that do not exist: nothing is sent, but all buffers are made."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from rematic.activations import Engine
from rematic.cost import TraceSettings, language_model_batch, trace_profile
from rematic.cost.sharding import shard_groups, sharded
from rematic.memory import SimulatedProbe
from rematic.policy import Keep, Plan, Recompute
from tests.cost.measured import predicted_peak

K, R = Keep(), Recompute()
PROCESSES = 4


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    yield init_device_mesh("cpu", (PROCESSES,))
    dist.destroy_process_group()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=130,  # not divisible by the number of processes
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=301,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


class Ledger(SimulatedProbe):
    """Also sees the storages of gathered weights, which are resized out of sight of ops."""

    def __enter__(self):
        def seen(resize):
            def resized(tensor):
                resize(tensor)
                self.track([tensor])

            return resized

        patched = {
            name: seen(getattr(_fsdp_param, name)) for name in ("alloc_storage", "free_storage")
        }
        self.patch = mock.patch.multiple(_fsdp_param, **patched)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patch.stop()


def peak_bytes(engine, model, batch, plan, *, accumulates):
    engine.apply(Plan(actions=tuple(plan)))
    if not accumulates:
        model.zero_grad(set_to_none=True)
    probe = Ledger()
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    weights = [p.to_local() for p in model.parameters()]
    probe.track([*weights, *gradients, *model.buffers(), *batch.values()])
    before = probe.allocated_bytes()
    with probe:
        model(**batch).loss.backward()
    return probe.peak_allocated_bytes - before


@pytest.mark.parametrize("case", ["full", "frozen", "accumulates"])
def test_a_sharded_step_needs_what_is_predicted(case, mesh):
    model, accumulates = llama(), case == "accumulates"
    if case == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
    settings = TraceSettings(
        make_batch=language_model_batch, on_accelerator=False, actions=(), batch=1, padded=(False,)
    )
    whole = trace_profile(model, settings)
    groups = shard_groups(model, whole.unit_names, num_parts=PROCESSES)
    profile = sharded(whole, groups, accumulates=accumulates)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = [p.to_local().untyped_storage().nbytes() for p in model.parameters()]
    buffers = sum(b.nbytes for b in model.buffers())
    assert profile.fixed.weights == sum(parts) + buffers
    engine = Engine(model, trust=["*"])
    peak_bytes(engine, model, language_model_batch(1, 24, False), [K] * 5, accumulates=False)
    for length in (40, 300):
        costs = profile.costs_at(batch=1, length=length)
        batch = language_model_batch(1, length, False)
        for plan in ([K] * 5, [R] * 5, [R, K, R, K, K]):
            peak = predicted_peak(costs, plan)
            measured = peak_bytes(engine, model, batch, plan, accumulates=accumulates)
            assert peak.total - peak.fixed == measured, (length, plan, peak.place, peak.unit)
    engine.detach()

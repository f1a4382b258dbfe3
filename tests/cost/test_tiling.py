import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rematic
from rematic.cost import TraceSettings, language_model_batch, trace_profile
from rematic.cost.tiling import Tiling
from rematic.policy import Keep, Recompute
from tests.cost.measured import RealStep, predicted_peak

K, R = Keep(), Recompute()


@pytest.mark.parametrize(
    ("vocabulary", "frozen", "autocast"),
    [
        (500, False, None),  # slices of the vocabulary, and from 500 tokens on of the tokens
        (6000, True, None),
        (6000, False, torch.bfloat16),
    ],
    ids=["small vocabulary", "frozen head", "autocast"],
)
def test_a_tiled_loss_needs_what_it_is_traced_to_need(vocabulary, frozen, autocast):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=vocabulary,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    model.lm_head.weight.requires_grad_(not frozen)
    settings = TraceSettings(
        make_batch=language_model_batch,
        on_accelerator=False,
        actions=(),
        batch=1,
        padded=(False,),
        autocast=autocast,
        tile_tokens=64,
    )
    profile = trace_profile(model, settings)
    switch = rematic.use_tiled_loss(model, tile_tokens=64)
    step = RealStep(model, language_model_batch(1, 24, False), autocast=autocast)
    places, plans = set(), ([R] * 3, [K] * 3, [R, K, R])
    for length in (200, 900):
        costs = profile.costs_at(batch=1, length=length)
        batch = language_model_batch(1, length, False)
        for plan in plans:
            peak = predicted_peak(costs, plan)
            places.add(peak.place)
            assert peak.total - peak.fixed == step.peak_bytes(batch, plan), (length, peak.place)
    assert "head" in places
    step.engine.detach()
    switch.remove()


def test_work_in_the_head_does_not_depend_on_the_slices():
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=256,
    )
    model = LlamaForCausalLM(config).train()
    plain = TraceSettings(make_batch=language_model_batch, batch=1, padded=(False,), actions=())
    tiled = TraceSettings(
        make_batch=language_model_batch, batch=1, padded=(False,), actions=(), tile_tokens=32
    )
    flops = [
        sum(op.flops for op in trace_profile(model, s).costs_at(batch=1, length=512).around_ops)
        for s in (plain, tiled)
    ]
    assert flops[0] == flops[1] > 0


def test_shares_of_a_slice():
    tokens = Tiling(tile_tokens=100, vocabulary=1000, is_trained=False)
    assert tokens.num_tiles(450) == 5
    assert tokens.share(450, forward=True) == tokens.share(450, forward=False) == 100 / 450
    assert tokens.share(50, forward=True) == 1.0
    vocabulary = Tiling(tile_tokens=100, vocabulary=1000, is_trained=True)
    assert vocabulary.share(450, forward=True) == 100 / 450
    assert vocabulary.share(450, forward=False) == 200 / 1000
    assert vocabulary.share(2000, forward=False) == 100 / 2000

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from rematic.cost import TraceSettings, language_model_batch, trace_profile
from rematic.policy import Keep, Offload, Recompute, RecomputeOffload, Selective
from tests.cost.measured import RealStep, predicted_peak

K, S, R, X, O = Keep(), Selective(), Recompute(), RecomputeOffload(), Offload()  # noqa: E741
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    use_cache=False,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).train()


def traced(model, **settings):
    made = TraceSettings(make_batch=language_model_batch, on_accelerator=False, **settings)
    return trace_profile(model, made)


@pytest.fixture(scope="module")
def profile(model):
    return traced(model, actions=(K, S, R, X, O), batch=1, padded=(False,))


def test_predicted_peaks_are_those_of_the_ledger(model, profile):
    step = RealStep(model, language_model_batch(1, 24, False))
    mixed = ([R, K, S, R, K], [K, O, X, S, R], [X, R, R, R, K], [X, K, S, O, K])
    plans = ([K] * 5, [R] * 5, [S] * 5, [X] * 5, [O] * 5, *mixed)
    for length in (40, 400, 700):  # at 40 tokens all tensors are too small to move, at 400 some
        costs = profile.costs_at(batch=1, length=length)
        batch = language_model_batch(1, length, False)
        for actions in plans:
            peak = predicted_peak(costs, actions)
            assert peak.total - peak.fixed == step.peak_bytes(batch, actions), (length, actions)
    step.engine.detach()


def test_what_came_back_is_gone_when_the_backward_of_its_unit_has_ended(profile):
    for unit in profile.pieces[0].units[:-1]:  # (what the last one moved lives to its very end)
        offload = dict(unit.actions)["offload"]
        taken = {i for i, (_, is_taken) in enumerate(offload.offered) if is_taken}
        gone = [set(part.gone) for part in offload.returns]
        assert gone == sorted(gone, key=len)
        assert gone[0] == set()
        assert gone[-1] == taken


def test_inputs_that_all_blocks_of_a_stack_share_are_in_predicted_peaks():
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 176, "num_heads": 4, "vocab_size": 96}
    counts = {"num_layers": 4, "num_decoder_layers": 4}
    config = T5Config(
        **sizes, **counts, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).train()
    costs = traced(model, actions=(K, S, R, X, O), batch=1, padded=(False,))
    costs = costs.costs_at(batch=1, length=300)
    step = RealStep(model, language_model_batch(1, 24, False))
    batch = language_model_batch(1, 300, False)
    mixed = ([K, X, R, X, O, X, X, S], [X, X, R, K, S, X, K, X], [O, S, R, K, O, X, K, X])
    for actions in ([X] * 8, [R] * 8, *mixed):
        peak = predicted_peak(costs, actions)
        assert peak.total - peak.fixed == step.peak_bytes(batch, actions), actions
    step.engine.detach()


def test_predicted_peaks_of_padded_batches_grow_with_the_square_of_the_length(model):
    padded = traced(model, actions=(), batch=2, padded=(True,))
    # an engine of its own: what a selective replay needs is learned from the calls of a unit
    step = RealStep(model, language_model_batch(2, 24, True))
    for length in (40, 500):
        costs = padded.costs_at(batch=2, length=length, padded=True)
        batch = language_model_batch(2, length, True)
        for actions in ([K] * 5, [R] * 5, [R, K, R, R, K]):
            peak = predicted_peak(costs, actions)
            assert peak.total - peak.fixed == step.peak_bytes(batch, actions), (length, actions)
    step.engine.detach()
    assert padded.pieces[0].around.embedding_kept.degree == 2


def test_copies_of_weights_that_autocast_makes_live_until_it_is_left(model):
    cast = torch.bfloat16
    mixed = traced(model, actions=(), batch=1, padded=(False,), autocast=cast)
    batch = language_model_batch(1, 300, False)
    step = RealStep(model, batch, autocast=cast)
    costs = mixed.costs_at(batch=1, length=300)
    recomputed = predicted_peak(costs, [R] * 5)
    assert recomputed.total - recomputed.fixed == step.peak_bytes(batch, [R] * 5)
    # copies that a kept unit saves count once more until autocast is left: too high, never too low
    kept = predicted_peak(costs, [K, R, K, R, K])
    copies = 3 * 2 * sum(p.numel() for p in model.model.layers[0].parameters())
    assert 0 <= kept.total - kept.fixed - step.peak_bytes(batch, [K, R, K, R, K]) <= copies
    step.engine.detach()


def test_fixed_bytes_are_the_weights_and_the_batch(model, profile):
    fixed = profile.costs_at(batch=1, length=100).fixed
    held = [*model.parameters(), *model.buffers()]
    assert fixed.weights == sum(tensor.nbytes for tensor in held)
    assert (fixed.gradients, fixed.optimizer, fixed.other) == (0, 0, 2 * 8 * 100)


def test_ops_tell_what_they_make_compute_and_whether_a_replay_comes_to_them(profile):
    ops = profile.costs_at(batch=1, length=512).classes[1].ops
    products = [op for op in ops if op.name == "aten::mm"]
    assert [op.occurrence for op in products] == list(range(7))
    query, gate, down = products[0], products[4], products[6]
    assert query.result_bytes == 512 * 64 * 4
    assert gate.flops == 2 * 512 * 64 * 176
    assert not down.is_replayed  # the replay stops at the last saved tensor, before it
    assert gate.is_saved
    assert not query.is_saved
    assert query.freed_after is not None
    attention = next(op for op in ops if "dot_product" in op.name)
    assert not attention.is_random  # it draws nothing without dropout
    views = [op for op in ops if op.name == "aten::_unsafe_view"]
    assert all(op.result_bytes == 0 and op.storage_of is not None for op in views)


def test_nothing_of_a_traced_model_is_changed(model, profile):
    assert all(parameter.grad is None for parameter in LlamaForCausalLM(CONFIG).parameters())
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert "forward" not in model.model.layers[0].__dict__


def test_a_profile_tells_which_shapes_it_holds(profile):
    with pytest.raises(ValueError, match=r"no batch of 2 x 64 tokens .* one of 1 x 1 to any, not"):
        profile.costs_at(batch=2, length=64)


def test_a_unit_called_twice_is_refused():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2)]
            self.layers = torch.nn.ModuleList(blocks)

        def forward(self, x):
            for layer in (*self.layers, *self.layers):
                x = layer(x)
            return x

    settings = TraceSettings(
        make_batch=lambda batch, length, _: {"x": torch.ones(batch, length, 4)},
        loss=lambda model, batch: model(batch["x"]).sum(),
    )
    with pytest.raises(ValueError, match="called units 4 times: expected each of the 2 once"):
        trace_profile(Twice(), settings)


@pytest.mark.parametrize(
    ("settings", "gradients", "other"),
    [
        ({"accumulates": True}, 1, 0),
        ({"gradient_buckets": "copies"}, 0, 1),
        ({"gradient_buckets": "views"}, 1, 0),
    ],
    ids=["accumulates", "copies", "views"],
)
def test_gradients_that_are_there_already_count_from_the_start(settings, gradients, other):
    with torch.device("meta"):
        blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(3)]
        model = torch.nn.Sequential(*blocks)

    def costs_with(**settings):
        made = TraceSettings(
            make_batch=lambda batch, length, _: {"x": torch.ones(batch, length, 8)},
            loss=lambda model, batch: model(batch["x"]).sum(),
            batch=1,
            padded=(False,),
            actions=(),
            **settings,
        )
        return trace_profile(model, made).costs_at(batch=1, length=16)

    def left(costs):
        return [dict(costs.classes[i].actions)["keep"].gradient for i in costs.unit_classes]

    plain, costs = costs_with(), costs_with(**settings)
    block_bytes = 4 * (8 * 8 + 8)
    assert costs.fixed.weights == 3 * block_bytes
    assert costs.fixed.gradients == gradients * 3 * block_bytes
    assert costs.fixed.other - plain.fixed.other == other * 3 * block_bytes
    # new gradients appear in backward only where there were none
    appeared = [a - b for a, b in zip(left(plain), left(costs), strict=True)]
    assert appeared == [gradients * block_bytes] * 3


def test_copies_of_weights_by_autocast_are_counted_once(model):
    mixed = traced(model, actions=(K, R), batch=1, padded=(False,), autocast=torch.bfloat16)
    step = RealStep(model, language_model_batch(1, 24, False), autocast=torch.bfloat16)
    for length in (60, 400):
        costs = mixed.costs_at(batch=1, length=length)
        batch = language_model_batch(1, length, False)
        for actions in ([K] * 5, [R] * 5, [R, K, R, K, K], [R, R, R, R, K]):
            peak = predicted_peak(costs, actions)
            assert peak.total - peak.fixed == step.peak_bytes(batch, actions), (length, actions)
    step.engine.detach()

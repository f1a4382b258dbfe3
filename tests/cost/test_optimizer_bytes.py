import pytest
import torch
from torch import nn

from rematic.cost import NO_OPTIMIZER, adam_8bit_bytes, trace_optimizer
from rematic.memory import SimulatedProbe

SHAPES = [(64, 32), (64, 32), (64,), (128, 64), (64,)]
MAKERS = {
    "adamw-loop": lambda weights: torch.optim.AdamW(weights, foreach=False),
    "adamw-foreach": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "adamw-fused": lambda weights: torch.optim.AdamW(weights, fused=True),
    "amsgrad": lambda weights: torch.optim.AdamW(weights, amsgrad=True, foreach=True),
    "sgd-momentum": lambda weights: torch.optim.SGD(weights, momentum=0.9, foreach=True),
    "adafactor": lambda weights: torch.optim.Adafactor(weights),
}


def weights():
    made = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for weight in made:
        weight.grad = torch.ones_like(weight)
    return made


@pytest.mark.parametrize("name", MAKERS)
def test_two_steps_need_what_they_are_traced_to_need(name):
    trained = weights()
    traced = trace_optimizer(MAKERS[name], trained)
    optimizer = MAKERS[name](trained)
    step_bytes = 0
    for _ in range(2):
        probe = SimulatedProbe()
        probe.track(trained)
        probe.track(weight.grad for weight in trained)
        probe.track(t for state in optimizer.state.values() for t in state.values())
        with probe:
            optimizer.step()
        step_bytes = max(step_bytes, probe.peak_allocated_bytes - probe.allocated_bytes())
    state = {t.untyped_storage() for s in optimizer.state.values() for t in s.values()}
    assert traced.state_bytes == sum(storage.nbytes() for storage in state)
    # A loop may meet its largest weight before all the state is there; foreach rounds the scalars.
    assert step_bytes - 64 <= traced.step_bytes <= 1.05 * step_bytes + 64


def test_the_foreach_step_of_adamw_copies_all_weights_once():
    trained = weights()
    weight_bytes = sum(weight.nbytes for weight in trained)
    assert trace_optimizer(MAKERS["adamw-foreach"], trained).step_bytes >= weight_bytes


def test_frozen_weights_need_nothing():
    assert trace_optimizer(MAKERS["adamw-loop"], [torch.zeros(4, 4)]) == NO_OPTIMIZER


def test_eight_bit_state_is_a_quarter_and_paged_state_is_away():
    weight = nn.Parameter(torch.empty(1024, 1024, device="meta"))
    plain = adam_8bit_bytes([weight], paged=False)
    assert plain.state_bytes == 2 * 2**20 + 2 * 4 * 2**12 + 2048
    assert adam_8bit_bytes([weight], paged=True).state_bytes == 2 * 4 * 2**12 + 2048
    small = nn.Parameter(torch.empty(64, device="meta"))
    assert adam_8bit_bytes([small], paged=True).state_bytes == 8 * 64 + 2048

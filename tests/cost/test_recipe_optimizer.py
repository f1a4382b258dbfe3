from functools import partial

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from rematic.cost import NO_OPTIMIZER
from rematic.cost.optimizer_bytes import measure_optimizer, trace_optimizer
from rematic.cost.recipe_optimizer import parts_of, recipe_optimizer_bytes
from rematic.recipes import (
    AdafactorConfig,
    AdamWConfig,
    SGDConfig,
    TargetOptimizerConfig,
    TrainingConfig,
)

SHAPES = ((300, 512), (64, 32), (4096,), (64,), (1000, 101))


def weights():
    return [nn.Parameter(torch.ones(shape)) for shape in SHAPES]


def state_bytes(optimizer, parameters):
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (AdamWConfig(), torch.optim.AdamW),
        (AdamWConfig(name="adamw-8bit"), bnb.optim.AdamW8bit),
        (AdafactorConfig(), torch.optim.Adafactor),
        (SGDConfig(momentum=0.9), lambda given: torch.optim.SGD(given, momentum=0.9)),
        (SGDConfig(), torch.optim.SGD),
        (TargetOptimizerConfig(_target_="torch.optim.RMSprop"), torch.optim.RMSprop),
        (TargetOptimizerConfig(_target_="torch.optim.NAdam"), torch.optim.NAdam),
        (TargetOptimizerConfig(_target_="torch.optim.ASGD"), torch.optim.ASGD),
        (
            TargetOptimizerConfig(_target_="torch.optim.Adam", options={"amsgrad": True}),
            lambda given: torch.optim.Adam(given, amsgrad=True),
        ),
        (TargetOptimizerConfig(_target_="bitsandbytes.optim.Adam8bit"), bnb.optim.Adam8bit),
        (TargetOptimizerConfig(_target_="bitsandbytes.optim.Lion"), bnb.optim.Lion),
    ],
    ids=lambda value: getattr(value, "_target_", getattr(value, "name", "")),
)
def test_state_is_what_a_real_step_leaves(config, make):
    parameters = weights()
    predicted = recipe_optimizer_bytes(
        TrainingConfig(optimizer=config), parameters, on_accelerator=False
    )
    found = state_bytes(make(parameters), parameters)
    assert predicted.state_bytes == pytest.approx(found, rel=1e-3)
    if not isinstance(config, TargetOptimizerConfig):
        assert predicted.state_bytes == found


def test_what_is_measured_is_what_a_trace_finds():
    for make in (torch.optim.RMSprop, partial(torch.optim.AdamW, foreach=True)):
        traced, measured = (find(make, weights()) for find in (trace_optimizer, measure_optimizer))
        assert measured.state_bytes == pytest.approx(traced.state_bytes, rel=1e-3)
        assert measured.step_bytes == pytest.approx(traced.step_bytes, rel=0.05)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("find", [trace_optimizer, measure_optimizer])
def test_empty_weights_need_nothing(find):
    make = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
    empty, weight = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(4, 4))
    assert find(make, [empty]) == NO_OPTIMIZER
    assert find(make, [empty, weight]) == find(make, [weight])


def test_state_of_muon_is_what_a_real_step_leaves():
    parameters = [weight for weight in weights() if weight.dim() == 2]  # it takes no others
    config = TargetOptimizerConfig(_target_="torch.optim.Muon")
    predicted = recipe_optimizer_bytes(
        TrainingConfig(optimizer=config), parameters, on_accelerator=False
    )
    assert 0 < predicted.state_bytes == state_bytes(torch.optim.Muon(parameters), parameters)


def test_paged_state_of_large_weights_does_not_count():
    def state(name):
        training = TrainingConfig(optimizer=AdamWConfig(name=name))
        return recipe_optimizer_bytes(training, weights(), on_accelerator=True).state_bytes

    small = sum(torch.Size(shape).numel() for shape in SHAPES[1:4])
    assert state("paged-adamw") == 8 * small
    assert state("adamw-8bit") - state("paged-adamw-8bit") == 2 * (300 * 512 + 1000 * 101)


def test_an_optimizer_of_which_nothing_is_known_is_refused():
    training = TrainingConfig(optimizer=TargetOptimizerConfig(_target_="mine.Lion"))
    with pytest.raises(ValueError, match=r"nothing is known of the state of mine\.Lion"):
        recipe_optimizer_bytes(training, weights(), on_accelerator=True)


def test_what_is_no_optimizer_is_refused():
    training = TrainingConfig(optimizer=TargetOptimizerConfig(_target_="torch.optim.lr_scheduler"))
    with pytest.raises(ValueError, match=r"'torch\.optim\.lr_scheduler', which is no Optimizer"):
        recipe_optimizer_bytes(training, weights(), on_accelerator=True)


def test_parts_of_weights_are_rows():
    parts = parts_of([*weights(), nn.Parameter(torch.ones(7, 3), requires_grad=False)], 8)
    assert [tuple(part.shape) for part in parts] == [(38, 512), (8, 32), (512,), (8,), (125, 101)]

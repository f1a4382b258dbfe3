from torch import nn
from torch.nn.utils import parametrize

from rematic.cost.unit_kinds import choose_slots, kind_of


def blocks(widths, prefix="layers"):
    return [(f"{prefix}.{i}", nn.Sequential(nn.Linear(8, w))) for i, w in enumerate(widths)]


def test_first_one_more_and_last_stand_for_equal_units():
    slots = choose_slots(blocks([8] * 6))
    assert slots.positions == (0, 1, 5)
    assert slots.of_unit == (0, 1, 1, 1, 1, 2)
    assert slots.counts == (1, 4, 1)


def test_each_kind_has_a_first_and_another_one():
    slots = choose_slots(blocks([8, 8, 9, 8, 8, 9, 8, 8, 9]))
    assert slots.positions == (0, 1, 2, 5, 8)
    assert slots.of_unit == (0, 1, 2, 1, 1, 3, 1, 1, 4)


def test_stacks_are_apart():
    slots = choose_slots([*blocks([8, 8, 8], "encoder"), *blocks([8, 8, 8], "decoder")])
    assert slots.positions == (0, 1, 2, 3, 4, 5)


def test_what_only_tells_the_position_does_not_set_units_apart():
    units = blocks([8] * 4)
    for position, (_, unit) in enumerate(units):
        unit.layer_idx = position
    assert choose_slots(units).positions == (0, 1, 3)
    units[2][1].is_sliding = True
    assert choose_slots(units).positions == (0, 1, 2, 3)


def test_frozen_weights_set_units_apart():
    units = blocks([8] * 5)
    units[1][1].requires_grad_(False)
    assert choose_slots(units).of_unit == (0, 1, 2, 2, 3)


def test_a_single_unit_stands_for_itself():
    assert choose_slots(blocks([8])).positions == (0,)


def test_parametrized_units_are_of_one_kind():
    stack = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for layer in stack:
        parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert len({type(layer) for layer in stack}) == 4
    assert len({kind_of(layer) for layer in stack}) == 1

import pytest
import torch

from rematic.cost.real_twins import RealTwins
from rematic.cost.torch_private import FakeTensor, FakeTensorMode, unset_fake_temporarily


def real(values):
    with unset_fake_temporarily():
        return torch.tensor(values)


@pytest.fixture
def twins():
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made = RealTwins(mode)
    with mode, made:
        yield made


def test_questions_about_whole_numbers_get_the_real_answer(twins):
    mask = twins.fake(real([[1, 1, 0]]))
    assert isinstance(mask, FakeTensor)
    assert not bool((mask == 1).all())
    assert int(mask.sum().item()) == 2
    assert bool((mask[:, :2] == 1).all())


def test_shapes_that_depend_on_values_are_real(twins):
    mask = twins.fake(real([1, 0, 1, 1])).bool()
    assert mask.nonzero().shape == (3, 1)
    states = torch.empty(4, 8)
    assert states[mask].shape == (3, 8)


def test_in_place_ops_reach_the_twin(twins):
    mask = twins.fake(real([1, 1, 1, 1]))
    mask[1:3].zero_()
    assert int(mask.sum().item()) == 2


def test_floating_numbers_are_equal_true_nowhere_and_one(twins):
    states = torch.empty(4)
    assert torch.equal(states, torch.empty(4))
    assert not bool((states > 0).any())
    assert states.sum().item() == 1.0


def test_a_router_spreads_its_tokens_evenly(twins):
    _, chosen = torch.topk(torch.empty(6, 4), 2, dim=-1)
    counts = torch.bincount(chosen.flatten(), minlength=4)
    assert [int(count) for count in counts] == [3, 3, 3, 3]

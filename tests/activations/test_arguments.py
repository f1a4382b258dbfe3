"""Arguments are kept as detached aliases and rebuilt as fresh leaves."""

from __future__ import annotations

import torch

from rematic.activations.arguments import CallArguments


def test_arguments_are_rebuilt_with_the_same_structure() -> None:
    weight = torch.ones(2, requires_grad=True)
    x = weight * 2
    ids = torch.tensor([1, 2])
    call = CallArguments((x, [ids, None]), {"again": x, "scale": 0.5, "leaf": weight})
    args, kwargs = call.rebuild()
    assert torch.equal(args[0], x)
    assert args[1][1] is None
    assert kwargs["scale"] == 0.5
    assert args[0] is kwargs["again"], "a tensor given twice is one tensor"
    assert args[0].requires_grad
    assert args[0].is_leaf
    assert args[0].grad_fn is None
    assert kwargs["leaf"] is not weight
    assert kwargs["leaf"].requires_grad
    assert not args[1][0].requires_grad
    assert args[0].data_ptr() == x.data_ptr(), "nothing is copied"
    assert call.rebuild()[0][0] is not args[0]


def test_a_change_in_place_is_seen_through_the_alias() -> None:
    x, y = torch.ones(2), torch.ones(2)
    call = CallArguments((x,), {"y": y})
    assert call.mutated_positions() == []
    y.add_(1)
    assert call.mutated_positions() == [1]
    x[:1].mul_(2)
    assert call.mutated_positions() == [0, 1]


def test_the_graph_of_an_argument_is_not_kept() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    (argument,) = CallArguments((x,), {}).tensors()
    assert argument.tensor().grad_fn is None
    assert argument.requires_grad


def test_inference_tensors_can_be_arguments() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    assert CallArguments((x,), {}).mutated_positions() == []

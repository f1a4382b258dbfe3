"""What a sample says of gradients is what they are, or near it where it looks at a part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rematic.gradient_sample import SAMPLED_ELEMENTS, GradientSample


def sample(parameters: list[nn.Parameter], gradients: list[torch.Tensor | None]) -> GradientSample:
    """A sample of one backward that gives every parameter such a gradient."""
    found = GradientSample(parameters)
    pairs = zip(parameters, gradients, strict=True)
    sum((p * g).sum() for p, g in pairs if g is not None).backward()  # type: ignore[union-attr]
    found.close()
    return found


def test_small_gradients_are_compared_as_a_whole_whatever_is_there_already() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(5, 7)), nn.Parameter(torch.zeros(3))]
    right = [torch.randn(5, 7), torch.randn(3)]
    one = [torch.randn(5, 7), torch.randn(3)]
    parameters[0].grad = torch.full((5, 7), 1e6)  # of earlier micro-batches
    found = sample(parameters, one).difference_from(sample(parameters, right))
    flat, flat_right = (torch.cat([t.flatten() for t in ts]) for ts in (one, right))
    assert found.norm == pytest.approx(float(flat.norm()))
    assert found.previous_norm == pytest.approx(float(flat_right.norm()))
    cosine = torch.nn.functional.cosine_similarity(flat, flat_right, dim=0)
    assert found.cosine == pytest.approx(float(cosine), abs=1e-6)
    apart = float((flat - flat_right).norm() / flat_right.norm())
    assert found.difference == pytest.approx(apart)


def test_large_gradients_are_estimated_by_a_part() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(600, 512)), nn.Parameter(torch.zeros(64))]
    right = [torch.randn(600, 512), 10 * torch.randn(64)]
    one = [right[0] + 0.1 * torch.randn(600, 512), right[1]]
    first = sample(parameters, right)
    assert all(p is not None and p.numel() <= SAMPLED_ELEMENTS for p in first._parts)
    found = sample(parameters, one).difference_from(first)
    norms = [float(torch.cat([t.flatten() for t in ts]).norm()) for ts in (one, right)]
    assert found.norm == pytest.approx(norms[0], rel=0.05)
    assert found.difference == pytest.approx(0.1 * 600**0.5 * 512**0.5 / norms[1], rel=0.1)


def test_transposed_and_sparse_gradients_and_several_backwards_add_up() -> None:
    table = nn.Embedding(9, 4, sparse=True)
    matrix = nn.Parameter(torch.zeros(4, 6))
    found = GradientSample([table.weight, matrix])
    for ids in ([1, 1, 2], [2]):
        (table(torch.tensor(ids)).sum() + (matrix.t() * torch.ones(6, 4)).sum()).backward()
    found.close()
    dense = torch.zeros(9, 4)
    dense[1:3] = 2.0
    nothing = GradientSample([table.weight, matrix])
    nothing.close()
    compared = nothing.difference_from(found)
    assert compared.previous_norm == pytest.approx(
        float(torch.cat([dense.flatten(), torch.full((24,), 2.0)]).norm())
    )
    assert (compared.norm, compared.difference) == (0.0, 1.0)


def test_nothing_is_left_on_parameters_and_gradients_are_as_without() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    found = GradientSample([parameter, frozen])
    (parameter * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    found.close()
    found.close()
    assert not parameter._backward_hooks
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0, 2.0, 3.0]
    assert found.difference_from(found).difference == 0.0

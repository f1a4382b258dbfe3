"""The shape of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rematic import BatchShape
from rematic.batch_shape import default_batch_shape


@dataclass
class Bundle:
    ids: torch.Tensor
    name: str = "x"


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def _jagged(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(n, 3) for n in lengths], layout=torch.jagged)


SHAPES: dict[str, tuple[Any, tuple[int, int]]] = {
    "nothing": (None, (1, 1)),
    "no tensors": ({"a": "b", "c": [1, 2]}, (1, 1)),
    "token ids": (_ids(2, 16), (2, 16)),
    "language model": (
        {"input_ids": _ids(2, 16), "attention_mask": _ids(2, 16), "labels": _ids(2, 16)},
        (2, 16),
    ),
    "tuple with class labels": ((_ids(4, 9), _ids(4)), (4, 9)),
    "dataclass": (Bundle(_ids(3, 5)), (3, 5)),
    "nested": ([{"x": (_ids(3, 5),)}], (3, 5)),
    "full attention mask": (
        {"input_ids": _ids(2, 16), "attention_mask": torch.ones(2, 1, 16, 16, dtype=torch.bool)},
        (2, 16),
    ),
    "integer attention mask of four dimensions": (
        {"input_ids": _ids(2, 16), "attention_mask": _ids(2, 1, 16, 16)},
        (2, 16),
    ),
    "three positions per token": (
        {"input_ids": _ids(2, 16), "position_ids": _ids(3, 2, 16)},
        (2, 16),
    ),
    "images beside tokens": (
        {"input_ids": _ids(2, 16), "pixel_values": torch.zeros(2, 3, 8, 8)},
        (2, 16),
    ),
    "embeddings": (torch.zeros(2, 7, 32), (2, 7)),
    "features": (torch.zeros(6, 32), (6, 1)),
    "images": ((torch.zeros(2, 3, 4, 5), _ids(2)), (2, 20)),
    "volumes": (torch.zeros(2, 1, 3, 4, 5), (2, 60)),
    "vector": (torch.zeros(5), (5, 1)),
    "a mask alone": (torch.ones(2, 16, dtype=torch.bool), (2, 16)),
    "scalar": (torch.tensor(1.0), (1, 1)),
    "jagged": (_jagged(2, 5), (2, 4)),
    "jagged beside a smaller one": ({"x": _jagged(2, 5), "mask": torch.zeros(1, 3)}, (2, 4)),
    "empty": (_ids(0, 16), (0, 16)),
    "no images": (torch.zeros(0, 3, 4, 4), (0, 16)),
}


@pytest.mark.parametrize(("batch", "shape"), SHAPES.values(), ids=SHAPES.keys())
def test_the_default_shape(batch: Any, shape: tuple[int, int]) -> None:
    found = default_batch_shape(batch)
    assert (found.batch, found.length) == shape
    assert found.tokens == shape[0] * shape[1]


PADDED = {
    "no mask": ({"input_ids": _ids(2, 3)}, False),
    "all ones": ({"input_ids": _ids(2, 3), "attention_mask": torch.ones(2, 3)}, False),
    "a zero": ({"input_ids": _ids(2, 3), "attention_mask": torch.tensor([[1, 1, 0]])}, True),
    "mask is None": ({"input_ids": _ids(2, 3), "attention_mask": None}, False),
    "not a mapping": ((_ids(2, 3), _ids(2, 3)), False),
}


@pytest.mark.parametrize(("batch", "padded"), PADDED.values(), ids=PADDED.keys())
def test_padding_is_part_of_the_shape(batch: Any, padded: bool) -> None:
    assert default_batch_shape(batch).padded is padded


def test_a_shape_is_a_value() -> None:
    assert BatchShape(batch=2, length=3, padded=False) == BatchShape(
        batch=2, length=3, padded=False
    )

"""Tensors of every dtype and layout, and the comparison of everything about two of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda base: base,
    "transposed": lambda base: base.transpose(0, 2),
    "columns": lambda base: base[:, :, 1:3],
    "every other": lambda base: base[1::2],
    "tail": lambda base: base.flatten()[317:],
    "middle": lambda base: base.flatten()[1001:1003],
    "expanded": lambda base: base[:1, :1].expand(4, 3, -1),
    "overlapping": lambda base: base.flatten().unfold(0, 6, 2),
    "diagonal": lambda base: base[0].diagonal(),
    "channels last": lambda base: base.as_strided((2, 3, 4, 5), (60, 1, 15, 3)),
    "no elements": lambda base: base[:, 2:2],
    "no dimensions": lambda base: base[3, 2, 1],
}


def base_of(dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Returns (12, 11, 10) elements of random bits, those of NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    count = 12 * 11 * 10
    raw = torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    flat = raw % 2 == 0 if dtype is torch.bool else raw.view(dtype)
    return flat.reshape(12, 11, 10)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as bytes, in order, as they are read."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor.resolve_conj())
    return plain.flatten().view(torch.uint8)


def assert_same(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Compares all that a kernel can see, but not the address."""
    assert found is not None
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    assert found.dtype is expected.dtype
    assert found.device == expected.device
    assert found.is_conj() == expected.is_conj()
    assert found.requires_grad is False
    assert torch.equal(bits_of(found), bits_of(expected))
    if expected.numel() > 0:
        places = [t.storage_offset() * t.element_size() % 256 for t in (found, expected)]
        assert places[0] == places[1]

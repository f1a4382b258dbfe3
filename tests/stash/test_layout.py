"""Which bytes are needed, and which tensors no stash takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rematic.stash import refusal
from rematic.stash.layout import ALIGNMENT_BYTES, spans_of
from tests.stash.bits import LAYOUTS, base_of


class Subclass(torch.Tensor):
    pass


def freed_tensor() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "subclass": (
        lambda: torch.ones(4).as_subclass(Subclass),
        "it is a Subclass, whose inner tensors are not seen",
    ),
    "sparse": (
        lambda: torch.ones(4).to_sparse(),
        "its layout is torch.sparse_coo: expected torch.strided",
    ),
    "meta": (lambda: torch.ones(4, device="meta"), "it is on the device meta"),
    "negated": (
        lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
        "its elements are read negated (a view of a conjugate)",
    ),
    "freed": (freed_tensor, "its storage was freed (0 bytes are left)"),
    "small": (lambda: torch.ones(3), "its storage has 12 bytes, fewer than 16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name: str) -> None:
    make, reason = REFUSED[name]
    tensor = make()
    assert refusal(tensor, min_bytes=16) == reason
    assert spans_of([tensor], min_bytes=16) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_layouts_are_taken(layout: str) -> None:
    assert refusal(LAYOUTS[layout](base_of(torch.float32)), min_bytes=16) is None


def test_a_parameter_is_taken_as_the_caller_knows_what_is_external() -> None:
    assert refusal(torch.nn.Parameter(torch.ones(4))) is None


def test_a_small_view_counts_by_the_storage_that_it_holds() -> None:
    assert refusal(torch.ones(1000)[:2], min_bytes=4000) is None


@pytest.mark.parametrize(
    ("start", "stop", "start_bytes", "num_bytes"),
    [(0, 1000, 0, 4000), (64, 1000, 256, 3744), (70, 80, 256, 64), (5, 5, 0, 0)],
    ids=["all", "aligned", "rounded down", "empty"],
)
def test_the_smallest_range_is_taken_from_an_aligned_start(
    start: int, stop: int, start_bytes: int, num_bytes: int
) -> None:
    (span,) = spans_of([torch.ones(1000)[start:stop]], min_bytes=0)
    assert (span.start_bytes, span.num_bytes) == (start_bytes, num_bytes)
    assert span.start_bytes % ALIGNMENT_BYTES == 0


def test_views_of_one_storage_lie_in_one_span() -> None:
    base, other = torch.ones(100, 10), torch.ones(50)
    tensors = [base[30:40], other, base.t()[:, 80:], base.view(torch.int32)[35]]
    first, second = spans_of(tensors, min_bytes=0)
    assert first.positions == (0, 2, 3)
    assert second.positions == (1,)
    assert (first.start_bytes, first.num_bytes) == (1024, 4000 - 1024)  # 30 rows are 1,200 bytes


def test_views_may_be_kept_apart_by_dtype() -> None:
    base = torch.ones(100)
    tensors = [base, base.view(torch.int32), base[10:]]
    floats, integers = spans_of(tensors, min_bytes=0, by_dtype=True)
    assert (floats.positions, integers.positions) == ((0, 2), (1,))

"""Eight bits: how far off, how small, and what stays with the caller."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rematic.stash import CompressStash, Handle, QuantizationError, quantization_error

pytest.importorskip("bitsandbytes", reason="an optional package")

# The code of bitsandbytes has 64 steps between 0.1 and 1 of a block's largest element; on a CPU it
# picks the nearest one but for 0.3 % of a step.
HALF_STEP = 0.9 / 64 / 2 * 1.003
ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture
def stash() -> CompressStash:
    return CompressStash(min_bytes=0)


def taken(handles: list[Any]) -> list[Handle]:
    return [handle for handle in handles if handle is not None]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("block_size", [64, 256, 4096])
def test_how_far_off_it_is(dtype: torch.dtype, block_size: int) -> None:
    stash = CompressStash(min_bytes=0, block_size=block_size)
    tensor = normal(300, 1001, dtype=dtype)
    (handle,) = taken(stash.put([tensor]))
    found = handle.get()
    assert (found.dtype, found.shape, found.stride()) == (dtype, tensor.shape, tensor.stride())

    before, after = tensor.double().flatten(), found.double().flatten()
    padded = torch.nn.functional.pad((after - before).abs(), (0, -before.numel() % block_size))
    sizes = torch.nn.functional.pad(before.abs(), (0, -before.numel() % block_size))
    largest = sizes.view(-1, block_size).amax(1)
    error = padded.view(-1, block_size).amax(1)
    assert (error <= largest * (HALF_STEP + ROUNDING[dtype])).all()

    relative = ((after - before).norm() / before.norm()).item()
    assert 0.008 < relative < 0.0145  # measured 0.0095 (64), 0.0109 (256), 0.0131 (4096)
    told = quantization_error([handle])
    assert told.relative_l2 == pytest.approx(relative, rel=1e-3)
    assert told.max_abs == pytest.approx((after - before).abs().max().item(), rel=1e-6)
    assert told.num_elements == 300 * 1001
    assert told.relative_max == pytest.approx(told.max_abs / before.abs().max().item(), rel=1e-6)


def test_what_it_holds_to_the_byte(stash: CompressStash) -> None:
    base = normal(1000, 64)
    handles = taken(stash.put([base, base.t(), base[:10]]))
    stored = 64_000 + 64_000 // 256 * 4
    assert stash.used_bytes == stored
    assert [handle.stored_bytes for handle in handles] == [stored] * 3
    assert [handle.nbytes for handle in handles] == [256_000] * 3
    first, second, third = (handle.get() for handle in handles)
    assert torch.equal(first.t(), second)
    assert torch.equal(first[:10], third)
    assert first.untyped_storage() is third.untyped_storage()
    handles.clear()
    assert stash.used_bytes == 0


def test_it_says_that_it_is_lossy(stash: CompressStash) -> None:
    assert (stash.name, stash.lossy) == ("compress", True)


def test_more_than_one_chunk_at_a_time(stash: CompressStash) -> None:
    tensor = normal(2**20 + 2**19 + 77)
    tensor[2**20] = 50  # the first of its chunk
    (handle,) = taken(stash.put([tensor]))
    (again,) = taken(CompressStash(min_bytes=0).put([tensor[2**20 :].clone()]))
    assert torch.equal(handle.get()[2**20 :], again.get())
    assert quantization_error([handle]).max_abs <= 50 * HALF_STEP


KEPT: dict[str, Callable[[], torch.Tensor]] = {
    "integers": lambda: torch.arange(1000),
    "booleans": lambda: torch.ones(1000, dtype=torch.bool),
    "float64": lambda: torch.ones(1000, dtype=torch.float64),
    "complex": lambda: torch.ones(1000, dtype=torch.complex64),
    "mask of infinities": lambda: torch.full((100, 100), -math.inf).triu(1),
    "undefined": lambda: torch.full((1000,), math.nan),
    "no elements": lambda: torch.ones(0, 5),
    "sparse": lambda: torch.eye(10).to_sparse(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_stays_with_the_caller(stash: CompressStash, name: str) -> None:
    first, kept, last = stash.put([normal(100), KEPT[name](), normal(50)])
    assert kept is None
    assert first is not None
    assert last is not None


def test_small_storages_stay_with_the_caller() -> None:
    handles = CompressStash().put([normal(2**14), normal(2**14 - 1)])
    assert [handle is not None for handle in handles] == [True, False]


@pytest.mark.parametrize(
    "make",
    [
        lambda base: [base[:, :30]],
        lambda base: [base[:, 40:], base[:50, :20]],
        lambda base: [base.as_strided((20, 4), (200, 2))],
    ],
    ids=["left columns", "two pieces", "every other"],
)
@pytest.mark.parametrize("noise", [1e30, math.inf, math.nan], ids=str)
def test_what_lies_between_tensors_does_not_spoil_them(
    stash: CompressStash, make: Callable[[torch.Tensor], list[torch.Tensor]], noise: float
) -> None:
    def tensors() -> list[torch.Tensor]:
        used, base = torch.zeros(100, 100, dtype=torch.bool), normal(100, 100)
        for view in make(used):
            view.fill_(True)
        return make(base.masked_fill_(~used, noise))

    handles = taken(stash.put(tensors()))
    assert len(handles) == len(tensors())
    for handle, tensor in zip(handles, tensors(), strict=True):
        found = handle.get()
        assert found.stride() == tensor.stride()
        assert ((found - tensor).norm() / tensor.norm()).item() < 0.0145


def test_expanded_and_split_tensors_have_no_gaps(stash: CompressStash) -> None:
    base = normal(10, 30)
    tensors = [*base.chunk(3, dim=1), normal(40).expand(5, 40)]
    handles = taken(stash.put(tensors))
    assert stash.used_bytes == 300 + 2 * 4 + 40 + 4
    for handle, tensor in zip(handles, tensors, strict=True):
        assert torch.allclose(handle.get(), tensor, atol=4 * HALF_STEP)


def test_the_error_of_a_put_counts_each_storage_once(stash: CompressStash) -> None:
    base, other = normal(1000), normal(1000) * 100
    handles = stash.put([base, base[:500], torch.arange(10), other, torch.zeros(300)])
    together = quantization_error(handles)
    alone = quantization_error(handles[3:4])
    assert together.num_elements == 2300
    assert together.max_abs == alone.max_abs
    assert together.relative_l2 == pytest.approx(alone.relative_l2, rel=1e-3)
    assert quantization_error([None, handles[4]]) == QuantizationError(
        relative_l2=0.0, relative_max=0.0, max_abs=0.0, num_elements=300
    )


def test_an_error_that_was_not_measured_does_not_count(stash: CompressStash) -> None:
    handles = [*stash.put([normal(1000)], measured=False), *stash.put([torch.zeros(300)])]
    assert quantization_error(handles).num_elements == 300
    assert taken(handles)[0].get().ne(0).any()


def test_zeros_and_one_element_and_overflow(stash: CompressStash) -> None:
    large = torch.full((256,), 65504.0, dtype=torch.float16)
    zeros, one, top = taken(stash.put([torch.zeros(1000), torch.tensor(3.5), large]))
    assert zeros.get().eq(0).all()
    assert one.get().item() == 3.5
    assert top.get().eq(65504).all()


def test_it_needs_little_memory_beside_what_it_makes() -> None:
    from rematic.memory import SimulatedProbe

    stash = CompressStash()
    stash.put([normal(1000)])  # bitsandbytes makes its code once
    tensor = normal(2**23)
    with SimulatedProbe() as probe:
        probe.track([tensor])
        handles = stash.put([tensor])
        assert probe.allocated_bytes() == tensor.nbytes + stash.used_bytes
        assert probe.peak_allocated_bytes - probe.allocated_bytes() < 20 * 2**20
        del tensor
        restored = taken(handles)[0].get()
        assert probe.allocated_bytes() == restored.nbytes + stash.used_bytes


def test_if_memory_runs_out_nothing_is_taken() -> None:
    from rematic.memory import SimulatedProbe

    stash = CompressStash()
    tensors = [normal(2**15), normal(2**21)]
    stash.put(tensors)
    with SimulatedProbe() as probe:
        probe.track(tensors)
        probe.budget_bytes = probe.allocated_bytes() + 2**20
        with pytest.raises(torch.OutOfMemoryError):
            stash.put(tensors)
    gc.collect()
    assert stash.used_bytes == 0
    assert torch.equal(tensors[1], normal(2**21))


def test_a_hundred_puts_leave_nothing_behind(stash: CompressStash) -> None:
    def use() -> None:
        base = normal(64, 64)
        first, second = taken(stash.put([base, base.t()]))
        assert torch.equal(first.get().t(), second.get())

    for _ in range(10):
        use()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(100):
            use()
        grown = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert grown < 20
    assert stash.used_bytes == 0


def test_a_block_size_that_bitsandbytes_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"block_size is 100: expected one of \[64, 128, 256"):
        CompressStash(block_size=100)


def test_without_bitsandbytes_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ValueError, match=r"compress needs bitsandbytes, which cannot be imported"):
        CompressStash()

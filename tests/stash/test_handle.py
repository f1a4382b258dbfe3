"""What comes back is what was put away: every dtype and layout, from every lossless stash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rematic.stash import DiskStash, HostStash, Stash
from rematic.stash.copies import Copies, PlainCopies, StreamCopies
from tests.stash.bits import DTYPES, LAYOUTS, assert_same, base_of
from tests.stash.simulated_device import SimulatedDevice


def on_disk(directory: Path) -> Stash:
    return DiskStash(directory, min_bytes=0)


def on_host(directory: Path) -> Stash:
    return HostStash(min_bytes=0, make_copies=lambda device: PlainCopies())


def beside(directory: Path) -> Stash:
    class EagerDevice(SimulatedDevice):
        """Waits for every copy."""

        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            super().copy(target, source)
            self._current.synchronize()

    def make(device: torch.device) -> Copies:
        return StreamCopies(EagerDevice())

    return HostStash(min_bytes=0, make_copies=make)


MAKERS: list[Callable[[Path], Stash]] = [on_disk, on_host, beside]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def stash(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stash]:
    made: Stash = request.param(tmp_path)
    yield made
    made.close()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_and_layout_comes_back_to_the_bit(stash: Stash, dtype: torch.dtype) -> None:
    expected = [make(base_of(dtype, seed=seed)) for seed, make in enumerate(LAYOUTS.values())]
    handles = stash.put([make(base_of(dtype, seed=s)) for s, make in enumerate(LAYOUTS.values())])
    for handle, tensor in zip(handles, expected, strict=True):
        assert handle is not None
        assert_same(handle.get(), tensor)


def test_conjugates_and_views_of_complex_numbers(stash: Stash) -> None:
    def make() -> list[torch.Tensor]:
        base = base_of(torch.complex64)
        return [base.conj(), torch.view_as_real(base), base.real, base.imag, base.mT.conj()[2]]

    handles = stash.put(make())
    for handle, tensor in zip(handles, make(), strict=True):
        assert handle is not None
        assert_same(handle.get(), tensor)
    assert len({id(handle.block) for handle in handles}) == 1  # type: ignore[union-attr]


def test_views_share_the_storage_that_comes_back(stash: Stash) -> None:
    base = torch.zeros(64, 64)
    whole, row, again = (h for h in stash.put([base, base[7], base]) if h is not None)
    assert stash.used_bytes == 64 * 64 * 4
    tensor = whole.get()
    row.get().fill_(5)
    assert tensor[7].eq(5).all()
    assert tensor.sum() == 5 * 64
    storages = {id(t.untyped_storage()) for t in (tensor, row.get(), again.get())}
    assert len(storages) == 1


def test_a_storage_is_moved_once_and_counted_once(stash: Stash) -> None:
    base, other = torch.ones(1024, 16), torch.ones(1024)
    handles = stash.put([base, base.t(), base[:512], other])
    assert stash.used_bytes == 65536 + 4096
    assert [h.nbytes for h in handles if h is not None] == [65536, 65536, 65536, 4096]
    assert [h.stored_bytes for h in handles if h is not None] == [65536, 65536, 65536, 4096]
    del handles[3]
    assert stash.used_bytes == 65536
    del handles[:2]
    assert stash.used_bytes == 65536
    handles.clear()
    assert stash.used_bytes == 0


def test_storages_that_are_too_small_stay_with_the_caller(stash: Stash) -> None:
    stash.min_bytes = 4096  # type: ignore[attr-defined]
    handles = stash.put([torch.ones(1024), torch.ones(1023), torch.ones(2000)[:3]])
    assert [handle is not None for handle in handles] == [True, False, True]


def test_nothing_to_put(stash: Stash) -> None:
    assert list(stash.put([])) == []
    assert stash.lossy is False


def test_it_can_be_read_many_times_and_changed_without_harm_to_others(stash: Stash) -> None:
    first, second = (h for h in stash.put([torch.ones(4096), torch.full((4096,), 2.0)]) if h)
    for _ in range(3):
        assert first.get().sum() == 4096
    first.get().zero_()
    assert second.get().eq(2).all()
    stash.prefetch([first, second])
    assert second.get().eq(2).all()


def test_it_serves_saved_tensors_through_backward(stash: Stash) -> None:
    """F18: with a branch that backward does not visit, nothing stays behind."""

    def step(*, moved: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        inputs = torch.randn(64, 64, requires_grad=True)

        def pack(tensor: torch.Tensor) -> object:
            (handle,) = stash.put([tensor.detach()]) if tensor.shape == inputs.shape else (None,)
            return tensor if handle is None else handle

        def unpack(held: object) -> torch.Tensor:
            return held if isinstance(held, torch.Tensor) else held.get()  # type: ignore[attr-defined,no-any-return]

        hooks = torch.autograd.graph.saved_tensors_hooks
        with hooks(pack, unpack) if moved else torch.enable_grad():
            hidden = first(inputs).exp()
            unused = hidden.sin().square()
            loss = second(hidden.tanh()).square().sum()
        loss.backward()
        del unused
        leaves = (inputs, *first.parameters(), *second.parameters())
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    expected = step(moved=False)
    assert len(expected) == 5
    for _ in range(20):
        for grad, plain in zip(step(moved=True), expected, strict=True):
            assert torch.equal(grad, plain)
        assert stash.used_bytes == 0

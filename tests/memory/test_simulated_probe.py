"""The simulated probe: exact live bytes, and failures where they are asked for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rematic.memory import MemorySnapshot, Probe, SimulatedProbe, is_out_of_memory, requested_bytes

FLOAT = 4


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Bytes must fall by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def floats(number: int) -> torch.Tensor:
    return torch.ones(number)


def test_it_is_a_probe() -> None:
    assert isinstance(SimulatedProbe(), Probe)
    assert SimulatedProbe().kind == "simulated"


@pytest.mark.usefixtures("no_collector")
def test_bytes_rise_with_tensors_and_fall_to_zero_with_the_last() -> None:
    with SimulatedProbe() as probe:
        assert probe.allocated_bytes() == 0
        first = floats(100)
        assert probe.allocated_bytes() == 400
        second = first + 1
        assert probe.allocated_bytes() == 800
        del first
        assert probe.allocated_bytes() == 400
        del second
        assert probe.allocated_bytes() == 0
        assert probe.peak_allocated_bytes == 800


def test_views_and_in_place_ops_add_nothing() -> None:
    with SimulatedProbe() as probe:
        base = floats(100)
        views = [base.view(10, 10), base[3:], base.t(), base.detach(), base.expand(4, 100)]
        base.add_(1).mul_(2)
        base.copy_(base.flip(0))
        torch.add(base, 1, out=base)
        assert probe.allocated_bytes() == 400
        del base
        assert probe.allocated_bytes() == 400, "the views hold the storage"
        del views
        assert probe.allocated_bytes() == 0


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "untracked"])
def test_aliases_of_inputs_add_nothing(tracked: bool) -> None:
    weight = nn.Parameter(floats(100))
    with SimulatedProbe() as probe:
        if tracked:
            probe.track([weight])
        before = probe.allocated_bytes()
        views = [weight.detach(), weight.view(10, 10), weight.data, weight.unbind()[0]]
        weight.detach().add_(1)
        assert probe.allocated_bytes() == before == (400 if tracked else 0)
        assert probe.num_allocations == 0
        del views


def test_tracked_tensors_count_once_until_they_die() -> None:
    probe = SimulatedProbe()
    weights = [floats(100), floats(50)]
    probe.track(weights)
    probe.track(tensor.view(-1) for tensor in weights)
    assert probe.allocated_bytes() == probe.peak_allocated_bytes == 600
    assert probe.num_allocations == 0
    del weights[0]
    assert probe.allocated_bytes() == 200


@pytest.mark.usefixtures("no_collector")
def test_what_only_a_graph_holds_counts() -> None:
    leaf = torch.ones(100, requires_grad=True)
    with SimulatedProbe() as probe:
        loss = leaf.exp().exp().sum()  # each exp saves its output
        assert probe.allocated_bytes() == 2 * 400 + FLOAT
        gc.collect()
        assert probe.allocated_bytes() == 2 * 400 + FLOAT
        loss.backward()
        assert probe.allocated_bytes() == 400 + FLOAT, "the gradient and the loss"
        del loss
        leaf.grad = None
        assert probe.allocated_bytes() == 0


@pytest.mark.usefixtures("no_collector")
def test_a_python_name_that_comes_and_goes_changes_nothing() -> None:
    leaf = torch.ones(100, requires_grad=True)
    with SimulatedProbe() as probe:
        loss = leaf.exp().sum()
        node = loss.grad_fn.next_functions[0][0]
        saved = node._saved_result.untyped_storage()
        assert probe.allocated_bytes() == 400 + FLOAT
        del saved
        assert probe.allocated_bytes() == 400 + FLOAT
        del node, loss
        assert probe.allocated_bytes() == 0


@pytest.mark.usefixtures("no_collector")
def test_an_address_that_is_used_again_is_counted_again() -> None:
    with SimulatedProbe() as probe:
        addresses = set()
        for _ in range(50):
            tensor = floats(1000)
            addresses.add(tensor.data_ptr())
            assert probe.allocated_bytes() == 4000
            del tensor
            assert probe.allocated_bytes() == 0
        assert len(addresses) < 50, "no address came twice: this test shows nothing"
        assert probe.num_allocations == 50


def test_tensors_made_from_python_values_count() -> None:
    with SimulatedProbe() as probe:
        tensor = torch.tensor([1.0, 2.0, 3.0])
        assert probe.allocated_bytes() == 12
        del tensor
        assert probe.allocated_bytes() == 0


def test_a_storage_that_grows_counts_with_its_new_size() -> None:
    with SimulatedProbe() as probe:
        tensor = torch.empty(0)
        assert probe.num_allocations == 0
        tensor.resize_(100)
        assert probe.allocated_bytes() == 400
        tensor.untyped_storage().resize_(0)
        tensor.detach()  # seen when an op next returns the storage
        assert probe.allocated_bytes() == 0


def test_tensors_without_storage_are_not_counted() -> None:
    sparse = torch.eye(3).to_sparse()
    with SimulatedProbe(budget_bytes=1) as probe:
        probe.track([sparse])
        total = sparse + sparse
        assert total.is_sparse
        assert probe.allocated_bytes() == 0
    assert torch.equal(total.to_dense(), 2 * torch.eye(3))


class Pair(torch.Tensor):
    """A wrapper subclass, as `DTensor` is one: no storage of its own, two tensors inside."""

    left: torch.Tensor
    right: torch.Tensor

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> Pair:
        pair: Pair = torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)
        pair.left, pair.right = left, right
        return pair

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        assert len(args) == 1
        return cls(func(args[0].left, **(kwargs or {})), func(args[0].right, **(kwargs or {})))


def test_of_a_wrapper_the_tensors_inside_count() -> None:
    probe = SimulatedProbe()
    pair = Pair(floats(10), floats(10))
    probe.track([pair])
    assert probe.allocated_bytes() == 80
    with probe:
        other = pair.exp()
        assert probe.allocated_bytes() == 160
        del other
        assert probe.allocated_bytes() == 80


def test_every_output_of_an_op_counts() -> None:
    with SimulatedProbe() as probe:
        values, positions = floats(16).sort()
        assert probe.allocated_bytes() == 16 * FLOAT + 16 * 8
        assert probe.num_allocations == 3
        del values
        assert probe.allocated_bytes() == 16 * 8
        del positions


def test_the_peak_is_exact_and_starts_again_on_request() -> None:
    with SimulatedProbe() as probe:
        big = floats(1000)
        small = floats(10)
        del big
        assert probe.peak_allocated_bytes == 4040
        probe.reset_peak()
        assert probe.peak_allocated_bytes == 40
        big = floats(100)
        assert probe.peak_allocated_bytes == 440
        del big, small


def test_a_snapshot_knows_everything() -> None:
    with SimulatedProbe(budget_bytes=1000) as probe:
        tensor = floats(100)
        with pytest.raises(torch.OutOfMemoryError):
            floats(1000)
        del tensor
        tensor = floats(10)
    assert probe.snapshot() == MemorySnapshot(
        allocated_bytes=40,
        reserved_bytes=40,
        peak_allocated_bytes=400,
        capacity_bytes=1000,
        inactive_split_bytes=0,
        num_alloc_retries=0,
        num_ooms=1,
    )
    del tensor


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_collector")
def test_over_budget_the_new_output_is_dropped_first() -> None:
    with SimulatedProbe(budget_bytes=1000) as probe:
        kept = floats(200)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            kept.clone()
        assert probe.allocated_bytes() == 800, "dropped although the error is still alive"
        assert probe.peak_allocated_bytes == 800, "what failed was never there"
        assert str(caught.value) == (
            "Simulated device out of memory. Tried to allocate 800 bytes in aten.clone.default; "
            "800 bytes in use of a budget of 1000."
        )
        assert is_out_of_memory(caught.value)
        assert requested_bytes(caught.value) == 800
        kept.add_(1)
        assert floats(50).shape == (50,), "exactly the budget fits"


def test_ops_that_allocate_nothing_go_on_over_budget() -> None:
    weight = floats(100)
    with SimulatedProbe(budget_bytes=100) as probe:
        probe.track([weight])
        weight.add_(1).view(10, 10)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4 bytes in aten\.sum"):
            weight.sum()
        probe.budget_bytes = 1000
        assert weight.sum() == 200


def test_it_fails_before_a_listed_op_and_once() -> None:
    tensor = torch.zeros(10)
    with SimulatedProbe(fail_at_ops=[2]) as probe:
        tensor.add_(1)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            tensor.add_(1)
        tensor.add_(1)
    assert torch.equal(tensor, torch.full((10,), 2.0)), "the second op has not run"
    assert (probe.num_ops, probe.num_ooms) == (3, 1)
    assert str(caught.value) == (
        "Simulated device out of memory. Failure injected at op 2 in aten.add_.Tensor; "
        "0 bytes in use of no budget."
    )
    assert is_out_of_memory(caught.value)
    assert requested_bytes(caught.value) == 1


def test_it_fails_at_a_listed_allocation_and_once() -> None:
    with SimulatedProbe(fail_at_allocations=[2]) as probe:
        first = floats(10)
        first.add_(1)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            first.clone()
        assert probe.allocated_bytes() == 40
        second = first.clone()
        assert probe.num_allocations == 3
        assert probe.allocated_bytes() == 80
    assert str(caught.value) == (
        "Simulated device out of memory. Failure injected at allocation 2, tried to allocate "
        "40 bytes in aten.clone.default; 40 bytes in use of no budget."
    )
    assert requested_bytes(caught.value) == 40
    del second


@pytest.mark.parametrize("failing", [2, 3])
def test_an_op_with_several_outputs_fails_at_each_of_them(failing: int) -> None:
    with SimulatedProbe(fail_at_allocations=[failing]) as probe:
        tensor = floats(16)
        with pytest.raises(torch.OutOfMemoryError, match=f"at allocation {failing}, tried"):
            tensor.sort()
        assert probe.allocated_bytes() == 16 * FLOAT
        assert probe.num_allocations == failing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget_bytes": 0}, "budget_bytes is 0: expected more than 0, or None"),
        ({"fail_at_ops": [3, 0]}, "fail_at_ops holds 0: expected numbers from 1"),
        ({"fail_at_allocations": [-1]}, "fail_at_allocations holds -1: expected numbers from 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedProbe(**arguments)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "arguments", [{"budget_bytes": 500}, {"fail_at_allocations": [2]}], ids=["budget", "position"]
)
def test_the_error_holds_neither_output_nor_input_by_the_probe(arguments: dict[str, Any]) -> None:
    dropped: list[weakref.ref[torch.UntypedStorage]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            output = func(*args, **(kwargs or {}))
            dropped.append(weakref.ref(output.untyped_storage()))
            return output

    with Watch(), SimulatedProbe(**arguments) as probe:
        tensor = floats(100)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            tensor.clone()
        assert [reference() is None for reference in dropped] == [False, True]
    trace = caught.value.__traceback__
    while trace is not None:
        if trace.tb_frame.f_locals.get("self") is probe:
            assert not {"args", "kwargs", "output"} & set(trace.tb_frame.f_locals)
        trace = trace.tb_next


@pytest.mark.usefixtures("no_collector")
def test_the_probe_is_in_no_cycle_and_ends_before_what_it_counted() -> None:
    tensor = floats(10)
    with SimulatedProbe() as probe:
        probe.track([tensor])
        other = tensor + 1
    reference = weakref.ref(probe)
    ledger = weakref.ref(probe._live)
    del probe
    assert reference() is None
    assert ledger() is None
    del tensor, other  # nobody is left to be told


def nothing() -> None:
    pass


# --- under other modes ------------------------------------------------------------------------


class Retry(TorchDispatchMode):
    """Runs an op again for as long as memory runs out, freeing something each time."""

    def __init__(self, relieve: Callable[[], object]) -> None:
        super().__init__()
        self.relieve = relieve
        self.num_retries = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        while True:
            try:
                return func(*args, **(kwargs or {}))
            except torch.OutOfMemoryError:
                self.num_retries += 1
            self.relieve()


def test_a_mode_inside_it_can_free_memory_and_run_the_op_again() -> None:
    with SimulatedProbe(budget_bytes=1000) as probe:
        cache = [floats(50), floats(50), floats(50)]
        with Retry(cache.pop) as retry:
            result = floats(200)
        assert retry.num_retries == 2
        assert len(cache) == 1
        assert probe.allocated_bytes() == 1000
        assert probe.num_ops == 6
        assert probe.num_allocations == 6
        del result


# Outside: an op that draws numbers and fails has drawn them, and `Retry` does not restore them.
DATA = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))


def small_step() -> list[torch.Tensor]:
    """Two steps of a model without randomness; loss, gradients and weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    results = []
    for features in DATA:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), torch.arange(6) % 4)
        loss.backward()
        results += [loss.detach()] + [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    return results + [parameter.detach() for parameter in model.parameters()]


def test_failures_all_over_a_step_are_answered_by_running_the_op_again() -> None:
    expected = small_step()
    with SimulatedProbe() as plain:
        counted = small_step()
    assert len(counted) == len(expected)
    for position in range(1, plain.num_allocations + 1, 5):
        with SimulatedProbe(fail_at_allocations=[position]) as probe, Retry(nothing) as retry:
            results = small_step()
        assert retry.num_retries == probe.num_ooms == 1
        assert probe.num_ops == plain.num_ops + 1
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), position


def test_failures_everywhere_are_all_raised() -> None:
    with SimulatedProbe(fail_at_ops=range(1, 2000, 2)) as probe, Retry(nothing) as retry:
        results = small_step()
    assert all(torch.equal(a, b) for a, b in zip(results, small_step(), strict=True))
    assert retry.num_retries == probe.num_ooms == probe.num_ops // 2


@pytest.mark.usefixtures("no_collector")
def test_after_a_step_only_what_is_returned_is_left() -> None:
    with SimulatedProbe() as probe:
        results = small_step()
        assert probe.allocated_bytes() == sum(tensor.nbytes for tensor in results)
        del results
        assert probe.allocated_bytes() == 0


# --- against a model of the ledger ------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["new", "view", "drop", "inplace"]), st.integers(0, 9))))
def test_bytes_are_those_of_the_distinct_storages_alive(actions: list[tuple[str, int]]) -> None:
    tensors: list[torch.Tensor] = []
    with SimulatedProbe() as probe:
        for action, number in actions:
            if action == "new":
                tensors.append(floats(number + 1))
            elif tensors:
                chosen = tensors[number % len(tensors)]
                if action == "view":
                    tensors.append(chosen[:1])
                elif action == "inplace":
                    chosen.add_(1)
                else:
                    del chosen, tensors[number % len(tensors)]
            chosen = None
            alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            assert probe.allocated_bytes() == sum(alive.values())
        tensors.clear()
        assert probe.allocated_bytes() == 0

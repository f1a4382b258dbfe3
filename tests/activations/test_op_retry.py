"""An op that runs out of memory is run again, with the same bits, or its failure stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.op_retry_sweep import OPTIMIZERS, Failures, run_plain, run_steps, sweep
from rematic.activations import OpRetry
from rematic.memory import SimulatedProbe
from tests.activations.parity import same_bits

# A slice of benchmarks/op_retry_sweep.py, which leaves no position out.
SLICES = [
    ("adamw-foreach", True, "before an op", 7),
    ("adamw-foreach", False, "before an op", 11),
    ("adamw-foreach", True, "after an allocation", 7),
    ("adamw-loop", True, "before an op", 29),
    ("adamw-fused", True, "before an op", 19),
    ("sgd-momentum", True, "before an op", 19),
]


@pytest.mark.parametrize(("optimizer", "kept", "kind", "stride"), SLICES)
def test_a_failure_at_any_op_of_a_step_is_answered_at_that_op(
    optimizer: str, kept: bool, kind: str, stride: int
) -> None:
    tally = sweep(optimizer, kept=kept, kind=kind, stride=stride)
    assert tally.positions >= 300 // stride
    assert tally.recovered == tally.positions
    assert tally.wrong == tally.stopped_cleanly == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_several_failures_in_one_step_are_all_answered(optimizer: str) -> None:
    plain, whole = run_plain(optimizer), run_steps(optimizer)
    assert whole.wrong(plain) == []
    (num_ops, _) = whole.sizes[1]
    positions = tuple(range(5, num_ops, 17))
    found = run_steps(optimizer, Failures(step=1, kind="before an op", positions=positions))
    assert found.num_retries >= len(positions)
    assert found.wrong(plain) == []


# --- ops that are half done when they fail --------------------------------------------------------


class FailsHalfway(TorchDispatchMode):
    """Runs an op whose name matches and then fails, once, as a kernel that allocates late does."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.num_failures = word, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.word in str(func) and not self.num_failures:
            self.num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return result


def _dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5)


def _batch_norm(x: torch.Tensor) -> torch.Tensor:
    mean, variance = _batch_norm.statistics  # type: ignore[attr-defined]
    return F.batch_norm(x, mean, variance, training=True)


def _generator(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape, generator=_generator.given)  # type: ignore[attr-defined]


HALFWAY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "dropout": (_dropout, "bernoulli"),
    "fused dropout": (lambda x: torch.native_dropout(x, 0.5, True)[0], "native_dropout"),
    "bernoulli": (torch.bernoulli, "bernoulli"),
    "randn": (torch.randn_like, "randn"),
    "randperm": (lambda x: torch.randperm(9) + 0 * x.sum().long(), "randperm"),
    "multinomial": (lambda x: torch.multinomial(x, 3), "multinomial"),
    "batch norm": (_batch_norm, "batch_norm"),
    "generator": (_generator, "rand"),
    "bernoulli in place": (lambda x: x.clone().bernoulli_(0.5), "bernoulli_"),
    "normal in place": (lambda x: x.clone().normal_(), "normal_"),
}


def _state() -> list[torch.Tensor]:
    _batch_norm.statistics = (torch.zeros(6), torch.ones(6))  # type: ignore[attr-defined]
    _generator.given = torch.Generator().manual_seed(4)  # type: ignore[attr-defined]
    torch.manual_seed(5)
    return list(_batch_norm.statistics)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("op", "word"), HALFWAY.values(), ids=HALFWAY.keys())
def test_generators_and_statistics_of_a_failed_op_are_put_back(
    op: Callable[[torch.Tensor], torch.Tensor], word: str
) -> None:
    x = torch.rand(4, 6, generator=torch.Generator().manual_seed(2))
    statistics = _state()
    wanted = [op(x), *statistics, torch.get_rng_state(), _generator.given.get_state()]  # type: ignore[attr-defined]
    statistics = _state()
    broken = FailsHalfway(word)
    with broken, OpRetry(lambda num_bytes, where: 1):
        found = [op(x)]
    found += [*statistics, torch.get_rng_state(), _generator.given.get_state()]  # type: ignore[attr-defined]
    assert broken.num_failures == 1
    assert all(map(same_bits, found, wanted))


# --- ops that may not run again -------------------------------------------------------------------


def _lists_of_two_dtypes() -> None:
    torch._foreach_add_(
        [torch.ones(2), torch.ones(2)], [torch.ones(2, dtype=torch.float64), torch.ones(2)]
    )


def _out_over_an_input() -> None:
    x = torch.ones(4)
    torch.add(x[:2], 1, out=x[2:])


UNSAFE: dict[str, tuple[Callable[[], object], str]] = {
    "out= of what it reads": (_out_over_an_input, "add.out"),
    "unknown in-place op": (lambda: torch.ones(3).cumprod_(0), "cumprod_"),
    "lists whose types are promoted": (_lists_of_two_dtypes, "_foreach_add_"),
}


@pytest.mark.parametrize(("op", "word"), UNSAFE.values(), ids=UNSAFE.keys())
def test_an_op_that_may_be_half_done_is_not_run_again(op: Callable[[], object], word: str) -> None:
    asked: list[str] = []

    def relieve(num_bytes: int, where: str) -> int:
        asked.append(where)
        return 1

    broken = FailsHalfway(word)
    with pytest.raises(torch.OutOfMemoryError), broken, OpRetry(relieve):
        op()
    assert broken.num_failures == 1
    assert asked == []


@pytest.mark.parametrize(
    ("op", "word"),
    [
        (lambda x: torch.add(x, 1, out=torch.empty(3)), "add.out"),
        (lambda x: torch.topk(x, 2, out=(torch.empty(2), torch.empty(2).long()))[0], "topk.values"),
        (lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (2,)), "set_"),
    ],
)
def test_an_op_that_only_writes_its_outputs_is_run_again(
    op: Callable[[torch.Tensor], torch.Tensor], word: str
) -> None:
    x = torch.arange(3.0)
    broken = FailsHalfway(word)
    with broken, OpRetry(lambda *_: 1):
        found = op(x)
    assert broken.num_failures == 1
    assert same_bits(found, op(x))


def test_a_failure_stands_when_nothing_could_be_freed() -> None:
    asked: list[tuple[int, str]] = []

    def relieve(num_bytes: int, where: str) -> int:
        asked.append((num_bytes, where))
        return 0

    with (
        pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 MiB") as caught,
        FailsHalfway("aten.exp"),
        OpRetry(relieve),
    ):
        torch.ones(3).exp()
    (answer,) = asked
    assert answer[0] >= 2 << 20
    assert answer[1] == "aten.exp.default"
    assert caught.value.__context__ is None, "the first failure is not kept alive"


def test_an_op_is_run_again_until_it_fits() -> None:
    freed = iter([10, 10, 10])
    with SimulatedProbe(fail_at_ops=[2, 3, 4]) as probe, OpRetry(lambda *_: next(freed)):
        x = torch.ones(3)
        x.exp()
    assert probe.num_ops == 5
    assert list(freed) == []


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), OpRetry(lambda *_: 1):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_every_op_is_reported_after_it_ran() -> None:
    calls: list[None] = []
    with OpRetry(lambda *_: 0, after_op=lambda: calls.append(None)):
        torch.ones(3).exp().sum()
    assert len(calls) == 3


def test_tensors_of_a_failed_call_are_free_when_memory_is_freed() -> None:
    """What the failing op had computed is gone before anything is evicted."""
    probe = SimulatedProbe()
    alive: list[int] = []

    def relieve(num_bytes: int, where: str) -> int:
        alive.append(probe.allocated_bytes())
        probe.budget_bytes = None
        return 1

    with probe, OpRetry(relieve):
        x = torch.ones(1000)
        probe.budget_bytes = 4001
        x.exp()
    assert alive == [4000]

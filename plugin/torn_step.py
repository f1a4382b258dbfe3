"""An optimizer step that ran out of memory half way: seen by counters, named, never repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_REMEDY = (
    "Resume from the last checkpoint, with `op_retry: always`, a smaller budget for activations or "
    "an optimizer that allocates less (`fused=True`)."
)


class TornOptimizerStepError(RuntimeError):
    """An optimizer changed some parameters or their state and then ran out of memory.

    It is no out-of-memory error, so that nobody who answers those goes on with the next batch.
    """

    parameters: tuple[str, ...] = ()
    """Names of what was changed."""


class OptimizerState:
    """In-place counters of an optimizer's parameters and of their state before a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = {id(p): _versions(optimizer, p) for p in _parameters(optimizer)}

    def changed(self) -> list[torch.Tensor]:
        """Returns the parameters that the step has changed since, or whose state it has."""
        return [
            parameter
            for parameter in _parameters(self._optimizer)
            if self._before.get(id(parameter)) != _versions(self._optimizer, parameter)
        ]


def torn_step_error(names: Sequence[str], *, num_parameters: int) -> TornOptimizerStepError:
    """Returns the error that stops the run.

    It leaves out the words of the allocator, by which callers recognise what can be tried again.

    Args:
        names: The parameters that were changed; none where only other ranks may have changed.
        num_parameters: How many the optimizer has.
    """
    if not names:
        return TornOptimizerStepError(
            "the optimizer's step found no memory on this rank, where it has changed nothing yet; "
            f"other ranks may have made theirs. {_REMEDY}"
        )
    first = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    error = TornOptimizerStepError(
        f"the optimizer's step found no memory after it had changed {len(names)} of "
        f"{num_parameters} parameters or their state ({first}), and can neither be finished nor "
        f"undone. {_REMEDY}"
    )
    error.parameters = tuple(names)
    return error


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _versions(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[object, ...]:
    # .get: the state is a defaultdict
    state = optimizer.state.get(parameter, {})
    tensors = [v._version if isinstance(v, torch.Tensor) else v for v in state.values()]
    return (parameter._version, *tensors)

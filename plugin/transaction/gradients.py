"""Gradients that a failed backward has touched: no parameter receives a batch twice.

A gradient cannot be taken back out of the sum it was added to, and a copy of all of them costs
their size. So the other way round: where a failed attempt has added to a gradient, that gradient is
put aside and the retry's contributions are dropped until there are as many as it holds already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from rematic.activations.torch_private import has_own_gradient_hooks, storage_key


class RestoreError(RuntimeError):
    """A failed step left something changed that cannot be put back, so it cannot be repeated."""


_IN_PARTS = (
    "gradients of earlier micro-batches hold a part of this one, so that it cannot be split any "
    "more."
)


@dataclass(slots=True)
class _Contributions:
    """One parameter and what this step has added to its gradient."""

    parameter: torch.Tensor
    before: torch.Tensor | None
    """Its gradient before the step."""
    first_version: int
    """In-place counter of that gradient then."""
    is_watched: bool
    """Whether hooks of others see its gradient arrive, who may act on it at once."""
    num_added: int = 0
    """How often backward has added to that gradient in place."""
    applied: int = 0
    """Contributions that its gradient, or the one put aside, holds."""
    seen: int = 0
    """Contributions of the attempt that runs."""
    aside: torch.Tensor | None = None
    """Its gradient with every applied contribution, while a retry repeats them."""
    family: tuple[_Contributions, ...] = ()
    """All whose gradients before the step were views of one buffer, which count together; empty
    for a gradient of its own."""

    def arrive(self, parameter: torch.Tensor) -> None:
        """Takes note of a contribution; drops it if an earlier attempt has made it."""
        self.seen += 1
        if self.seen > self.applied:
            self.applied = self.seen
            self.num_added += parameter.grad is self.before
        elif self.seen == self.applied:
            parameter.grad, self.aside = self.aside, None
        else:
            parameter.grad = None

    @property
    def is_untouched(self) -> bool:
        """Whether the gradient from before the step still has the values it had."""
        if self.before is None or self.before._version == self.first_version:
            return True
        return bool(self.family) and self.num_added == 0 and not self.is_someone_elses()

    def undo(self) -> None:
        """Puts the gradient back, or aside if it has been added to in place."""
        if self.is_untouched:  # none before, or set to None by the step, or added out of place
            self.parameter.grad, self.aside = self.before, None
            self.applied = 0
        else:
            if self.seen >= self.applied:
                self.aside = self.parameter.grad
            self.parameter.grad = None
        self.seen = 0

    def settle(self) -> None:
        """Puts back a gradient that is still aside when the step ends."""
        if self.aside is not None:
            self.parameter.grad, self.aside = self.aside, None

    def is_someone_elses(self) -> bool:
        """Returns whether the gradient from before was changed by something but backward."""
        if self.before is None:
            return False
        num_added = sum(entry.num_added for entry in self.family or (self,))
        return self.before._version != self.first_version + num_added


class GradientContributions:
    """Counts what each parameter receives in one step, and undoes it for a retry.

    Until `close`, every parameter carries a hook that runs when backward has added to its gradient.

    Args:
        parameters: The leaves whose gradients the step adds to, each at most once.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._entries = [
            _Contributions(
                p, p.grad, -1 if p.grad is None else p.grad._version, has_own_gradient_hooks(p)
            )
            for p in parameters
            if p.requires_grad and p.is_leaf
        ]
        _join_families(self._entries)
        self._in_parts = False
        self._handles: list[RemovableHandle] = [
            entry.parameter.register_post_accumulate_grad_hook(entry.arrive)  # type: ignore[no-untyped-call] # torch 2.13
            for entry in self._entries
        ]

    def received(self) -> list[torch.Tensor]:
        """Returns the parameters whose gradients hold a part of this step."""
        return [entry.parameter for entry in self._entries if entry.applied]

    def check(self) -> None:
        """Refuses what cannot be undone.

        Raises:
            RestoreError: If something other than backward changed a gradient, or one holds only
                some parts of the batch.
        """
        mixed = [e for e in self._entries if not e.is_untouched and e.applied < sys.maxsize]
        if self._in_parts and mixed:
            raise RestoreError(_IN_PARTS)
        watched = [e.parameter for e in self._entries if e.applied and e.is_watched]
        if watched:
            raise RestoreError(
                f"hooks of your own have taken {len(watched)} gradients (the first of shape "
                f"{tuple(watched[0].shape)}) and would take them again. Do after the step what "
                "`register_post_accumulate_grad_hook` does in it."
            )
        changed = [e.parameter for e in self._entries if e.is_someone_elses()]
        if changed and _share_memory(self._entries):
            raise RestoreError(
                f"{len(changed)} gradients (the first of shape {tuple(changed[0].shape)}) share "
                "memory with others in a way that does not tell which of them backward has added "
                "to. Make them views of one buffer (`buffer[a:b].view_as(p)`, without `detach`)."
            )
        if changed:
            raise RestoreError(
                f"{len(changed)} gradients (the first of shape {tuple(changed[0].shape)}) were "
                "changed by something other than backward. Clip or scale gradients after the "
                "step, not inside it."
            )

    def undo(self) -> None:
        """Makes every gradient ready for the same backward again."""
        for entry in self._entries:
            entry.undo()

    def expect_parts(self) -> None:
        """Makes ready, after `undo`, for the same batch in parts, each with a backward of its own.

        A gradient that holds the contribution of the whole batch takes none of the parts'.
        """
        self._in_parts = True
        for entry in self._entries:
            if entry.applied:
                entry.applied = sys.maxsize

    def check_parts(self) -> None:
        """Refuses parts where a gradient holds some of several contributions.

        Raises:
            RestoreError: If there is one.
        """
        if any(1 < e.applied < sys.maxsize for e in self._entries if not e.is_untouched):
            raise RestoreError(_IN_PARTS)

    def restore(self) -> list[torch.Tensor]:
        """Puts gradients back when the step is given up.

        Returns:
            The parameters whose earlier gradient holds a part of this step for good.
        """
        torn = [e.parameter for e in self._entries if not e.is_untouched]
        self.undo()
        self.settle()
        return torn

    def settle(self) -> None:
        """Puts back every gradient that is still aside."""
        for entry in self._entries:
            entry.settle()

    def close(self) -> None:
        """Ends the step: nothing stays on the parameters; safe to call twice."""
        self.settle()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for entry in self._entries:
            entry.family = ()  # which it is itself a part of
        self._entries = []


def _join_families(entries: list[_Contributions]) -> None:
    """Lets gradients that are views of one buffer know each other: they have one version."""
    families: dict[int, list[_Contributions]] = {}
    for entry in entries:
        if entry.before is not None:
            base = entry.before._base
            families.setdefault(id(entry.before if base is None else base), []).append(entry)
    for family in families.values():
        if len(family) > 1:
            for entry in family:
                entry.family = tuple(family)


def _share_memory(entries: list[_Contributions]) -> bool:
    """Returns whether gradients that were changed have one storage, and are not of one family."""
    found = [entry for entry in entries if entry.is_someone_elses()]
    keys = {storage_key(entry.before) for entry in found if entry.before is not None}
    families = {id((entry.family or (entry,))[0]) for entry in found}
    return len(keys) < len(families)

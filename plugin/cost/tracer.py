"""Traces a model at a few small shapes and makes the profile of its steps at all shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import nn

from rematic.activations.units import find_units
from rematic.cost.fake_model import scales_of
from rematic.cost.fit import Fit, PathDiffers
from rematic.cost.optimizer_bytes import NO_OPTIMIZER, OptimizerBytes
from rematic.cost.polynomial import Grid
from rematic.cost.profile import Moving, Piece, StepProfile, UnitProfile, names_of_slots
from rematic.cost.step_trace import Batch, Loss, TracedModel
from rematic.cost.tiling import FEW_TILES, MANY_TILES
from rematic.cost.unit_kinds import choose_slots
from rematic.cost.windows import attention_windows
from rematic.planner import FixedBytes
from rematic.policy import Action, Keep, Offload, Recompute, RecomputeOffload
from rematic.stash.stash import MIN_BYTES
from rematic.training_tensors import tensor_bytes

MakeBatch = Callable[[int, int, bool], Batch]
"""Makes a batch from batch size, length and whether it is padded: real tensors on the CPU."""

GradientBuckets: TypeAlias = Literal["none", "copies", "views"]
"""Where DDP keeps gradients until it has reduced them."""

LOSSLESS: tuple[Action, ...] = (Keep(), Recompute(), RecomputeOffload(), Offload())
"""What is traced unless other actions are named."""

MOST_TRACED = 256
"""Most sequences of a batch that is traced as it is."""

_STEPS = (32, 64, 96)
_FALLBACK_STEPS = (256, 384, 512)


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """How steps are traced."""

    loss: Loss = field(default=lambda model, batch: model(**batch).loss)
    """Runs the forward and returns the loss; the default is that of transformers."""

    make_batch: MakeBatch
    """Makes the batches."""

    actions: tuple[Action, ...] = LOSSLESS
    """Actions to trace; `keep` and `recompute` are traced in any case."""

    batch: int | None = None
    """The one batch size that will be asked for, which is a third of the work; None for any."""

    padded: tuple[bool, ...] = (False, True)
    """Kinds of padding to trace."""

    max_length: int | None = None
    """Longest sequence that will be asked for; None for any."""

    patterns: tuple[str, ...] = ()
    """Patterns that name the units."""

    autocast: torch.dtype | None = None
    """What autocast computes in; None without it."""

    accumulates: bool = False
    """Whether gradients of an earlier micro-batch are there when a step begins."""

    gradient_buckets: GradientBuckets = "none"
    """Buckets of `DistributedDataParallel`: `copies` of all gradients beside them (its default),
    or `views` (`gradient_as_bucket_view=True`), where gradients live in the buckets and are there
    before the step begins."""

    on_accelerator: bool = True
    """Where the steps will run. What was moved comes back into an accelerator's memory, ahead of
    need; on a CPU it comes back as a mapping of a file, which takes no heap."""

    tile_tokens: int | None = None
    """Tokens in a slice of a tiled loss, 0 for the default of `use_tiled_loss`; None: not tiled."""

    optimizer: OptimizerBytes = NO_OPTIMIZER
    """What the optimizer holds and needs."""

    @property
    def gradients_exist(self) -> bool:
        """Whether a step finds memory for its gradients instead of allocating it."""
        return self.accumulates or self.gradient_buckets == "views"


def trace_profile(model: nn.Module, settings: TraceSettings) -> StepProfile:
    """Returns what steps of a model cost.

    Nothing is computed and no weight is read: the model may be on any device, `meta` included.

    Args:
        model: The whole model, as it will be trained (adapters, frozen weights, dtypes).
        settings: How.

    Raises:
        ValueError: If the model has no units, or its steps cannot be compared between lengths.
    """
    units = find_units(model, settings.patterns)
    names = tuple(name for name, _ in units)
    slots = choose_slots(units)
    traced = TracedModel(
        model,
        names,
        slots.positions,
        patterns=settings.patterns,
        loss=settings.loss,
        autocast=settings.autocast,
        on_accelerator=settings.on_accelerator,
        tile_tokens=settings.tile_tokens,
    )
    classes = [type(units[position][1]).__name__ for position in slots.positions]
    named = tuple(zip(names_of_slots(classes, slots.positions), slots.counts, strict=True))
    bounds = _bounds(model, settings, traced)
    pieces = [
        _piece(traced, settings, batches, bound, padded=padded, slots=named)
        for padded in settings.padded
        for batches in _batch_grids(settings.batch)
        for bound in bounds
    ]
    return StepProfile(
        pieces=tuple(pieces),
        fixed=_fixed_bytes(model, settings),
        optimizer_bytes=settings.optimizer.step_bytes,
        unit_names=names,
        unit_classes=slots.of_unit,
        moving=Moving(min_bytes=MIN_BYTES, prefetches=settings.on_accelerator),
    )


def _batch_grids(batch: int | None) -> tuple[tuple[int, ...], ...]:
    if batch is None:
        return ((1,), (2, 3))
    # masks are real tensors, so of very many sequences a few are traced
    return ((batch,),) if batch <= MOST_TRACED else ((2, 3),)


def _bounds(
    model: nn.Module, settings: TraceSettings, traced: TracedModel
) -> list[tuple[int, int | None]]:
    """Returns the ranges of lengths in which a step takes one path.

    They end at attention windows, and where a tiled loss begins to slice tokens.
    """
    ends = [window - 1 for window in attention_windows(model)]
    tiling = None if traced.tiles is None else traced.tiles.tiling
    if tiling is not None and tiling.is_trained and settings.batch is not None:
        ends.append(-(-tiling.vocabulary // settings.batch) - 1)
    longest = settings.max_length
    inner = sorted({end for end in ends if end > 0 and (longest is None or end < longest)})
    edges: list[int | None] = [0, *inner, None]
    return [((start or 0) + 1, end) for start, end in pairwise(edges)]


def _piece(
    traced: TracedModel,
    settings: TraceSettings,
    batches: tuple[int, ...],
    bound: tuple[int, int | None],
    *,
    padded: bool,
    slots: Sequence[tuple[str, int]],
) -> Piece:
    last_error: PathDiffers | None = None
    for steps in (_STEPS, _FALLBACK_STEPS):
        lengths = _lengths(bound, steps)
        grid = Grid(batches=batches, lengths=lengths)
        try:
            return _piece_on(traced, settings, grid, bound=bound, padded=padded, slots=slots)
        except PathDiffers as error:
            last_error = error
    raise ValueError(
        f"{last_error} Its bytes cannot be told from a few lengths: leave the planner out, or "
        "trace it for one length."
    ) from last_error


def _lengths(bound: tuple[int, int | None], steps: Sequence[int]) -> tuple[int, ...]:
    first, last = bound
    if last is not None and last < first - 1 + steps[-1]:  # a narrow range: its upper half
        half = (last - first) // 2
        return tuple(sorted({last - half, last - half // 2, last}))
    start = -(-(first - 1) // _STEPS[0]) * _STEPS[0]  # whole slices of a tiled loss
    return tuple(start + step for step in steps)


def _piece_on(
    traced: TracedModel,
    settings: TraceSettings,
    grid: Grid,
    *,
    bound: tuple[int, int | None],
    padded: bool,
    slots: Sequence[tuple[str, int]],
) -> Piece:
    """Traces all actions on a grid; `slots` are (name, number of units for which it stands)."""
    full = _Traces(traced, settings, grid, padded=padded)
    fits = {"keep": full.fit(Keep())}
    # What grows with the square of the length (masks, scores) shows when everything is kept. Where
    # nothing does, two lengths are enough for the other actions, which run the same ops again.
    lengths = grid.lengths[:2] if fits["keep"].is_linear else grid.lengths
    fewer = _Traces(traced, settings, Grid(batches=grid.batches, lengths=lengths), padded=padded)
    for action in {a.name: a for a in (Recompute(), *settings.actions)}.values():
        if action.name not in fits:
            fits[action.name] = fewer.fit(action)
    fit = fits["recompute"]
    counts = [count for _, count in slots]
    casts = fit.casts(counts)
    tiling = None if traced.tiles is None else traced.tiles.tiling
    sliced = None
    if tiling is not None:
        sliced = (fewer.fit(Recompute(), num_tiles=MANY_TILES), tiling)
    return Piece(
        min_batch=grid.batches[0],
        max_batch=grid.batches[0] if len(grid.batches) == 1 else None,
        min_length=bound[0],
        max_length=bound[1],
        padded=padded,
        batch_bytes=fit.batch_bytes(),
        around=fit.around(counts, sliced=sliced),
        around_ops=fits["keep"].around_ops(tiling),
        units=tuple(
            UnitProfile(
                name=name,
                actions=tuple((action, f.action(slot, casts=casts)) for action, f in fits.items()),
                ops=fit.unit_ops(slot, kept=fits["keep"]),
            )
            for slot, (name, _) in enumerate(slots)
        ),
    )


class _Traces:
    """The batches of a grid, each made once."""

    def __init__(
        self, traced: TracedModel, settings: TraceSettings, grid: Grid, *, padded: bool
    ) -> None:
        self._traced = traced
        self._accumulates = settings.gradients_exist
        self._grid = grid
        self._batches = [settings.make_batch(*point, padded) for point in grid.points]

    def fit(self, action: Action, *, num_tiles: int = FEW_TILES) -> Fit:
        """Traces the step with every unit under one action, at every point."""
        actions = [action] * self._traced.num_units
        traces = [
            self._traced.run(actions, batch, accumulates=self._accumulates, num_tiles=num_tiles)
            for batch in self._batches
        ]
        return Fit(self._grid, traces)


def _fixed_bytes(model: nn.Module, settings: TraceSettings) -> FixedBytes:
    parameters = list(model.parameters())
    trained = sum(tensor_bytes(p) for p in parameters if p.requires_grad)
    scales = scales_of(model)
    return FixedBytes(
        weights=sum(tensor_bytes(t) for t in (*parameters, *scales, *model.buffers())),
        gradients=trained if settings.gradients_exist else 0,
        optimizer=settings.optimizer.state_bytes,
        other=trained if settings.gradient_buckets == "copies" else 0,
    )

"""What sharding over processes changes in the bytes of a step: FSDP2 of torch, on each of them.

Every unit is one group of `fully_shard`, and what lies outside the units is the root's. By torch
2.13 (`_fsdp_param_group.py`), with its defaults: a group's weights are gathered into a flat buffer
and copied out of it. In forward that buffer lives until the next group's weights are there, that of
the root until the first unit's are; in backward the next group's is filled while a group is at
work. Gradients are copied into a flat buffer, which lives until the group after that has come so
far. The root's weights stay whole from the first op to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rematic.cost.fake_model import scales_of
from rematic.cost.polynomial import Envelope, Polynomial
from rematic.cost.profile import (
    ActionProfile,
    Piece,
    StepProfile,
    SurroundingsProfile,
)
from rematic.planner import FixedBytes
from rematic.training_tensors import tensor_bytes


@dataclass(frozen=True, kw_only=True)
class GroupBytes:
    """One group of weights that are gathered together."""

    part: int
    """Bytes of the part that each process holds."""

    whole: int
    """Bytes of the weights when they are gathered; of the flat buffer as well."""

    gradient_part: int
    """Bytes of the gradients that each process keeps."""

    gradient_whole: int
    """Bytes of the gradients as backward makes them."""

    gradient_buffer: int
    """Bytes of the flat buffer of gradients, in which rows are padded."""


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """The groups of a model."""

    units: tuple[GroupBytes, ...]
    """Of each unit, in the order of the forward calls."""

    root: GroupBytes
    """Of everything else."""

    replicated_bytes: int
    """What every process holds whole: buffers, and the scales of 4-bit weights."""


def shard_groups(model: nn.Module, unit_names: Sequence[str], *, num_parts: int) -> ShardedModel:
    """Returns the bytes of a model's groups.

    Args:
        model: The whole model, on any device.
        unit_names: Qualified names of the units.
        num_parts: Processes that share the weights.
    """
    modules = dict(model.named_modules())
    of_units = [list(modules[name].parameters()) for name in unit_names]
    inside = {id(p) for parameters in of_units for p in parameters}
    rest = [p for p in model.parameters() if id(p) not in inside]
    scales = scales_of(model)
    return ShardedModel(
        units=tuple(_group(parameters, num_parts) for parameters in of_units),
        root=_group(rest, num_parts),
        replicated_bytes=sum(tensor_bytes(t) for t in (*scales, *model.buffers())),
    )


def _group(parameters: Sequence[torch.Tensor], num_parts: int) -> GroupBytes:
    parts = [_part_bytes(p, num_parts) for p in parameters]
    trained = [part for p, part in zip(parameters, parts, strict=True) if p.requires_grad]
    return GroupBytes(
        part=sum(parts),
        whole=num_parts * sum(parts),
        gradient_part=sum(trained),
        gradient_whole=sum(tensor_bytes(p) for p in parameters if p.requires_grad),
        gradient_buffer=num_parts * sum(trained),
    )


def _part_bytes(parameter: torch.Tensor, num_parts: int) -> int:
    """Rows are dealt out, the last processes may have fewer; each pads up to the first one's."""
    rows = parameter.shape[0] if parameter.dim() else 1
    row_bytes = parameter.numel() * parameter.element_size() // max(1, rows)
    return -(-rows // num_parts) * row_bytes


_NOTHING = GroupBytes(part=0, whole=0, gradient_part=0, gradient_whole=0, gradient_buffer=0)


def sharded(profile: StepProfile, model: ShardedModel, *, accumulates: bool) -> StepProfile:
    """Returns the profile of each process.

    Args:
        profile: That of one process which holds everything and has no gradients yet.
        model: The groups.
        accumulates: Whether gradients of an earlier micro-batch are there already.
    """
    first_of_slot = [profile.unit_classes.index(slot) for slot in sorted({*profile.unit_classes})]
    groups = [model.units[position] for position in first_of_slot]
    last = [[model.root, *model.units][position] for position in first_of_slot]
    before = [[_NOTHING, *model.units][position] for position in first_of_slot]
    after = [[*model.units, _NOTHING][position + 1] for position in first_of_slot]
    parts = (*model.units, model.root)
    return replace(
        profile,
        pieces=tuple(
            _piece(piece, model, list(zip(groups, last, before, after, strict=True)), accumulates)
            for piece in profile.pieces
        ),
        fixed=FixedBytes(
            weights=sum(group.part for group in parts) + model.replicated_bytes,
            gradients=sum(group.gradient_part for group in parts) if accumulates else 0,
            optimizer=profile.fixed.optimizer,
            other=profile.fixed.other,
        ),
    )


def _piece(
    piece: Piece,
    model: ShardedModel,
    neighbours: Sequence[tuple[GroupBytes, GroupBytes, GroupBytes, GroupBytes]],
    accumulates: bool,
) -> Piece:
    units = tuple(
        replace(
            unit,
            actions=tuple(
                (name, _action(action, *groups, accumulates=accumulates))
                for name, action in unit.actions
            ),
        )
        for unit, groups in zip(piece.units, neighbours, strict=True)
    )
    return replace(piece, units=units, around=_around(piece.around, model, accumulates))


def _action(
    action: ActionProfile,
    group: GroupBytes,
    gathered: GroupBytes,
    before: GroupBytes,
    after: GroupBytes,
    *,
    accumulates: bool,
) -> ActionProfile:
    """Returns an action of a unit.

    Args:
        action: The same in one process.
        group: The unit's weights.
        gathered: Those that were gathered before it in forward.
        before: Those of the unit before it, which are gathered during its backward.
        after: Those of the unit after it, whose gradients wait during its backward.
        accumulates: Whether gradients of an earlier micro-batch are there already.
    """
    copied_out = Polynomial.constant(gathered.whole + 2 * group.whole)
    left = 0 if accumulates else group.gradient_part
    more = group.whole + before.whole + after.gradient_buffer
    return replace(
        action,
        forward=Envelope((*action.forward.plus(2 * group.whole).candidates, copied_out)),
        backward=action.backward.plus(more),
        returns=tuple(replace(part, rise=part.rise.plus(more)) for part in action.returns),
        gradient=action.gradient + Polynomial.constant(left - group.gradient_whole),
    )


def _around(
    around: SurroundingsProfile, model: ShardedModel, accumulates: bool
) -> SurroundingsProfile:
    root, last = model.root, model.units[-1]
    left = 0 if accumulates else root.gradient_part
    whole = Polynomial.constant(root.whole)
    return replace(
        around,
        embedding_forward=around.embedding_forward.plus(2 * root.whole),
        embedding_kept=around.embedding_kept + whole,
        head=around.head.plus(last.whole),
        head_uncast=None if around.head_uncast is None else around.head_uncast.plus(last.whole),
        embedding_backward=around.embedding_backward.plus(model.units[0].gradient_buffer),
        embedding_gradient=around.embedding_gradient
        + Polynomial.constant(left - root.gradient_whole),
    )

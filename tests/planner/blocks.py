"""Measured costs of a made-up block, written out by hand."""

from __future__ import annotations

from rematic.planner import (
    ActionBytes,
    FixedBytes,
    OpCost,
    Pace,
    StepCosts,
    Surroundings,
    UnitCosts,
)

PACE = Pace(
    op_seconds=lambda op: op.flops / 100,
    replay_seconds=0.5,
    selective_seconds=1.0,
    moved_bytes_per_second=10.0,
)


def op(name, occurrence=0, *, made=0, flops=0, freed=None, **more):
    return OpCost(
        name=name,
        occurrence=occurrence,
        result_bytes=made,
        flops=flops,
        touched_bytes=2 * made,
        freed_after=freed,
        **more,
    )


OPS = (
    op("aten::mm", 0, made=100, flops=800, freed=2),
    op("aten::view", 0, storage_of=0),
    op("aten::gelu", 0, made=100, flops=50, freed=3),
    op("aten::mm", 1, made=40, flops=800, freed=5),
    op("aten::dropout", 0, made=40, flops=20, freed=6, is_random=True),
    op("aten::add_", 0, flops=20, storage_of=3, is_in_place=True),
    op("aten::add", 0, made=40, flops=20, is_replayed=False, is_saved=False),
)

BLOCK = UnitCosts(
    name="Block",
    actions=(
        ("keep", ActionBytes(kept=280, forward=300, backward=150, gradient=60)),
        ("recompute", ActionBytes(kept=40, forward=200, backward=390, gradient=60)),
        ("offload", ActionBytes(kept=40, forward=300, backward=390, gradient=60, moved=240)),
        ("compress", ActionBytes(kept=100, forward=300, backward=330, gradient=60)),
    ),
    ops=OPS,
)


def step_costs(num_units=3):
    return StepCosts(
        batch=1,
        length=10,
        padded=False,
        fixed=FixedBytes(weights=1000),
        around=Surroundings(head=50),
        around_ops=(),
        classes=(BLOCK,),
        unit_classes=(0,) * num_units,
        unit_names=tuple(f"blocks.{i}" for i in range(num_units)),
    )

"""Units that exchange tensors with other ranks: replayed on all of them at once, or on none."""

from __future__ import annotations

import re

import pytest

from tests.ranks import run_ranks


@pytest.mark.timeout(180)
def test_joint_units_are_replayed_on_all_ranks_or_on_none() -> None:
    """Bits and order of collectives are looked at in `joint_ranks.py`; one rank tries to evict."""
    outputs = run_ranks("tests.activations.joint_ranks", seconds=120)
    for output in outputs:
        rows = dict(re.findall(r"^ran (.*?): (\d+ \d+ \d+)$", output, re.M))
        assert set(rows) == {
            f"{kind}, {policy}"
            for kind in ("tensor parallel", "sharded inside", "wrapped inside", "exchanging")
            for policy in ("recompute", "selective", "planned")
        }
        for name, row in rows.items():
            replays, evictions, joint = map(int, row.split())
            assert (evictions, joint) == (0, 3), name
            kept = name.endswith("planned") or name.startswith("wrapped")
            assert replays == (0 if kept else 3), name
        assert "unit 'blocks.0': its forward exchanges tensors with other ranks (all_re" in output
        assert "kept under every policy, since FullyShardedDataParallel inside it frees" in output
        counts = dict(re.findall(r"^collectives of (.*): (\d+)$", output, re.M))
        assert counts["sharded inside, recompute"] == counts["sharded inside, plain"]  # E1
        assert counts["tensor parallel, planned"] == counts["tensor parallel, plain"]
        assert "equal" in output.splitlines()
    assert "stopped: False True" in outputs[0]  # since the other rank has left
    assert "stopped: True True" in outputs[1]

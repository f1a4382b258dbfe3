"""A slice of benchmarks/actions.py: every action runs beside what it replaces."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.actions import PEERS, measure


def test_actions_keep_no_more_than_what_they_replace() -> None:
    pytest.importorskip("bitsandbytes")
    arguments = argparse.Namespace(actions=list(PEERS), rounds=1, hidden_size=128, layers=2)
    rows = {row["action"]: row for row in measure(256, arguments)}
    assert list(rows) == list(PEERS)
    assert rows["keep"]["kept_vs_torch"] <= 1.01
    assert rows["recompute"]["kept_vs_torch"] <= 1.01
    assert rows["selective"]["kept_vs_torch"] <= 1
    assert rows["recompute+offload"]["kept_bytes"] < rows["recompute"]["kept_bytes"]
    assert rows["offload"]["kept_bytes"] < rows["keep"]["kept_bytes"] / 4
    assert rows["compress"]["kept_bytes"] < rows["keep"]["kept_bytes"] / 2
    assert rows["tile"]["kept_bytes"] < rows["keep"]["kept_bytes"]
    assert all(row["seconds_vs_plain"] > 0 for row in rows.values())

"""Slices of benchmarks/variable_length.py: the search, and a small run under a real cap."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import variable_length
from benchmarks.variable_length_child import LIST_SAVED, TitanPolicy, action_of
from benchmarks.variable_length_data import load_workload
from benchmarks.variable_length_figures import summary
from benchmarks.variable_length_table import Choices, best_mixes, options_at, rises_of, table_of
from rematic.cost.live_profile import StepKind, trace_live
from rematic.cost.profile import StepProfile
from rematic.memory import glibc
from rematic.planner import Problem, peak_of, seconds_of
from rematic.policy import Keep, Recompute

NAMES = ("keep", "list", "recompute")
CHOICES = Choices(names=NAMES, actions=tuple(map(action_of, NAMES)))
SECONDS = (0.0, 0.4, 1.0)


@pytest.fixture(scope="module")
def profile() -> StepProfile:
    """What steps of a small Llama cost."""
    from benchmarks.variable_length_child import make_model

    kind = StepKind(
        batch=1, padded=False, accumulates=False, inputs=(("input_ids", 2), ("labels", 2))
    )
    model = make_model({"layers": 4, "hidden_size": 64})
    return trace_live(model, kind, actions=(Keep(), Recompute()), patterns=())


def test_every_plan_is_judged_by_the_peak_formula(profile: StepProfile) -> None:
    costs = profile.costs_at(batch=1, length=512)
    options = options_at(CHOICES, costs)
    problem = Problem(fixed=costs.fixed, around=costs.around, units=tuple(map(tuple, options)))
    plans = np.array(list(itertools.product(range(3), repeat=4)), dtype=np.intp)
    expected = [peak_of(problem, plan).total - costs.fixed.total for plan in plans]
    assert rises_of(options, costs, plans).tolist() == expected


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_the_search_finds_the_fastest_plan_that_fits(profile: StepProfile, share: float) -> None:
    costs = profile.costs_at(batch=1, length=512)
    options = options_at(CHOICES, costs)
    problem = Problem(fixed=costs.fixed, around=costs.around, units=tuple(map(tuple, options)))
    plans = list(itertools.product(range(3), repeat=4))
    rises = [peak_of(problem, plan).total - costs.fixed.total for plan in plans]
    room = min(rises) + int(share * (max(rises) - min(rises)))
    times = {plan: sum(SECONDS[choice] for choice in plan) for plan in plans}
    fastest = min(times[p] for p, rise in zip(plans, rises, strict=True) if rise <= room)
    found = best_mixes(CHOICES, profile, length=512, room_bytes=room, seconds=SECONDS)
    assert times[found[0]] == fastest
    assert [times[p] for p in found] == sorted(times[p] for p in found)
    assert all(rises[plans.index(plan)] <= room for plan in found)
    assert seconds_of(problem, found[0]) == 0, "the problem itself knows no time"


def test_the_table_is_relative_to_keep_of_the_same_round() -> None:
    rows = [
        {"action": "keep", "baseline": True, "length": 64, "round": r, "cpu": 1.0 + r}
        | {"is_keep": True}
        for r in range(3)
    ]
    rows += [
        {"action": "list", "baseline": True, "length": 64, "round": r, "cpu": 1.4 + r}
        | {"is_keep": False}
        for r in range(3)
    ]
    table = table_of(rows, num_units=4)
    assert table.seconds("keep", 64) == 0
    assert table.seconds("list", 64) == pytest.approx(0.1)
    assert table.seconds("list", 32) == pytest.approx(0.05)


def test_the_documents_are_those_that_are_described() -> None:
    corpus = load_workload("corpus", longest=2048)
    lengths = sorted(corpus.lengths)
    assert 70 <= len(lengths) <= 79
    assert 380 <= lengths[len(lengths) // 2] <= 460
    assert lengths[-len(lengths) // 10] == lengths[-1] == 2048
    tail = load_workload("log-normal", longest=2048)
    lengths = sorted(tail.lengths)
    assert 270 <= lengths[len(lengths) // 2] <= 300
    assert lengths[-1] == 2048
    assert tail.documents == load_workload("log-normal", longest=2048).documents
    assert tail.order(0) != tail.order(1)


def test_the_op_list_is_that_of_torchtitan() -> None:
    """Every second product, from the first; rematic names the same ops."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

    policy, context = TitanPolicy(), SelectiveCheckpointContext(is_recompute=False)
    kept = [policy(context, torch.ops.aten.mm.default) for _ in range(7)]
    places = [i for i, one in enumerate(kept) if one == CheckpointPolicy.MUST_SAVE]
    assert (*(f"aten::mm[{i}]" for i in places), "attention") == LIST_SAVED
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert policy(context, attention) == CheckpointPolicy.MUST_SAVE
    assert policy(context, torch.ops.aten.add.Tensor) == CheckpointPolicy.PREFER_RECOMPUTE


def test_each_row_has_the_budget_that_it_ran_under() -> None:
    ways = {"rematic": {"cpu": 1.0, "wall": 1.0, "peak": 1, "lost": False}}
    rows = [
        {"workload": "corpus", "budget": share, "cap_bytes": int(100 * share), "sha256": ""}
        | {"documents": [{"length": 8, "ways": ways}]}
        for share in (0.5, 0.25)
    ]
    options = variable_length.arguments_of(["--workloads", "corpus"])
    found = summary({"rows": rows, "settings": {}}, options)["rows"]
    assert [(row["budget"], row["cap_bytes"]) for row in found] == [(0.5, 50), (0.25, 25)]


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or glibc.read_heap() is None,
    reason="the cap needs Linux with glibc 2.33",
)
@pytest.mark.timeout(600)
def test_a_small_run_loses_no_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--quick", "--json", "--out", str(out), "--ways", "nothing", "recompute"]
    assert variable_length.main([*arguments, "static list", "rematic"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    assert row["documents"] == 3
    assert row["ways"]["nothing"]["documents_lost"] > 0
    assert row["ways"]["rematic"]["documents_lost"] == result["documents_lost"] == 0
    assert row["ways"]["rematic"]["peak_bytes"] <= row["cap_bytes"] + 2**22
    assert result["time_vs_full"] == row["time_vs_full"] > 0
    assert result["time_vs_best_static_list"] > 0
    options = variable_length.arguments_of(arguments)
    again = summary(json.loads(out.read_text("utf-8")), options)
    assert again["rows"] == result["rows"], "what is written as it goes is all there is"

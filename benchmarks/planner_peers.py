"""Other planners on the problems of `planner.py`: each is given what it can express.

All choose between keeping a block and recomputing it. What they return is an assignment, to be
judged by the peak formula of `rematic.planner`. Those whose packages are missing are left out:
`sac_milp` of torch needs `pulp`, `ckptplan` is a package of its own.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from rematic.planner import Problem

Plan = tuple[int, ...]
"""For each block 0 to keep it, 1 to recompute it."""

Peer = Callable[[Problem, float], Plan | None]
"""From a problem, with `keep` and `recompute` as options 0 and 1 of each block, and the share of
the bytes between the two extremes that may be kept."""

KNAPSACKS = ("greedy_knapsack", "ilp_knapsack", "dp_knapsack")
ROOT = "m"
MILLISECONDS = 1000.0
_BYTES = (
    *("param_per_module", "grad_per_module", "grad_total", "act_fw_per_module"),
    *("act_bw_per_module", "act_grad_per_module", "act_total", "input_per_module"),
    *("output_per_module", "sac_memory"),
)
"""What `sac_milp` reads of a module, in bytes."""


def peers() -> Iterator[tuple[str, Peer, int]]:
    """Yields name, planner, and the number of budgets that are tried for one answer."""
    knapsacks = _module("torch._functorch._activation_checkpointing.knapsack")
    for name in KNAPSACKS:
        if hasattr(knapsacks, name):
            yield name, _by_knapsack(getattr(knapsacks, name)), 65
    sac = _module("torch.distributed._tools.sac_ilp")
    if sac is not None:
        sac.logger.setLevel(logging.CRITICAL)
        yield "sac_milp", _by_sac_milp(sac), 9
    ckptplan = _module("ckptplan")
    if ckptplan is not None:
        yield "ckptplan", _by_ckptplan(ckptplan), 65


def _module(name: str) -> Any:  # noqa: ANN401 - private modules of torch, and packages without types
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _saved(problem: Problem) -> list[int]:
    return [options[0].kept_bytes - options[1].kept_bytes for options in problem.units]


def _by_knapsack(knapsack: Callable[..., tuple[float, list[int], list[int]]]) -> Peer:
    def plan(problem: Problem, share: float) -> Plan:
        saved = _saved(problem)
        seconds = [options[1].seconds - options[0].seconds for options in problem.units]
        _, kept, _ = knapsack([one / sum(saved) for one in saved], seconds, share)
        chosen = set(kept)
        return tuple(0 if i in chosen else 1 for i in range(len(saved)))

    return plan


def _by_ckptplan(package: Any) -> Peer:  # noqa: ANN401
    """Dynamic programming over a sum of activations (0.1.0rc1)."""
    from torch import nn

    types = importlib.import_module("ckptplan.types")

    def profile(i: int, saved: int, seconds: float) -> Any:  # noqa: ANN401
        return types.BlockProfile(
            block_id=f"b{i}",
            order=i,
            device="cpu",
            dtype="torch.float32",
            input_shape_signature="x",
            output_shape_signature="x",
            param_count=1,
            trainable_param_count=1,
            timing_only=False,
            activation_bytes_estimate=saved,
            activation_bytes_method="isolated_forward_delta",
            forward_time_ms_mean=seconds * MILLISECONDS,
            forward_time_ms_std=0.0,
            recompute_time_upper_bound_ms_mean=seconds * MILLISECONDS,
            recompute_time_upper_bound_ms_std=0.0,
            recompute_time_source="measured_full_recompute_early_stop_disabled",
            num_warmup=1,
            num_trials=1,
            is_stochastic=False,
            is_stateful=False,
            stochastic_submodules=(),
            stateful_submodules=(),
            eligible_for_checkpoint=True,
            exclusion_reason=None,
            warnings=(),
            pytorch_version="",
            profiler_version="",
        )

    def plan(problem: Problem, share: float) -> Plan:
        saved = _saved(problem)
        seconds = [options[1].seconds for options in problem.units]
        profiles = [profile(i, *pair) for i, pair in enumerate(zip(saved, seconds, strict=True))]
        blocks = [
            types.CheckpointableBlock(block_id=f"b{i}", order=i, module=nn.Linear(1, 1))
            for i in range(len(saved))
        ]
        found = package.plan_checkpoints(
            profiles,
            blocks,
            target_kind="activation_budget_bytes",
            target_value=float(share * sum(saved)),
            # a bucket such that its own guard lets a stack of 126 pass
            activation_bucket_bytes=max(1, sum(saved) // 16_384),
            on_infeasible="best_effort",
        )
        return tuple(int(decision.checkpointed) for decision in found.decisions)

    return plan


def _by_sac_milp(sac: Any) -> Peer:  # noqa: ANN401
    """The integer program of torch, over backward alone, solved to within 5 % by its own choice."""
    tools = importlib.import_module("torch.distributed._tools.ilp_utils")

    def node(name: str, **values: object) -> dict[str, object]:
        nothing = dict.fromkeys(_BYTES, 0)
        times = dict.fromkeys(
            ("fw_runtime_per_module", "bw_runtime_per_module", "sac_runtime"), 0.0
        )
        # a block that is chosen is recomputed whole, at one price
        curve = {"n_segments": 1, "slopes": [0.0], "intercepts": [1.0], "breakpoints": [1.0]}
        return {"fqn": name, "is_leaf": False, **nothing, **times, **curve, **values}

    def plan(problem: Problem, share: float) -> Plan | None:
        saved = _saved(problem)
        names = [f"{ROOT}.b{i}" for i in range(len(saved))]
        left, before = problem.around.head_left, problem.around.embedding_kept
        totals, gradients = [], []
        for options in problem.units:
            before += options[0].kept_bytes
            totals.append(before)
        for options in reversed(problem.units):
            gradients.insert(0, left + options[0].backward_bytes)
            left += options[0].gradient_bytes
        stats = [
            node(ROOT, is_leaf=True, param_per_module=problem.fixed.total, act_total=totals[-1])
        ]
        for i, options in enumerate(problem.units):
            stats.append(
                node(
                    names[i],
                    act_fw_per_module=saved[i],
                    sac_memory=saved[i],
                    act_total=totals[i],
                    act_grad_per_module=gradients[i],
                    sac_runtime=options[1].seconds * MILLISECONDS,
                )
            )
        order = {"fw_pre_order": [ROOT, *names], "fw_post_order": [*names, ROOT]}
        graph = tools.parse_module_info({"mod_stats": stats, "mod_order": order})
        highest = problem.fixed.total + max(map(sum, zip(totals, gradients, strict=True)))
        budget = highest - (1 - share) * sum(saved)
        chosen, _, peak = sac.sac_milp(graph, budget / 2**30, ac_units=names)
        return None if peak < 0 else tuple(int(name in chosen) for name in names)

    return plan

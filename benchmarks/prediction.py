"""How well a trace predicts the peak of a step: against the exact ledger and against the heap.

    python benchmarks/prediction.py --json                     # all families, 15 minutes of a core
    python benchmarks/prediction.py --families llama,gpt2 --plans 3

For each family, fine-tuning, length and padding a profile is traced with fake tensors at a few
small shapes; then real steps run under mixed plans. The ledger counts live storages at every op,
the heap is what glibc has handed out at the ends of ops. Both are taken beyond what was in use when
the step began; errors are (predicted - measured) / measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from prediction_families import FAMILIES, Batch, Family
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the ledger is that of the tests

from rematic.cost import TraceSettings, trace_profile
from rematic.memory import HostProbe, use_caching_malloc
from rematic.planner import StepCosts
from rematic.policy import Action, Keep, Offload, Plan, Recompute, RecomputeOffload, Selective
from tests.cost.measured import RealStep, predicted_peak

ACTIONS: tuple[Action, ...] = (Keep(), Selective(), Recompute(), RecomputeOffload(), Offload())
TUNINGS = ("full", "lora", "qlora")
MIN_HEAP_BYTES = 100_000_000
"""Peaks below this are not compared with the heap, which holds about 1 MB of Python's objects."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step under one plan; bytes beyond those at its start."""

    family: str
    tuning: str
    batch: int
    length: int
    padded: bool
    plan: str
    place: str
    predicted: int
    ledger: int
    heap: int | None
    error: float
    heap_error: float | None


class HeapPeak(TorchDispatchMode):
    """Reads the heap at the end of every op."""

    def __init__(self) -> None:
        super().__init__()
        self._probe = HostProbe()
        self.start = self.peak = self._probe.allocated_bytes() or 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Runs one op."""
        output = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self._probe.allocated_bytes() or 0)
        return output


class Steps(RealStep):
    """Real steps of one model, by the ledger and by the heap."""

    def heap_bytes(self, batch: Batch, actions: Sequence[Action]) -> int:
        """Returns the peak of the heap at the ends of ops."""
        self.engine.apply(Plan(actions=tuple(actions)))
        self.model.zero_grad(set_to_none=True)
        with HeapPeak() as heap:
            self.model(**batch).loss.backward()
        return heap.peak - heap.start


def build(family: Family, tuning: str) -> nn.Module:
    """Returns the model of a family as it is fine-tuned."""
    torch.manual_seed(0)
    model = family.build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if tuning == "full":
        return model
    from peft import LoraConfig, get_peft_model

    if tuning == "qlora":
        quantize(model)
    adapted = LoraConfig(r=8, target_modules=list(family.adapters), lora_dropout=0.0)
    return get_peft_model(model, adapted).train()


def quantize(model: nn.Module) -> None:
    """Puts 4-bit layers in the place of the linear layers of the blocks, as QLoRA does."""
    import bitsandbytes as bnb

    stays = {"lm_head", "decoder", "classifier", *(model._keep_in_fp32_modules or ())}
    model.is_loaded_in_4bit = True
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name not in stays:
                layer = bnb.nn.Linear4bit(
                    child.in_features, child.out_features, bias=child.bias is not None
                )
                layer.weight = bnb.nn.Params4bit(
                    child.weight.data, requires_grad=False, quant_type="nf4"
                )
                layer.bias = child.bias
                setattr(module, name, layer.to("cpu"))


def plans(num_units: int, number: int, seed: int) -> list[list[Action]]:
    """Returns uniform plans and mixed ones."""
    draw = random.Random(seed)
    uniform = [[action] * num_units for action in ACTIONS]
    mixed = [[draw.choice(ACTIONS) for _ in range(num_units)] for _ in range(number)]
    return [*uniform, *mixed]


def rows(family: Family, tuning: str, *, number: int, heap: bool) -> Iterator[Row]:
    """Measures one family, with so many mixed plans for each shape."""
    model = build(family, tuning)
    for batch_size, padded in _kinds(family, tuning):
        settings = TraceSettings(
            make_batch=family.batch,
            actions=ACTIONS,
            batch=batch_size,
            padded=(padded,),
            max_length=max(family.lengths),
            on_accelerator=False,
            **family.trace,
        )
        profile = trace_profile(model, settings)
        steps = Steps(model, family.batch(batch_size, family.lengths[0], padded))
        for length in family.lengths:
            costs = profile.costs_at(batch=batch_size, length=length, padded=padded)
            batch = family.batch(batch_size, length, padded)
            for plan in plans(len(steps.engine.units), number, seed=length):
                yield _row(family.name, tuning, steps, costs, batch, plan, heap=heap)
        steps.engine.detach()


def _kinds(family: Family, tuning: str) -> list[tuple[int, bool]]:
    """Returns batch sizes and whether batches are padded; with adapters the first and the last."""
    kinds = list(itertools.product(family.batches, family.paddings))
    return kinds if tuning == "full" else sorted({kinds[0], kinds[-1]})


def _row(
    family: str,
    tuning: str,
    steps: Steps,
    costs: StepCosts,
    batch: Batch,
    plan: Sequence[Action],
    *,
    heap: bool,
) -> Row:
    peak = predicted_peak(costs, plan)
    expected = peak.total - peak.fixed
    ledger = steps.peak_bytes(batch, plan)
    in_heap = steps.heap_bytes(batch, plan) if heap and ledger >= MIN_HEAP_BYTES else None
    letters = {"recompute+offload": "x"}
    return Row(
        family=family,
        tuning=tuning,
        batch=costs.batch,
        length=costs.length,
        padded=costs.padded,
        plan="".join(letters.get(action.name, action.name[0]) for action in plan),
        place=peak.place,
        predicted=expected,
        ledger=ledger,
        heap=in_heap,
        error=expected / ledger - 1,
        heap_error=None if in_heap is None else expected / in_heap - 1,
    )


def summary(found: Sequence[Row]) -> dict[str, object]:
    """Returns medians and extremes of the absolute errors; nothing without rows."""
    if not found:
        return {}
    errors = [abs(row.error) for row in found]
    heap_errors = [abs(row.heap_error) for row in found if row.heap_error is not None]
    return {
        "error_median": statistics.median(errors),
        "error_max": max(errors),
        "heap_error_median": statistics.median(heap_errors) if heap_errors else None,
        "heap_error_max": max(heap_errors, default=None),
        "num_rows": len(found),
    }


def main() -> None:
    """Measures and prints."""
    warnings.filterwarnings("ignore")
    logging.getLogger("rematic").setLevel(logging.ERROR)
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    use_caching_malloc()
    found: list[Row] = []
    apart: list[Row] = []
    by_family: dict[str, dict[str, object]] = {}
    for whole in FAMILIES:
        family = whole
        if arguments.slice:
            ends = tuple(sorted({family.lengths[0], family.lengths[-1]}))
            family = replace(family, batches=family.batches[-1:], lengths=ends)
        if arguments.families and family.name not in arguments.families.split(","):
            continue
        for tuning in arguments.tunings.split(","):
            if tuning != "full" and not family.adapters:
                continue
            new = list(rows(family, tuning, number=arguments.plans, heap=not arguments.no_heap))
            by_family[f"{family.name} {tuning}"] = summary(new)
            (apart if family.apart else found).extend(new)
            progress = sys.stderr if arguments.json else sys.stdout
            print(f"{family.name} {tuning}: {summary(new)}", flush=True, file=progress)
            for row in sorted(new, key=lambda row: -abs(row.error))[: arguments.worst]:
                print(f"  {row}", file=progress)
    result = {**summary(found), "apart": summary(apart), "families": by_family}
    result["torch"] = torch.__version__
    if arguments.json:
        result["rows"] = [asdict(row) for row in (*found, *apart)]
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default="", help="names, comma-separated; all by default")
    parser.add_argument("--tunings", default=",".join(TUNINGS))
    parser.add_argument("--plans", type=int, default=3, help="mixed plans for each shape")
    parser.add_argument("--worst", type=int, default=0, help="rows to print for each family")
    parser.add_argument("--slice", action="store_true", help="one batch size and two lengths")
    parser.add_argument("--no-heap", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object, with rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()

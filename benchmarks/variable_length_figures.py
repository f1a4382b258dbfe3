"""Figures of `variable_length.py`: from documents to rows, ratios and a table."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

NUM_FOLDS = 4
"""Parts of an epoch whose ratios give the spread, where there is one epoch only."""

RATIOS = {
    "time_vs_full": "recompute",
    "time_vs_best_static_list": "static list",
    "time_vs_best_static_own": "static own",
    "time_vs_optimum": "optimum",
}
"""Keys and whom rematic is compared with."""

Row = dict[str, Any]


def summary(state: Row, options: argparse.Namespace) -> Row:
    """Returns everything; the figures at the top are those of the first workload and budget."""
    rows = []
    for workload in options.workloads:
        for share in options.budgets:
            own = [
                row
                for row in state["rows"]
                if row["workload"] == workload and row["budget"] == share and row["documents"]
            ]
            if own:
                rows.append(_row(workload, share, [row["documents"] for row in own], own[-1]))
    top = rows[0] if rows else {}
    return {
        **{key: top.get(key) for key in RATIOS},
        "documents_lost": sum(row["documents_lost"] for row in rows),
        "rows": rows,
        "peaks": state.get("peaks"),
        "extra_seconds": state.get("extra_seconds"),
        "settings": state["settings"],
    }


def _row(workload: str, share: float, epochs: Sequence[list[Row]], of: Row) -> Row:
    names = list(epochs[0][0]["ways"])
    documents = [document for epoch in epochs for document in epoch]
    own = [document["ways"].get("rematic") for document in documents]
    row: Row = {
        "workload": workload,
        "budget": share,
        "cap_bytes": of["cap_bytes"],
        "documents": len(documents),
        "tokens": sum(document["length"] for document in documents),
        "documents_lost": sum(found["lost"] for found in own if found is not None),
        "sha256": of["sha256"],
        "ways": {name: _way(name, epochs) for name in names},
    }
    for key, peer in RATIOS.items():
        if peer not in names:
            continue
        ratios = [_ratio(epoch, peer) for epoch in epochs]
        parts = ratios if len(ratios) > 1 else [_ratio(fold, peer) for fold in _folds(epochs[0])]
        parts = [part for part in parts if part is not None]
        row[key] = statistics.median(r for r in ratios if r is not None) if ratios else None
        row[f"{key}_spread"] = [min(parts), max(parts)] if parts else None
        row[f"{key}_settled"] = _ratio([d for d in documents if not _is_watched(d)], peer)
    return row


def _way(name: str, epochs: Sequence[list[Row]]) -> Row:
    found = [document["ways"][name] for epoch in epochs for document in epoch]
    seconds = [sum(d["ways"][name]["cpu"] or 0.0 for d in epoch) for epoch in epochs]
    clock = [sum(d["ways"][name]["wall"] or 0.0 for d in epoch) for epoch in epochs]
    peaks = [row["peak"] for row in found if row["peak"] is not None and not row["lost"]]
    full = "recompute" if "recompute" in epochs[0][0]["ways"] else name
    ratios = [ratio for epoch in epochs if (ratio := _ratio(epoch, full, of=name))]
    return {
        "seconds_per_epoch": statistics.median(seconds),
        "clock_seconds_per_epoch": statistics.median(clock),
        "time_vs_full": statistics.median(ratios) if ratios else None,
        "documents_lost": sum(row["lost"] for row in found),
        "peak_bytes": max(peaks, default=None),
    }


def _ratio(documents: Sequence[Row], peer: str, *, of: str = "rematic") -> float | None:
    """Returns the time of one way over another's, over the documents that neither lost."""
    pairs = [(d["ways"][of], d["ways"][peer]) for d in documents]
    both = [(a["cpu"], b["cpu"]) for a, b in pairs if not (a["lost"] or b["lost"])]
    total = sum(b for _, b in both)
    return sum(a for a, _ in both) / total if total else None


def _is_watched(document: Row) -> bool:
    """Returns whether rematic read memory after every op, to learn; the model is traced then."""
    return bool(document["ways"]["rematic"].get("peak_source") == "op ends")


def _folds(documents: Sequence[Row]) -> list[list[Row]]:
    """Returns parts of equal mixes of lengths."""
    ordered = sorted(documents, key=lambda document: document["length"])
    return [fold for i in range(NUM_FOLDS) if (fold := list(ordered[i::NUM_FOLDS]))]


def as_text(result: Row) -> str:
    """Returns the rows as a table."""
    lines = []
    for row in result["rows"]:
        lines.append(
            f"{row['workload']}, f = {row['budget']:g}: {row['documents']} documents, "
            f"{row['tokens']:,} tokens, {row['cap_bytes'] / 2**20:.0f} MiB over idle"
        )
        for key, peer in RATIOS.items():
            if key not in row:
                continue
            low, high = row[f"{key}_spread"] or (float("nan"),) * 2
            settled = row[f"{key}_settled"]
            apart = "" if settled is None else f"; {settled:.3f} without steps that it learned from"
            lines.append(f"  rematic over {peer}: {row[key]:.3f} ({low:.3f} to {high:.3f}{apart})")
        for name, way in row["ways"].items():
            peak = "-" if way["peak_bytes"] is None else f"{way['peak_bytes'] / 2**20:.0f}"
            ratio = "-" if way["time_vs_full"] is None else f"{way['time_vs_full']:.3f}"
            took, clock = way["seconds_per_epoch"], way["clock_seconds_per_epoch"]
            lines.append(
                f"    {name:14} {took:8.1f} s ({clock:.1f} by the clock)  "
                f"x recompute {ratio:>6}  lost {way['documents_lost']:3}  "
                f"peak {peak:>4} MiB"
            )
    return "\n".join(lines)

from __future__ import annotations

from rematic.journal import format_report, summarize

MIB = 1 << 20


def step(number: int, **fields: object) -> dict[str, object]:
    defaults: dict[str, object] = {
        "event": "step",
        "step": number,
        "length": 100,
        "tokens": 100,
        "policy": "planned",
        "plan": {"keep": 8},
        "predicted_peak_bytes": 99 * MIB,
        "peak_bytes": 100 * MIB,
        "budget_bytes": 200 * MIB,
        "seconds": 2.0,
        "evictions": 0,
        "evicted_bytes": 0,
        "op_retries": 0,
        "unit_retries": 0,
        "replays": 4,
    }
    return {**defaults, **fields}


def test_a_whole_run() -> None:
    events = [
        {
            "event": "run_start",
            "name": "tiny-2",
            "recipe": "tiny",
            "corpus_sha256": "ab" * 32,
            "versions": {"rematic": "0.1.0", "torch": "2.13.0"},
        },
        step(1),
        step(
            2,
            plan={"keep": 5, "recompute": 3},
            tokens=1900,
            length=1900,
            seconds=8.0,
            op_retries=2,
            step_retries=1,
            evictions=3,
            evicted_bytes=6 * MIB,
        ),
        {"event": "checkpoint", "step": 2, "path": "runs/tiny-2/last.ckpt"},
        {"event": "run_end", "status": "finished", "reason": None, "last_loss": 2.53217},
    ]
    assert format_report(events).splitlines() == [
        "run tiny-2: finished",
        "recipe tiny",
        "corpus sha256 abababababababab",
        "rematic 0.1.0, torch 2.13.0",
        "",
        "policy   plan                 steps       length  tokens  seconds  tokens/s       peak",
        "-------  -------------------  -----  -----------  ------  -------  --------  ---------",
        "planned  keep 8                   1          100     100     2.00        50  100.0 MiB",
        "planned  keep 5, recompute 3      1         1900   1,900     8.00       238  100.0 MiB",
        "all                               2  100 to 1900   2,000    10.00       200  100.0 MiB",
        "",
        "peak              100.0 MiB of 200.0 MiB (50.0%), at step 1",
        "evictions         3 (6.0 MiB freed)",
        "retries           2 of one op, 0 of one unit, 1 of a whole step",
        "replays           8",
        "policy changes    0, taken back 0",
        "prediction error  median 1.00%, max 1.00%, over 1 steps",
        "batches lost      0",
        "tokens/s          200",
        "last loss         2.5322",
        "checkpoint        runs/tiny-2/last.ckpt",
    ]


def test_says_what_is_unknown() -> None:
    lines = format_report(
        [step(1, peak_bytes=None, budget_bytes=None, seconds=0, plan={})]
    ).splitlines()
    assert lines[0] == "run without a name: unfinished"
    assert lines[4].split() == [
        "planned",
        "no",
        "units",
        "1",
        "100",
        "100",
        "0.00",
        *["unknown"] * 2,
    ]
    assert "peak              unknown, no budget" in lines
    assert "prediction error  no step was predicted, measured and left alone" in lines
    assert "tokens/s          unknown" in lines


def test_says_why_a_run_ended_and_what_was_over_budget() -> None:
    events = [
        step(1, peak_bytes=201 * MIB),
        {"event": "stop", "step": 2, "reason": "nothing left to evict"},
        {"event": "run_end", "status": "failed", "reason": "nothing left to evict"},
    ]
    lines = format_report(events).splitlines()
    assert lines[0] == "run without a name: failed (nothing left to evict)"
    assert any(line.endswith("at step 1; 1 steps above their budget") for line in lines)
    assert "batches lost      1" in lines


def test_a_run_without_a_step() -> None:
    assert "no step was finished" in format_report([])
    assert summarize([]).steps == 0


def test_notices_come_last_and_are_grouped() -> None:
    def notice(unit: str, kind: str, text: str) -> dict[str, object]:
        return {"event": "notice", "step": 0, "unit": unit, "kind": kind, "text": text}

    events = [
        step(0),
        *(notice(f"layers.{i}", "compress", f"8 bits differ by {i}.5%") for i in range(5)),
        notice("layers.7", "kept", "the replay of unit 'layers.7' saved 3 tensors less"),
        notice("layers.8", "kept", "the replay of unit 'layers.8' saved 3 tensors less"),
        notice("layers.0", "compress", "8 bits differ by 0.7%"),
        notice("", "taken_over", "gradient checkpointing is turned off"),
    ]
    assert format_report(events).splitlines()[-4:] == [
        "",
        "layers.0, layers.1, layers.2 and 2 more (compress): 8 bits differ by 0.7%",
        "layers.7, layers.8 (kept): the replay of unit 'layers.7' saved 3 tensors less",
        "the model (taken_over): gradient checkpointing is turned off",
    ]
    told = summarize(events).to_dict()["notices"]
    assert isinstance(told, tuple)
    assert [len(each["units"]) for each in told] == [5, 2, 1]

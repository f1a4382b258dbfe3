"""What would fit, and what a run says when nothing does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rematic.control import (
    Costs,
    FailedAttempt,
    StepOutcome,
    StepRequest,
    StopReport,
    advise,
    format_stop,
    largest_length,
    learn,
)

REQUEST = StepRequest(
    tokens=2000,
    length=1000,
    unit_classes=("Block", "Block"),
    actions=(None, None),
    in_use_bytes=1000,
    pending_gradient_bytes=0,
    budget_bytes=11_000,
    reserve=0.0,
)
REPORT = StopReport(
    batch=2,
    length=512,
    budget_bytes=1 << 20,
    attempts=(
        FailedAttempt(name="as planned", needed_bytes=3 << 20, error="first", where="a.py:1 in f"),
        FailedAttempt(name="recompute", needed_bytes=None, error="last", where="b.py:2 in g"),
    ),
    obstacle=None,
    largest_length=None,
    resident_bytes=(("weights", 5),),
)


def _measured(tokens: int) -> Costs:
    outcome = StepOutcome(
        tokens=tokens,
        length=tokens,
        kept_bytes=(("Block", 100 * tokens),),
        unit_transient_bytes=10 * tokens,
        head_transient_bytes=5 * tokens,
        backward_transient_bytes=10 * tokens,
        missing_bytes=0,
    )
    return learn(Costs(), outcome)


def test_the_largest_length_is_that_of_the_working_set() -> None:
    """Ten bytes for each token of two sequences, beside a thousand in use, in 11,000."""
    assert largest_length(_measured(1000), REQUEST) == 500
    assert largest_length(_measured(1000), replace(REQUEST, budget_bytes=1 << 40)) == 1000
    assert largest_length(_measured(1000), replace(REQUEST, budget_bytes=900)) == 0


@pytest.mark.parametrize(
    ("costs", "request_"),
    [(Costs(), REQUEST), (_measured(10), replace(REQUEST, budget_bytes=None))],
    ids=["nothing measured", "no budget"],
)
def test_it_is_unknown_otherwise(costs: Costs, request_: StepRequest) -> None:
    assert largest_length(costs, request_) is None


def test_the_text_says_what_was_tried() -> None:
    assert format_stop(REPORT) == (
        "a batch of 2 x 512 tokens ran out of memory. Tried: as planned (needed 3.0 MiB); "
        "recompute. last (at b.py:2 in g). The budget is 1.0 MiB."
    )


def test_a_batch_that_told_no_shape_gets_no_numbers() -> None:
    """Such as one of texts, which a trainer tokenizes inside its step."""
    text = format_stop(replace(REPORT, batch=1, length=1, largest_length=1))
    assert text.startswith("a batch ran out of memory. Tried: as planned")
    assert "expected to fit" not in text


def test_the_text_says_what_would_fit_and_what_to_do() -> None:
    advice = advise(may_tile=False, may_compress=False, split_by=None, head_is_peak=True)
    report = replace(
        REPORT, obstacle="weights changed.", largest_length=300, num_torn_gradients=2, advice=advice
    )
    text = format_stop(report)
    assert "It was not tried again: weights changed." in text
    assert "2 gradients of earlier micro-batches hold a part of this one: call `zero_grad`" in text
    assert "Sequences of up to 300 tokens are expected to fit." in text
    assert "Most of it is needed by head and loss: use a tiled loss." in text
    assert "`policy: {allow_lossy: true}`" in text
    assert "`policy: {allow_tile: true}` permits MLPs and norms in slices" in text
    assert "split" not in text


@pytest.mark.parametrize("usable", [None, 1 << 20, 2 << 20, 700_000])
def test_the_text_says_where_less_than_the_budget_was_there(usable: int | None) -> None:
    text = format_stop(replace(REPORT, usable_bytes=usable))
    assert "The budget is 1.0 MiB" in text
    short = "but only 683.6 KiB could be in use: what this process holds beside tensors"
    assert (short in text) is (usable == 700_000)


def test_a_stop_between_steps_says_what_a_person_must_decide() -> None:
    """Where nothing was tried, no smaller batch would help, so no caller shall shrink it."""
    text = format_stop(replace(REPORT, attempts=(), obstacle="memory stays short."))
    assert text == "the training was stopped between two steps: memory stays short."


def test_the_report_is_plain() -> None:
    plain = REPORT.to_plain()
    assert plain["resident_bytes"] == {"weights": 5}
    assert plain["attempts"][0]["name"] == "as planned"

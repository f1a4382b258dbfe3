"""What the demo found: three ways to train the same documents, compared."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PLAIN = "plain"
KEPT = "kept"
RECOMPUTED = "recomputed"
REMATIC = "rematic"


@dataclass(frozen=True, kw_only=True)
class DocumentFigures:
    """One document, trained one way."""

    number: int
    """Position in the order of training, from 0."""
    length: int
    """Tokens."""
    loss_hex: str
    """The loss to the last bit, as `float.hex` writes it."""
    seconds: float
    """Forward, backward and optimizer step."""
    peak_bytes: int | None = None
    """Highest memory in use, in bytes; None where nothing measured it."""
    budget_bytes: int | None = None
    """Bytes that may be in use."""
    evictions: int = 0
    """Records evicted inside the step."""
    op_retries: int = 0
    """Failed allocations answered by the retry of one op."""
    unit_retries: int = 0
    """Failed allocations answered by the retry of one unit."""
    plan: str = ""
    """How many units each action had."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A document that could not be trained."""

    number: int
    """Position in the order of training, from 0."""
    name: str
    """Name of the document."""
    length: int
    """Tokens."""
    error: str
    """First line of the error."""


@dataclass(frozen=True, kw_only=True)
class WayFigures:
    """All documents, trained one way."""

    way: str
    """`plain` (no cap), `kept`, `recomputed` or `rematic`."""
    documents: tuple[DocumentFigures, ...]
    """Those that were trained."""
    failures: tuple[Failure, ...]
    """Those that were not."""
    losses_equal: int
    """Losses that are bit-equal to those of the plain run."""
    seconds: float
    """Time of the trained documents together, in seconds."""
    peak_bytes: int | None
    """Highest memory in use, in bytes."""
    evictions: int
    """Records evicted."""
    retries: int
    """Failed allocations that were answered."""


@dataclass(frozen=True, kw_only=True)
class DemoFigures:
    """The whole comparison."""

    num_documents: int
    """Documents to train."""
    num_tokens: int
    """Their tokens."""
    max_length: int
    """Longest, in tokens."""
    budget_bytes: int
    """Bytes that may be in use; the heap was really capped there, the plain run's aside."""
    corpus_sha256: str
    """Hash of the documents."""
    ways: tuple[WayFigures, ...]
    """Plain, kept, recomputed, rematic."""
    seconds_ratio: float | None
    """Time of rematic over that of everything recomputed, all documents together."""
    seconds_ratio_median: float | None
    """The same per document: median."""
    seconds_ratio_min: float | None
    """The same per document: least."""
    seconds_ratio_max: float | None
    """The same per document: most."""

    def to_dict(self) -> dict[str, object]:
        """The comparison as plain values, as `--json` prints it."""
        return dataclasses.asdict(self)

    def way(self, name: str) -> WayFigures:
        """The figures of one way."""
        return next(way for way in self.ways if way.way == name)


def compare(
    documents: Mapping[str, Sequence[DocumentFigures]],
    failures: Mapping[str, Sequence[Failure]],
    *,
    lengths: Sequence[int],
    max_length: int,
    budget_bytes: int,
    corpus_sha256: str,
) -> DemoFigures:
    """Puts the three ways beside the plain run.

    Args:
        documents: Trained documents, by way.
        failures: Documents that could not be trained, by way.
        lengths: Tokens of each document.
        max_length: Tokens at which documents were cut.
        budget_bytes: Bytes that may be in use.
        corpus_sha256: Hash of the documents.
    """
    plain = {document.number: document.loss_hex for document in documents.get(PLAIN, ())}
    ways = tuple(
        _summarize(way, documents.get(way, ()), failures.get(way, ()), plain=plain)
        for way in (PLAIN, KEPT, RECOMPUTED, REMATIC)
    )
    ratios = _ratios(documents.get(REMATIC, ()), documents.get(RECOMPUTED, ()))
    ours, theirs = (sum(pair[way] for pair in ratios.values()) for way in (0, 1))
    each = [mine / other for mine, other in ratios.values()]
    return DemoFigures(
        num_documents=len(lengths),
        num_tokens=sum(lengths),
        max_length=max_length,
        budget_bytes=budget_bytes,
        corpus_sha256=corpus_sha256,
        ways=ways,
        seconds_ratio=ours / theirs if each else None,
        seconds_ratio_median=statistics.median(each) if each else None,
        seconds_ratio_min=min(each, default=None),
        seconds_ratio_max=max(each, default=None),
    )


def _summarize(
    way: str,
    documents: Sequence[DocumentFigures],
    failures: Sequence[Failure],
    *,
    plain: Mapping[int, str],
) -> WayFigures:
    peaks = [document.peak_bytes for document in documents if document.peak_bytes is not None]
    return WayFigures(
        way=way,
        documents=tuple(documents),
        failures=tuple(failures),
        losses_equal=sum(plain.get(d.number) == d.loss_hex for d in documents),
        seconds=sum(document.seconds for document in documents),
        peak_bytes=max(peaks, default=None),
        evictions=sum(document.evictions for document in documents),
        retries=sum(document.op_retries + document.unit_retries for document in documents),
    )


def _ratios(
    ours: Sequence[DocumentFigures], theirs: Sequence[DocumentFigures]
) -> dict[int, tuple[float, float]]:
    """Seconds of both for each document that both have trained."""
    other = {document.number: document.seconds for document in theirs}
    return {d.number: (d.seconds, other[d.number]) for d in ours if d.number in other}

"""The documents of `variable_length.py`: two distributions of lengths, always the same texts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from rematic.recipes import DataConfig
from rematic.training.corpus import EMBEDDED_SOURCE, load_corpus

SHORTEST = 64
"""Documents of the corpus that keep fewer bytes are left out."""

NUM_DRAWN = 80
MEDIAN = 284
SIGMA = 1.0
"""Of the log-normal tail: its 90th percentile is 3.6 times the median."""

WORKLOADS = ("corpus", "log-normal")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Documents as bytes, in the order in which the first epoch takes them."""

    name: str
    documents: tuple[bytes, ...]
    sha256: str
    """Hash of the corpus that the texts come from."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document; a byte is a token."""
        return [len(document) for document in self.documents]

    def order(self, epoch: int) -> list[int]:
        """Positions of the documents in the order of one epoch; the first is as they stand."""
        order = list(range(len(self.documents)))
        if epoch:
            random.Random(epoch).shuffle(order)
        return order


def load_workload(name: str, *, longest: int, every: int = 1) -> Workload:
    """Returns the documents of a workload, shuffled by a fixed seed.

    `corpus`: the embedded texts at a quarter of their length, cut at `longest`. `log-normal`: as
    long as the quantiles of that distribution, so that no draw decides, cut likewise.

    Args:
        name: One of `WORKLOADS`.
        longest: Tokens at which documents are cut.
        every: Take every so-manieth document by length, from the longest down.
    """
    corpus = load_corpus(DataConfig(source=EMBEDDED_SOURCE))
    texts = [document.text for document in corpus.documents]
    if name == "corpus":
        cut = [text[: min(longest, len(text) // 4)] for text in texts]
        documents = [text for text in cut if len(text) >= min(SHORTEST, longest)]
    else:
        documents = _pieces(b"".join(texts), _log_normal_lengths(longest))
    documents = sorted(documents, key=len, reverse=True)[::every]
    random.Random(0).shuffle(documents)
    return Workload(name=name, documents=tuple(documents), sha256=corpus.sha256)


def _log_normal_lengths(longest: int) -> list[int]:
    scale = MEDIAN * longest / 2048
    shares = [(i + 0.5) / NUM_DRAWN for i in range(NUM_DRAWN)]
    drawn = [scale * math.exp(SIGMA * NormalDist().inv_cdf(share)) for share in shares]
    return [max(8, min(longest, round(length))) for length in drawn]


def _pieces(text: bytes, lengths: Sequence[int]) -> list[bytes]:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]

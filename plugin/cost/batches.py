"""Batches to trace with: the shapes and the masks of real ones."""

from __future__ import annotations

import torch

from rematic.cost.step_trace import Batch


def language_model_batch(batch: int, length: int, padded: bool) -> Batch:
    """Returns token ids and labels of shape (batch, length); padded ones with a mask.

    A quarter of the first sequence is hidden; that is enough for the path that masks take.
    """
    ids = torch.ones(batch, length, dtype=torch.int64)
    if not padded:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length - max(1, length // 4) :] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def packed_batch(batch: int, length: int, padded: bool) -> Batch:
    """Returns a batch of sequences that are two documents each, which do not see each other."""
    made = language_model_batch(batch, length, padded)
    half = length // 2
    positions = torch.cat([torch.arange(half), torch.arange(length - half)])
    return {**made, "position_ids": positions.expand(batch, length).contiguous()}


def classified_batch(batch: int, length: int, padded: bool) -> Batch:
    """Returns a batch with a class for each sequence."""
    made = language_model_batch(batch, length, padded)
    return {**made, "labels": torch.zeros(batch, dtype=torch.int64)}

from __future__ import annotations

import torch

from rematic.recipes import DataConfig
from rematic.training.corpus import load_corpus
from rematic.training.loader import DocumentLoader, build_loader

DOCUMENTS = [[number] * (number + 2) for number in range(10)]


def seen(loader: DocumentLoader) -> list[int]:
    return [int(batch["input_ids"][0, 0]) for batch in loader]


def test_each_batch_is_one_document_at_its_own_length() -> None:
    loader = DocumentLoader(DOCUMENTS, seed=0, shuffle=False)
    assert [tuple(batch["input_ids"].shape) for batch in loader] == [(1, n) for n in range(2, 12)]
    assert all(torch.equal(batch["input_ids"], batch["labels"]) for batch in loader)
    assert len(loader) == 10
    assert loader.max_length == 11


def test_every_epoch_has_every_document_in_an_order_of_its_own() -> None:
    loader = DocumentLoader(DOCUMENTS, seed=0, shuffle=True)
    first = seen(loader)
    loader.finished = 10
    second = seen(loader)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_goes_on_after_the_finished_batches() -> None:
    loader = DocumentLoader(DOCUMENTS, seed=0, shuffle=True)
    whole = seen(loader)
    loader.finished = 7
    again = DocumentLoader(DOCUMENTS, seed=0, shuffle=True)
    again.load_state_dict(loader.state_dict())
    assert seen(again) == whole[7:]


def test_a_batch_that_was_only_handed_out_is_not_finished() -> None:
    loader = DocumentLoader(DOCUMENTS, seed=0, shuffle=True)
    next(iter(loader))
    assert loader.state_dict() == {"finished": 0}


def test_cuts_documents_at_the_length_of_the_recipe() -> None:
    loader = build_loader(load_corpus("pydoc_topics"), DataConfig(max_length=100), seed=0)
    assert loader.max_length == 100
    assert len(loader) == 79

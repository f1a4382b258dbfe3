from __future__ import annotations

import pytest
import torch

from rematic.recipes import DataConfig
from rematic.recipes.data_schema import Order
from rematic.training.loader import BatchLoader
from tests.training.small import examples, maker

DOCUMENTS = [[number] * (number + 2) for number in range(10)]


def make_loader(order: Order = "shuffled", **options: int) -> BatchLoader:
    return BatchLoader(examples(DOCUMENTS), maker(), order=order, **options)


def seen(loader: BatchLoader) -> list[int]:
    return [int(batch["input_ids"][0, 0]) for batch in loader]


def test_each_batch_is_one_document_at_its_own_length() -> None:
    loader = make_loader("written")
    assert [tuple(batch["input_ids"].shape) for batch in loader] == [(1, n) for n in range(2, 12)]
    assert all(torch.equal(batch["input_ids"], batch["labels"]) for batch in loader)
    assert len(loader) == 10
    assert loader.max_length == 11


def test_every_epoch_has_every_document_in_an_order_of_its_own() -> None:
    loader = make_loader()
    first = seen(loader)
    loader.finished = 10
    second = seen(loader)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_goes_on_after_the_finished_batches() -> None:
    loader = make_loader()
    whole = seen(loader)
    loader.finished = 7
    again = make_loader()
    again.load_state_dict(loader.state_dict())
    assert seen(again) == whole[7:]


def test_a_batch_that_was_only_handed_out_is_not_finished() -> None:
    loader = make_loader()
    next(iter(loader))
    assert loader.state_dict() == {"finished": 0}


def test_the_longest_come_first_where_that_is_asked_for() -> None:
    assert seen(make_loader("longest-first")) == list(range(9, -1, -1))


def test_a_batch_has_as_many_documents_as_the_recipe_says() -> None:
    loader = make_loader("written", batch_size=4)
    batches = list(loader)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(4, 5), (4, 9), (2, 11)]
    assert [batch["attention_mask"].sum(1).tolist() for batch in batches] == [
        [2, 3, 4, 5],
        [6, 7, 8, 9],
        [10, 11],
    ]
    assert all(
        bool((batch["labels"][batch["attention_mask"] == 0] == -100).all()) for batch in batches
    )


def test_ranks_share_an_epoch_and_get_equally_many_batches() -> None:
    loaders = [make_loader(rank=rank, num_ranks=3) for rank in range(3)]
    shares = [seen(loader) for loader in loaders]
    assert [len(share) for share in shares] == [len(loader) for loader in loaders] == [3, 3, 3]
    assert len({document for share in shares for document in share}) == 9
    with pytest.raises(ValueError, match="the data makes 10 batches for 11 processes"):
        make_loader(rank=0, num_ranks=11)


def test_lengths_are_rounded_up_to_the_multiple() -> None:
    loader = BatchLoader(examples(DOCUMENTS), maker(DataConfig(pad_to_multiple=8)))
    assert {batch["input_ids"].shape[1] for batch in loader} == {8, 16}
    assert loader.max_length == 16

"""The count of live storages, and where in a value its storages are found."""

from __future__ import annotations

import gc
import weakref

import torch

from rematic.memory.storages import LiveStorages, storages_of


def test_a_storage_is_new_once() -> None:
    live = LiveStorages()
    tensor = torch.ones(10)
    storage = tensor.untyped_storage()
    assert not live.knows(storage)
    assert live.note(storage) == 40
    assert live.note(tensor[2:].untyped_storage()) is None
    assert live.knows(storage)
    assert (len(live), live.num_bytes) == (1, 40)


def test_it_is_forgotten_when_the_last_tensor_goes() -> None:
    live = LiveStorages()
    tensor = torch.ones(10)
    view = tensor[:1]
    live.note(tensor.untyped_storage())
    del tensor
    assert (len(live), live.num_bytes) == (1, 40)
    del view
    assert (len(live), live.num_bytes) == (0, 0)


def test_two_counts_of_one_storage_are_independent() -> None:
    first, second = LiveStorages(), LiveStorages()
    tensor = torch.ones(10)
    first.note(tensor.untyped_storage())
    second.note(tensor.untyped_storage())
    del first
    assert second.num_bytes == 40
    del tensor
    assert second.num_bytes == 0


def test_it_is_in_no_cycle() -> None:
    gc.collect()
    gc.disable()
    try:
        live, tensor = LiveStorages(), torch.ones(10)
        live.note(tensor.untyped_storage())
        reference = weakref.ref(live)
        del live
        assert reference() is None
    finally:
        gc.enable()


def test_storages_are_found_in_containers() -> None:
    tensors = [torch.ones(size) for size in (1, 2, 3, 4)]
    value = (tensors[0], [tensors[1], None, "text", 3], {"key": (tensors[2], [tensors[3]])})
    assert [storage.nbytes() for storage in storages_of(value)] == [4, 8, 12, 16]
    assert list(storages_of(None)) == []
    assert list(storages_of(torch.eye(2).to_sparse())) == []


def test_meta_tensors_have_the_size_they_stand_for() -> None:
    (storage,) = storages_of(torch.empty(2**30, device="meta"))
    assert storage.nbytes() == 2**32

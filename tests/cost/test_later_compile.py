from __future__ import annotations

import pytest
import torch

from rematic.cost.later_compile import compiled_when_called


def test_what_is_decorated_is_compiled_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, dict[str, object]]] = []

    def compile_now(model, **options):
        compiled.append((model.__name__, options))
        return lambda number: model(number) + 100

    monkeypatch.setattr(torch, "compile", compile_now)
    with compiled_when_called():

        @torch.compile
        def once(number):
            return number + 1

        @torch.compile(dynamic=False)
        def twice(number):
            return number + 2

        assert compiled == []
    assert torch.compile is compile_now
    assert [once(1), once(2), twice(1)] == [102, 103, 103]
    assert compiled == [("once", {}), ("twice", {"dynamic": False})]


def test_compile_is_back_after_an_error() -> None:
    before = torch.compile
    with pytest.raises(ImportError), compiled_when_called():
        raise ImportError
    assert torch.compile is before

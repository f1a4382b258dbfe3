"""Lets what a module compiles when it is imported be compiled when it is called.

bitsandbytes (0.50) decorates functions with `torch.compile`, which loads a compiler that a plan
never uses: a second of the command's time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_Function = Callable[..., Any]


@contextlib.contextmanager
def compiled_when_called() -> Iterator[None]:
    """Defers `torch.compile` in the body to the first call of what it returns."""
    compile_now: Any = torch.compile

    def compile_later(model: _Function | None = None, **options: Any) -> _Function:
        if model is None:
            return functools.partial(compile_later, **options)

        @functools.cache
        def compiled() -> _Function:
            made: _Function = compile_now(model, **options)
            return made

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - what the function takes
            return compiled()(*args, **kwargs)

        return call

    torch.compile = compile_later  # the part of it that decorators use
    try:
        yield
    finally:
        torch.compile = compile_now

"""Lets transformers treat the fake tensors of a trace as real ones.

Version 5.24 asks whether a tensor is fake, and then leaves out what it cannot decide without values
(it always builds masks, for one). The trace answers such questions itself (`RealTwins`), and must
take the path of the real step. Delete this when transformers looks at values where there are some.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def on_real_path() -> Iterator[None]:
    """Makes transformers answer that no tensor is fake, if it is imported at all."""
    module = sys.modules.get("transformers.utils.import_utils")
    if module is None or not hasattr(module, "is_fake_tensor"):
        yield
    else:
        with mock.patch.object(module, "is_fake_tensor", _no):
            yield


def _no(tensor: object) -> bool:
    return False


@contextlib.contextmanager
def accelerators_8_bits() -> Iterator[None]:
    """Lets 8-bit layers of bitsandbytes (0.50) train on the CPU as they do on a GPU."""
    module = sys.modules.get("bitsandbytes")
    if module is None or not hasattr(module, "matmul"):
        yield
    else:
        log = logging.getLogger("bitsandbytes.autograd._functions")  # repeats itself in every layer
        with (
            mock.patch.object(module, "matmul", _product_of_8_bits),
            mock.patch.object(log, "disabled", True),
        ):
            yield


def _product_of_8_bits(
    left: Any,  # noqa: ANN401 - whatever the layer passes
    right: Any,  # noqa: ANN401
    out: Any = None,  # noqa: ANN401
    state: Any = None,  # noqa: ANN401
    threshold: float = 0.0,
    bias: Any = None,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    from bitsandbytes.autograd._functions import MatMul8bitLt

    return MatMul8bitLt.apply(left, right, out, bias, state)  # type: ignore[no-untyped-call]

"""Lets transformers treat the fake tensors of a trace as real ones.

Version 5.24 asks whether a tensor is fake, and then leaves out what it cannot decide without values
(it always builds masks, for one). The trace answers such questions itself (`RealTwins`), and must
take the path of the real step. Delete this when transformers looks at values where there are some.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
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

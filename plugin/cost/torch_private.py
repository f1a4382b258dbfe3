"""The only place of this room that touches private torch names (as of 2.13)."""

import linecache

from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

disable_current_modes = _disable_current_modes
"""Switches off every dispatch mode inside `with`."""


def make_fake_mode() -> FakeTensorMode:
    """Returns a mode that leaves nothing behind: a step may be traced because memory is short.

    (Its cache of what ops return belongs to the process, and grows by 0.9 MiB in one trace of a
    small model; the source that it reads to remember where it was made is 0.5 MiB.)
    """
    known = set(linecache.cache)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for filename in set(linecache.cache) - known:
        linecache.cache.pop(filename, None)
    mode.cache_enabled = False
    return mode

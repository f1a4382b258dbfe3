"""The only place of this room that touches private torch names (as of 2.13)."""

from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

disable_current_modes = _disable_current_modes
"""Switches off every dispatch mode inside `with`."""

"""Apply: the places to which saved tensors move, host memory, disk, or 8 bits."""

from __future__ import annotations

from rematic.stash.compress import CompressStash as CompressStash
from rematic.stash.compress import QuantizationError as QuantizationError
from rematic.stash.compress import load_quantization as load_quantization
from rematic.stash.compress import quantization_error as quantization_error
from rematic.stash.disk import DiskStash as DiskStash
from rematic.stash.host import HostStash as HostStash
from rematic.stash.layout import refusal as refusal
from rematic.stash.stash import Handle as Handle
from rematic.stash.stash import Stash as Stash
from rematic.stash.stash import StashError as StashError

"""Measure: memory snapshots, probes, out-of-memory classification, the heap cap."""

from __future__ import annotations

from rematic.memory.autocast_of_call import autocast_of_call as autocast_of_call
from rematic.memory.cached_blocks import RELEASING_KINDS as RELEASING_KINDS
from rematic.memory.cached_blocks import release_cached_blocks as release_cached_blocks
from rematic.memory.compiler_import import load_compiler_now as load_compiler_now
from rematic.memory.device_probe import AcceleratorProbe as AcceleratorProbe
from rematic.memory.device_probe import CudaProbe as CudaProbe
from rematic.memory.device_probe import allocator_settings as allocator_settings
from rematic.memory.heap_cap import CappedHeap as CappedHeap
from rematic.memory.heap_cap import capped_heap as capped_heap
from rematic.memory.heap_cap import warm_up_threads as warm_up_threads
from rematic.memory.host_malloc import use_caching_malloc as use_caching_malloc
from rematic.memory.host_malloc import use_mapping_malloc as use_mapping_malloc
from rematic.memory.host_probe import HostProbe as HostProbe
from rematic.memory.host_probe import process_overhead_bytes as process_overhead_bytes
from rematic.memory.last_tries import LastTries as LastTries
from rematic.memory.list_versions import ListVersions as ListVersions
from rematic.memory.list_versions import changed_lists as changed_lists
from rematic.memory.out_of_memory import ErrorRow as ErrorRow
from rematic.memory.out_of_memory import classify_error as classify_error
from rematic.memory.out_of_memory import is_out_of_memory as is_out_of_memory
from rematic.memory.out_of_memory import requested_bytes as requested_bytes
from rematic.memory.probe_choice import make_probe as make_probe
from rematic.memory.simulated_probe import SimulatedProbe as SimulatedProbe
from rematic.memory.snapshot import MemorySnapshot as MemorySnapshot
from rematic.memory.snapshot import Probe as Probe

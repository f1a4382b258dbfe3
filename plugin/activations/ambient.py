"""The torch state around a call that decides its bits: generators, autocast, global switches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch

from rematic.activations import torch_private
from rematic.activations.host_generators import HostGenerator
from rematic.activations.kept_values import same_contents
from rematic.activations.torch_private import unwrapped

# Each switch is (read, write). Read in forward, written for the replay where it differs.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (
        unwrapped(torch.backends.cuda.flash_sdp_enabled, "_get_flash_sdp_enabled"),
        torch.backends.cuda.enable_flash_sdp,
    ),
    (
        unwrapped(torch.backends.cuda.mem_efficient_sdp_enabled, "_get_mem_efficient_sdp_enabled"),
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    (
        unwrapped(torch.backends.cuda.math_sdp_enabled, "_get_math_sdp_enabled"),
        torch.backends.cuda.enable_math_sdp,
    ),
    (
        unwrapped(torch.backends.cuda.cudnn_sdp_enabled, "_get_cudnn_sdp_enabled"),
        torch.backends.cuda.enable_cudnn_sdp,
    ),
    (torch_private.sdpa_priority_order, torch_private.set_sdpa_priority_order),
    (
        unwrapped(torch.get_float32_matmul_precision, "_get_float32_matmul_precision"),
        torch.set_float32_matmul_precision,
    ),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (
        unwrapped(torch.are_deterministic_algorithms_enabled, "_get_deterministic_algorithms"),
        lambda enabled: torch.use_deterministic_algorithms(
            enabled, warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
        ),
    ),
    (
        unwrapped(
            torch.is_deterministic_algorithms_warn_only_enabled,
            "_get_deterministic_algorithms_warn_only",
        ),
        lambda warn_only: torch.use_deterministic_algorithms(
            torch.are_deterministic_algorithms_enabled(), warn_only=warn_only
        ),
    ),
)
_AUTOCAST_CACHE = 7
"""Where the switch of autocast's cache stands."""

_READERS = tuple(read for read, _ in _SWITCHES)

Generator: TypeAlias = torch.Generator | HostGenerator
"""What draws random numbers and can be put back."""


class AmbientState(NamedTuple):
    """What a forward saw around it, so that its replay sees the same.

    (A named tuple: one is made for every call of a unit.)
    """

    cpu_generator: torch.Tensor
    """State of the CPU generator."""

    device_generators: tuple[tuple[torch.device, torch.Tensor], ...]
    """State of the generator of each accelerator the unit's tensors live on."""

    own_generators: tuple[tuple[Generator, Any], ...]
    """Generators that the call was given or that the unit's modules hold, and those outside torch
    that it draws from, and their states."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """(device type, enabled, dtype) of autocast."""

    default_device: torch.device | None
    """Device of `torch.set_default_device`, None if never set."""

    switches: tuple[Any, ...]
    """Values of the global switches, in the order of `_SWITCHES`."""


def capture_ambient(
    devices: tuple[torch.device, ...], generators: tuple[Generator, ...] = ()
) -> AmbientState:
    """Reads the state around a call whose tensors live on `devices`, and that of `generators`."""
    return AmbientState(
        cpu_generator=torch.get_rng_state(),
        device_generators=tuple(
            [
                (device, _device_module(device).get_rng_state(device))
                for device in devices
                if _has_generator(device)
            ]
        ),
        own_generators=tuple([(generator, generator.get_state()) for generator in generators]),
        autocast=tuple(
            [
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _autocast_types(devices)
            ]
        ),
        default_device=torch_private.default_device_override(),
        switches=tuple([read() for read in _READERS]),
    )


@functools.cache
def _autocast_types(devices: tuple[torch.device, ...]) -> tuple[str, ...]:
    types = {"cpu", *(device.type for device in devices)}
    return tuple(kind for kind in sorted(types) if torch.amp.is_autocast_available(kind))


def restore_generators(state: AmbientState) -> None:
    """Puts every generator back to where `state` saw it."""
    torch.set_rng_state(state.cpu_generator)
    for device, generator_state in state.device_generators:
        _device_module(device).set_rng_state(generator_state, device)
    for generator, generator_state in state.own_generators:
        generator.set_state(generator_state)


def generators_moved(ambient: AmbientState) -> bool:
    """Returns whether a generator has drawn since `ambient` was read."""
    devices = tuple(device for device, _ in ambient.device_generators)
    now = capture_ambient(devices, tuple(generator for generator, _ in ambient.own_generators))
    pairs = [(ambient.cpu_generator, now.cpu_generator)]
    for kind in ("device_generators", "own_generators"):
        before, after = getattr(ambient, kind), getattr(now, kind)
        pairs += [(b, a) for (_, b), (_, a) in zip(before, after, strict=True)]
    return not all(same_contents(before, after) for before, after in pairs)


@contextlib.contextmanager
def applied(state: AmbientState) -> Iterator[None]:
    """Runs the body under `state` and restores everything after it, whatever happens."""
    devices = tuple(device for device, _ in state.device_generators)
    before = capture_ambient(devices, tuple(generator for generator, _ in state.own_generators))
    with contextlib.ExitStack() as stack:
        stack.callback(restore_generators, before)
        stack.callback(_write_switches, before.switches)
        _write_switches(state.switches)
        for kind, enabled, dtype in state.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        # autocast(enabled=...) above sets the cache flag as well: the recorded one wins
        torch.set_autocast_cache_enabled(state.switches[_AUTOCAST_CACHE])
        if state.default_device != before.default_device:
            stack.enter_context(torch.device(state.default_device or "cpu"))
        restore_generators(state)
        yield


def save_modes() -> Callable[[], None]:
    """Takes down grad mode, autocast and the global switches; returns what puts them back.

    (Code that sets one by a call, and not by a context, leaves it behind when it fails.)
    """
    switches, grad = tuple([read() for read in _READERS]), torch.is_grad_enabled()
    kinds = _autocast_types(_accelerator_in_use())
    autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    device = torch_private.default_device_override()

    def put_back() -> None:
        torch.set_grad_enabled(grad)
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        if torch_private.default_device_override() != device:
            torch.set_default_device(device)
        _write_switches(switches)

    return put_back


def _accelerator_in_use() -> tuple[torch.device, ...]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return () if found is None else (found,)


def _write_switches(wanted: tuple[Any, ...]) -> None:
    # Compared with what is there now: a body that is stopped early may leave its own behind.
    for (read, write), value in zip(_SWITCHES, wanted, strict=True):
        if value != read():
            write(value)


def _has_generator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta") and hasattr(_device_module(device), "get_rng_state")


def _device_module(device: torch.device) -> Any:
    # torch.cuda, torch.xpu, ...: modules without a common type
    return torch.get_device_module(device)

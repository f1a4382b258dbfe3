"""The state around a call: read in forward, shown in the replay, put back after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rematic.activations.ambient import applied, capture_ambient, restore_generators


@contextlib.contextmanager
def _setting(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Any:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


# A context, and what is read inside and outside it.
STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "autocast to another dtype": (
        lambda: torch.autocast("cpu", torch.float16),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "autocast without a cache": (
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        torch.is_autocast_cache_enabled,
    ),
    "attention kernel": (
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
    ),
    "attention kernels in order": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        lambda: torch._C._get_sdp_priority_order(),
    ),
    "default dtype": (
        lambda: _setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        torch.get_default_dtype,
    ),
    "matmul precision": (
        lambda: _setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
        ),
        torch.get_float32_matmul_precision,
    ),
    "deterministic algorithms": (
        lambda: _setting(
            torch.are_deterministic_algorithms_enabled,
            lambda on: torch.use_deterministic_algorithms(on, warn_only=on),
            True,
        ),
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
    ),
    "default device": (lambda: torch.device("meta"), lambda: torch.empty(0).device.type),
}


@pytest.mark.parametrize(("context", "read"), STATES.values(), ids=STATES.keys())
@pytest.mark.parametrize("recorded_inside", [True, False], ids=["forward", "backward"])
def test_state_is_shown_and_put_back(
    context: Callable[[], Any], read: Callable[[], Any], recorded_inside: bool
) -> None:
    """The state was on in forward and is off in backward, or the other way round."""
    outside = contextlib.nullcontext
    with (context if recorded_inside else outside)():
        state, recorded = capture_ambient(()), read()
    with (outside if recorded_inside else context)():
        present = read()
        assert present != recorded
        with applied(state):
            assert read() == recorded
        assert read() == present
        with pytest.raises(KeyError), applied(state):
            raise KeyError
        assert read() == present


def test_the_generator_is_shown_and_put_back() -> None:
    torch.manual_seed(0)
    state = capture_ambient(())
    wanted = torch.rand(3)
    later = torch.get_rng_state()
    for _ in range(2):
        with applied(state):
            assert torch.equal(torch.rand(3), wanted)
        assert torch.equal(torch.get_rng_state(), later)
    restore_generators(state)
    assert torch.equal(torch.rand(3), wanted)


def test_given_generators_are_shown_and_put_back() -> None:
    generator = torch.Generator().manual_seed(1)
    state = capture_ambient((), (generator,))
    wanted = torch.rand(3, generator=generator)
    later = generator.get_state()
    with applied(state):
        assert torch.equal(torch.rand(3, generator=generator), wanted)
    assert torch.equal(generator.get_state(), later)


def test_a_body_that_leaves_something_behind_is_cleaned_up() -> None:
    state = capture_ambient(())
    with applied(state):
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.rand(3)
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.equal(torch.get_rng_state(), state.cpu_generator)

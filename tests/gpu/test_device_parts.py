"""The parts of the device check on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from benchmarks.device_parts import PARTS, NotHere

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_passes(part: str) -> None:
    try:
        figures = PARTS[part](torch.device("cuda"))
    except NotHere as reason:
        pytest.skip(str(reason))
    assert figures["ok"], figures

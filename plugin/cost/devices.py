"""What devices can do: the figures of their makers, and how a device is found by name.

Rates are the dense ones (no sparsity), for products that accumulate in float32. The memory is what
the driver reports, a little less than on the box. float32 is the rate without TF32, which torch
leaves off unless told otherwise.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

GB = 10**9
TERA = 10**12
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device."""

    name: str
    """How it is called on the command line: `a100-80g`."""

    memory_bytes: int | None
    """Memory that the driver reports; None where only the user can say how much is to be used."""

    flops_per_second: tuple[tuple[str, float], ...]
    """Rate of matrix products by dtype; a dtype that is missing runs at that of float32."""

    bytes_per_second: float
    """Bandwidth of the device's memory."""

    link_bytes_per_second: float
    """Bandwidth to where tensors move (host memory, or disk on a CPU), in one direction."""

    attained_share: float
    """Share of the rates above that real ops attain."""

    replay_seconds: float
    """Time of the host for one replay of a unit."""

    selective_seconds: float
    """Time of the host for one selective forward and replay of a unit."""

    overlaps_host: bool
    """Whether ops run while the host prepares the next ones."""

    source: str
    """Where the figures come from."""

    def rate(self, dtype: str) -> float:
        """Returns floating-point operations per second of products of a dtype."""
        rates = dict(self.flops_per_second)
        return rates.get(dtype, rates["float32"])


ATTAINED_SHARE = 0.7
"""Of the makers' peak rates, for arithmetic, memory and link alike; an assumption."""

REPLAY_SECONDS, SELECTIVE_SECONDS = 1.2e-3, 3e-3
"""Python's time per unit, as it was measured on one slow CPU core."""


def _gpu(
    name: str,
    *,
    mib: int,
    tera: dict[str, float],
    bandwidth_gb: float,
    pcie: int,
    source: str,
) -> Device:
    return Device(
        name=name,
        memory_bytes=mib * MIB,
        flops_per_second=tuple((dtype, rate * TERA) for dtype, rate in tera.items()),
        bytes_per_second=bandwidth_gb * GB,
        link_bytes_per_second={3: 15.75, 4: 31.5, 5: 63.0}[pcie] * GB,  # 16 lanes
        attained_share=ATTAINED_SHARE,
        replay_seconds=REPLAY_SECONDS,
        selective_seconds=SELECTIVE_SECONDS,
        overlaps_host=True,
        source=source,
    )


def _tera(float32: float, half: float, *, bfloat16: bool = True) -> dict[str, float]:
    rates = {"float32": float32, "float16": half}
    return {**rates, "bfloat16": half} if bfloat16 else rates


_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_A100 = f"{_NVIDIA}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_ADA = (
    "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/"
    "nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
)

GPUS = (
    _gpu(
        "t4",
        mib=15360,
        tera=_tera(8.1, 65, bfloat16=False),  # Turing has no bfloat16 products
        bandwidth_gb=320,
        pcie=3,
        source=f"{_NVIDIA}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
    ),
    _gpu(
        "l4",
        mib=23034,
        tera=_tera(30.3, 121),
        bandwidth_gb=300,
        pcie=4,
        source="https://www.nvidia.com/en-us/data-center/l4/ (its figures with sparsity, halved)",
    ),
    _gpu(
        "a10g",
        mib=23028,
        tera=_tera(35, 70),  # not those of the A10: 31.2 and 125
        bandwidth_gb=600,
        pcie=4,
        source="https://d1.awsstatic.com/product-marketing/ec2/"
        "NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
    ),
    _gpu(
        "l40s",
        mib=46068,
        tera=_tera(91.6, 362),
        bandwidth_gb=864,
        pcie=4,
        source="https://www.nvidia.com/en-us/data-center/l40s/",
    ),
    _gpu(
        "rtx-3090",
        mib=24576,
        tera=_tera(35.6, 71),
        bandwidth_gb=936,
        pcie=4,
        source="https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-"
        "whitepaper-v2.pdf, appendix A",
    ),
    _gpu(
        "rtx-4090",
        mib=24564,
        tera=_tera(82.6, 165.2),
        bandwidth_gb=1008,
        pcie=4,
        source=f"{_ADA}, appendix A",
    ),
    _gpu(
        "rtx-5090",
        mib=32607,
        tera=_tera(104.8, 209.5),
        bandwidth_gb=1792,
        pcie=5,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/"
        "nvidia-rtx-blackwell-gpu-architecture.pdf, appendix A",
    ),
    _gpu("a100-40g", mib=40960, tera=_tera(19.5, 312), bandwidth_gb=1555, pcie=4, source=_A100),
    _gpu("a100-80g", mib=81920, tera=_tera(19.5, 312), bandwidth_gb=2039, pcie=4, source=_A100),
    _gpu(
        "h100",
        mib=81559,
        tera=_tera(66.9, 989.4),
        bandwidth_gb=3350,
        pcie=5,
        source="https://resources.nvidia.com/en-us-tensor-core (SXM)",
    ),
    _gpu(
        "h200",
        mib=143771,
        tera=_tera(66.9, 989.4),
        bandwidth_gb=4800,
        pcie=5,
        source="https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446",
    ),
    _gpu(
        "b200",
        mib=183359,
        tera=_tera(75, 2250),
        bandwidth_gb=8000,
        pcie=5,
        source="https://resources.nvidia.com/en-us-blackwell-architecture (HGX, 1,000 W)",
    ),
    _gpu(
        "mi300x",
        mib=196592,
        tera=_tera(163.4, 1307.4),
        bandwidth_gb=5300,
        pcie=5,
        source="https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/"
        "amd-instinct-mi300x-data-sheet.pdf",
    ),
)
"""The GPUs that `rematic plan --device` knows."""

REFERENCE_CPU = Device(
    name="cpu",
    memory_bytes=None,
    flops_per_second=(("float32", 8.5e10), ("bfloat16", 2e11)),
    bytes_per_second=1.9e10,
    link_bytes_per_second=5e8,
    attained_share=1.0,
    replay_seconds=REPLAY_SECONDS,
    selective_seconds=4.7e-3,
    overlaps_host=False,
    source="what one thread of an AMD EPYC did once, so that figures are the same everywhere",
)
"""A CPU for figures that are written down; what is planned for a run goes by the local one."""

_ALIASES = {"a100": "a100-80g", "a10": "a10g", "3090": "rtx-3090", "4090": "rtx-4090"}
_ALIASES |= {"5090": "rtx-5090", "h100-80g": "h100", "h200-141g": "h200", "a100-40gb": "a100-40g"}
_ALIASES |= {"a100-80gb": "a100-80g"}


def gpu_named(name: str) -> Device:
    """Returns a GPU of the catalogue.

    Raises:
        ValueError: If it is not in there.
    """
    wanted = name.lower().replace("_", "-").replace(" ", "-")
    wanted = _ALIASES.get(wanted, wanted)
    by_name = {gpu.name: gpu for gpu in GPUS}
    if wanted not in by_name:
        near = difflib.get_close_matches(wanted, by_name, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"unknown device {name!r}: expected cpu or one of {', '.join(by_name)}{hint}"
        )
    return by_name[wanted]


def gpu_like(torch_name: str) -> Device:
    """Returns the GPU of the catalogue that torch calls by this name.

    Args:
        torch_name: As `torch.cuda.get_device_name` says it: `NVIDIA A100-SXM4-80GB`.

    Raises:
        ValueError: If it is none of them.
    """
    words = torch_name.lower().replace("-", " ").split()
    for gpu in reversed(GPUS):
        parts = gpu.name.split("-")
        if all(part in words or f"{part}b" in words for part in parts):  # 80g is written 80GB
            return gpu
    raise ValueError(
        f"the device {torch_name!r} is not in the catalogue: name the one nearest to it by "
        f"--device; expected cpu or one of {', '.join(gpu.name for gpu in GPUS)}"
    )

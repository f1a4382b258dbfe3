import pytest

from rematic.cost.devices import gpu_named
from rematic.cost.roofline import op_seconds, pace_of
from rematic.planner import OpCost


def op(*, flops, touched, dtype="bfloat16"):
    return OpCost(
        name="aten::mm",
        occurrence=0,
        result_bytes=0,
        flops=flops,
        touched_bytes=touched,
        dtype=dtype,
    )


def test_an_op_takes_as_long_as_the_slower_of_arithmetic_and_traffic():
    gpu = gpu_named("a100-80g")
    product = op(flops=312 * 10**9, touched=10**6)
    assert op_seconds(product, gpu) == pytest.approx(1e-3 / 0.7)
    copy = op(flops=0, touched=2_039_000_000)
    assert op_seconds(copy, gpu) == pytest.approx(1e-3 / 0.7)
    assert op_seconds(op(flops=0, touched=0), gpu) == 0.0


def test_float32_products_are_slower_by_the_ratio_of_the_rates():
    gpu = gpu_named("a100-80g")
    slow = op_seconds(op(flops=10**12, touched=0, dtype="float32"), gpu)
    fast = op_seconds(op(flops=10**12, touched=0), gpu)
    assert slow / fast == pytest.approx(312 / 19.5)


def test_on_an_accelerator_the_host_works_beside_the_ops():
    pace = pace_of(gpu_named("l4"))
    assert pace.with_host(1.0, 0.001) == 1.0
    assert pace.with_host(0.0001, 0.001) == 0.001
    assert pace.moved_bytes_per_second == pytest.approx(31.5e9 * 0.7)

import pytest

from rematic.cost.devices import GPUS, gpu_like, gpu_named


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_has_plausible_figures_and_a_source(gpu):
    assert "https://" in gpu.source
    assert 14 * 2**30 < gpu.memory_bytes <= 192 * 2**30
    assert gpu.rate("float16") > 1.9 * gpu.rate("float32")
    assert 300e9 <= gpu.bytes_per_second <= 8e12
    assert gpu.link_bytes_per_second < gpu.bytes_per_second / 5


def test_a_dtype_without_a_rate_runs_as_float32():
    assert gpu_named("t4").rate("bfloat16") == gpu_named("t4").rate("float32") == 8.1e12
    assert gpu_named("h100").rate("bfloat16") == 989.4e12


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100", "a100-80g"),
        ("a100_40g", "a100-40g"),
        ("RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
    ],
)
def test_devices_are_found_as_people_write_them(written, name):
    assert gpu_named(written).name == name


def test_an_unknown_device_names_those_there_are():
    with pytest.raises(
        ValueError, match=r"unknown device 'rtx-4091': expected cpu or one of t4, l4"
    ):
        gpu_named("rtx-4091")
    with pytest.raises(ValueError, match=r"did you mean rtx-4090\?"):
        gpu_named("rtx-4091")


def test_names_are_unique():
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_torch_has_for_it(torch_name, name):
    assert gpu_like(torch_name).name == name


@pytest.mark.parametrize("torch_name", ["Tesla V100-SXM2-16GB", "NVIDIA L40", "NVIDIA GeForce"])
def test_another_gpu_has_to_be_named(torch_name):
    with pytest.raises(ValueError, match="is not in the catalogue: name the one nearest to it"):
        gpu_like(torch_name)

import json

import pytest
import torch

from rematic.cost import calibrate


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rematic" / "cpu.json"


RATES = {"float32": 2e10, "bfloat16": 3e10, "bytes": 4e9, "replay": 1e-3, "selective": 3e-3}


def test_the_cpu_is_measured_once(monkeypatch, cache):
    calls = []
    monkeypatch.setattr(calibrate, "measure", lambda: calls.append(1) or RATES)
    first, second = calibrate.local_cpu(), calibrate.local_cpu()
    assert first == second
    assert calls == [1]
    assert first.rate("bfloat16") == 3e10
    assert first.rate("float64") == 2e10
    assert (first.bytes_per_second, first.memory_bytes, first.overlaps_host) == (4e9, None, False)
    assert "one thread of" in first.source
    assert cache.exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"other": {"float32": 1}}'])
def test_a_damaged_cache_is_measured_again(monkeypatch, cache, text):
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    monkeypatch.setattr(calibrate, "measure", lambda: RATES)
    assert calibrate.local_cpu().rate("float32") == 2e10
    assert RATES in json.loads(cache.read_text()).values()


@pytest.mark.parametrize("damaged", [0.0, -1.0, float("nan"), float("inf"), None, "much"])
@pytest.mark.parametrize("name", ["float32", "bytes"])
def test_rates_that_no_cpu_has_are_measured_again(monkeypatch, cache, name, damaged):
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps({calibrate._key(): {**RATES, name: damaged}}))
    monkeypatch.setattr(calibrate, "measure", lambda: RATES)
    device = calibrate.local_cpu()
    assert (device.rate("float32"), device.bytes_per_second) == (2e10, 4e9)


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, cache):
    cache.parent.write_text("a file where the folder should be")
    monkeypatch.setattr(calibrate, "measure", lambda: RATES)
    assert calibrate.local_cpu().rate("float32") == 2e10


def test_measured_rates_are_those_of_a_real_core(monkeypatch):
    monkeypatch.setattr(calibrate, "MATRIX_SIZE", 256)
    monkeypatch.setattr(calibrate, "COPIED_BYTES", 2**22)
    threads = torch.get_num_threads()
    rates = calibrate.measure()
    assert torch.get_num_threads() == threads
    assert 1e8 < rates["float32"] < 1e13
    assert 1e8 < rates["bytes"] < 1e12
    assert 1e-5 < rates["replay"] < 0.2
    assert 1e-5 < rates["selective"] < 0.2

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rematic.training import json_lines
from rematic.training.json_lines import JsonLines


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_number_that_json_lacks_becomes_a_word(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(path, notify=pytest.fail).append({"batch": 1, "loss": math.nan, "rate": None})
    assert read(path) == [{"batch": 1, "loss": "nan", "rate": None}]


def test_a_disk_that_takes_nothing_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, notify=told.append)
    lines.append({"batch": 1})
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")

        def fails(*args: object) -> None:
            raise full

        patch.setattr(json_lines, "_append", fails)
        lines.append({"batch": 2})
        lines.append({"batch": 3})
    lines.append({"batch": 4})
    assert [line["batch"] for line in read(path)] == [1, 4]
    (text,) = told
    assert f"{path} cannot be written: [Errno 28] No space left on device" in text


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    """A file that may not grow takes a part of a line, as a full disk does."""
    path = tmp_path / "metrics.jsonl"
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from rematic.training.json_lines import JsonLines\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))\n"
        "lines = JsonLines(Path(sys.argv[1]), notify=print)\n"
        "lines.append({'batch': 1})\n"
        "lines.append({'batch': 2})\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert read(path) == [{"batch": 1}]
    assert "7 of 13 bytes of a line could be written" in done.stdout


@pytest.mark.parametrize("torn", [b'{"batch": 3', b"\xff\xfe\n", b"[]\n", b'{"batch": null}\n'])
def test_lines_that_come_again_and_torn_ones_are_dropped(tmp_path: Path, torn: bytes) -> None:
    """By their number, not their place: lines may be missing."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, notify=pytest.fail)
    lines.drop_after("batch", 3)
    assert not path.exists()
    for batch in (1, 3, 4):
        lines.append({"batch": batch})
    path.write_bytes(path.read_bytes() + torn)
    lines.drop_after("batch", 3)
    assert [line["batch"] for line in read(path)] == [1, 3]
    assert list(tmp_path.iterdir()) == [path]

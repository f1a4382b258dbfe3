"""One script and one file: the key in the file decides, whoever launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rematic.cli import main

SCRIPT = str(Path(__file__).parent / "launched_script.py")
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: 'no'
num_processes: 1
use_cpu: true
recompute_config:
  enabled: true
  overrides: [policy.start=recompute, "policy.trust=['*']"]
"""
FSDP_CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_processes: {processes}
# any that is free: tests run side by side, and the default is one for all
main_process_port: 0
use_cpu: true
fsdp_config:
  fsdp_version: 2
  # the key people know
  fsdp_activation_checkpointing: true
  rematic_recipe: auto
"""
SECTION = CONFIG[CONFIG.index("recompute_config") :]
LIKE_OPTIONS = ["--config_file", "other.yaml", "--recipe", "x", "--help", "--num_processes=9"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REMATIC_RECIPE", "REMATIC_ENABLED", "REMATIC_OVERRIDES"):
        monkeypatch.delenv(name, raising=False)


def results(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]
    for path in folder.glob("?.json"):
        path.unlink()
    return found


def by_rematic(path: Path, folder: Path) -> list[dict[str, Any]]:
    """Launches by `rematic launch`; returns what the script says on each rank."""
    assert main(["launch", "--config_file", str(path), SCRIPT, str(folder), *LIKE_OPTIONS]) == 0
    return results(folder)


def by_accelerate(path: Path, folder: Path) -> list[dict[str, Any]]:
    """Launches by the stock launcher, to which the recipe's values go by the environment."""
    overrides = json.dumps(yaml.safe_load(SECTION)["recompute_config"]["overrides"])
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    done = subprocess.run(
        [*launcher, "--config_file", str(path), SCRIPT, str(folder), *LIKE_OPTIONS],
        env={**os.environ, "REMATIC_OVERRIDES": overrides, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (folder / "stderr.txt").write_text(done.stderr)
    return results(folder)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_flipping_the_key_changes_the_policy_and_nothing_else(
    tmp_path: Path, processes: int
) -> None:
    """Case G1: declared and measured, by exact numbers of forwards, whoever launches."""
    stock, own = tmp_path / "fsdp.yaml", tmp_path / "own.yaml"
    stock.write_text(FSDP_CONFIG.format(processes=processes))
    off_by_key = stock.read_text().replace("checkpointing: true", "checkpointing: false")
    own.write_text(off_by_key.replace("  rematic_recipe: auto\n", "") + SECTION)
    on = {"rematic": by_rematic(own, tmp_path), "accelerate": by_accelerate(stock, tmp_path)}
    if processes == 1:  # each launcher is shown off once
        assert main(["config", "--config_file", str(own), "--disable"]) == 0
        assert "# the key people know" in own.read_text()
        off = by_rematic(own, tmp_path)
    else:
        stock.write_text(off_by_key)
        off = by_accelerate(stock, tmp_path)
        lost = f"{stock} names a recipe by fsdp_config.rematic_recipe, which `accelerate launch`"
        assert lost in (tmp_path / "stderr.txt").read_text()
    assert [(rank["policy"], rank["forwards"]) for rank in off] == [(None, 3)] * processes
    for ranks in on.values():
        assert [(r["policy"], r["forwards"]) for r in ranks] == [("recompute", 6)] * processes
        for there, without in zip(ranks, off, strict=True):
            assert there["argv"] == without["argv"] == LIKE_OPTIONS
            assert there["processes"] == without["processes"] == processes
            assert there["losses"] == without["losses"]
            assert there["weights"] == without["weights"]
    if processes == 2:
        assert off[0]["weights"] == off[1]["weights"]
        assert off[0]["losses"] != off[1]["losses"], "ranks have batches of their own"


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


TELLS = """\
import os, json, sys
names = ("REMATIC_ENABLED", "REMATIC_RECIPE", "REMATIC_OVERRIDES")
print(json.dumps([os.environ.get(name) for name in names]))
"""


def told(capfd: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capfd.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG, ["true", "auto", '["policy.start=recompute", "policy.trust=[\'*\']"]']),
        (CONFIG.split("recompute_config")[0], [None, None, None]),
        (
            CONFIG.split("recompute_config")[0] + "fsdp_config: {rematic_recipe: tiny-cpu}\n",
            ["true", "tiny-cpu", "[]"],
        ),
    ],
    ids=["section", "nothing", "inside fsdp_config"],
)
def test_scripts_are_told_by_the_environment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], config: str, expected: list[str | None]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(config)
    before = dict(os.environ)
    assert main(["launch", "--config_file", str(path), script(tmp_path, TELLS)]) == 0
    assert told(capfd) == expected
    assert dict(os.environ) == before
    assert path.read_text() == config


def test_a_json_file_is_honoured_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    plain = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True}
    path.write_text(json.dumps({**plain, "recompute_config": {"enabled": False}}))
    assert main(["launch", "--config_file", str(path), script(tmp_path, TELLS)]) == 0
    assert told(capfd) == ["false", "auto", "[]"]


def test_the_default_file_is_honoured_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Accelerate itself refuses it then."""
    path = tmp_path / "default_config.yaml"
    path.write_text(CONFIG)
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(path))
    assert main(["launch", script(tmp_path, TELLS)]) == 0
    assert told(capfd)[0] == "true"


def test_a_variable_that_gives_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REMATIC_RECIPE", "tiny-cpu")
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    assert main(["launch", "--config_file", str(path), script(tmp_path, TELLS)]) == 0
    captured = capfd.readouterr()
    assert "REMATIC_RECIPE of the environment gives way to the config file" in captured.err
    assert json.loads(captured.out.splitlines()[-1])[1] == "auto"
    assert os.environ["REMATIC_RECIPE"] == "tiny-cpu"


def test_the_exit_code_is_the_scripts(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    launched = ["launch", "--config_file", str(path), script(tmp_path, "raise SystemExit(7)")]
    assert main(launched) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config_file", "nowhere.yaml", "s.py"], "there is no Accelerate config nowhere.yaml"),
        (["--cpu", "--multi_gpu", "s.py"], "You can only use one of `--cpu`"),
    ],
    ids=["no file", "accelerate's own check"],
)
def test_what_cannot_be_launched(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["launch", *arguments]) == 2
    assert message in capsys.readouterr().err

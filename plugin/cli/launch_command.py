"""`rematic launch ...`: `accelerate launch`, where the config may hold `recompute_config`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from rematic.cli.accelerate_file import SECTION, load_accelerate_file, section_of
from rematic.cli.exit_codes import DONE, FAILED


def run_launch(arguments: Sequence[str]) -> int:
    """Launches a script; every argument is `accelerate launch`'s and is passed on unchanged.

    Args:
        arguments: Options, script, and arguments of the script.

    Returns:
        The exit code of the script, or of the first of its processes that failed.

    Raises:
        ValueError: If the config file or an option cannot be used.
    """
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parsed = launch_command_parser().parse_args(list(arguments))
    path = _config_path(parsed, Path(default_config_file))
    config = {} if path is None else load_accelerate_file(path)
    section = None if path is None else section_of(config, path=path)
    variables = {} if section is None else section.environment()
    with _set(variables), _without_section(config, path) as stripped:
        if stripped is not None:
            parsed.config_file = str(stripped)
        try:
            launch_command(parsed)
        except subprocess.CalledProcessError as error:
            return error.returncode or FAILED
        except ChildFailedError as error:
            print(f"rematic: {error}", file=sys.stderr)
            return error.get_first_failure()[1].exitcode or FAILED
    return DONE


def _config_path(parsed: Any, default: Path) -> Path | None:  # noqa: ANN401 - accelerate ships no types
    """Returns the file that Accelerate would read."""
    if parsed.config_file is not None:
        return Path(parsed.config_file)
    return default if default.is_file() and not parsed.cpu else None


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Puts variables into the environment, which the launched processes inherit."""
    before = {name: os.environ.get(name) for name in variables}
    replaced = [n for n, old in before.items() if old not in (None, "", variables[n])]
    if replaced:
        print(
            f"rematic: {', '.join(replaced)} of the environment gives way to the config file",
            file=sys.stderr,
        )
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old


@contextmanager
def _without_section(config: Mapping[str, Any], path: Path | None) -> Iterator[Path | None]:
    """Writes the file without the section that Accelerate refuses; None if it has none."""
    if path is None or SECTION not in config:
        yield None
        return
    rest = {key: value for key, value in config.items() if key != SECTION}
    with tempfile.TemporaryDirectory(prefix="rematic-") as folder:
        stripped = Path(folder) / path.name
        as_json = path.suffix == ".json"
        stripped.write_text(json.dumps(rest) if as_json else yaml.safe_dump(rest), "utf-8")
        yield stripped

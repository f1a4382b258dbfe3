"""What gets installed: the packages, their version, their files, and what importing them costs."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
VERSION: str = runpy.run_path(str(ROOT / "plugin" / "version.py"))["__version__"]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
FOLDERS = {
    name: ROOT / folder for name, folder in PYPROJECT["tool"]["setuptools"]["package-dir"].items()
}
DECIDING_ROOMS = ("policy", "planner", "control")
# What a decision may rest on: the language, arithmetic, and other rooms that hold plain values.
PURE_IMPORTS = {
    *("__future__", "abc", "bisect", "collections", "copy", "dataclasses", "difflib", "enum"),
    *("fnmatch", "fractions", "functools", "heapq", "itertools", "math", "operator", "re"),
    *("statistics", "string", "textwrap", "types", "typing"),
    *("numpy", "scipy"),
    *("rematic.byte_sizes", "rematic.recipes"),
    *(f"rematic.{room}" for room in DECIDING_ROOMS),
}


@dataclass(frozen=True, kw_only=True)
class Built:
    """The two archives of one build."""

    sdist: Path
    wheel: Path

    def names_in_sdist(self) -> set[str]:
        with tarfile.open(self.sdist) as archive:
            return {name.split("/", 1)[-1] for name in archive.getnames()}

    def names_in_wheel(self) -> set[str]:
        return set(zipfile.ZipFile(self.wheel).namelist())

    def metadata(self) -> str:
        name = f"rematic-{VERSION}.dist-info/METADATA"
        return zipfile.ZipFile(self.wheel).read(name).decode()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An sdist, and the wheel that is built from it, from a copy of the source."""
    source = tmp_path_factory.mktemp("source") / "rematic"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    shutil.copytree(ROOT, source, ignore=left_out)
    run([sys.executable, "-m", "build", "--no-isolation"], cwd=source)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    (wheel,) = (source / "dist").glob("*.whl")
    return Built(sdist=sdist, wheel=wheel)


@pytest.fixture(scope="module")
def elsewhere(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel was installed, with no network and no dependencies."""
    target = tmp_path_factory.mktemp("elsewhere")
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target)]
    run([sys.executable, "-m", "pip", "install", *options, str(built.wheel)])
    return target


def run(command: list[str], *, cwd: Path | None = None, **variables: str) -> str:
    """Run a command with these environment variables added and return what it printed."""
    result = subprocess.run(
        command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def run_python(code: str, *, cwd: Path | None = None, **variables: str) -> str:
    """Run lines of Python in an interpreter of their own, warnings being errors."""
    return run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], cwd=cwd, **variables)


def packages_in_folders() -> set[str]:
    found = set()
    for package, folder in FOLDERS.items():
        for init in folder.rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(folder).parts]))
    return found


def product_files(*patterns: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of the package that match, with their names inside a wheel."""
    for package, folder in FOLDERS.items():
        for pattern in patterns:
            for path in folder.rglob(pattern):
                yield f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}", path


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


def declared_requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    texts = [*project["dependencies"], *(text for extra in extras for text in extra)]
    requirements = [Requirement(text) for text in texts]
    return [requirement for requirement in requirements if requirement.name != "rematic"]


def pinned_versions() -> dict[str, str]:
    """Read what constraints.txt pins for the running Python."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    valid = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in valid}


def test_every_package_is_listed_and_every_listed_package_exists() -> None:
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == packages_in_folders()


def test_no_source_file_lies_outside_a_package() -> None:
    orphans = [
        str(path.relative_to(ROOT))
        for _, path in product_files("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert orphans == []


def test_installed_version_is_the_one_in_the_source() -> None:
    assert importlib.metadata.version("rematic") == VERSION


@pytest.mark.parametrize("requirement", declared_requirements(), ids=lambda found: found.name)
def test_every_requirement_has_a_lower_bound_that_the_pin_meets(requirement: Requirement) -> None:
    assert [specifier.operator for specifier in requirement.specifier] == [">="]
    pinned = pinned_versions()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pinned), f"{requirement} but constraints pin {pinned}"


def test_core_needs_no_host() -> None:
    names = {Requirement(text).name for text in PYPROJECT["project"]["dependencies"]}
    assert names == {"numpy", "omegaconf", "PyYAML", "torch"}


def test_wheel_holds_every_source_file_and_nothing_else(built: Built) -> None:
    expected = {name for name, _ in product_files("*.py", "*.yaml", "py.typed")}
    shipped = {name for name in built.names_in_wheel() if ".dist-info/" not in name}
    assert shipped == expected
    assert "rematic/py.typed" in shipped


def test_wheel_ships_the_recipes(built: Built) -> None:
    recipes = {name for name in built.names_in_wheel() if name.endswith(".yaml")}
    assert {"rematic/recipes/tiny-cpu.yaml", "rematic/recipes/tiny-cpu-full.yaml"} <= recipes


def test_archives_hold_the_license_and_what_explains_them(built: Built) -> None:
    sdist = built.names_in_sdist()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt"} <= sdist
    assert {"docs/contract.md", "tests/test_packaging.py"} <= sdist
    assert f"rematic-{VERSION}.dist-info/licenses/LICENSE" in built.names_in_wheel()


def test_metadata_states_version_python_and_license(built: Built) -> None:
    lines = built.metadata().splitlines()
    assert f"Version: {VERSION}" in lines
    assert "Requires-Python: >=3.10" in lines
    assert "License-Expression: Apache-2.0" in lines


def test_wheel_runs_elsewhere(elsewhere: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(elsewhere / "bin" / "rematic"), "--version"]
    assert run(command, cwd=tmp_path, PYTHONPATH=str(elsewhere)).split() == ["rematic", VERSION]


def test_wheel_finds_its_own_packages_and_recipes(elsewhere: Path, tmp_path: Path) -> None:
    code = """
        import rematic, rematic.recipes
        print(rematic.__file__, rematic.recipes.__file__)
        print(*rematic.recipes.list_recipes())
    """
    places, recipes = run_python(code, cwd=tmp_path, PYTHONPATH=str(elsewhere)).splitlines()
    assert all(Path(place).is_relative_to(elsewhere) for place in places.split())
    assert {"tiny-cpu", "tiny-cpu-full"} <= set(recipes.split())


def test_core_loads_no_host() -> None:
    hosts = {"accelerate", "bitsandbytes", "lightning", "psutil", "rich", "transformers"}
    code = f"""
        import sys
        from rematic import Session, attach
        print(*sorted({hosts!r} & set(sys.modules)))
    """
    assert run_python(code).split() == []


@pytest.mark.parametrize("room", ["cli", "control", "journal", "policy", "recipes"])
def test_import_of_a_room_without_torch_loads_no_torch(room: str) -> None:
    code = f"""
        import sys
        import rematic.{room}
        print(*sorted({{"lightning", "torch", "transformers"}} & set(sys.modules)))
    """
    assert run_python(code).split() == []


def test_public_names_are_those_that_type_checkers_see() -> None:
    """The root loads names on first use, so it states them twice."""
    tree = ast.parse((FOLDERS["rematic"] / "__init__.py").read_text("utf-8"))
    checked = {
        alias.name: found.module
        for found in ast.walk(tree)
        if isinstance(found, ast.ImportFrom) and found.module and found.module.startswith("rematic")
        for alias in found.names
    }
    code = f"""
        import importlib, rematic
        names = {checked!r}
        print(*(names.keys() ^ (rematic._HOMES.keys() | {{"__version__"}})))
        for name, home in names.items():
            assert getattr(rematic, name) is getattr(importlib.import_module(home), name), name
    """
    assert run_python(code).split() == []


def test_import_has_no_side_effects() -> None:
    code = """
        import logging, os, random, signal, sys, threading, warnings
        import omegaconf, torch, yaml

        def state():
            return {
                "environment": dict(os.environ),
                "warning filters": list(warnings.filters),
                "log handlers": list(logging.getLogger().handlers),
                "log level": logging.getLogger().level,
                "signals": [signal.getsignal(number) for number in signal.valid_signals()],
                "threads": threading.active_count(),
                "hooks": (sys.excepthook, sys.unraisablehook),
                "random": random.getstate(),
                "torch generator": torch.get_rng_state().tolist(),
                "torch threads": torch.get_num_threads(),
                "default dtype": torch.get_default_dtype(),
                "gradients": torch.is_grad_enabled(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            }

        before = state()
        import rematic.control, rematic.journal, rematic.memory, rematic.recipes
        from rematic import Session, attach
        after = state()
        print(*[name for name in before if before[name] != after[name]], sep="\\n")
    """
    assert run_python(code).split() == []


@pytest.mark.parametrize(
    "path",
    [path for room in DECIDING_ROOMS for path in sorted((FOLDERS["rematic"] / room).rglob("*.py"))],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_deciding_rooms_import_plain_values_only(path: Path) -> None:
    """Contract 10."""

    def is_pure(module: str) -> bool:
        parts = module.split(".")
        return parts[0] in PURE_IMPORTS or ".".join(parts[:2]) in PURE_IMPORTS

    assert [module for module in imported_modules(path) if not is_pure(module)] == []


@pytest.mark.parametrize(
    ("path", "is_refused"),
    [("plugin/control/x.py", True), ("plugin/policy/x.py", True), ("plugin/memory/x.py", False)],
)
def test_lint_refuses_torch_where_decisions_are_made(path: str, is_refused: bool) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--stdin-filename"]
    result = subprocess.run(
        [*command, path, "-"], cwd=ROOT, input="import torch\n", capture_output=True, text=True
    )
    assert ("`torch` is banned: Decisions are pure (contract 10)" in result.stdout) is is_refused
    assert result.returncode == int(is_refused)

"""What Accelerate configs say, those of several versions included."""

from __future__ import annotations

from pathlib import Path

import pytest

from rematic.cli.accelerate_file import RecomputeSection, load_accelerate_file, section_of

CONFIGS = sorted((Path(__file__).parent / "accelerate_configs").iterdir())
"""As Accelerate 1.12 to 1.15 write them; its default `.yaml` holds JSON."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_what_accelerate_writes_is_read_and_says_nothing(path: Path) -> None:
    config = load_accelerate_file(path)
    assert config["compute_environment"] == "LOCAL_MACHINE"
    assert section_of(config, path=path) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"recompute_config": None}, RecomputeSection()),
        ({"recompute_config": {"enabled": False}}, RecomputeSection(enabled=False)),
        (
            {"recompute_config": {"recipe": "tiny-cpu", "overrides": ["a=1"]}},
            RecomputeSection(recipe="tiny-cpu", overrides=("a=1",)),
        ),
        ({"fsdp_config": {"rematic_recipe": "r.yaml"}}, RecomputeSection(recipe="r.yaml")),
        ({"fsdp_config": {"fsdp_version": 2}}, None),
    ],
    ids=["empty", "off", "recipe", "inside fsdp_config", "other keys"],
)
def test_the_two_places(config: dict[str, object], expected: RecomputeSection | None) -> None:
    assert section_of(config, path=Path("c.yaml")) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"recompute_config": {"recipie": "x"}}, r"recompute_config.recipie is unknown \(did you"),
        ({"recompute_config": {"enabled": "no"}}, r"enabled is 'no'; expected true or false"),
        ({"recompute_config": {"recipe": 3}}, r"recompute_config.recipe is 3; expected text"),
        ({"recompute_config": {"overrides": "a=1"}}, r"overrides is 'a=1'; expected a list"),
        ({"recompute_config": ["on"]}, r"recompute_config is \['on'\]; expected keys and values"),
        (
            {"recompute_config": {}, "fsdp_config": {"rematic_recipe": "x"}},
            r"has both recompute_config and fsdp_config.rematic_recipe; expected one",
        ),
    ],
    ids=["unknown key", "quoted no", "number", "no list", "no mapping", "both places"],
)
def test_what_cannot_be_used_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section_of(config, path=Path("c.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no Accelerate config"),
        ("a: [", "cannot be parsed"),
        ("3", "holds 3; expected the keys"),
    ],
    ids=["missing", "damaged", "number"],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_accelerate_file(path)

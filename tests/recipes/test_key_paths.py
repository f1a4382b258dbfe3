from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematic.recipes.key_paths import KeyPath, format_path, parse_path


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("a", ("a",)),
        ("training.learning_rate", ("training", "learning_rate")),
        ("policy.rules[0].match", ("policy", "rules", 0, "match")),
        ("a[0][12]", ("a", 0, 12)),
        ("model.config['a.b'].c", ("model", "config", "a.b", "c")),
        ('a["it\'s"]', ("a", "it's")),
        ("a.0", ("a", "0")),
        ("model-type", ("model-type",)),
    ],
)
def test_paths_are_read_and_written(text: str, path: KeyPath) -> None:
    assert parse_path(text) == path
    assert format_path(path) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        ".a",
        "a.",
        "a..b",
        "a[",
        "a[]",
        "a[-1]",
        "a[x]",
        "a[0]b",
        "a b",
        "+a",
        "--a",
        "a['']",
    ],
)
def test_what_is_no_path(text: str) -> None:
    message = (
        f"{text!r} is not a path to a value; expected names joined by dots, with the place in a"
        " list as [0], such as training.epochs or policy.rules[0].match"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_path(text)


@given(
    st.lists(
        st.text(min_size=1).filter(lambda key: not ("'" in key and '"' in key))
        | st.integers(0, 999_999),
        min_size=1,
    )
)
def test_a_path_survives_writing_and_reading(path: list[str | int]) -> None:
    assert parse_path(format_path(tuple(path))) == tuple(path)

from __future__ import annotations

from rematic.journal import text_table


def test_aligns_words_left_and_figures_right() -> None:
    table = text_table(("policy", "steps"), [("keep", "7"), ("planned", "1,210"), ("x", "-")])
    assert table.splitlines() == [
        "policy   steps",
        "-------  -----",
        "keep         7",
        "planned  1,210",
        "x            -",
    ]


def test_a_table_without_rows_keeps_its_headers() -> None:
    assert text_table(("a", "b"), []).splitlines() == ["a  b", "-  -"]

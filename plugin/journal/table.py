"""Plain text tables, the same in a terminal, a file and an issue."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns rows under headers; a column whose cells all start with a digit goes to the right.

    Args:
        headers: One per column.
        rows: Cells, as many in each row as there are headers.
    """
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    to_right = [_is_numeric(column[1:]) for column in columns]
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, to_right, strict=True)
        ).rstrip()
        for line in lines
    )


def _is_numeric(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell not in ("", "-", "unknown")]
    return bool(filled) and all(cell[0].isdigit() for cell in filled)

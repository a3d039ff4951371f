"""Tables that are never cut: where a terminal has no room for the columns, each row becomes lines of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["FoldingTable"]

# Text may be folded to this width, which leaves most words whole; numbers are not folded at all.
_TEXT_COLUMNS: Final = 14
_FACT_COLUMNS: Final = 20


class FoldingTable(Table):
    """A table of rich's whose cells are ``Text``; columns that may not be wrapped keep their width.

    Rich takes the room that it lacks from every column in the end, cuts numbers in the middle without a sign, and
    leaves whole columns out. Here the cells of a row are then written below each other, ``name: value``.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._least_columns() <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from self._lines()

    def _least_columns(self) -> int:
        gap = self.padding[1] + self.padding[3]
        text = _TEXT_COLUMNS if self.show_header else _FACT_COLUMNS
        return sum(_least(column, text) for column in _columns(self)) + gap * (len(self.columns) - 1)

    def _lines(self) -> Iterator[Text]:
        columns = [(header, cells) for header, cells, _ in _columns(self)]
        for row in range(self.row_count):
            # Without headers (facts) the first cell is the name of the others.
            named = [(header, cells[row]) for header, cells in columns]
            if not any(header for header, _ in named):
                named = [(named[0][1], cell) for _, cell in named[1:]]
            elif row:
                yield Text()
            for name, cell in named:
                yield Text(f"{name}: {cell}" if name else cell, overflow="fold")


def _columns(table: Table) -> list[tuple[str, list[str], bool]]:
    """Header, cells and whether they may not be wrapped, of each column."""
    return [(str(column.header), [str(cell) for cell in column._cells], column.no_wrap) for column in table.columns]


def _least(column: tuple[str, list[str], bool], text: int) -> int:
    header, cells, no_wrap = column
    if no_wrap:
        return max((Text(cell).cell_len for cell in [header, *cells]), default=0)
    words = (Text(word).cell_len for cell in [header, *cells] for word in cell.split())
    return min(text, max(words, default=0))

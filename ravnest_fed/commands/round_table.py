"""How rounds are shown: a live table on a terminal, one plain line a round anywhere else."""

import sys
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

METRICS_SHOWN = ("loss", "accuracy")
ROWS_SHOWN = 20


class RoundView:
    """Shows rounds as they are finished. Use as a context."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        self._title = title
        self._entries: list[dict[str, Any]] = []
        self._state = "starting"
        self._live: Live | None = None

    def __enter__(self) -> "RoundView":
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=8, transient=False)
            self._live.start()
        else:
            self._console.print(self._title)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()

    def state(self, text: str) -> None:
        """What is going on right now; shown below the table."""
        if text != self._state:
            self._state = text
            if self._live is not None:
                self._live.update(self._table())

    def add(self, entry: dict[str, Any]) -> None:
        """A finished round, as `Summary.round_entry` gives it."""
        self._entries.append(entry)
        if self._live is not None:
            self._live.update(self._table())
        else:
            cells = zip(self._columns(), self._cells(entry), strict=True)
            self._console.print("  ".join(f"{name} {value}" for name, value in cells if value))

    def note(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, markup=False)

    def _metric_names(self) -> list[str]:
        present = {name for entry in self._entries for name in entry["metrics"]}
        known = [name for name in METRICS_SHOWN if name in present]
        return known + sorted(present - set(known))[: 4 - len(known)]

    def _columns(self) -> list[str]:
        return ["round", "contributions", *self._metric_names(), "up", "down", "seconds"]

    def _cells(self, entry: dict[str, Any]) -> list[str]:
        metrics = [f"{entry['metrics'][name]:.4f}" if name in entry["metrics"] else "" for name in self._metric_names()]
        sizes = [readable_bytes(entry["bytes_up"]), readable_bytes(entry["bytes_down"])]
        return [str(entry["server_round"]), str(entry["contributions"]), *metrics, *sizes, f"{entry['seconds']:.2f}"]

    def _table(self) -> Table:
        table = Table(title=self._title, caption=self._state, title_justify="left", caption_justify="left")
        for column in self._columns():
            table.add_column(column, justify="right")
        for entry in self._entries[-ROWS_SHOWN:]:
            table.add_row(*self._cells(entry))
        return table


def readable_bytes(count: int) -> str:
    """`count` bytes for people."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError

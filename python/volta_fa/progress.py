"""Shows how far a command is. It needs rich, as the commands do."""

from __future__ import annotations

from rich import progress

from .lines import Lines


class Progress(progress.Progress):
    """A bar on a terminal. In a pipe or a file, where rich shows none, `Lines`."""

    _lines: Lines | None = None

    def start(self) -> None:
        """Shows the bar, or begins to print lines."""
        super().start()
        shows_bars = self.console.is_terminal and not self.console.is_dumb_terminal
        if not shows_bars and not self.disable:
            self._lines = Lines(self._at)

    def stop(self) -> None:
        """Ends either."""
        if self._lines:
            self._lines.stop()
        super().stop()

    def _at(self) -> str:
        at = (f"{task.description}: {task.completed:g} of {task.total:g} done" for task in self.tasks if task.total)
        return ", ".join(at) or "working"

"""Shows how far a command is: a progress bar, or lines in a pipe. The commands `check` and `versus-1cat` and the
benchmarks use it. It needs rich."""

import sys
import threading
import time
from collections.abc import Callable

from rich import progress


class Lines:
    """Prints a line on standard error every eight seconds, in a thread, until `stop`.

    The first line comes earlier, because the imports before already took seconds.

    Args:
        text: returns the text of a line; the elapsed seconds follow it.
    """

    #: Seconds between lines, and before the first one.
    interval = 8.0
    _FIRST = 2.0

    def __init__(self, text: Callable[[], str]) -> None:
        self._text, self._ended = text, threading.Event()
        threading.Thread(target=self._say, daemon=True).start()

    def stop(self) -> None:
        """Ends the lines."""
        self._ended.set()

    def _say(self) -> None:
        began, wait = time.monotonic(), min(self._FIRST, self.interval)
        while not self._ended.wait(wait):
            wait = self.interval
            print(f"{self._text()}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


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
        """Ends the bar or the lines."""
        if self._lines:
            self._lines.stop()
        super().stop()

    def _at(self) -> str:
        at = (f"{task.description}: {task.completed:g} of {task.total:g} done" for task in self.tasks if task.total)
        return ", ".join(at) or "working"

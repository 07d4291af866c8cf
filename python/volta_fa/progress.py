"""Shows how far a command is. It needs rich, as the commands do."""

from __future__ import annotations

import sys
import threading
import time

from rich import progress


class Progress(progress.Progress):
    """A bar on a terminal. In a pipe or a file, where rich shows none, a line on standard error every eight seconds.

    The first line comes earlier, because the imports before it take seconds.
    """

    interval = 8.0
    _FIRST = 2.0

    def start(self) -> None:
        """Shows the bar, or begins to print lines."""
        super().start()
        self._ended = threading.Event()
        shows_bars = self.console.is_terminal and not self.console.is_dumb_terminal
        if not shows_bars and not self.disable:
            threading.Thread(target=self._say, daemon=True).start()

    def stop(self) -> None:
        """Ends either."""
        self._ended.set()
        super().stop()

    def _say(self) -> None:
        began, wait = time.monotonic(), min(self._FIRST, self.interval)
        while not self._ended.wait(wait):
            wait = self.interval
            at = ", ".join(f"{task.description}: {task.completed:g} of {task.total:g} done" for task in self.tasks if task.total)
            print(f"{at or 'working'}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

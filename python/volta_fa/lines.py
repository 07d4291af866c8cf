"""Lines that say how far a command is: in a pipe, in a file, and where no bar fits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable


class Lines:
    """Prints a line on standard error every eight seconds, in a thread. The first comes earlier: the imports before it take seconds.

    Args:
        text: what to say; the seconds follow.
    """

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

"""Loads text that every Python installation has: the source of its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from ..errors import CommandError

#: Large enough that a few hundred steps rarely repeat a window, small enough to read at once.
CORPUS_BYTES = 1_500_000

# One token per character: newline, the printable ASCII characters, and one for all others.
_OTHER = 0
_ALPHABET = "\n" + "".join(chr(c) for c in range(32, 127))
VOCABULARY = 1 + len(_ALPHABET)


def read_corpus(limit: int = CORPUS_BYTES) -> tuple[bytes, int]:
    """Returns the top-level modules of the standard library in order of their names, up to `limit` bytes.

    Returns the text and the number of files. The same Python gives the same text.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    if size < 100_000:
        raise CommandError(f"{folder} holds {size} bytes of Python source, too little to train on: install Python's full standard library")
    return b"".join(parts)[:limit], len(parts)


def encode(text: bytes) -> torch.Tensor:
    """Returns one token id per byte."""
    table = torch.full((256,), _OTHER, dtype=torch.long)
    for token, character in enumerate(_ALPHABET, start=1):
        table[ord(character)] = token
    return table[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]


class Batches:
    """Yields (input, target) windows at random positions of the text, endlessly, from a seed."""

    def __init__(self, tokens: torch.Tensor, batch: int, seqlen: int, seed: int):
        self._windows = tokens.unfold(0, seqlen + 1, 1)
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        start = torch.randint(len(self._windows), (self._batch,), generator=self._generator)
        window = self._windows[start]
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

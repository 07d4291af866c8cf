"""The errors that this package raises, one format for arguments and one type for the command line, and checks that raise them."""

import importlib.util
import tempfile
from pathlib import Path

import torch
from torch import Tensor


def bad_argument(name: str, got: object, expected: object, *, op: str = "", error: type[Exception] = ValueError) -> Exception:
    """Returns the error `volta_fa: name: got X, expected Y`, for the caller to raise.

    Args:
        name: the argument, as the user writes it.
        got, expected: the value and the allowed ones, in words. `expected` may end with a reason or remedy after a colon.
        op: the public function, if several take such an argument: the message begins with `volta_fa.op`.
        error: ValueError for wrong arguments, NotImplementedError for what volta_fa lacks.
    """
    return error(f"{'.'.join(('volta_fa', op)) if op else 'volta_fa'}: {name}: got {got}, expected {expected}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def require_tensors(**tensors: Tensor | None) -> None:
    """Raises ValueError for the first argument that is not a tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise bad_argument(name, "None" if tensor is None else f"an object of type {type(tensor).__name__}", "a tensor")


def require_strided(**tensors: Tensor) -> None:
    """Raises ValueError for the first argument that is not a tensor, or is a nested, sparse or MKL-DNN tensor. torch's own errors for these
    name no argument."""
    require_tensors(**tensors)
    for name, tensor in tensors.items():
        if tensor.is_nested:
            expected = "a dense tensor: pass its values() and offsets().int() to flash_attn_varlen_func"
            raise bad_argument(name, "a nested tensor", expected)
        if tensor.layout != torch.strided:
            raise bad_argument(name, f"layout {tensor.layout}", "a dense tensor: convert it with to_dense()")


def require_none(
    expected: str, *, got: str | None = "a tensor", op: str = "", error: type[Exception] = NotImplementedError, **arguments: object
) -> None:
    """Raises `bad_argument` for the first of `arguments` that is not None. `got`: describes it; None: its value does."""
    for name, value in arguments.items():
        if value is not None:
            raise bad_argument(name, value if got is None else got, expected, op=op, error=error)


class CommandError(Exception):
    """A command cannot do what was asked. The message is one line for the user."""


def require_rich(*also: str) -> None:
    """Raises CommandError unless rich, and the packages named in `also`, are installed. Only the command line needs them."""
    missing = [package for package in ("rich", *also) if importlib.util.find_spec(package) is None]
    if missing:
        raise CommandError(f"this command needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def require_output(output: Path, *, is_folder: bool) -> None:
    """Creates the folder of --output, which is that folder or a file. Raises CommandError if nothing can be written there."""
    try:
        (output if is_folder else output.parent).mkdir(parents=True, exist_ok=True)
        if is_folder:
            tempfile.TemporaryFile(dir=output).close()
        else:
            output.open("a").close()
    except OSError as error:
        raise CommandError(f"--output {output}: {error.strerror}") from None

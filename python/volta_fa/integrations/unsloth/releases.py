"""The releases of unsloth that ran with this package, and checks that the installed one has the same functions and arguments.
`enable_unsloth` makes the checks before it replaces anything."""

import dataclasses
import importlib
import inspect
import warnings
from types import ModuleType
from typing import Any

from ...errors import bad_argument

#: A module of unsloth, the name of an attribute, and its new value.
Replacement = tuple[ModuleType, str, Any]
#: Releases of unsloth and unsloth_zoo that ran with this package.
TESTED = ("2026.10.9",)


def version(package: str) -> str:
    """Returns the installed version of unsloth or unsloth_zoo, or "no version" without metadata."""
    from importlib import metadata  # slow to import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "no version"


def warn_if_untested() -> None:
    """Warns about releases that are not in TESTED. The other functions here raise ImportError for releases that differ."""
    untested = [f"{package} {version(package)}" for package in ("unsloth", "unsloth_zoo") if version(package) not in TESTED]
    if untested:
        warnings.warn(
            f"volta_fa.enable_unsloth: {' and '.join(untested)}: tested with {', '.join(TESTED)}; "
            "the functions that volta_fa replaces have the same arguments",
            stacklevel=3,
        )


def module(name: str) -> ModuleType:
    """Imports a module of unsloth. Raises ImportError, with the versions, if there is none of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and needs another package
        raise _changed(name, "no such module", "a module", ImportError) from error


def find(owner: ModuleType, name: str) -> Any:
    """Returns an attribute of a module of unsloth. Raises ImportError, with the versions, if there is none of this name."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _changed(f"{owner.__name__}.{name}", "no such attribute", "the attribute", ImportError) from None


def find_function(owner: ModuleType, name: str, parameters: tuple[str, ...]) -> Any:
    """Returns a function of a module of unsloth. Raises ImportError, with the versions, if its parameters are others."""
    function = find(owner, name)
    check_parameters(f"{owner.__name__}.{name}", function, parameters)
    return function


def check_parameters(name: str, function: Any, parameters: tuple[str, ...]) -> None:
    """Raises ImportError, with the versions, if a function of unsloth has other parameters."""
    found = tuple(inspect.signature(function).parameters) if callable(function) else None
    if found != parameters:
        got = f"a function of ({', '.join(found)})" if found is not None else f"{function!r}"
        raise _changed(name, got, f"a function of ({', '.join(parameters)})", ImportError)


def check_fields(owner: ModuleType, name: str, fields: frozenset[str]) -> None:
    """Raises ImportError, with the versions, if a dataclass of unsloth has other fields: a new one may change the result."""
    cls = find(owner, name)
    found = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    if found != fields:
        missing, new = sorted(fields - found), sorted(found - fields)
        got = "; ".join(f"{what} {', '.join(names)}" for what, names in (("without", missing), ("with", new)) if names)
        raise _changed(f"{owner.__name__}.{name}", f"fields {got}", "those of the tested release", ImportError)


def _changed(name: str, got: str, expected: str, error: type[Exception]) -> Exception:
    """Returns an error that says what was found under `name`, what was expected, and the versions."""
    package = name.partition(".")[0]
    expected = f"{expected}: tested with {package} {', '.join(TESTED)}; install a tested release or update volta_fa"
    return bad_argument(name, f"{got} in {package} {version(package)}", expected, op="enable_unsloth", error=error)

"""Compares the arguments of all ranks, at the beginning of each function of `volta_fa.distributed` that sends tensors.

A rank with other arguments, or one that has ended, would leave the others waiting in a collective. So the ranks exchange their arguments as
JSON text through the key-value store of the process group. This does not synchronize with a GPU, and every rank raises the same error."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..errors import bad_argument

#: Number of calls so far of each group.
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()

#: A rank's arguments, JSON values: those that must be the same on all ranks, by name, and others, which all ranks receive.
RankArguments = tuple[dict[str, Any], Any]


def check_same_arguments(
    groups: Sequence[dist.ProcessGroup], op: str, local_arguments: Callable[[], RankArguments], device: torch.device
) -> list[Any]:
    """Compares the arguments of all ranks, and returns the second part of each rank's arguments.

    The result is in the order of the last group's ranks, and within each in the order of the group before it.

    Args:
        groups: the dimensions of a grid of ranks: [Ulysses group, ring], or one group.
        op: the public function, for messages.
        local_arguments: checks this rank's arguments, and returns them.
        device: device of the tensors. The group's backend for it has the timeout.

    Raises the same on all ranks: the ValueError or NotImplementedError of `local_arguments` on any rank, or ValueError for arguments that
    differ. Raises RuntimeError if a rank does not make the call within the group's timeout.
    """
    try:
        same, own = local_arguments()
        mine: dict[str, Any] = {"op": op, "same": same, "own": own}
    except (ValueError, NotImplementedError) as error:
        mine = {"op": op, "error": [type(error).__name__, str(error)]}
    everyone = [mine]
    for group in groups:
        everyone = [arguments for texts in _exchange(group, op, everyone, device) for arguments in texts]
    for rank, theirs in enumerate(everyone):
        if "error" in theirs:
            kind = NotImplementedError if theirs["error"][0] == "NotImplementedError" else ValueError
            message = theirs["error"][1]
            raise kind(message if len(everyone) == 1 else f"{message} (on rank {rank} of the group)")
    _compare(op, everyone)
    return [theirs["own"] for theirs in everyone]


def _compare(op: str, everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for the first argument that differs between ranks, with all its values."""
    first = everyone[0]
    tables = [{"call": theirs["op"]} | theirs["same"] for theirs in everyone]
    for name in {"call": first["op"]} | first["same"]:
        values = [table.get(name) for table in tables]
        if any(value != values[0] for value in values):
            found = {str(value): [r for r, v in enumerate(values) if v == value] for value in values}
            given = ", ".join(f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in found.items())
            raise bad_argument(name, given, "the same on all ranks", op=f"distributed.{op}")


def _exchange(group: dist.ProcessGroup, op: str, mine: Any, device: torch.device) -> list[Any]:
    """Returns all ranks' arguments. Rank 0 gathers and distributes them, so that a large group makes few requests."""
    size, rank = group.size(), group.rank()
    if size == 1:
        return [json.loads(json.dumps(mine))]
    number = _calls.get(group, 0)
    _calls[group] = number + 1
    store: Any = dist.distributed_c10d._world.pg_map[group][1]  # the group's key-value store
    keys = [f"volta_fa/{number}/{r}" for r in range(size)]
    everyone = f"volta_fa/{number}/all"
    timeout = group_timeout(group, device) or store.timeout
    try:
        store.set(keys[rank], json.dumps(mine))
        if rank == 0:
            store.wait(keys, timeout)
            texts = [json.loads(text) for text in store.multi_get(keys)]
            store.set(everyone, json.dumps(texts))
            # every rank has begun this call, so every rank has read the previous call's text
            store.delete_key(f"volta_fa/{number - 1}/all")
        else:
            store.wait([everyone], timeout)
            texts = json.loads(store.get(everyone))
        store.delete_key(keys[rank])
    except RuntimeError as error:
        raise RuntimeError(f"volta_fa.distributed.{op}: {_missing(store, keys, timeout)}") from error
    return texts


def _missing(store: Any, keys: Sequence[str], timeout: timedelta) -> str:
    """Returns why an exchange failed: which ranks have not set their key."""
    within = f"within the group's timeout of {timeout.total_seconds():g} s"
    try:
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return f"the store of the process group does not answer {within}: the process that holds it, usually rank 0's, has ended"
    if not absent:
        return f"rank 0 did not answer {within}"
    return (
        f"rank{'s' * (len(absent) > 1)} {', '.join(absent)} of the group did not make this call {within}: "
        "such a process is late, has ended, or does something else"
    )


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Returns the timeout that `init_process_group` or `new_group` got; None if the backend does not provide it."""
    try:
        options = group._get_backend(torch.device(device.type)).options
        return getattr(options, "_timeout", None)
    except (RuntimeError, AttributeError):
        return None

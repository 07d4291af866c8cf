"""Simulates ring attention on V100s, and prints kernel time / total time by tokens and GPUs: 100% where kernels hide all messages.

    python -m benchmarks.ring_simulation

A ring of n ranks shards the sequence. In step t a rank computes attention of its queries over the keys of the rank t before it.
The inputs are simulated kernel rates and published link rates; nothing is measured on a V100. Each rank computes its steps in order and
requests the keys and values of step t + 1 as step t begins. A message travels once both ranks have requested it and both links are free.
In the backward pass the gradients of step t's keys leave when the step ends. All kernels of a pass run at one rate, and nothing else takes
time. As in volta_fa.distributed, attention is causal and the layout is zigzag: of 2n chunks, rank i holds i and 2n - 1 - i.

It compares two layouts over nodes of eight GPUs: one ring of all GPUs, and Ulysses, which shards heads, inside a node with a ring of nodes.
Both send directly from a key's rank to its reader, without hops along the ring. A "place" is a rank of the ring: GPU, or node with Ulysses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

NODE = 8  # GPUs of a node, a DGX-1V
#: GB/s one way between two GPUs of a node: one NVLink of the six that a V100 has. Many pairs of a DGX-1V have two; some none.
NVLINK = 25.0
#: GB/s one way of a GPU to other nodes: four EDR InfiniBand ports of 100 Gbit/s for eight GPUs.
NETWORK = 4 * 12.5 / NODE
#: TFLOP/s of the simulated V100 at headdim 128 without a mask, at the longest that docs/reference/figures.md has: 4,096 and 2,048 keys.
FORWARD, BACKWARD = 92.6, 75.5


@dataclass(frozen=True)
class Setup:
    """A layer's causal attention over one sequence, and the machine."""

    seqlen: int
    gpus: int
    mesh: bool = False  # Ulysses inside a node, and a ring of nodes
    nheads: int = 32
    nheads_k: int = 8
    headdim: int = 128
    node: int = NODE  # GPUs
    nvlink: float = NVLINK  # GB/s one way
    network: float = NETWORK  # GB/s one way of each GPU
    forward: float = FORWARD  # TFLOP/s
    backward: float = BACKWARD  # TFLOP/s

    @property
    def shared(self) -> int:
        """GPUs that share the heads of one place."""
        return min(self.node, self.gpus) if self.mesh else 1

    @property
    def places(self) -> int:
        """Size of the ring."""
        return self.gpus // self.shared

    @property
    def rows(self) -> float:
        """Tokens of one place."""
        return self.seqlen / self.places

    def seconds(self, backward: bool) -> float:
        """Returns the time of a GPU's kernels in one step.

        With zigzag's two chunks, the causal mask hides half of the rows x rows pairs in every step. A pair takes 4 * headdim operations
        forward and 10 backward. The GPUs of a place divide the query heads."""
        operations = (10 if backward else 4) * self.rows**2 / 2 * self.headdim * self.nheads / self.shared
        return operations / ((self.backward if backward else self.forward) * 1e12)

    def message(self, first_half: bool) -> float:
        """Returns the bytes of fp16 keys and values that each GPU of a place receives for a step.

        Under the causal mask a place needs only the first chunk of an earlier place (`first_half`), but both chunks of a later one.
        With fewer KV heads than GPUs in a node, GPUs share KV heads, so each receives one."""
        heads = max(self.nheads_k / self.shared, 1)
        return (0.5 if first_half else 1.0) * self.rows * heads * self.headdim * 2 * 2  # K and V, 2 bytes


def rates(setup: Setup, step: int) -> numpy.ndarray:
    """Returns the link rate, in bytes per second, of the message that each place receives from `step` places before it."""
    place = numpy.arange(setup.places)
    source = (place - step) % setup.places
    same_node = (place // setup.node == source // setup.node) & (not setup.mesh)  # a mesh has one place in a node
    return numpy.where(same_node, setup.nvlink, setup.network) * 1e9


def simulate(setup: Setup, backward: bool = False) -> float:
    """Returns the seconds of one pass, until the last rank has its result."""
    n = setup.places
    place = numpy.arange(n)
    # seconds, of each place: when its links out and in are free, its kernels done, its next keys there, its gradients returned
    way_out, way_in, done, arrived, returned = numpy.zeros((5, n))
    for step in range(n):
        begin = numpy.maximum(done, arrived)
        if step + 1 < n:
            arrived = _transfer(setup, step + 1, begin, way_out, way_in)
        done = begin + setup.seconds(backward)
        if backward and step > 0:
            # dK and dV return in fp16, as many bytes as came, to the place of their keys (`owner`); `reader` returns this place's
            owner = (place - step) % n
            reader = (place + step) % n
            seconds = _bytes(setup, step) / rates(setup, step)
            start = numpy.maximum.reduce([done, way_out, way_in[owner]])
            end = start + seconds
            way_out[:] = end
            way_in[:] = end[reader]
            returned = numpy.maximum(returned, end[reader])
    return float(numpy.maximum(done, returned).max())


def _bytes(setup: Setup, step: int) -> numpy.ndarray:
    """Returns the bytes that each place receives for a step: the first chunk from an earlier place, both from a later one."""
    place = numpy.arange(setup.places)
    return numpy.where((place - step) % setup.places < place, setup.message(first_half=True), setup.message(first_half=False))


def _transfer(setup: Setup, step: int, requested: numpy.ndarray, way_out: numpy.ndarray, way_in: numpy.ndarray) -> numpy.ndarray:
    """Returns when each place has the keys from `step` places before it, and occupies the links in `way_out` and `way_in` until then."""
    place = numpy.arange(setup.places)
    source, reader = (place - step) % setup.places, (place + step) % setup.places
    start = numpy.maximum.reduce([requested, requested[source], way_out[source], way_in])
    end = start + _bytes(setup, step) / rates(setup, step)
    way_in[:] = end
    way_out[:] = end[reader]
    return end


def efficiency(setup: Setup, passes: Sequence[bool] = (False,)) -> float:
    """Returns kernel time / total time, at most 1, of the passes together (True: backward). tests/test_distributed.py calls it too."""
    return setup.places * sum(map(setup.seconds, passes)) / sum(simulate(setup, backward) for backward in passes)


def hides_from(setup: Setup, rate: float, backward: bool = False) -> float:
    """Returns the minimum tokens per place for which a step's kernels hide its largest messages at `rate` GB/s. The same tests call it.

    With `rows` tokens per place, a step takes 2 * rows^2 * headdim * nheads operations (backward: 5), half of `Setup.seconds`'s 4 (10)
    per pair. A link moves 4 * rows * headdim * nheads_k bytes in each direction: K and V in fp16 (backward: 8, with their gradients).
    The result equates both times. With Ulysses, the GPUs of a place divide both by the same number, unless they share KV heads."""
    if backward:
        return 8 * setup.nheads_k * setup.backward * 1e12 / (5 * setup.nheads * rate * 1e9)
    return 4 * setup.nheads_k * setup.forward * 1e12 / (2 * setup.nheads * rate * 1e9)


SEQLENS = [2**n for n in range(15, 23)]  # 32K to 4M
GPUS = [8, 16, 32, 64, 128, 256, 512, 1024]


def table() -> str:
    """Returns a Markdown table of the efficiency of forward and backward by tokens and GPUs: one ring, Ulysses with a ring of nodes."""
    from . import report  # here, because the simulation needs no torch

    lines = ["| tokens | " + " | ".join(f"{n} GPUs" for n in GPUS) + " |", "| ---: |" + " ---: |" * len(GPUS)]
    for seqlen in report.track(SEQLENS, "lengths"):
        cells = [", ".join(f"{efficiency(Setup(seqlen, gpus, mesh), (False, True)):.0%}" for mesh in (False, True)) for gpus in GPUS]
        size = f"{seqlen // 1024}K" if seqlen < 2**20 else f"{seqlen // 2**20}M"
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

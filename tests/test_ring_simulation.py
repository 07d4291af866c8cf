"""benchmarks.ring_simulation: its limits, and a case by hand."""

import dataclasses

import pytest

from benchmarks.ring_simulation import Setup, efficiency, hides_from, simulate
from volta_fa.distributed.layout import shard_ranges
from volta_fa.distributed.plan import Mask, plan


def test_a_node_by_itself_sends_nothing():
    """One place: only kernels."""
    for setup in (Setup(4096, 1), Setup(4096, 8, mesh=True)):
        assert setup.places == 1
        assert simulate(setup) == pytest.approx(setup.seconds(False))


@pytest.mark.parametrize("backward", [False, True])
def test_with_endless_bandwidth_only_kernels_count(backward):
    setup = Setup(65536, 64, nvlink=1e9, network=1e9)
    assert efficiency(setup, backward) == pytest.approx(1, abs=1e-3)


def test_with_slow_links_only_messages_count():
    """Four places of one GPU in one node: the last reader of the second chunk gets three messages, of which the first begins at 0."""
    setup = Setup(4096, 4, nvlink=1e-3)
    bytes_ = [setup.message(False)] * 3
    assert simulate(setup) == pytest.approx(sum(bytes_) / 1e6, rel=1e-3)


def test_two_places_by_hand():
    """Place 0 reads both chunks of place 1, which reads the first of place 0. Messages begin at 0 with step 0's kernels."""
    setup = Setup(8192, 2, nvlink=2.0)
    kernel, both = setup.seconds(False), setup.message(False) / 2e9
    assert simulate(setup) == pytest.approx(max(kernel, both) + kernel)
    # backward: and the gradients of both chunks go back after step 1
    kernel = setup.seconds(True)
    assert simulate(setup, True) == pytest.approx(max(kernel, both) + kernel + both)


def test_hidden_from_the_derived_length_on():
    """Well above it nearly everything is hidden, well below it is not, in the forward pass inside a node."""
    base = Setup(0, 8)
    rows = hides_from(base, base.nvlink)
    assert efficiency(dataclasses.replace(base, seqlen=int(8 * rows * 1.05))) > 0.99
    assert efficiency(dataclasses.replace(base, seqlen=int(8 * rows * 0.4))) < 0.6


def test_more_tokens_hide_more_and_the_mesh_more_than_the_ring():
    for gpus in (64, 1024):
        shares = [efficiency(Setup(2**n, gpus)) for n in range(15, 23)]
        assert shares == sorted(shares)
        assert efficiency(Setup(2**20, gpus, mesh=True)) > efficiency(Setup(2**20, gpus))


def test_it_simulates_what_the_ring_plans():
    """Rows that travel, and scores of a step: those of volta_fa.distributed."""
    size, seqlen = 4, 4096
    setup = Setup(seqlen, size)
    ranges = [shard_ranges(seqlen, size, rank, "zigzag") for rank in range(size)]
    mask = Mask(((0, seqlen),), ((0, seqlen),), None, 0)
    for rank in range(size):
        for step in range(1, size):
            source = (rank - step) % size
            planned = plan(ranges[rank], ranges[source], mask)
            row = 2 * 2 * setup.nheads_k * setup.headdim
            assert planned.count * row == setup.message(source < rank)
            scores = sum(call.rows * call.keys for launch in planned.launches for call in launch.calls)
            assert scores == setup.rows**2 / 2

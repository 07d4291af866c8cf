"""volta_fa.distributed, attention over sequences that are sharded over ranks, and benchmarks.ring_simulation, which models its time.

`test_ranks` starts distributed_worker.py in one process per rank, which runs all cases for that number of ranks, because a process costs
seconds. The other tests need no processes. They test the plan of a ring: which keys travel to a rank at each step, and which calls
of the op compute them. Zigzag gives rank r the chunks r and 2 * size - 1 - r of a sequence, so that causal work is equal.
`Mask(queries, keys, left, right)` has ranges (begin, end) of each sequence's queries and keys, and the window's bounds (None: no bound).
`shard_ranges(seqlen, size, rank, layout)` are a rank's ranges of positions, and `unroll` lists the positions of ranges."""

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter

import pytest
import torch

from benchmarks.ring_simulation import Setup, efficiency, hides_from, simulate
from conftest import INFO, LIBRARY, REPOSITORY
from distributed_problems import unroll
from volta_fa.distributed.plan import LAYOUTS, Distance, Mask, length, plan, shard_ranges

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or os.name != "posix", reason="no torch.distributed with gloo")
#: Seconds for all cases, after which a rank counts as hung.
LIMIT = 500


def run_ranks(folder, size: int, **environment) -> list[dict]:
    """Runs distributed_worker.py once per rank. Returns the JSON that each rank wrote: failures by name of the case."""
    path = os.pathsep.join(filter(None, [str(LIBRARY.parents[2]), os.environ.get("PYTHONPATH")]))
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    master = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, **master, **environment}
    ranks = []
    for rank in range(size):
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, REPOSITORY / "tests" / "distributed_worker.py", str(rank), str(size), folder]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, code in enumerate(codes):
        assert (folder / f"{rank}.json").exists(), f"rank {rank}: exit status {code}: {(folder / f'{rank}.log').read_text()[-2000:]}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


SIZES = [("gloo", 2), *(pytest.param("gloo", size, marks=pytest.mark.slow) for size in (1, 3, 4))]


@pytest.mark.parametrize("backend, size", [*SIZES, pytest.param("nccl", 2, marks=pytest.mark.cuda)])
def test_ranks(tmp_path, backend, size):
    """Runs all cases of distributed_worker.py for this number of ranks."""
    if not INFO["simulator"]:
        pytest.skip("this library was built without the simulator (cargo feature `sim`)")
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    found = run_ranks(tmp_path, size, VOLTA_FA_TEST_NCCL=str(int(backend == "nccl")))
    failures = [f"rank {rank}, {name}: {text}" for rank, cases in enumerate(found) for name, text in cases.items()]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seqlen", [0, 1, 3, 7, 64, 101])
def test_shards_are_the_sequence(layout, seqlen):
    """Shards of `size` ranks, each divided into `parts`, have each position once. The parts of a rank are its shard, in order."""
    for size in range(1, 6):
        for parts in (1, 2, 3):
            shards = [shard_ranges(seqlen, size, rank, layout, parts, part) for rank in range(size) for part in range(parts)]
            assert sorted(i for shard in shards for i in unroll(shard)) == list(range(seqlen)), (size, parts)
            if parts == 1:
                assert max(map(length, shards)) - min(map(length, shards)) <= 2
            assert [i for shard in shards[:parts] for i in unroll(shard)] == unroll(shard_ranges(seqlen, size, 0, layout))


def test_zigzag_balances():
    """Under a causal mask every rank sees equally many keys; contiguous chunks differ by a factor of nearly 2 * size - 1, here 7."""

    def visible_keys(layout):
        return [sum(i + 1 for i in unroll(shard_ranges(96, 4, rank, layout))) for rank in range(4)]

    assert len(set(visible_keys("zigzag"))) == 1
    assert max(visible_keys("contiguous")) > 6 * min(visible_keys("contiguous"))


def visible(mask: Mask, i: int, j: int) -> bool:
    """Returns whether query i sees key j: both in one sequence, and within the window, aligned to the sequence's last key."""
    for (q0, q1), (k0, k1) in zip(mask.queries, mask.keys):
        if q0 <= i < q1 and k0 <= j < k1:
            last = (i - q0) + (k1 - k0) - (q1 - q0)
            return (mask.right is None or j - k0 <= last + mask.right) and (mask.left is None or j - k0 >= last - mask.left)
    return False


def covered(q_ranges, k_ranges, mask):
    """Returns the plan of a step, and how many of its calls compute each pair of query and key. Also checks distances for ALiBi.

    A step has launches, each a call of the op, and `key_ranges`, the keys of the shard that travel (`count` of them). A launch has one
    `Call`, or one for each packed sequence: a rectangle of queries `q` of the shard and of keys `k` in `key_ranges`, both (begin, end)."""
    step = plan(q_ranges, k_ranges, mask)
    q_positions, k_all = unroll(q_ranges), unroll(k_ranges)
    k_positions = [k_all[j] for j in unroll(step.key_ranges)]
    found = Counter()
    for launch in step.launches:
        for before, after in zip(launch.calls, launch.calls[1:]):
            assert before.q[1] == after.q[0] and before.k[1] == after.k[0]
        for call in launch.calls:
            assert call.rows > 0 and call.keys > 0
            left, right = launch.left, launch.right
            assert (left is None or left >= 0) and (right is None or right >= 0)
            for row in range(call.rows):
                for key in range(call.keys):
                    last = row + call.keys - call.rows
                    if (left is None or key >= last - left) and (right is None or key <= last + right):
                        pair = q_positions[call.q[0] + row], k_positions[call.k[0] + key]
                        found[pair] += 1
                        if mask.alibi:
                            check_distance(call, row, key, *pair, mask)
    return step, found


def check_distance(call, row, key, i, j, mask):
    """Checks that ALiBi in a call, at its (row, key), has the distance of positions i and j of the whole problem. Distance.OWN: by the op's
    alibi_slopes, which count from the call's last row and key. BEFORE, AFTER: by a bias, as all keys lie on one side of all rows."""
    (q0, q1), (k0, k1) = mask.queries[call.sequence], mask.keys[call.sequence]
    distance = (i - q0) + (k1 - k0) - (q1 - q0) - (j - k0)
    if call.distance is Distance.OWN:
        assert abs(row + call.keys - call.rows - key) == abs(distance)
    else:
        assert call.offset + row - key == distance
        assert distance >= 0 if call.distance is Distance.BEFORE else distance <= 0


def random_mask(rng: random.Random) -> tuple[Mask, int, int]:
    """Returns a mask, and its numbers of queries and keys: one sequence or several packed ones."""
    bounds = [rng.choice([None, 0, 1, 3, 9, 30]) for _ in range(2)]  # of a window: left and right; None: no bound
    alibi = rng.random() < 0.3
    if rng.random() < 0.5:
        seqlen_q, seqlen_k = (rng.choice([0, 1, 5, 16, 23]) for _ in range(2))
        if rng.random() < 0.6:
            seqlen_k = seqlen_q
        return Mask(((0, seqlen_q),), ((0, seqlen_k),), *bounds, alibi), seqlen_q, seqlen_k
    starts = [0]
    for _ in range(rng.randint(1, 5)):
        starts.append(starts[-1] + rng.choice([0, 1, 2, 5, 11]))
    sequences = tuple(zip(starts, starts[1:]))
    return Mask(sequences, sequences, *bounds, alibi), starts[-1], starts[-1]


def test_every_visible_pair_once():
    rng = random.Random(16)
    for _ in range(400):
        mask, seqlen_q, seqlen_k = random_mask(rng)
        layout, size = rng.choice(LAYOUTS), rng.randint(1, 4)
        for queries in range(size):
            for keys in range(size):
                q_ranges, k_ranges = shard_ranges(seqlen_q, size, queries, layout), shard_ranges(seqlen_k, size, keys, layout)
                _, found = covered(q_ranges, k_ranges, mask)
                pairs = itertools.product(unroll(q_ranges), unroll(k_ranges))
                assert found == {pair: 1 for pair in pairs if visible(mask, *pair)}, (mask, layout, size, queries, keys)


def steps(size, mask, seqlen, layout="zigzag"):
    """Returns the steps of each rank: step t computes the keys of the t-th rank before it."""
    ranges = [shard_ranges(seqlen, size, rank, layout) for rank in range(size)]
    return [[plan(ranges[r], ranges[(r - t) % size], mask) for t in range(size)] for r in range(size)]


@pytest.mark.parametrize("right", [None, 0])
def test_one_launch_a_step(right):
    """Without a window, one call computes the two chunks of queries with those of another rank. Under a causal mask each step after the
    first has 128 pairs on every rank, half of the 16 x 16 pairs of two shards."""
    for rank in steps(4, Mask(((0, 64),), ((0, 64),), None, right), 64):
        assert [len(step.launches) for step in rank] == [1, 1, 1, 1]
        if right == 0:
            areas = [launch.calls[0].rows * launch.calls[0].keys for step in rank[1:] for launch in step.launches]
            assert areas == [128, 128, 128]


def test_hidden_keys_do_not_travel():
    """`count`, the keys that a rank gets at each step, leaves out keys that a window or causality hides."""
    counts = [[step.count for step in rank] for rank in steps(8, Mask(((0, 64),), ((0, 64),), 7, 0), 64, "contiguous")]
    assert counts == [[8, 7 * (r > 0), *[0] * 6] for r in range(8)]
    counts = [[step.count for step in rank] for rank in steps(4, Mask(((0, 64),), ((0, 64),), None, 0), 64, "contiguous")]
    assert counts == [[16 * (t <= r) for t in range(4)] for r in range(4)]


def test_packed_sequences_travel_as_far_as_they_reach():
    """Four ranks with 16 tokens each. A sequence goes on in each next shard, so a rank needs only its keys of the rank before."""
    starts = (0, 5, 20, 22, 40, 41, 64)
    sequences = tuple(zip(starts, starts[1:]))
    counts = [[step.count for step in rank] for rank in steps(4, Mask(sequences, sequences, None, 0), 64, "contiguous")]
    # rank 1 reads 5 to 15, rank 2 reads 22 to 31, rank 3 reads 41 to 47
    assert counts == [[16, 0, 0, 0], [16, 11, 0, 0], [16, 10, 0, 0], [16, 7, 0, 0]]
    own = steps(4, Mask(sequences, sequences, None, 0), 64, "contiguous")[1][0]
    assert len(own.launches) == 1 and len(own.launches[0].calls) == 3


def test_a_plan_is_made_once():
    """Equal arguments return the same plan object."""
    mask = Mask(((0, 33),), ((0, 33),), 4, 0)
    first = plan(((0, 9),), ((3, 20),), mask)
    assert plan(((0, 9),), ((3, 20),), Mask(((0, 33),), ((0, 33),), 4, 0)) is first


# ---- benchmarks.ring_simulation: seconds of a ring. Setup(seqlen, GPUs); nvlink: GB/s between two GPUs of a node ------------


def test_a_node_by_itself_sends_nothing():
    """A ring of one place (one GPU, or with `mesh` a node of eight GPUs) sends no messages, so its time is the kernels'."""
    for setup in (Setup(4096, 1), Setup(4096, 8, mesh=True)):
        assert setup.places == 1 and simulate(setup) == pytest.approx(setup.seconds(backward=False))


def test_with_slow_links_only_messages_count():
    """Four places of one GPU in one node: the last reader of the second chunk gets three messages. The first begins at 0."""
    setup = Setup(4096, 4, nvlink=1e-3)
    assert simulate(setup) == pytest.approx(3 * setup.message(first_half=False) / 1e6, rel=1e-3)


def test_two_places_by_hand():
    """Place 0 reads both chunks of place 1, which reads the first of place 0. Messages begin at 0 with step 0's kernels."""
    setup = Setup(8192, 2, nvlink=2.0)
    kernel, both = setup.seconds(backward=False), setup.message(first_half=False) / 2e9
    assert simulate(setup) == pytest.approx(max(kernel, both) + kernel)
    # backward: and the gradients of both chunks go back after step 1
    kernel = setup.seconds(backward=True)
    assert simulate(setup, backward=True) == pytest.approx(max(kernel, both) + kernel + both)


def test_hidden_from_the_derived_length_on():
    """Kernels hide messages from `hides_from` rows per rank on, because kernels' time is quadratic in the rows. Above it nearly everything
    is hidden, well below it is not, in the forward pass inside a node."""
    base = Setup(0, 8)
    rows = hides_from(base, base.nvlink)
    assert efficiency(dataclasses.replace(base, seqlen=int(8 * rows * 1.05))) > 0.99
    assert efficiency(dataclasses.replace(base, seqlen=int(8 * rows * 0.4))) < 0.6


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
            row = 2 * 2 * setup.nheads_k * setup.headdim  # bytes of K and V in fp16
            assert planned.count * row == setup.message(source < rank)
            scores = sum(call.rows * call.keys for launch in planned.launches for call in launch.calls)
            assert scores == setup.rows**2 / 2

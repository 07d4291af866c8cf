"""One rank of tests/test_distributed.py, which starts this program once per rank. It runs all cases for that number of ranks.

    python tests/distributed_worker.py RANK WORLD FOLDER

The cases test volta_fa.distributed: ring_attention (in each step, keys and values travel a rank further), ulysses_attention (an all-to-all
gives each rank some heads of the whole sequence), context_parallel_attention (both, over a mesh), DTensors as arguments of the op, and
DistributedDataParallel. None as a group or a mesh means all ranks. MASTER_ADDR and MASTER_PORT are of a TCPStore, which test_distributed.py
serves. A failure is written to FOLDER/RANK.json: case and traceback.

distributed_problems.py has PROBLEMS by name, and runs each in one process (`whole_of`) or on all ranks (`sharded`). `compare` allows fp64
errors of CLOSE; `judge` checks fp16 and bf16 against the fp64 reference. `inputs` draws q, k, v and dout of a whole problem, the same on
all ranks. Layouts are zigzag (rank r has chunks r and 2 * ranks - 1 - r) and contiguous; `unroll` lists the positions of ranges. NCCL:
whether each rank has a GPU; else ranks are CPU processes over gloo."""

import copy
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

import reference
import volta_fa
from distributed_problems import CLOSE, DTYPE, NAMES, NCCL, OTHER, PROBLEMS, compare, inputs, judge, problem, sharded, unroll, whole_of
from processes import end_rank
from volta_fa.distributed import context_parallel_attention, ring_attention, shard_sequence, ulysses_attention, unshard_sequence
from volta_fa.distributed import ring as ring_module

#: By name, in the order of the file: the numbers of ranks that run a case, and its function.
CASES = {}


def case(*worlds: int, gpu: bool = False):
    """Registers a case, a function of a `World`, for these numbers of ranks: over gloo, and if `gpu` over NCCL too (a GPU per rank).

    A case need not undo what it changes if it fails: no other case follows."""

    def register(function):
        if gpu or not NCCL:
            CASES[function.__name__] = (worlds, function)
        return function

    return register


@dataclass
class World:
    """This rank, the number of ranks (`size`), and their meshes by shape (ring, ulysses)."""

    rank: int
    size: int
    device: torch.device
    folder: Path  # for the failures
    meshes: dict = field(default_factory=dict)

    def finish(self, failures):
        """Writes the failures, by case, for test_distributed.py."""
        (self.folder / f"{self.rank}.json").write_text(json.dumps(failures))

    def mesh(self, ring: int, ulysses: int):
        """Returns the mesh of ring x ulysses ranks. The product is `size`."""
        if (ring, ulysses) not in self.meshes:
            shape = (ring, ulysses)
            self.meshes[shape] = init_device_mesh(self.device.type, shape, mesh_dim_names=("ring", "ulysses"))
        return self.meshes[ring, ulysses]


def equals_one_process(world, attend, groups, layouts=("zigzag",)):
    """Compares each problem in fp64, over each group (or mesh) and layout, with the result of one process."""
    for name in PROBLEMS:
        tensors, options = problem(name, torch.float64, world.device)
        expected = whole_of(*tensors, **options)
        for group in groups:
            for layout in layouts:
                compare(sharded(attend, group, *tensors, layout=layout, **options), expected, f"{name}, {layout}, {group}:")


@case(1, 2, 3, 4)
def ring(world):
    equals_one_process(world, ring_attention, [None], ("zigzag", "contiguous"))


@case(1, 2, 4)
def ulysses(world):
    equals_one_process(world, ulysses_attention, [None], ("zigzag", "contiguous"))


@case(2)
def second_derivatives(world):
    """Second derivatives raise an error, also where an exchange of heads (ulysses) is between attention and its arguments."""
    leaves = [shard_sequence(t, None).requires_grad_() for t in inputs(torch.float64, world.device)[:3]]
    for attend in (ring_attention, ulysses_attention):
        gradients = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
        penalty = sum(t.square().sum() for t in (*leaves, *gradients))
        refused(RuntimeError, lambda: torch.autograd.grad(penalty, leaves), "derivative for volta_fa::bwd is not implemented")


@case(2, 4)
def mesh(world):
    shapes = [(world.size, 1), (1, world.size), (world.size // 2, 2)]
    equals_one_process(world, context_parallel_attention, [world.mesh(*shape) for shape in shapes])


@case(2, 4)
def low_precision(world):
    """fp16, bf16 and fp32 against the fp64 reference: of the CPU backend, and with two ranks of the kernels in the simulator
    (VOLTA_FA_SIMULATE=1). Those also merge each step's result into the fp32 one."""
    ways = [(dtype, ring_attention, options) for dtype in (torch.float16, torch.bfloat16) for options in ({}, {"is_causal": True})]
    ways += [(torch.bfloat16, ulysses_attention, {"is_causal": True}), (torch.float32, ring_attention, {"is_causal": True})]
    of_kernels = [(torch.float16, ring_attention, {"is_causal": True})]
    of_kernels.append((torch.bfloat16, ring_attention, {"window_left": 20, "window_right": 9}))
    for simulate, calls in (("0", ways), ("1", of_kernels if world.size == 2 else [])):
        os.environ["VOLTA_FA_SIMULATE"] = simulate
        for dtype, attend, options in calls:
            tensors = inputs(dtype, world.device, seqlen=93, headdim=32, batch=1)
            judge(f"{dtype} {options}", tensors, sharded(attend, None, *tensors, **options), **options)
    del os.environ["VOLTA_FA_SIMULATE"]


@case(1, 3)
def dropout(world):
    """Launches of all ranks draw different random numbers. With their dropout masks put together, one process gives the same result."""
    p, seqlen = 0.3, 48
    q, k, v, dout = inputs(torch.float64, world.device, seqlen=seqlen, batch=1)
    for t in (q, k, v):
        t.mul_(0.3)
    calls = []  # of this rank: its part of the call (ring_module.Problem), and the rng_state of each launch
    inner = ring_module.forward

    def remember(prob, *arguments):
        result = inner(prob, *arguments)
        calls.append((prob, result[2]))
        return result

    ring_module.forward = remember
    torch.manual_seed(7)
    found = sharded(ring_attention, None, q, k, v, dout, is_causal=True, dropout_p=p)
    again = sharded(ring_attention, None, q, k, v, dout, is_causal=True, dropout_p=p)
    torch.manual_seed(7)
    repeated = sharded(ring_attention, None, q, k, v, dout, is_causal=True, dropout_p=p)
    ring_module.forward = inner
    assert all(torch.equal(a, b) for a, b in zip(found, repeated)), "the same seed gives other numbers"
    assert not torch.equal(found[0], again[0]), "a second call has the numbers of the first"
    kept = mask_of_ring(*calls[0], seqlen, p)
    dist.all_reduce(kept, op=dist.ReduceOp.MAX)
    seen = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
    share = kept[:, :, seen].double().mean().item()
    assert abs(share - (1 - p)) < 0.03, share  # 4 heads x 1,176 scores: 4.5 standard deviations
    heads = kept[:, :, seen].flatten(0, 1).double()
    correlation = torch.corrcoef(heads).fill_diagonal_(0).abs().max().item()
    assert correlation < 0.15, correlation  # of 1,176 scores: 5 standard deviations
    if world.size > 1:  # if ranks drew the same numbers, at most half of the rows would differ
        rows = kept[0, 0, 16:, :16].tolist()
        assert len({tuple(row) for row in rows}) > 0.9 * len(rows)
    options = dict(is_causal=True, dropout_p=p, kept=kept.bool())
    expected = [reference.forward(q, k, v, **options).out, *reference.backward(dout, q, k, v, **options)]
    compare(found, expected, "dropout:")


def mask_of_ring(prob, rng_states, seqlen, p):
    """Returns this rank's part of the whole dropout mask, (1, 4 heads, seqlen, seqlen): the mask of each launch at its rows and keys.

    A launch is one call of the op on a rectangle: `call.q` is its range (begin, end) of rows in this rank's shard, `call.k` its range of
    the keys that the step reads, which are the ranges `step.key_ranges` of the source's shard."""
    kept = torch.zeros(1, 4, seqlen, seqlen, dtype=torch.uint8)
    rows, states = unroll(prob.q_ranges[prob.rank]), iter(rng_states)  # positions of this rank's queries
    for t in range(prob.size):  # step t computes the keys of the t-th rank before this one
        source = (prob.rank - t) % prob.size
        step, theirs = prob.step(prob.rank, source), unroll(prob.k_ranges[source])
        keys = [theirs[i] for i in unroll(step.key_ranges)]
        for launch in step.launches:
            call = launch.calls[0]  # the only one: dense tensors
            mask = torch.ops.volta_fa._dropout_mask(next(states), 1, 4, call.rows, call.keys, p)
            for row in range(call.rows):
                kept[:, :, rows[call.q[0] + row], keys[call.k[0] : call.k[1]]] = mask[:, :, row].to(torch.uint8)
    return kept


@case(4)
def ulysses_dropout(world):
    """Ranks compute different heads from the same generator state, and drop different elements. v is 1, so out shows the mask."""
    torch.manual_seed(3)
    q, k, v, _ = inputs(torch.float64, world.device, seqlen=40, batch=1)
    q, k, v = torch.zeros_like(q), torch.zeros_like(k), torch.ones_like(v)
    out = ulysses_attention(*(shard_sequence(t, None) for t in (q, k, v)), None, dropout_p=0.5)
    out = unshard_sequence(out, None)[0, :, :, 0]
    assert len({tuple(head) for head in out.T.tolist()}) == 4
    assert abs(out.mean().item() - 1) < 0.05  # kept probabilities are doubled: 4 standard deviations


@case(2, gpu=True)
def many_problems(world):
    """All problems against the fp64 reference: zigzag ring_attention in fp16; over NCCL also bf16, lengths of 23 instead of 4 times those
    of PROBLEMS, and all functions."""
    for name in PROBLEMS:
        for dtype in (torch.float16, torch.bfloat16)[: 2 if NCCL else 1]:
            tensors, options = problem(name, dtype, world.device, stretch=23 if NCCL else 4)
            ways = [(ring_attention, None, "zigzag"), (ring_attention, None, "contiguous"), (ulysses_attention, None, "zigzag")]
            ways += [(context_parallel_attention, world.mesh(*shape), "zigzag") for shape in ((2, 1), (1, 2))]
            for attend, group, layout in ways if NCCL else ways[:1]:
                found = sharded(attend, group, *tensors, layout=layout, **options)
                judge(f"{name}, {dtype}, {attend.__name__}, {layout}", tensors, found, **options)


@case(2, gpu=True)
def bit_equal(world):
    """Two runs of a deterministic call give bitwise identical results."""
    tensors = inputs(torch.float16, world.device, seqlen=2000 if NCCL else 80)
    first, second = (sharded(ring_attention, None, *tensors, is_causal=True, deterministic=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@case(1, 2)
def compiled(world):
    """With torch.compiler.disable, as docs/guides/context-parallel.md says, ring_attention breaks a compiled graph exactly once."""
    attend = torch.compiler.disable(ring_attention)
    q = shard_sequence(inputs(torch.float64, world.device, nheads_k=4)[0], None)

    def f(q):
        return attend(q * 2, q, q, is_causal=True) * 3

    torch._dynamo.utils.counters.clear()
    assert torch.equal(torch.compile(f, backend="eager")(q), f(q))
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 1, torch._dynamo.utils.counters["graph_break"]


@case(2, 3)
def no_gradient(world):
    """Without gradients (no_grad), and with a gradient of k alone, out is bitwise identical."""
    q, k, v, _ = (shard_sequence(t, None) for t in inputs(torch.float64, world.device))
    with torch.no_grad():
        out = ring_attention(q, k, v, is_causal=True)
    assert not out.requires_grad
    k.requires_grad_()
    other = ring_attention(q, k, v, is_causal=True)
    assert torch.equal(other, out)
    other.sum().backward()
    assert k.grad is not None and q.grad is None


@case(2)
def autocast(world):
    """Autocast of fp32 tensors to bf16: out is bf16, the gradient fp32. As everywhere in PyTorch, fp64 stays."""
    q, k, v, _ = (shard_sequence(t, None) for t in inputs(torch.float32, world.device))
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_attention(q.requires_grad_(), k, v)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert ring_attention(q.double(), k.double(), v.double()).dtype == torch.float64


@case(3)
def shards(world):
    """unshard_sequence undoes shard_sequence, in any dimension, and two tensors are divided alike."""
    for seqlen in (0, 2, 11, 48):
        for layout in ("zigzag", "contiguous"):
            positions = torch.arange(seqlen)
            mine = shard_sequence(positions, None, 0, layout)
            assert torch.equal(unshard_sequence(mine, None, 0, layout), positions)
            labels = torch.randn(2, 3, seqlen, 2, generator=torch.Generator().manual_seed(1))
            shard = shard_sequence(labels, None, -2, layout)
            assert torch.equal(shard, labels[:, :, mine])
            assert torch.equal(unshard_sequence(shard, None, -2, layout), labels)


@case(2, 4)
def dtensor(world):
    """The op on DTensors, with batch, heads, both or nothing sharded, equals the op on whole tensors, forward and backward.

    Batches or heads that the ranks do not divide, and a sharded sequence (Shard(1)), give the same result."""
    flat, grid = world.mesh(1, world.size)["ulysses"], world.mesh(world.size // 2, 2)
    batch, heads, both, neither = [Shard(0)], [Shard(2)], [Shard(0), Shard(2)], [Replicate()]
    cases = [(flat, p, {}) for p in (batch, heads, neither, [Shard(1)])] + [(grid, both, {}), (flat, heads, dict(nheads_k=1))]
    cases += [(flat, batch, dict(batch=3)), (flat, heads, dict(nheads=3, nheads_k=3))]
    for mesh, placements, sizes in cases:
        q, k, v, dout = inputs(torch.float64, world.device, **{"nheads_k": 4, "batch": 4} | sizes)
        options = dict(is_causal=True, alibi_slopes=torch.rand(q.shape[0], q.shape[2]), window_left=20)
        bias = torch.randn(1, q.shape[2], q.shape[1], 1, dtype=torch.float64)
        sinks = torch.randn(q.shape[2], dtype=torch.float64)

        def run(q, k, v, bias, sinks, dout, **options):
            leaves = [t.detach().requires_grad_() for t in (q, k, v, bias, sinks)]
            out, lse, _ = torch.ops.volta_fa.fwd(*leaves[:3], attn_bias=leaves[3], sinks=leaves[4], **options)
            return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout)]

        whole = [t.contiguous() for t in (q, k, v, bias, sinks, dout)]
        for t in whole:
            dist.broadcast(t, 0)
        dist.broadcast(options["alibi_slopes"], 0)

        def spread(t, p=None):
            return distribute_tensor(t, mesh, p or [Replicate()] * mesh.ndim)

        mine = [spread(t, placements) for t in whole[:3]] + [spread(t) for t in whole[3:]]
        expected, found = run(*whole, **options), run(*mine, **options)
        assert all(isinstance(t, DTensor) for t in found)
        if placements in (batch, heads, both) and sizes.get("nheads") != 3:
            assert list(found[0].placements) == placements, (found[0].placements, placements)
        for name, f, e in zip(("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"), found, expected):
            assert f.shape == e.shape
            error = (f.full_tensor() - e).abs().max().item()
            assert error < CLOSE, (name, placements, sizes, error)


class Layer(torch.nn.Module):
    """Causal self-attention by PyTorch's function: 4 heads of 8."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def layer_and_input(world):
    """Returns a layer and a batch of two, the same on all ranks."""
    torch.manual_seed(5)
    dtype = torch.float16 if NCCL else torch.float32
    return Layer().to(world.device, dtype), torch.randn(2, 11, 32).to(world.device, dtype)


@case(2, gpu=True)
def ddp(world):
    """Averaged gradients of DistributedDataParallel over two ranks, one batch entry each, are half of those of the whole batch."""
    one, x = layer_and_input(world)
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(one))
    volta_fa.sdpa_stats(reset=True)
    with volta_fa.sdpa_enabled(world.device, force=True):
        model(x[world.rank : world.rank + 1]).float().square().sum().backward()
        one(x).float().square().sum().backward()
    assert volta_fa.sdpa_stats()["ran"] == 2
    for p, q in zip(model.parameters(), one.parameters()):
        torch.testing.assert_close(p.grad, q.grad / 2, **({"rtol": 2e-2, "atol": 5e-2} if p.is_cuda else {"rtol": 1e-4, "atol": 1e-5}))


@case(2, gpu=True)
def dtensor_model(world):
    """A tensor-parallel layer over PyTorch's own attention: eager and compiled, outputs and gradients those of one process."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    one, x = layer_and_input(world)
    expected = one(x)
    expected.pow(2).sum().backward()
    mesh = world.mesh(1, world.size)["ulysses"]
    local = dict(use_local_output=False)
    plan = {n: ColwiseParallel(**local) for n in "qkv"} | {"o": RowwiseParallel()}
    for compiled in (False, True):
        layer = Layer().to(x)
        layer.load_state_dict(one.state_dict())
        layer = parallelize_module(layer, mesh, plan)
        volta_fa.sdpa_stats(reset=True)
        with volta_fa.sdpa_enabled(world.device, force=True):
            out = (torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer)(x)
            out.pow(2).sum().backward()
        assert volta_fa.sdpa_stats()["traced" if compiled else "ran"] >= 1 and not volta_fa.sdpa_stats()["fell_back"], volta_fa.sdpa_stats()
        assert (out - expected).abs().max() < (1e-2 if NCCL else 1e-5)
        for name, p in layer.named_parameters():
            assert isinstance(p.grad, DTensor)
            assert (p.grad.full_tensor() - one.get_parameter(name).grad).abs().max() < (1e-1 if NCCL else 1e-4), name


@case(2)
def dtensor_beside_plain_tensors(world):
    """A plain q, k or v beside DTensors may be a rank's shard. It counted as replicated, so each rank took a part of its own part."""
    from torch.distributed.tensor.experimental import implicit_replication

    mesh = world.mesh(1, world.size)["ulysses"]
    whole = [torch.ones(2, 8, 2, 8, dtype=torch.float64) for _ in range(3)]
    for plain, name in enumerate("qkv"):
        operands = [t if i == plain else distribute_tensor(t, mesh, [Shard(0)]) for i, t in enumerate(whole)]
        with pytest.raises(ValueError, match=f"volta_fa: {name}: got a plain tensor beside DTensors, expected a DTensor: "):
            torch.ops.volta_fa.fwd(*operands)
        with implicit_replication():
            assert torch.equal(torch.ops.volta_fa.fwd(*operands)[0].full_tensor(), whole[2])


@case(2, 4)
def dtensor_dropout(world):
    """Ranks with different heads drop different elements, replicas drop the same. v is 1, so out shows the mask."""
    mesh = world.mesh(1, world.size)["ulysses"]
    zeros, ones = torch.zeros(1, 32, 4, 8), torch.ones(1, 32, 4, 8)
    for placement in (Shard(2), Replicate()):
        torch.manual_seed(1)
        q, k, v = (distribute_tensor(t, mesh, [placement]) for t in (zeros, zeros, ones))
        out = torch.ops.volta_fa.fwd(q, k, v, dropout_p=0.5)[0]
        first = out.to_local().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, out.to_local()) == (placement == Replicate() or world.rank == 0)


@case(2, 3, 4, gpu=True)
def pytorch_context_parallel(world):
    """PyTorch's own context_parallel, with SDPA replaced by enable_sdpa(), runs volta_fa's ring."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard

    attend = torch.nn.functional.scaled_dot_product_attention
    mesh = world.mesh(world.size, 1)["ring"]
    seqlen = 4 * world.size * (50 if NCCL else 1)
    whole = [t.transpose(1, 2).contiguous() for t in inputs(DTYPE, world.device, seqlen=seqlen, nheads_k=4)]
    for is_causal, balanced in ((True, True), (True, False), (False, False)):
        leaves = [t.clone().requires_grad_() for t in whole[:3]]
        out = attend(*leaves, is_causal=is_causal)
        expected = [out.detach(), *torch.autograd.grad(out, leaves, whole[3])]
        _cp_options.enable_load_balance = balanced
        q, k, v, dout = (t.clone() for t in whole)
        volta_fa.sdpa_stats(reset=True)
        ours = volta_fa.sdpa_enabled(world.device, force=True)  # force: also on GPUs newer than the kernels are for
        with ours, context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4):
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=is_causal)
            assert out.shape[2] == seqlen // world.size
            found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
            found = context_parallel_unshard(mesh, found, [2] * 4)
        _cp_options.enable_load_balance = True
        assert volta_fa.sdpa_stats() == {"ran": 1, "traced": 0, "fell_back": {}}
        for name, f, e in zip(NAMES, found, expected):
            # over NCCL in fp16
            assert (f - e).abs().max() < (2e-2 if NCCL else CLOSE) * max(1.0, e.abs().max()), (name, is_causal, balanced)
    # is_causal with more keys than queries: SDPA cuts k and v, which are no longer sharded then
    shards = [whole[0][:, :, : seqlen // 2].contiguous(), *(t.clone() for t in whole[1:3])]
    _cp_options.enable_load_balance = False
    with volta_fa.sdpa_enabled(world.device, force=True), context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * 3):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        refused(
            NotImplementedError,
            lambda: sdpa(*shards, is_causal=True),
            "context_parallel: k: got Replicate()",
            "cut k and v to q's seqlen before",
        )
    _cp_options.enable_load_balance = True


@case(2, 4)
def transformers_llama(world):
    """A Llama of transformers (with a window: Mistral) over a mesh: losses and gradients are those of one process; packed too."""
    try:
        import transformers
    except ImportError:
        return
    import volta_fa.transformers as on_transformers

    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    grid = world.mesh(world.size // 2, 2)
    for kind, mesh, packed in (("Llama", None, False), ("Llama", grid, False), ("Mistral", None, False), ("Llama", None, True)):
        options = sizes | (dict(sliding_window=6) if kind == "Mistral" else {})
        config = getattr(transformers, f"{kind}Config")(**options, attn_implementation="volta_fa", use_cache=False)
        torch.manual_seed(2)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
        lengths = (9, 4, 10)
        tokens = torch.randint(50, (1 if packed else 2, sum(lengths)))
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        cu_seqlens = [0, 9, 13, 23] if packed else None
        positions = torch.arange(23)[None] if not packed else torch.cat([torch.arange(n) for n in lengths])[None]
        if packed:
            labels[:, [8, 12]] = -100  # a sequence's last token predicts none
        positions = positions.expand(tokens.shape)
        count = int((labels != -100).sum())
        for checkpointed in (False, True):
            if checkpointed:  # transformers renamed the method
                enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
                enable(dict(use_reentrant=False))
            model.train()
            loss = model(input_ids=tokens, position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=count).loss
            loss.backward()
            expected = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            with on_transformers.context_parallel(mesh, cu_seqlens=cu_seqlens):
                mine = [shard_sequence(t, mesh) for t in (tokens, positions, labels)]
                part = model(input_ids=mine[0], position_ids=mine[1], labels=mine[2], shift_labels=mine[2], num_items_in_batch=count).loss
                part.backward()
            total = part.detach().clone()
            dist.all_reduce(total)
            assert abs(total - loss) < 1e-6, (kind, total, loss)
            for (name, p), e in zip(model.named_parameters(), expected):
                dist.all_reduce(p.grad)
                assert (p.grad - e).abs().max() < 1e-6, (kind, packed, name)
            model.zero_grad()


def refused(kind, action, *words):
    """Checks that `action` raises this kind of error, with all words in its message."""
    text = None
    try:
        action()
    except kind as error:  # not pytest.raises: main() would not catch its exception
        text = str(error)
    assert text is not None and all(word in text for word in words), (words, text)


@case(2, 3, gpu=True)
def errors(world):
    """Wrong arguments, of all ranks or of the last one only, raise on every rank before q, k or v are sent. So later calls still work."""
    last = world.rank == world.size - 1
    q, k, v, _ = (shard_sequence(t, None) for t in inputs(DTYPE, world.device))
    prefix = "volta_fa.distributed.ring_attention: "

    def each(t):
        return t.to(OTHER) if last else t

    on_last = f"on rank {world.size - 1}"
    refused(ValueError, lambda: ring_attention(each(q), each(k), each(v)), prefix + "q: got ", on_last, "the same on all ranks")
    refused(ValueError, lambda: ring_attention(each(q), k, v), prefix, f"k: got dtype {DTYPE}", f"({on_last} of the group)")
    refused(ValueError, lambda: ring_attention(q, k[..., :8] if last else k, v), "k: got", "(on rank")
    refused(ValueError, lambda: ring_attention(q, k, v, softcap=-1.0), prefix + "softcap")
    refused(ValueError, lambda: ring_attention(q, k, v, is_causal=last), "options: got", "the same on all ranks")
    refused(ValueError, lambda: ring_attention(q, k, v, layout="zagzig"), "layout: got 'zagzig', expected 'zigzag' or 'contiguous'")
    refused(ValueError, lambda: ring_attention(q, k, v, layout="contiguous" if last else "zigzag"), "layout: got zigzag on rank")
    refused(ValueError, lambda: ring_attention(q[:, 1:] if last else q, k, v), "q: got shards of", "as shard_sequence makes them")
    refused(ValueError, lambda: ring_attention(q[:, :, :3], k, v), "nheads")
    refused(ValueError, lambda: ring_attention(q[0], k[0], v[0], cu_seqlens=[0, 5]), "cu_seqlens: got 5 tokens, expected the 37")
    refused(ValueError, lambda: ring_attention(q[0], k[0], v[0], cu_seqlens=[1, 37]), "cu_seqlens: got [1, 37]", "begin with 0")
    refused(ValueError, lambda: ring_attention(q[0], k[0], v[0], cu_seqlens=[0, 5 + last, 37]), "cu_seqlens: got 2 sequences of 37 tokens")
    for wrong in (torch.tensor([0.0, 37.0]), [0, 3.7, 37], "037", torch.tensor([[0, 37]])):
        words = "cu_seqlens: got ", "expected an int32 tensor (sequences + 1), or ints"
        refused(ValueError, lambda wrong=wrong: ring_attention(q[0], k[0], v[0], cu_seqlens=wrong), *words)
    refused(ValueError, lambda: ring_attention(q[0], k[0], v[0]), "q: got a tensor of rank 3, expected rank 4")
    refused(ValueError, lambda: ring_attention(q.detach().requires_grad_(last), k, v), "requires_grad: got False on rank")
    generator = torch.Generator(world.device).manual_seed(world.rank)
    refused(ValueError, lambda: ring_attention(q, k, v, dropout_p=0.1, generator=generator), "generator: got a state")
    refused(ValueError, lambda: (context_parallel_attention if last else ring_attention)(q, k, v), "call: got ")
    heads = world.size + 1
    q1, k1, v1, _ = (shard_sequence(t, None) for t in inputs(DTYPE, world.device, nheads=heads, nheads_k=1))
    refused(ValueError, lambda: ulysses_attention(q1, k1, v1), f"q: got {heads} heads", f"multiple of the {world.size} ranks")
    refused(ValueError, lambda: unshard_sequence(q[..., :3] if last else q), "tensor: got")
    # a group without this rank
    alone = dist.new_group([0])
    if world.rank:
        refused(ValueError, lambda: ring_attention(q, k, v, alone), "group: got", f"that rank {world.rank} is in")
    else:
        assert ring_attention(q, q[:, :, :2], q[:, :, :2], alone).shape == q.shape
    refused(ValueError, lambda: ring_attention(q, k, v, world.mesh(world.size, 1)), "group: got a mesh of 2 dimensions")
    ring_attention(q, k, v, is_causal=True)  # ranks are still in step


@case(2, gpu=True)
def late(world):
    """If rank 1 does not make a call, the others raise after the group's timeout and name rank 1."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    q, k, v, _ = (shard_sequence(t, None) for t in inputs(DTYPE, world.device))
    if world.rank == 0:
        words = "ring_attention: rank 1 of the group did not make this call", "timeout of 2 s"
        refused(RuntimeError, lambda: ring_attention(q, k, v, group), *words)
    dist.barrier()


@case(2, 3, gpu=True)
def dying(world):
    """If a rank's process ends between forward and backward, the others raise and name it. The last case, because it ends the group."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    q, k, v, _ = (shard_sequence(t, None) for t in inputs(DTYPE, world.device))
    out = ring_attention(q.requires_grad_(), k, v, group, is_causal=True)
    if world.rank == world.size - 1:
        world.finish({})
        os._exit(0)
    begin = time.monotonic()
    refused(RuntimeError, out.sum().backward, "ring_attention, backward: rank", f"{world.size - 1} of the group did not make this call")
    assert time.monotonic() - begin < 10
    world.finish({})
    os._exit(0)  # with a member gone, a group cannot be taken down in order


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    device = torch.device("cuda", rank) if NCCL else torch.device("cpu")
    if NCCL:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if NCCL else "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    world = World(rank, size, device, folder)
    failures = {}
    for name, (worlds, function) in CASES.items():
        if size not in worlds:
            continue
        try:
            function(world)
        except Exception:
            failures[name] = traceback.format_exc()
            break  # other ranks may wait in another call, so later cases would hang
    world.finish(failures)
    if not failures:
        dist.destroy_process_group()
        end_rank()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

"""`volta_fa.BlockMask` packs a mask for the kernels: from torch's BlockMask, a mask function (mask_mod) or bool blocks. Tests compare
`mask.dense()` with the dense bool mask of torch's create_mask. test_block_mask.py tests the operators with a packed mask.

A packed mask has tiles of 128 queries by 64 keys: absent, full, or partial with bits. Packing evaluates cells of 64 by 64; two cells are
a tile. A mask function runs on whole index tensors if it only compares, combines and indexes ("recorded"), else by vmap. Packed masks of
torch's BlockMasks are kept (`volta_fa.block_mask.kept`) and reused while the values that the function read are unchanged."""

import gc
import random
import weakref
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, noop_mask, or_masks
from torch.utils._python_dispatch import TorchDispatchMode

from reference import block_masks  # reads lists and bits in an implementation of its own
from volta_fa import BlockMask
from volta_fa.block_mask import elements, kept, packing
from volta_fa.block_mask.source import source_of

#: The document of each of 750 tokens, of two batch entries.
DOCUMENTS = torch.tensor([[0] * 300 + [1] * 50 + [2] * 400, [0] * 10 + [1] * 600 + [2] * 140])
#: Mask functions (mask_mod) by name: whether a query of a batch entry and head sees a key.
MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 100),
    "documents": lambda b, h, q, kv: DOCUMENTS[b, q] == DOCUMENTS[b, kv],
    "strided heads": lambda b, h, q, kv: (q * h + kv) % 3 == 0,
    "prefix": lambda b, h, q, kv: (kv < 130) | (q >= kv),
    "empty rows": lambda b, h, q, kv: (q > 300) & (q >= kv),
    "nothing": lambda b, h, q, kv: q < 0,
    "everything": noop_mask,
}
#: (seqlen_q, seqlen_k), and block sizes of torch's masks (queries, keys), which need not be those of tiles.
LENGTHS = [(700, 700), (129, 513), (64, 65), (1, 1)]
BLOCK_SIZES = [128, 64, (128, 256), 16, 48, 384]


def dense(mask_mod, seqlen_q, seqlen_k, batch=2, heads=3):
    """Returns torch's dense bool mask, (batch, heads, seqlen_q, seqlen_k)."""
    return create_mask(mask_mod, batch, heads, seqlen_q, seqlen_k, device="cpu")


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_from_mask_mod(name, lengths):
    mask = BlockMask.from_mask_mod(MASKS[name], 2, 3, *lengths, device="cpu")
    assert torch.equal(mask.dense(), dense(MASKS[name], *lengths)) and mask.shape == (2, 3, *lengths)


@pytest.mark.parametrize("name", MASKS)
def test_from_torch_with_all_block_sizes(name):
    for number, size in enumerate(BLOCK_SIZES):
        lengths = LENGTHS[number % len(LENGTHS)]
        expected = dense(MASKS[name], *lengths)
        mask = BlockMask.from_torch(create_block_mask(MASKS[name], 2, 3, *lengths, device="cpu", BLOCK_SIZE=size))
        assert torch.equal(mask.dense(), expected), (size, lengths)
        assert mask.is_causal() == (not bool(expected.triu(1).any()))


def shuffled_lists(blocks, dtype):
    """Returns torch's counts and indices of a bool tensor of blocks, in random order, with random numbers after the counts."""
    counts = blocks.sum(-1).to(dtype)
    indices = torch.randint(-5, 1000, blocks.shape, dtype=dtype)
    for at in torch.cartesian_prod(*map(torch.arange, blocks.shape[:-1])).view(-1, blocks.dim() - 1).tolist():
        listed = blocks[tuple(at)].nonzero().flatten()
        indices[tuple(at)][: len(listed)] = listed[torch.randperm(len(listed))]
    return counts, indices


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", BLOCK_SIZES, ids=str)
def test_lists_in_any_order_are_honored_under_any_mask_mod(size, dtype):
    """torch's lists of a row are unsorted, and may lack the full blocks. A mask function hides scores of partial blocks alone."""
    torch.manual_seed(0)
    rows, columns = size if isinstance(size, tuple) else (size, size)
    lengths = (3 * rows - 7, 4 * columns - 30)
    partial, full = torch.rand(2, 1, 3, 4) < 0.4, torch.rand(2, 1, 3, 4) < 0.3
    partial &= ~full
    for mask_mod in (None, lambda b, h, q, kv: (q + kv) % 5 != 0):

        def spread(blocks):
            return blocks.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[..., : lengths[0], : lengths[1]]

        for with_full in (True, False):
            lists = shuffled_lists(partial, dtype) + (shuffled_lists(full, dtype) if with_full else (None, None))
            torch_mask = TorchBlockMask.from_kv_blocks(
                *lists, BLOCK_SIZE=(rows, columns), mask_mod=mask_mod, seq_lengths=lengths, compute_q_blocks=False
            )
            expected = spread(partial) & dense(mask_mod or noop_mask, *lengths, heads=1)
            expected = expected | spread(full) if with_full else expected
            assert torch.equal(BlockMask.from_torch(torch_mask).dense(), expected)


@pytest.mark.parametrize("size", [128, (64, 192), 40], ids=str)
def test_from_blocks(size):
    torch.manual_seed(0)
    rows, columns = size if isinstance(size, tuple) else (size, size)
    blocks = torch.rand(2, 3, 5, 6) < 0.5
    lengths = (5 * rows - 3, 6 * columns - 20)
    expected = blocks.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[..., : lengths[0], : lengths[1]]
    assert torch.equal(BlockMask.from_blocks(blocks, size, lengths).dense(), expected)
    assert torch.equal(BlockMask.from_blocks(blocks[0, 0], size).dense()[0, 0, : lengths[0], : lengths[1]], expected[0, 0])


def assert_valid(lists, bits, columns):
    """Checks that blocks exist and ascend among the partial and among the full ones, and that tiles have some bits, but not all (int32 of
    -1). A list has the numbers of partial and of full blocks, the first partial block's tile in `bits`, a place in the launch order, then
    the blocks: numbers of 64 keys each. `columns`: keys of the mask."""
    for partial, full, first, _, *entries in lists.flatten(0, 2).tolist():
        for blocks in (entries[:partial], entries[partial : partial + full]):
            assert blocks == sorted(blocks) and all(0 <= block < -(-columns // 64) for block in blocks)
        tiles = bits[first : first + partial]
        assert tiles.any(-1).all() and (tiles != -1).any(-1).all()


@pytest.mark.parametrize("name", ["strided heads", "prefix"])
def test_layout_of_lists_and_bits(name):
    lengths = (190, 300)
    for mask in (
        BlockMask.from_mask_mod(MASKS[name], 1, 2, *lengths, device="cpu"),
        BlockMask.from_torch(create_block_mask(MASKS[name], 1, 2, *lengths, device="cpu")),
    ):
        expected = dense(MASKS[name], *lengths, 1, 2)
        options = mask.options()
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in options.values())
        for of_pass, seen in (("", expected), ("_t", expected.mT)):
            lists, bits = options[f"block_lists{of_pass}"], options[f"block_bits{of_pass}"]
            assert_valid(lists, bits, seen.shape[-1])
            assert torch.equal(block_masks.expand(lists, bits, *seen.shape), seen)
            order, work = lists[..., 3], lists[..., :2].sum(-1)
            assert torch.equal(order.sort(-1).values, torch.arange(order.shape[-1], dtype=torch.int32).expand_as(order))
            assert (work.gather(-1, order.long()).diff(dim=-1) <= 0).all()  # longest first


# Tensors that the mask functions below read: SHOWN has an element for each score.
SHOWN = torch.arange(2 * 3 * 190 * 300).view(2, 3, 190, 300) % 7 > 2
OFFSETS, HALF, FEW = torch.tensor([3, 70], dtype=torch.int32), torch.tensor(0.5, dtype=torch.float64), torch.tensor(100, dtype=torch.int8)
LARGE = torch.tensor([2**33, 3])


def caught(b, h, q, kv):
    try:
        return torch.stack((q > kv, h > 0)).any()
    except Exception:
        return q < kv


#: Mask functions: True for those that are recorded and run on whole tensors, False for those that vmap runs.
FUNCTIONS = {
    "all indices": (True, lambda b, h, q, kv: SHOWN[b, h, q, kv]),
    "a number as index": (True, lambda b, h, q, kv: SHOWN[0, h, q, 7] & SHOWN[b, 1, 3, kv]),
    "arithmetic": (True, lambda b, h, q, kv: (q - kv) // 3 % (h + 2) <= abs(b - 1) + q / 90),
    "torch's functions": (True, lambda b, h, q, kv: torch.logical_or(torch.where(h > 0, q, kv) > 50, torch.eq(q, kv))),
    "a captured number": (True, lambda b, h, q, kv: (q * HALF > kv) ^ (kv + FEW > 3 * q)),
    "of heads alone": (True, lambda b, h, q, kv: h > 0),
    "int32": (True, lambda b, h, q, kv: OFFSETS[b] + q > kv),
    "a number of a captured tensor": (True, lambda b, h, q, kv: OFFSETS[b] * LARGE[0] > q * LARGE[0]),
    "torch's and_masks": (True, and_masks(MASKS["window"], or_masks(MASKS["documents"], MASKS["prefix"]), noop_mask)),
    "a division of a number": (True, lambda b, h, q, kv: 900 / (q + 1) > kv),
    "one element": (True, lambda b, h, q, kv: SHOWN[1, 2, 3, 4]),
    "partial indices": (True, lambda b, h, q, kv: SHOWN[b, h][q][kv]),
    "an index of an index": (True, lambda b, h, q, kv: SHOWN[b, h, q][kv]),
    "numbers of numpy": (True, lambda b, h, q, kv: SHOWN[b, numpy.int64(1)][q, kv] & (q * numpy.float32(0.3) < kv + numpy.int32(7))),
    "an index too many": (False, lambda b, h, q, kv: SHOWN[b, h][q, kv][...] & (q > kv)),
    "a sum of a row": (False, lambda b, h, q, kv: SHOWN[b, h, q].sum() > kv),
    "a slice": (False, lambda b, h, q, kv: SHOWN[b, h, q, 5:][kv % 100]),
    "a reduction": (False, lambda b, h, q, kv: torch.stack((q > kv, h > 0, b > 0)).any()),
    "an in-place operation": (False, lambda b, h, q, kv: (q > kv).logical_or_(kv > 250)),
    "a captured row": (False, lambda b, h, q, kv: (OFFSETS + q > kv).all()),
    "a shape": (False, lambda b, h, q, kv: (q > kv) if q.dim() == 0 else (q < kv)),
    "a new tensor": (False, lambda b, h, q, kv: torch.ones_like(q, dtype=torch.bool) & (q > kv)),
    "an exception that it catches": (False, caught),
    "a captured tensor alone": (True, lambda b, h, q, kv: SHOWN.any()),
    "an argument by name": (False, lambda b, h, q, kv: torch.clamp(q, max=100) > kv),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mask_functions_of_any_kind(monkeypatch, name):
    """Functions that compare, combine and index run without vmap, and all give what vmap gives."""
    is_recorded, mask_mod = FUNCTIONS[name]
    mapped = []  # functions that vmap runs
    monkeypatch.setattr(packing, "CHUNK", 50)  # cells at a time, of 90
    monkeypatch.setattr(elements, "_mapped", lambda function, made=elements._mapped: mapped.append(function) or made(function))
    assert torch.equal(BlockMask.from_mask_mod(mask_mod, 2, 3, 190, 300, device="cpu").dense(), dense(mask_mod, 190, 300))
    assert bool(mapped) != is_recorded


@pytest.mark.parametrize(
    "error, words, mask_mod",
    [
        (RuntimeError, "random", lambda b, h, q, kv: torch.rand(1) > q / 190),
        (RuntimeError, "data-dependent", lambda b, h, q, kv: q >= kv if h == 0 else q < kv),
        (ValueError, r"BlockMask: mask_mod: got a result of shape \(2,\), expected one scalar", lambda b, h, q, kv: q > OFFSETS),
        (ValueError, "BlockMask: mask_mod: got a tuple, expected one scalar", lambda b, h, q, kv: (q > kv,)),
        (IndexError, "out of bounds", lambda b, h, q, kv: OFFSETS[q] > kv),
    ],
)
@pytest.mark.parametrize("lengths", [(190, 300), (1, 1)])
def test_wrong_mask_functions(error, words, mask_mod, lengths):
    if error is IndexError and lengths == (1, 1):
        pytest.skip("inside")
    with pytest.raises(error, match=words) as raised:
        BlockMask.from_mask_mod(mask_mod, 1, 1, *lengths, device="cpu")
    assert raised.value.__context__ is None  # not "during handling of another exception"


def test_a_mask_mod_gets_the_batch_entries_and_heads_of_the_problem():
    # torch counts lists modulo the mask's sizes, but calls the function with the problem's indices
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.int32)
    torch_mask = TorchBlockMask.from_kv_blocks(blocks.sum(-1).int(), torch.arange(2).expand(1, 1, 2, 2), mask_mod=MASKS["strided heads"])
    assert torch.equal(BlockMask.from_torch(torch_mask, 2, 3).dense(), dense(MASKS["strided heads"], 256, 256, 1))
    assert BlockMask.from_torch(create_block_mask(MASKS["causal"], None, None, 256, 256, device="cpu"), 2, 3).shape[:2] == (1, 1)


def test_masks_of_later_releases_have_more_fields():
    """Fields that later releases of torch add to a mask change nothing."""
    made = create_block_mask(MASKS["causal"], None, None, 300, 300, device="cpu")
    later = SimpleNamespace(**vars(made), dq_write_order=None, dq_kv_order=None)
    later.shape = made.shape
    assert torch.equal(BlockMask.from_torch(later).dense(), dense(MASKS["causal"], 300, 300, 1, 1))


def packed(torch_mask):
    """Returns the packed mask that volta_fa keeps for torch's mask; packs it if none is kept."""
    return kept.block_mask_of(source_of(torch_mask, batch=1, heads=1))


def test_the_packed_mask_is_kept_until_something_changes():
    """A change of a value that the mask function reads, or of torch's lists, packs anew. A kept mask does not keep torch's mask alive."""
    documents = torch.zeros(256, dtype=torch.int64)
    torch_mask = create_block_mask(lambda b, h, q, kv: documents[q] == documents[kv], None, None, 256, 256, device="cpu")
    # all blocks are full; as partial ones they depend on the function
    torch_mask.kv_num_blocks, torch_mask.full_kv_num_blocks = torch_mask.full_kv_num_blocks, torch_mask.kv_num_blocks
    torch_mask.kv_indices, torch_mask.full_kv_indices = torch_mask.full_kv_indices, torch_mask.kv_indices
    mask = packed(torch_mask)
    assert packed(torch_mask) is mask and mask.dense().all()
    documents[100:] = 1
    changed = packed(torch_mask)
    assert changed is not mask and not changed.dense().all()
    torch_mask.kv_num_blocks.data.zero_()
    assert not packed(torch_mask).dense().any()
    ended = weakref.ref(torch_mask)
    del torch_mask
    gc.collect()
    assert ended() is None


def test_bits_past_the_last_key_are_no_later_keys():
    """`is_causal` ignores the bits that a tile has past the last key."""
    tril = BlockMask.from_blocks(torch.ones(65, 65, dtype=torch.bool).tril(), 1)
    assert tril.is_causal() and not BlockMask.from_blocks(torch.ones(65, 66, dtype=torch.bool).tril(1), 1).is_causal()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: BlockMask.from_mask_mod(MASKS["causal"], None, None, -5, 64, "cpu"), "Q_LEN: got -5, expected an integer of at least 0"),
        (lambda: BlockMask.from_mask_mod(MASKS["causal"], None, None, 64, 6.5, "cpu"), "KV_LEN: got 6.5"),
        (lambda: BlockMask.from_mask_mod(MASKS["causal"], None, None, True, 64, "cpu"), "Q_LEN: got True"),
        (lambda: BlockMask.from_mask_mod(MASKS["causal"], 0, None, 64, 64, "cpu"), "B: got 0, expected an integer of at least 1"),
        (lambda: BlockMask.from_mask_mod(MASKS["causal"], None, 2.0, 64, 64, "cpu"), "H: got 2.0"),
        (lambda: BlockMask.from_mask_mod("causal", None, None, 64, 64, "cpu"), "mask_mod: got a str, expected a function"),
        (lambda: BlockMask.from_torch(None), "block_mask: got a NoneType, expected a BlockMask of torch"),
        (lambda: BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool), (8,)), r"block_size: got \(8,\)"),
        (lambda: BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool), 1.5), "block_size: got 1.5"),
        (lambda: BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool), (8, 0)), r"block_size: got \(8, 0\)"),
        (lambda: BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.int64)), "blocks: got torch.int64"),
        (lambda: BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool), 128, (100, 256)), "seq_lengths: got"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


#: Parts of names of operations that launch no kernel on a GPU.
VIEWS = ("view.", "slice", "transpose", "unsqueeze", "select", "expand", "detach", "alias", "unbind", "permute", ".empty.")


class Operations(TorchDispatchMode):
    """Records the names of operations that would launch a kernel, the largest storage in bytes, and the number of synchronizations."""

    def __init__(self):
        super().__init__()
        self.names, self.largest, self.waits = [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = str(func)
        results = result if isinstance(result, (tuple, list)) else (result,)
        has_memory = not all(isinstance(r, torch.Tensor) and r.is_meta for r in results)
        if has_memory and not any(part in name for part in VIEWS):
            self.names.append(name)
        self.waits += any(part in name for part in ("_local_scalar_dense", "aten.nonzero.", "masked_select", "is_nonzero"))
        self.largest = max(self.largest, *(r.untyped_storage().nbytes() for r in results if isinstance(r, torch.Tensor)), 0)
        return result


@pytest.mark.parametrize("name", ["causal", "documents", "prefix"])
def test_packing_takes_few_launches_and_waits_once(name):
    documents = torch.arange(2048) // 300
    mask_mod = (lambda b, h, q, kv: documents[q] == documents[kv]) if name == "documents" else MASKS[name]
    made = create_block_mask(mask_mod, None, None, 2048, 2048, device="cpu")
    BlockMask.from_torch(made)  # asks torch for types, once
    with Operations() as operations:
        BlockMask.from_torch(made)
    # The one wait is a transfer of a tensor to the host, which is no operation on CPU tensors.
    assert operations.waits == 0
    assert len(operations.names) < 61  # each a launch on a GPU: a limit near today's number


def test_finding_a_kept_mask_takes_one_copy_and_one_comparison():
    documents = torch.arange(2048) // 300
    made = create_block_mask(lambda b, h, q, kv: documents[q] == documents[kv], None, None, 2048, 2048, device="cpu")
    mask = packed(made)
    with Operations() as operations:
        assert packed(made) is mask
    assert operations.names == ["aten.cat.default", "aten.equal.default"]


def test_the_default_dtype_does_not_matter():
    """Counts of a cell's visible elements must not be fp16, where 4095 rounds to 4096: a cell that lacks one would look full."""
    torch.set_default_dtype(torch.float16)
    try:
        mask = BlockMask.from_mask_mod(lambda b, h, q, kv: (q != 5) | (kv != 7), 1, 1, 64, 64, device="cpu").dense()
    finally:
        torch.set_default_dtype(torch.float32)
    assert (~mask).nonzero().tolist() == [[0, 0, 5, 7]]


def test_a_mask_function_is_evaluated_in_parts(monkeypatch):
    """Packing evaluates the function on at most CHUNK cells at once, so that it never has the dense mask in memory."""
    monkeypatch.setattr(packing, "CHUNK", 32)
    for compact_above in (10, 10**6):
        monkeypatch.setattr(packing, "COMPACT_ABOVE", compact_above)
        with Operations() as operations:
            mask = BlockMask.from_mask_mod(MASKS["prefix"], 1, 1, 1100, 1100, device="cpu")
        assert operations.largest < 1100 * 1100
        assert torch.equal(mask.dense(), dense(MASKS["prefix"], 1100, 1100, 1, 1))
        blocks = lambda b, h, q, kv: q // 64 >= kv // 64  # noqa: E731  no cell is partial
        assert torch.equal(BlockMask.from_mask_mod(blocks, 1, 1, 1100, 1100, device="cpu").dense(), dense(blocks, 1100, 1100, 1, 1))


def test_memory_and_sparsity():
    random.seed(0)
    mask = BlockMask.from_mask_mod(MASKS["causal"], None, None, 1024, 1024, device="cpu")
    # 16 bit tiles of 1 KiB in each direction; 8 lists of a header of 4 numbers and up to 16 blocks. 72 of 8 * 16 blocks are there
    assert mask.nbytes == 2 * (16 * 1024 + 8 * 4 * (4 + 16)) and mask.sparsity() == 100 * (1 - 72 / 128)
    assert mask.to("cpu").options().keys() == {"block_lists", "block_bits", "block_lists_t", "block_bits_t"}

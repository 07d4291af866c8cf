//! Every limit of what the operators take, once. Validation (src/problem/) rejects what is beyond, the planner and launches rely on them,
//! and Python reads some from `_info()` ([`published`]). tests/test_validation.py tests them.

use serde_json::{json, Value};
use std::ops::RangeInclusive;

/// Largest headdim of q, k and v. A device may have fewer kernels above [`COMMON_HEADDIM`]: see `Kernels::max_headdim`.
pub const MAX_HEADDIM: i64 = 512;
/// Largest headdim for which a family (the kernels of one architecture) has all kernels of `fwd` and `bwd`; above, `bwd` has only those
/// that keep scores in memory.
pub const COMMON_HEADDIM: i64 = 256;
/// Largest headdim of the kernels of `fwd_fast` (int8 scores). Above, the kernels of `fwd` compute the call.
pub const MAX_FAST_HEADDIM: i64 = 256;
/// Columns that kernels read together: 16 bytes of fp16. Other headdims are padded with zeros.
pub const HEADDIM_MULTIPLE: i64 = 8;
/// Columns of a latent of multi-head latent attention (its values), and columns after it for positions. Published models have these.
pub const LATENT_HEADDIMS: [i64; 2] = [512, 64];
/// Longest sequence. Rows and keys are int32 in the kernels, and these must not overflow: sums of up to three sequence lengths and a tile
/// in the mask (csrc/mask.cuh); the byte offset of a key in an fp32 bias, four times its number (`Bias::load4` in csrc/score_mod.cuh).
pub const MAX_SEQLEN: i64 = (1 << 29) - 1;
/// Largest `max_seqlen_q` and `max_seqlen_k`: any length that int32 cu_seqlens can express.
pub const MAX_GIVEN_SEQLEN: i64 = i32::MAX as i64;
/// Most sequences of a call. Each has up to 32 rows of scratch memory beyond its own, and kernels count these rows in int32.
pub const MAX_SEQUENCES: i64 = 1 << 25;
/// Most query heads: grids have heads on an axis of at most 65535 blocks.
pub const MAX_HEADS: i64 = MAX_GRID_YZ;
/// Largest stride between rows, in elements: kernels step by 32-bit multiples (`TileStream` in csrc/tile.cuh).
pub const MAX_ROW_STRIDE: i64 = (1 << 32) - 1;
/// Largest headdim of the merge kernel, which counts the chunks of a block's rows in int32.
pub const MAX_MERGED_HEADDIM: i64 = 1 << 20;
/// Softcaps other than 0 (off). Kernels compute a capped score as cap - 2 * cap / (exp(2x) + 1) with x = score / cap
/// (csrc/score_function.cuh), with an error of about cap * 2^-23. At 1e4 the error of scores is 4e-4 (RMS, simulated), that of a
/// probability in fp16 5e-4. Under a cap below 1e-4, all scores are equal within that.
pub const SOFTCAPS: RangeInclusive<f64> = 1e-4..=1e4;
/// Page sizes are multiples of this: kernels load 16 rows together, and vLLM's page sizes are multiples of it.
pub const PAGE_SIZE_MULTIPLE: i64 = 16;
/// Most rows (queries times query heads per KV head) that decode kernels take. Sequences with more run on forward tiles.
pub const MAX_DECODE_ROWS: i64 = 64;
/// Most queries of a sequence beside `tree_mask`: a query has a bit for each of them.
pub const MAX_DRAFT_TOKENS: i64 = 64;
/// Most heads of the indexer: a tile has 32 rows or 64 for each query. DeepSeek V3.2 has 64 heads.
pub const MAX_INDEXER_HEADS: i64 = 64;
/// Values of `kv_block`: tokens of the blocks that `kv_indices` selects for each query.
pub const KV_BLOCKS: [i64; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Largest y and z extents of a CUDA grid.
pub const MAX_GRID_YZ: i64 = 65535;
/// Most splits of a forward launch with a stream-K grid, which divides the keys of some row tiles among blocks. A split is 8 bytes of the
/// kernel's parameters, which have at most 4096 (`StreamKParams`).
pub const MAX_STREAM_K_SPLITS: usize = 440;
/// The same of a head in a backward launch (`BwdSplits`), whose other parameters take more.
pub const MAX_BACKWARD_SPLITS: usize = 384;
/// Parts into which stream-K splits divide the steps of a row tile over a KV cache, whose lengths the host does not know (kPagedParts in
/// csrc/forward/tile_split.cuh). Both ends of a split are 16-bit numbers.
pub const PAGED_PARTS: u32 = 1 << 15;

/// Returns the limits of the operators' arguments, by the names that `_info()` has for them.
pub fn published() -> Value {
    json!({
        "max_headdim": MAX_HEADDIM,
        "headdim_multiple": HEADDIM_MULTIPLE,
        "latent_headdims": LATENT_HEADDIMS,
        "page_size_multiple": PAGE_SIZE_MULTIPLE,
        "max_decode_rows": MAX_DECODE_ROWS,
        "max_draft_tokens": MAX_DRAFT_TOKENS,
        "max_seqlen": MAX_SEQLEN,
        "max_sequences": MAX_SEQUENCES,
        "max_heads": MAX_HEADS,
        "max_row_stride": MAX_ROW_STRIDE,
        "max_merged_headdim": MAX_MERGED_HEADDIM,
        "softcap": [SOFTCAPS.start(), SOFTCAPS.end()],
    })
}

//! Tests of plans for calls with a KV cache: decode (few query rows per sequence), prefill, appends, dequantization, latents (the cache of
//! multi-head latent attention, MLA), sparse MLA (a query reads some chosen latents), and the indexer (DeepSeek's scores that choose them).
//!
//! A decode kernel's row tile has the query rows of a KV head: seqlen_q times the heads per KV head (`group`). Its grid does not depend on
//! lengths: as many blocks as the GPU holds, which split the tokens of all sequences. The feature `tree`: queries are a tree of draft
//! tokens. `batch_invariant`: a row's bits do not depend on the batch. attention(seqlen_q, seqlen_k, headdim, headdim_v) and other helpers
//! are in main.rs.

use super::*;
use volta_fa::kernels::{CacheFormat, FORMATS};
use volta_fa::limits::MAX_DECODE_ROWS;
use volta_fa::plan::DecodePlan;
use volta_fa::problem::{Cache, CacheLayout, Indexer};

/// Three entries of 800 tokens.
const CACHE: Cache = Cache { layout: CacheLayout::Entries, entries: 3, rows: 800, format: CacheFormat::Unquantized };

/// Returns a causal problem of three sequences with up to 800 tokens, and two KV heads of `group` query heads each.
fn cached(headdim: i64, group: i64, seqlen_q: i64) -> Attention {
    Attention {
        batch: 3,
        nheads: 2 * group,
        softmax_scale: 1.0,
        window: Window::CAUSAL,
        keys: Keys::Cache(CACHE),
        ..attention(seqlen_q, 800, headdim, headdim)
    }
}

/// Returns the same for multi-head latent attention: all heads read one latent of 576 columns, whose first 512 are the values.
fn latents(heads: i64, seqlen_q: i64) -> Attention {
    Attention { nheads: heads, nheads_k: 1, headdim_v: 512, keys: Keys::Latents(CACHE), ..cached(576, 1, seqlen_q) }
}

/// Returns the problem with a cache of another format.
fn with_format(a: Attention, format: CacheFormat) -> Attention {
    let cache = Cache { format, ..CACHE };
    Attention { keys: if a.has_latents() { Keys::Latents(cache) } else { Keys::Cache(cache) }, ..a }
}

/// Returns the problem with fp16 and with bf16 queries over an unquantized cache, and over a cache of each quantized format.
fn in_all_types(a: Attention) -> impl Iterator<Item = Attention> {
    CacheFormat::quantized().map(move |format| with_format(a, format)).chain([a, Attention { dtype: DType::BFloat16, ..a }])
}

/// Plans decoding. `has_long`: some sequences have too many rows for decode, and prefill computes them.
fn plan(a: &Attention, has_long: bool, d: &DeviceLimits) -> DecodePlan {
    plan::decode(a, has_long, d).unwrap()
}

#[test]
fn every_variant_of_sparse_latents_is_chosen() {
    let is_sparse = |v: &&kernels::Variant| matches!(v.pass, Pass::SparseSelect | Pass::SparseMla);
    let mut unused: Vec<_> = kernels::variants().filter(is_sparse).map(|v| v.name).collect();
    for format in [CacheFormat::E4m3, CacheFormat::Unquantized] {
        for (headdim, heads) in [(576, 8), (576, 16), (576, 17), (576, 128), (512, 16), (512, 32), (512, 64)] {
            for dtype in [DType::Half, DType::BFloat16] {
                let cache = Cache { layout: CacheLayout::Entries, entries: 70, rows: 2048, format };
                let a = Attention { batch: 70, headdim, dtype, keys: Keys::Latents(cache), ..latents(heads, 1) };
                let p = plan::sparse_mla(&a, &V100).unwrap();
                let v = p.kernel.variant;
                assert_eq!((i64::from(v.headdim), v.headdim_v, v.cache, v.is_bf16), (headdim, 512, format, dtype == DType::BFloat16));
                assert_eq!(i64::from(v.block_rows), [16, 32, 64].into_iter().find(|&rows| rows >= heads).unwrap_or(64));
                let select = plan::sparse_select(&a, 70, &V100).unwrap();
                // 70 queries: a block for each selects its tokens; others cast bf16 queries to fp16, with a warp a head and eight a block
                let of_heads = if dtype == DType::BFloat16 { (heads as u32).div_ceil(8) } else { 0 };
                assert_eq!(select.blocks, [70, 1 + of_heads]);
                unused.retain(|name| ![v.name, select.variant.name].contains(name));
            }
        }
    }
    assert!(unused.is_empty(), "{unused:?}");
}

/// Rows of chosen latents have no padding, so no wider kernel replaces those that failed.
#[test]
fn sparse_latents_have_their_own_headdim() {
    let own = |v: &&kernels::Variant| v.pass == Pass::SparseMla && v.headdim == 512 && v.family.name == "volta";
    let failed: Vec<_> = kernels::variants().filter(own).map(|v| v.name).collect();
    let cache = Cache { layout: CacheLayout::Entries, entries: 70, rows: 2048, format: CacheFormat::Unquantized };
    let a = Attention { headdim: 512, keys: Keys::Latents(cache), ..latents(16, 1) };
    let error = plan::sparse_mla(&a, &tuned(&failed, &[])).unwrap_err().to_string();
    assert!(error.contains("excluded because they failed"), "{error}");
}

/// Calls of at most 256 rows over at most 16,400 latents take tiles of 16 rows on a V100, unless a row's bits must not depend on the batch.
#[test]
fn few_rows_over_few_latents_take_small_tiles() {
    for (batch, seqlen_k, heads, rows) in
        [(1, 16_400, 128, 16), (2, 8_200, 128, 16), (3, 100, 128, 64), (1, 16_401, 128, 64), (1, 16_401, 32, 32), (8, 2_050, 32, 16)]
    {
        let dense = Attention { batch, seqlen_k, ..latents(heads, 1) };
        assert_eq!(plan(&dense, false, &V100).kernel.variant.block_rows, rows, "{batch} {seqlen_k} {heads}");
        assert_eq!(plan::sparse_mla(&dense, &V100).unwrap().kernel.variant.block_rows, rows);
        let features = RequestedFeatures { batch_invariant: true, ..Default::default() };
        let of_heads = heads.min(64) as u32; // of the largest tile
        assert_eq!(plan(&Attention { features, ..dense }, false, &V100).kernel.variant.block_rows, of_heads);
    }
}

#[test]
fn every_variant_of_the_indexer_is_chosen() {
    let mut unused: Vec<_> = kernels::variants().filter(|v| v.pass == Pass::Indexer).map(|v| v.name).collect();
    for d in [V100, T4] {
        // a query has 32 rows up to 32 heads, else 64; from 192 rows of a sequence on, the tile of 256 rows is faster
        for (seqlen_q, nheads, rows) in
            [(1, 64, 64), (2, 64, 64), (3, 64, 256), (4096, 64, 256), (5, 32, 64), (6, 32, 256), (6, 1, 256), (6, 33, 256)]
        {
            let x = Indexer { batch: 3, seqlen_q, nheads, columns: 1000, keys: 900, page_size: Some(64), is_causal: true };
            let p = plan::indexer(&x, &d).unwrap();
            assert_eq!((p.variant.block_rows, p.blocks), (rows, [d.sms * p.variant.blocks_per_sm, 1]), "{x:?}");
            assert_eq!(p.variant.family.sm, d.sm());
            unused.retain(|name| *name != p.variant.name);
        }
    }
    assert!(unused.is_empty(), "{unused:?}");
}

#[test]
fn every_variant_is_chosen_for_some_problem() {
    let others = [Pass::SparseSelect, Pass::SparseMla, Pass::Indexer];
    // CACHED (main.rs): the passes of calls with a KV cache
    let is_tested = |v: &&Variant| CACHED.contains(&v.pass) && !others.contains(&v.pass);
    let mut unused: Vec<_> = kernels::variants().filter(is_tested).map(|v| v.name).collect();
    for d in [V100, T4] {
        unused.retain(|name| *name != plan::dequantize(800, 2, &d).unwrap().variant.name); // 800 tokens of 2 KV heads
        for format in FORMATS.map(|row| row.format) {
            unused.retain(|name| *name != plan::append(5, 2, format, &d).unwrap().variant.name); // 5 tokens
            for (heads, batch_invariant) in [1, 16, 32, 64, 128].into_iter().flat_map(|heads| [(heads, false), (heads, true)]) {
                let features = RequestedFeatures { batch_invariant, ..Default::default() };
                // over few latents, few rows take the smallest tile
                let a = Attention { features, seqlen_k: 8000, ..with_format(latents(heads, 1), format) };
                let planned = plan::decode(&a, false, &d);
                assert_eq!(planned.is_ok(), format.info().of_latents, "{}", format.name());
                if let Ok(p) = planned {
                    unused.retain(|name| *name != p.kernel.variant.name);
                }
            }
        }
        for headdim in (8..=512).step_by(8) {
            let plain = RequestedFeatures::default();
            let requests = [plain, RequestedFeatures { batch_invariant: true, ..plain }, RequestedFeatures { tree: true, ..plain }];
            for (group, features) in [1, 8, 9, 16, 32, 64].into_iter().flat_map(|group| requests.map(|features| (group, features))) {
                for a in in_all_types(Attention { features, ..cached(headdim, group, 1) }) {
                    let is_wide_on_t4 = headdim > 256 && d.capability == T4.capability;
                    if features.batch_invariant && is_wide_on_t4 && a.cache_format() != CacheFormat::Unquantized {
                        assert!(plan::decode(&a, false, &d).is_err(), "the tile of 32 rows takes more than 64 KB");
                        continue;
                    }
                    unused.retain(|name| *name != plan(&a, false, &d).kernel.variant.name);
                }
            }
            for score_function in [None, Some(ScoreFunction::Softcap(30.0))] {
                // more heads of a group and longer prompts make larger grids, which get larger blocks
                for (group, seqlen_q) in [1, 2, 3, 32].map(|group| (group, 300)).into_iter().chain([(1, 100), (32, 384)]) {
                    let features = RequestedFeatures { score_function, ..Default::default() };
                    let a = Attention { features, ..cached(headdim, group, seqlen_q) };
                    // a short window; one sequence with many tokens before the chunk
                    let local = Attention { window: Window { left: Some(127), right: Some(0) }, ..a };
                    let one = Attention { batch: 1, nheads: 32, seqlen_q: 512, seqlen_k: 16384, ..a };
                    for a in [a, local, one] {
                        unused.retain(|name| *name != plan::prefill(&a, &d).unwrap().variant.name);
                    }
                }
            }
        }
    }
    assert!(unused.is_empty(), "compiled but never planned: {unused:?}");
}

/// Batch-invariant tiles of a headdim have the same bits if as many groups of warps (here not heads) divide a split's tokens.
#[test]
fn batch_invariant_tiles_divide_tokens_alike() {
    // A warp computes `step` of the tile's `block_rows`, so block_rows / step warps have the same tokens: one group. (Warps that share
    // columns add a factor that the headdim decides.)
    let groups = |v: &kernels::Variant| v.threads / 32 * v.step / v.block_rows;
    let invariant = || kernels::variants().filter(|v| v.pass == Pass::Decode && v.is_batch_invariant);
    for v in invariant() {
        let key = |v: &kernels::Variant| (v.family.name, v.headdim, v.is_bf16, v.cache);
        for other in invariant().filter(|other| key(other) == key(v)) {
            assert_eq!(groups(v), groups(other), "{} {}", v.name, other.name);
        }
    }
}

/// The dequantize kernel zeroes tokens before the first visible one up to the largest step of forward kernels. Its grid covers all tokens.
#[test]
fn dequantize_grid_covers_padding_of_key_steps() {
    let longest = kernels::variants().filter(|v| v.pass == Pass::Forward).map(|v| v.step).max();
    for v in kernels::variants().filter(|v| v.pass == Pass::Dequantize) {
        assert_eq!(Some(v.step), longest, "{}", v.name);
    }
    let planned = plan::dequantize(801, 2, &V100).unwrap(); // 801 tokens of 2 KV heads
    assert_eq!(planned.blocks, [801_u32.div_ceil(planned.variant.block_rows), 2]);
}

/// Decode kernels read one cache format. A family without kernels for a format leaves the call to the next family.
#[test]
fn plans_kernels_for_each_quantized_format() {
    for format in CacheFormat::quantized() {
        for d in [V100, T4] {
            // a tile of 32 rows is the largest, which 40 rows take twice
            for (group, rows) in [(8, 8), (9, 16), (17, 32), (40, 32)] {
                let v = plan::decode(&with_format(cached(128, group, 1), format), false, &d).unwrap().kernel.variant;
                assert_eq!((v.cache, v.block_rows, v.headdim), (format, rows, 128), "{}", v.name);
            }
        }
        let turing = kernels::COMPILED.families().find(|f| f.name == "turing");
        let none = DeviceLimits { only: turing, ..T4 }; // a T4 that may run no other family
        let e = plan::decode(&with_format(cached(128, 8, 1), format), false, &none).unwrap_err();
        assert!(e.message.contains(format.name()), "{e}");
    }
}

/// A chunk of 512 queries gets smaller blocks than a long prompt, whose blocks would leave SMs idle.
#[test]
fn plans_smaller_blocks_for_prefill_chunks() {
    for (headdim, rows) in [(64, 64), (128, 128), (256, 128)] {
        let chunk = Attention { batch: 1, nheads: 32, seqlen_k: 16384, ..cached(headdim, 16, 512) };
        let planned = plan::prefill(&chunk, &H200).unwrap();
        // under a causal mask heads are the first axis
        assert_eq!((planned.variant.block_rows, planned.blocks), (rows, [32, 512 / rows]), "{}", planned.variant.name);
        let prompt = Attention { seqlen_q: 16384, ..chunk };
        // headdim 256 has one size
        let is_larger = |block_rows: u32| block_rows > rows || headdim == 256 && block_rows == rows;
        assert!(is_larger(plan::prefill(&prompt, &H200).unwrap().variant.block_rows));
    }
}

#[test]
fn plans_smallest_row_tile_that_fits() {
    // expected: rows of the smallest tile that fits group * seqlen_q, else of the largest
    for (headdim, group, seqlen_q, rows) in
        [(64, 1, 1, 8), (64, 8, 1, 8), (64, 9, 1, 32), (128, 6, 3, 32), (128, 8, 8, 64), (128, 40, 8, 64), (256, 8, 8, 64), (8, 1, 1, 8)]
    {
        let v = plan(&cached(headdim, group, seqlen_q), false, &V100).kernel.variant;
        assert_eq!((v.block_rows, v.family.name), (rows, "volta"), "{headdim} {group} {seqlen_q}: {}", v.name);
        assert!(i64::from(v.headdim) >= headdim);
    }
    assert_eq!(plan(&cached(128, 8, 8), false, &T4).kernel.variant.name, "turing_decode_128x64");
}

#[test]
fn leaves_sequences_of_many_rows_to_prefill() {
    let a = cached(128, 8, 100);
    let mixed = plan(&a, true, &V100);
    assert_eq!((mixed.kernel.variant.block_rows, mixed.max_rows), (32, MAX_DECODE_ROWS));
    assert_eq!(plan(&a, false, &V100).max_rows, i64::MAX);
}

#[test]
fn decode_grid_fills_the_gpu() {
    for d in [V100, T4] {
        let mut long = cached(64, 4, 1);
        let of_short = plan(&long, false, &d);
        long.seqlen_k = 1 << 20;
        let p = plan(&long, false, &d);
        assert_eq!(p, of_short, "lengths do not matter");
        let blocks = d.sms * p.kernel.variant.blocks_per_sm;
        assert_eq!(p.kernel.blocks, [blocks, 1]);
        // two partial results per block (first and last row tile); semaphores are planned for a tree of the smallest radix, 4
        let levels = p.semaphores / (2 * i64::from(blocks));
        assert!(4_i64.pow(levels as u32) >= i64::from(blocks) && 4_i64.pow(levels as u32 - 1) < i64::from(blocks), "{levels}");
        assert!(p.partials >= 2 * i64::from(blocks) * 8 * 64, "fp32 numbers: a result has 8 rows of 64 columns, and row states");
    }
}

#[test]
fn plans_mla_kernels_only_for_latents() {
    for d in [V100, T4] {
        for (heads, seqlen_q) in [(1, 1), (16, 1), (128, 8)] {
            let p = plan(&latents(heads, seqlen_q), false, &d);
            let v = p.kernel.variant;
            assert_eq!((v.pass, v.headdim, v.headdim_v, p.max_rows), (Pass::DecodeMla, 576, 512, i64::MAX), "{}", v.name);
        }
        // no other problem gets them, because they read keys as values
        for headdim in [64, 256] {
            assert_eq!(plan(&cached(headdim, 8, 1), false, &d).kernel.variant.pass, Pass::Decode);
        }
    }
}

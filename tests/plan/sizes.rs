//! Tests of the sizes of blocks (`sized` in src/plan/choose.rs): where the planner takes smaller ones than the cheapest kernel's.
//!
//! attention(seqlen_q, seqlen_k, headdim, headdim_v) of main.rs is a problem without mask; without_backward_stream_k() is a V100
//! whose backward grids are never stream-K. A plan's `Reason`: Cheapest is the usual kernel. Smaller blocks are taken as all are resident
//! (Resident), the longest decides (ShorterLongest), a window or causal mask hides many keys (ShortWindow, ShortDiagonal), an SM gets fewer
//! rows (FewerRows), or there are no more of them (NoMoreBlocks).
//!
//! A V100 has 80 SMs. Numbers below are resident blocks, those that it holds at once, by kernel and rows of a block:
//!
//! | | headdim 64 | headdim 128 |
//! |---|---|---|
//! | forward: large, 128 queries | 160 | 160 |
//! | forward: medium, 64 queries | 320 | none |
//! | forward: heads, 16 queries of 4 heads | 320 | none |
//! | forward: small, 64 queries by twice as many warps as medium | 160 | 80 |
//! | backward: large, 128 keys | 160 | 80 |
//! | backward: small, 64 keys | 160 | 80 |

use super::*;

/// Under a causal mask the longest block of a resident grid decides, and small blocks with more warps per row are shorter.
#[test]
fn plans_small_blocks_for_resident_causal_grids() {
    let of = |nheads, seqlen_k, headdim, window| {
        let a = Attention { batch: 1, nheads, nheads_k: nheads, window, ..attention(512, seqlen_k, headdim, headdim) };
        let plan = plan::forward(&a, &V100).unwrap();
        (plan.variant.block_rows, plan.reason)
    };
    let rows = |nheads, headdim, right| of(nheads, 512, headdim, Window { left: None, right });
    // 40 heads of four large blocks are resident; one head more exceeds them, and medium blocks skip keys
    for headdim in [64, 128] {
        assert_eq!(rows(40, headdim, None), (128, Reason::Cheapest));
        assert_eq!(rows(40, headdim, Some(0)), (64, Reason::ShorterLongest));
    }
    assert_eq!(rows(41, 64, Some(0)), (64, Reason::ShortDiagonal));
    // all blocks take about as long
    for (seqlen_k, left, right) in [(16384, None, 0), (1025, None, 0), (512, None, 200), (512, Some(400), 0)] {
        assert_eq!(of(40, seqlen_k, 64, Window { left, right: Some(right) }), (128, Reason::Cheapest));
    }
    assert_eq!(of(40, 1024, 64, Window { left: Some(1024), right: Some(0) }), (64, Reason::ShorterLongest));
}

/// Under a short window small blocks skip many of the keys that a large block's rows see together. They pay where as many are resident.
#[test]
fn plans_small_blocks_for_short_windows() {
    // of the forward and the main backward kernel: rows of a block, and whether the window is the reason
    let of = |d: DeviceLimits, headdim, left, right, sinks| {
        let window = Window { left: Some(left), right };
        let a = Attention { batch: 1, nheads: 64, nheads_k: 8, window, ..attention(4096, 4096, headdim, headdim) };
        // two heads on a KV head are too few for blocks of four, which have sinks
        let with_sinks = Attention { nheads_k: if sinks { 32 } else { 8 }, features: RequestedFeatures { sinks, ..a.features }, ..a };
        let kernels = [plan::forward(&with_sinks, &d).unwrap(), plan::backward(&a, DEFAULT, &d).unwrap().main];
        kernels.map(|kernel| (kernel.variant.block_rows, kernel.reason == Reason::ShortWindow))
    };
    let (small, large) = ((64, true), (128, false));
    for sinks in [false, true] {
        let on_v100 = |headdim, left, right| of(V100, headdim, left, right, sinks);
        assert_eq!(on_v100(64, 128, Some(0)), [small, small], "the rows of a small block see 193 keys, those of a large one 257");
        assert_eq!(on_v100(64, 64, Some(64)), [small, small], "as many");
        assert_eq!(on_v100(64, 256, Some(0)), [small, large], "321 of 385 keys: pays with the four medium blocks an SM of the forward");
        assert_eq!(on_v100(64, 512, Some(0)), [large, large], "577 of 641 keys");
        assert_eq!(on_v100(64, 128, None), [large, large], "keys after a query are not hidden");
        assert_eq!(on_v100(128, 128, Some(0)), [large, small], "forward: one small block an SM, in place of two large ones");
    }
    assert_eq!(of(T4, 128, 128, Some(0), false)[0], small, "Turing's large blocks of headdim 128 have 256 rows");
}

/// With sinks, and over a KV cache, blocks of four heads have fewer rows of each, which see fewer keys together.
#[test]
fn plans_blocks_of_heads_for_short_windows() {
    let of = |d, (nheads, nheads_k), left| {
        let window = Window { left: Some(left), right: Some(0) };
        let features = RequestedFeatures { sinks: true, ..Default::default() };
        let a = Attention { batch: 1, nheads, nheads_k, window, features, ..attention(4096, 4096, 64, 64) };
        let plan = plan::forward(&a, &d).unwrap();
        (plan.variant.name, plan.blocks, plan.reason == Reason::ShortWindow)
    };
    // row tiles, then groups of heads
    assert_eq!(of(V100, (64, 8), 128), ("volta_fwd_varlen_64x64_heads", [256, 16], true));
    assert_eq!(of(T4, (64, 8), 128), ("turing_fwd_varlen_64x64_heads", [128, 16], true));
    assert_eq!(of(V100, (60, 5), 128).0, "volta_fwd_varlen_64x64_heads", "12 heads on a KV head");
    assert_eq!(of(V100, (60, 10), 128).0, "volta_fwd_varlen_64x64_medium", "6, which 4 does not divide");
    assert_eq!(of(V100, (64, 8), 512).0, "volta_fwd_varlen_64x64_heads", "529 of 641 keys");
    assert_eq!(of(V100, (64, 8), 1000).0, "volta_fwd_varlen_64x64", "1,017 of 1,129");
    assert_eq!(of(T4, (64, 8), 600).0, "turing_fwd_varlen_64x64_heads", "633 of 793");
    assert_eq!(of(T4, (64, 8), 1000).0, "turing_fwd_varlen_64x64");
}

/// Medium blocks (V100, headdim 64) pay where they skip rows, or keys outside a window or mask. Small ones pay where all are resident.
#[test]
fn plans_medium_blocks_that_skip_rows_or_keys() {
    let of = |nheads, seqlen, headdim, left, right| {
        let window = Window { left, right };
        let a = Attention { batch: 1, nheads, nheads_k: nheads, window, ..attention(seqlen, seqlen, headdim, headdim) };
        let kernel = plan::forward(&a, &V100).unwrap();
        (kernel.variant.name, kernel.reason)
    };
    let (large, medium, small) = ("volta_fwd_64x64", "volta_fwd_64x64_medium", "volta_fwd_64x64_small");
    assert_eq!(of(512, 257, 64, None, None), (medium, Reason::FewerRows), "257 queries (ViT-L): 320 rows in place of 384");
    assert_eq!(of(8, 257, 64, None, None), (small, Reason::Resident));
    assert_eq!(of(512, 64, 64, None, None), (medium, Reason::NoMoreBlocks));
    assert_eq!(of(512, 256, 64, None, None), (large, Reason::Cheapest));
    // 192 medium blocks are resident, but have as many rows as 96 large ones
    assert_eq!(of(12, 1024, 64, None, None), (large, Reason::Cheapest));
    assert_eq!(of(6, 2048, 64, None, None).1, Reason::StreamK);
    assert_eq!(of(48, 512, 64, None, Some(0)), (medium, Reason::ShortDiagonal));
    assert_eq!(of(24, 512, 64, None, Some(0)), (small, Reason::ShorterLongest));
    assert_eq!(of(48, 640, 64, None, Some(0)), (large, Reason::Cheapest));
    assert_eq!(of(96, 512, 128, None, Some(0)), ("volta_fwd_128x128", Reason::Cheapest), "only headdim 64 has medium blocks");
    assert_eq!(of(24, 4096, 64, Some(64), Some(64)), (medium, Reason::ShortWindow));
    assert_eq!(of(2, 4096, 64, Some(64), Some(64)), (small, Reason::Resident));
}

/// Key blocks of the backward pass count per KV head.
#[test]
fn plans_small_blocks_for_small_backward_grids() {
    let keys = |nheads, nheads_k, seqlen, headdim, right| {
        let window = Window { left: None, right };
        let a = Attention { batch: 1, nheads, nheads_k, window, ..attention(300, seqlen, headdim, headdim) };
        let plan = plan::backward(&a, DEFAULT, &without_backward_stream_k()).unwrap();
        assert_eq!((plan.preprocess.unwrap().reason, plan.postprocess.unwrap().reason), (Reason::Cheapest, Reason::Cheapest));
        let blocks = (seqlen as u64).div_ceil(plan.main.variant.block_rows.into()) as i64 * nheads_k;
        assert_eq!(plan.main.blocks.iter().product::<u32>() as i64, blocks);
        (plan.main.variant.block_rows, plan.main.reason)
    };
    for headdim in [64, 128] {
        assert_eq!(keys(8, 8, 512, headdim, None), (64, Reason::Resident));
        assert_eq!(keys(40, 40, 512, headdim, None), (128, Reason::Cheapest));
    }
    assert_eq!(keys(40, 10, 512, 128, None), (64, Reason::Resident), "10 KV heads of 8 small blocks are resident");
    assert_eq!(keys(40, 11, 512, 128, None), (128, Reason::Cheapest), "11 are not");
    assert_eq!(keys(40, 40, 512, 64, Some(0)), (64, Reason::ShorterLongest), "40 KV heads of 4 large blocks are resident");
    assert_eq!(keys(41, 41, 512, 64, Some(0)), (128, Reason::Cheapest), "41 are not");
    assert_eq!(keys(40, 40, 512, 96, Some(0)), (128, Reason::Cheapest), "there are no smaller ones");
}

/// Turing's blocks have 192, 128 or 64 rows at headdim 64, two an SM, and 256, 128 or 64 at headdim 128, one an SM. An H200, which runs
/// them as PTX, has 132 SMs. The number of resident blocks decides.
#[test]
fn chooses_among_three_block_sizes_of_turing() {
    let rows = |batch, nheads, seqlen, headdim| {
        let a = Attention { batch, nheads, nheads_k: nheads, ..attention(seqlen, seqlen, headdim, headdim) };
        plan::forward(&a, &H200).unwrap().variant.block_rows
    };
    assert_eq!(rows(4, 32, 8192, 64), 192);
    assert_eq!(rows(1, 32, 2048, 64), 128, "512 blocks in two waves of 264, instead of 352 in two waves");
    assert_eq!(rows(1, 8, 512, 64), 64, "all resident");
    assert_eq!(rows(4, 32, 8192, 128), 256);
    assert_eq!(rows(1, 32, 2048, 128), 256);
    assert_eq!(rows(1, 16, 1024, 128), 128);
    assert_eq!(rows(1, 8, 512, 128), 64);
}

#[test]
fn plans_small_blocks_for_small_grids() {
    // rows of a block, and blocks of a head
    let blocks = |batch, nheads, seqlen, headdim, sms| {
        let a = Attention { batch, nheads, nheads_k: nheads, ..attention(seqlen, seqlen, headdim, headdim) };
        let s = plan::forward(&a, &DeviceLimits { sms, ..V100 }).unwrap();
        (s.variant.block_rows, s.blocks[0])
    };
    // 64 blocks of 64 rows are resident, instead of 32 blocks of 128
    assert_eq!(blocks(1, 8, 512, 128, 80), (64, 8));
    assert_eq!(blocks(1, 8, 512, 64, 80), (64, 8));
    // all 160 (headdim 64) or 80 (128) resident blocks, and one head more
    assert_eq!(blocks(1, 20, 512, 64, 80), (64, 8));
    assert_eq!(blocks(1, 21, 512, 64, 80), (128, 4));
    assert_eq!(blocks(1, 10, 512, 128, 80), (64, 8));
    assert_eq!(blocks(1, 11, 512, 128, 80), (128, 4));
    // fewer blocks fill fewer SMs; the batch counts like heads
    assert_eq!(blocks(1, 8, 512, 128, 40), (128, 4));
    assert_eq!(blocks(2, 8, 512, 128, 80), (128, 4));
    // two large blocks per SM: no gain
    assert_eq!(blocks(1, 16, 1024, 64, 80), (128, 8));
    // one row tile per head: no more small blocks than large ones
    assert_eq!(blocks(64, 32, 64, 128, 80), (64, 1));
    assert_eq!(blocks(64, 32, 65, 128, 80), (128, 1));
}

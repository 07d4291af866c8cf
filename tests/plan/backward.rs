//! Tests of backward plans: which kernels, grids and scratch memory `plan::backward` chooses for a problem, mode and GPU.
//!
//! Usually three kernels run. Preprocess computes row statistics and zeroes dq's fp32 accumulators. The main kernel computes dk and dv and
//! adds to the accumulators by atomics. Postprocess rounds them to dq. Other plans: one fused kernel; dq in a kernel of its own, without
//! atomics; P and dS stored in memory between the main kernel and postprocess (`stored`).
//!
//! A BackwardPlan has these three kernels with their grids (`blocks`), and `main_launches`, the launches of the main one.
//! `dq_accum_splits` counts accumulators (0: none), each of `scratch_rows` query rows and `headdim_rounded` columns. `tail` is a launch of
//! small blocks for the last keys. BackwardMode: `has_dlse`: softmax_lse has a gradient; `split`: fp32 numbers are two fp16 parts.
//!
//! Helpers of main.rs:
//! - attention(queries, keys, headdim, headdim_v): a problem with two batch entries, and eight query heads on two KV heads
//! - on_packed_tensors(Some([queries, keys]), a): the problem on packed tensors, with these totals
//! - tuned(failed, choices): a V100 with a tuning: kernels that failed, by name, and choices that come first; tuned_with(): another GPU
//! - without_backward_stream_k(): a V100 without stream-K kernels: each key block (128 keys, or 64) has a block of the grid
//! - parts(plan): the three kernels; feature_requests(): features, totals of packed tensors, and the features that kernels need for both
//! - DEFAULT, DETERMINISTIC: modes; in the latter gradients have the same bits in each run

use super::*;

/// If one block has all keys of a head (64 or 128), and it pays, the plan launches one kernel. It pays for up to 512 query rows of a KV
/// head, or for blocks enough for two waves (of 160 small blocks, or 80 of headdim 128).
#[test]
fn plans_fused_backward_for_few_keys() {
    let with = |nheads, (seqlen_q, seqlen_k), headdim| Attention {
        batch: 1,
        nheads,
        nheads_k: nheads,
        ..attention(seqlen_q, seqlen_k, headdim, headdim)
    };
    let name = |a: &Attention, d: &DeviceLimits| {
        let plan = plan::backward(a, DEFAULT, d).unwrap();
        assert_eq!((plan.preprocess, plan.postprocess.is_none()), (None, true), "{a:?}");
        assert_eq!((plan.deterministic, plan.main_launches, plan.dq_accum_splits, plan.headdim_rounded), (true, 1, 0, 0));
        assert_eq!(plan.main.blocks, [1, a.nheads_k as u32]);
        assert!(plan.scratch_rows >= a.seqlen_q && plan.kernels().count() == 1);
        assert_eq!(plan, plan::backward(a, DETERMINISTIC, d).unwrap(), "one block adds in one order");
        plan.main.variant.name
    };
    assert_eq!(name(&with(4, (64, 64), 64), &V100), "volta_bwd_varlen_fused_64_small");
    assert_eq!(name(&with(1, (512, 1), 40), &V100), "volta_bwd_varlen_fused_64_small");
    assert_eq!(name(&with(200, (128, 128), 128), &V100), "volta_bwd_varlen_fused_128");
    assert_eq!(name(&with(200, (100, 64), 128), &V100), "volta_bwd_varlen_fused_128_small");
    assert_eq!(name(&Attention { nheads_k: 1, ..with(4, (64, 64), 64) }, &V100), "volta_bwd_varlen_fused_64_small");
    assert_eq!(name(&with(1, (128, 128), 64), &T4), "turing_bwd_varlen_fused_64");
    let packed = Some([100, 100]);
    assert_eq!(name(&on_packed_tensors(packed, with(3, (60, 60), 64)), &V100), "volta_bwd_varlen_fused_64_small");
    // 4096 rows: 400 blocks are two waves, 8 are not
    assert_eq!(name(&with(400, (4096, 64), 64), &V100), "volta_bwd_varlen_fused_64_small");
    let in_parts = |a: Attention, d: &DeviceLimits| plan::backward(&a, DEFAULT, d).unwrap().kernels().count() >= 3;
    assert!(in_parts(with(8, (4096, 64), 64), &V100));
    assert!(in_parts(Attention { nheads_k: 1, ..with(16, (64, 64), 64) }, &V100));
    // one key more than a block has; small blocks of 64 keys are faster for few heads; half of the columns would be padding
    assert!(in_parts(with(4, (64, 65), 64), &V100) && in_parts(with(4, (64, 129), 64), &T4));
    assert!(in_parts(with(4, (128, 128), 128), &V100));
    assert!(in_parts(with(4, (64, 64), 32), &V100) && in_parts(with(4, (64, 64), 96), &V100));
    // fused kernels have no feature of scores
    let features = RequestedFeatures { dropout_p: 0.1, ..RequestedFeatures::default() };
    assert!(in_parts(Attention { features, ..with(4, (64, 64), 64) }, &V100));
    // a tuning decides first: by its choices (the usual main kernel; determinism) and its failed kernels
    let a = || with(4, (64, 64), 64);
    assert!(in_parts(a(), &tuned(&[], &[r#""pass": "Backward", "variant": "volta_bwd_64""#])));
    assert!(in_parts(a(), &tuned(&["volta_bwd_varlen_fused_64_small"], &[])));
    let newer = DeviceLimits { capability: (9, 0), ..V100 };
    assert_eq!(name(&a(), &newer), "turing_bwd_varlen_fused_64");
    assert!(in_parts(a(), &tuned_with(*COMPILED, &["turing_bwd_varlen_fused_64"], &[], newer)), "Volta's fused kernel does not replace it");
    assert!(in_parts(a(), &tuned(&[], &[r#""pass": "Backward", "deterministic": true"#])));
    let fused = tuned(&[], &[r#""pass": "BackwardFused", "variant": "volta_bwd_varlen_fused_64_small""#]);
    assert_eq!(name(&with(8, (4096, 64), 64), &fused), "volta_bwd_varlen_fused_64_small");
    assert!(in_parts(with(8, (64, 65), 64), &fused), "a block has 64 keys");
}

/// A deterministic pass launches the main kernel several times, each for some key blocks of each head. Each block of a head in a launch
/// adds to an accumulator of dq of its own (`sums` of them), which fixes the order of additions. src/plan/backward/parts.rs estimates time.
#[test]
fn deterministic_backward_takes_several_main_launches() {
    let heads = |nheads, a| Attention { batch: 1, nheads, nheads_k: nheads, ..a };
    let planned = |a: &Attention, d: &DeviceLimits| plan::backward(a, DETERMINISTIC, d).unwrap();
    // expected: launches of the main kernel, and accumulators of dq
    for (nheads, seqlen, headdim, launches, sums) in [
        // 160 resident blocks: heads times accumulators fill the GPU
        (40, 2048, 64, 4, 4),
        (32, 2048, 64, 3, 5),
        (160, 2048, 64, 16, 1),
        (200, 2048, 64, 4, 4),
        // 80 resident blocks
        (40, 2048, 128, 8, 2),
        (20, 2048, 128, 4, 4),
        // the only block of a head, and all blocks of a few heads
        (4, 60, 32, 1, 1),
        (2, 300, 64, 1, 5),
    ] {
        let a = heads(nheads, attention(seqlen, seqlen, headdim, headdim));
        let (p, default) = (planned(&a, &V100), plan::backward(&a, DEFAULT, &without_backward_stream_k()).unwrap());
        assert_eq!((p.main_launches, p.dq_accum_splits, p.deterministic), (launches, sums, true), "{a:?}");
        assert_eq!(p.main.blocks, [sums, nheads as u32], "one sum for each block of a launch");
        assert!(launches * sums >= default.main.blocks[0] && (launches - 1) * sums < default.main.blocks[0], "each key block once");
        let tail_blocks = p.tail.map(|tail| tail.kernel.blocks[0]);
        assert_eq!(p.tail.map(|tail| tail.first_block), default.tail.map(|tail| tail.first_block));
        assert!(tail_blocks.is_none_or(|n| n <= sums), "and one for each of the tail");
        let kernels = |p: &plan::BackwardPlan| parts(p).map(|k| k.variant.name);
        assert_eq!(kernels(&p), kernels(&default), "the same bits of dk and dv");
        assert_eq!((p.headdim_rounded, default.main_launches, default.dq_accum_splits), (default.headdim_rounded, 1, 1));
        let causal = planned(&Attention { window: Window::CAUSAL, ..a }, &V100);
        assert!(causal.main.blocks == [nheads as u32, causal.dq_accum_splits] || causal.dq_accum_splits == 0);
    }
    // few heads with many blocks would need more memory, or leave most of the GPU idle
    for a in [heads(1, attention(65536, 65536, 64, 64)), heads(4, attention(8192, 8192, 128, 128))] {
        assert_eq!(planned(&a, &V100).main.variant.pass, Pass::BackwardDkDv);
    }
    // under a narrow window each block meets few rows, so zeroing and adding accumulators of all rows would take most of the time
    let narrow = Attention { window: Window { left: Some(64), right: Some(0) }, ..heads(40, attention(8192, 8192, 64, 64)) };
    assert_eq!(planned(&narrow, &V100).dq_accum_splits, 0);
    // T4: Turing's kernels have no key block offset
    assert_eq!(planned(&heads(40, attention(2048, 2048, 64, 64)), &T4).main.variant.pass, Pass::BackwardDkDv);
    // after a failed dq kernel, several launches at any cost
    let names = |pass: Pass| COMPILED.of(&VOLTA, pass).map(|v| v.name).collect::<Vec<_>>();
    assert!(planned(&narrow, &tuned(&names(Pass::BackwardDq), &[])).dq_accum_splits > 0);
}

/// Without a causal mask, small blocks compute the last keys (`tail`) if large blocks would need another wave.
#[test]
fn plans_small_blocks_for_last_keys() {
    let with = |nheads, seqlen, headdim| Attention { batch: 1, nheads, nheads_k: nheads, ..attention(seqlen, seqlen, headdim, headdim) };
    let planned = |a: &Attention| plan::backward(a, DEFAULT, &without_backward_stream_k()).unwrap();
    for (a, main, tail) in [
        (with(32, 2048, 64), 15, 2),  // 3.2 waves of 160 blocks
        (with(40, 1111, 64), 8, 2),   // 2.25
        (with(40, 1111, 128), 8, 2),  // 4.5 of 80
        (with(32, 2048, 128), 15, 2), // 6.4
        (with(32, 2050, 128), 15, 0), // the rest would be 96 small blocks, more than the 80 resident ones
    ] {
        let p = planned(&a);
        if tail == 0 {
            assert_eq!((p.tail, i64::from(p.main.blocks[0])), (None, (a.seqlen_k + 127) / 128));
            continue;
        }
        let found = p.tail.unwrap();
        assert_eq!((p.main.blocks[0], found.kernel.blocks[0], found.kernel.reason), (main, tail, Reason::Tail), "{a:?}");
        let (large, small) = (p.main.variant.block_rows, found.kernel.variant.block_rows);
        assert!(small < large && found.first_block * small == main * large, "it goes on where the others end");
        assert!(i64::from(main * large) < a.seqlen_k && i64::from(main * large + tail * small) >= a.seqlen_k);
    }
    for whole in [
        with(40, 2048, 64),  // 4 waves
        with(8, 1024, 64),   // one
        with(32, 2048, 256), // has no smaller blocks
        Attention { window: Window::CAUSAL, ..with(32, 2048, 64) },
    ] {
        assert_eq!(planned(&whole).tail, None);
    }
    let small_failed = tuned(&["volta_bwd_64_small", "volta_bwd_streamk_64"], &[]);
    assert_eq!(plan::backward(&with(32, 2048, 64), DEFAULT, &small_failed).unwrap().tail, None);
}

/// Kernels without the feature Fp32Gradients write fp16 gradients only.
#[test]
fn fp32_gradients_get_kernels_that_write_fp32() {
    for mode in [DEFAULT, DETERMINISTIC] {
        for headdim in (8..=256).step_by(8) {
            // needed: features that kernels must have for the request
            for (features, packed, needed) in feature_requests() {
                let a = on_packed_tensors(packed, Attention { features, ..attention(100, 100, headdim, headdim) });
                let plan = plan::backward(&a, BackwardMode { fp32_gradients: true, ..mode }, &V100).unwrap();
                for v in [plan.main.variant, plan.postprocess.unwrap().variant] {
                    assert!(v.features.contains(FeatureSet::of(&[Feature::Fp32Gradients])), "{} for {features:?}", v.name);
                }
                let fp16 = plan::backward(&a, mode, &V100).unwrap();
                assert_eq!(plan.preprocess, fp16.preprocess, "writes no gradient");
                // kernels with other features (varlen, generic) write fp32 too, plain ones only fp16
                let has_other_features = needed.intersection(plan.main.variant.pass.info().features) != FeatureSet::NONE;
                assert!(!has_other_features || plan.main == fp16.main, "nothing else changes");
            }
        }
    }
}

/// Checks what kernels and host code assume about a family's scratch memory. It has -lse/scale and -delta (delta: sum(dout * out)) of each
/// query row, in groups of `group_rows` rows and `group_floats` floats: at these offsets in the group, with copies at these distances.
#[test]
fn scratch_layouts_are_consistent() {
    for table in COMPILED.0 {
        for v in *table {
            assert_eq!(v.family, table[0].family, "{}: a table is of one family", v.name);
            if !matches!(v.pass.info().params, ParamBlock::Backward | ParamBlock::BackwardStored) {
                continue;
            }
            let s = v.family.scratch.expect("backward kernels have scratch memory");
            assert_eq!(s.row_rounding % s.group_rows, 0, "{}", v.family.name);
            // validation assumes at most this many extra rows per packed sequence (MAX_SEQUENCES)
            assert!(s.row_rounding <= 32, "{}", v.family.name);
            for at in [s.neg_lse_offsets, s.neg_delta_offsets] {
                assert_eq!(at.len(), s.group_rows as usize, "{}", v.family.name);
            }
            let all = [s.neg_lse_offsets, s.neg_delta_offsets].concat();
            let copies = s.copy_distances.iter().flat_map(|distance| all.iter().map(move |at| at + distance));
            let mut all: Vec<_> = copies.collect();
            all.sort();
            all.dedup();
            assert_eq!(all.len(), s.copy_distances.len() * 2 * s.group_rows as usize, "{}: two values share an offset", v.family.name);
            assert!(all.iter().all(|&at| at < s.group_floats), "{}", v.family.name);
            // kernels with key blocks step through queries
            assert!(v.pass.info().rows != RowKind::Keys || s.row_rounding % v.step == 0, "{}", v.name);
        }
    }
}

/// Above headdim 256, plans store P and dS in memory, in tiles of 128 x 128. A launch of `main` computes those of some heads and key tiles,
/// then one of `postprocess` adds them to the gradients, and so on. Tiles take at most 128 MiB, or one key tile of one KV head.
#[test]
fn stores_scores_for_large_headdims() {
    const TILE: i64 = 128;
    let tiles = |rows: i64| (rows + TILE - 1) / TILE;
    for (batch, nheads, nheads_k, seqlen_q, seqlen_k, packed) in [
        (1, 32, 8, 2048, 2048, None),
        (3, 32, 8, 4096, 4096, None),
        (1, 1, 1, 16384, 16384, None),
        (2, 1, 1, 1, 1, None),
        (5000, 4, 4, 100, 129, None),
        (1, 16, 1, 131072, 1000, None),
        // 5000 rows of queries and 15,000 of keys in all sequences
        (70, 4, 2, 300, 900, Some([5000, 15_000])),
        (1500, 4, 2, 300, 900, Some([5000, 15_000])),
    ] {
        for (headdim, headdim_v) in [(512, 512), (264, 8), (64, 320)] {
            let a = on_packed_tensors(packed, Attention { batch, nheads, nheads_k, ..attention(seqlen_q, seqlen_k, headdim, headdim_v) });
            let p = plan::backward(&a, DEFAULT, &V100).unwrap();
            assert_eq!(p, plan::backward(&a, DETERMINISTIC, &V100).unwrap(), "no atomics");
            let passes = [Pass::BackwardPreprocess, Pass::BackwardScores, Pass::BackwardGradients];
            assert_eq!(parts(&p).map(|k| k.variant.pass), passes);
            assert!(p.deterministic && p.dq_accum_splits == 0);
            let s = p.stored.unwrap();
            // all entries, heads and keys, each once
            let entries: Vec<_> = p.batch_chunks(batch).collect();
            assert_eq!(entries.iter().map(|(_, n)| n).sum::<i64>(), batch);
            let launches: Vec<_> = s.launches(nheads_k).collect();
            assert_eq!(launches.len(), p.main_launches as usize);
            assert_eq!(p.all_main_launches(batch), (launches.len() * entries.len()) as i64);
            assert_eq!(p.launch_entries(batch), entries.iter().map(|e| e.1).max().unwrap());
            let mut covered: Vec<_> = launches
                .iter()
                .flat_map(|&(head, key)| (0..s.heads).flat_map(move |h| (0..s.key_tiles).map(move |k| (head + h, key + k))))
                .filter(|&(head, key)| head < nheads_k && key < tiles(seqlen_k))
                .collect();
            covered.sort();
            let all: Vec<_> = (0..nheads_k).flat_map(|head| (0..tiles(seqlen_k)).map(move |key| (head, key))).collect();
            assert_eq!(covered, all, "{a:?}");
            // memory
            let entries = if packed.is_some() { 1 } else { entries.iter().map(|e| e.1).max().unwrap() };
            // 2048 pairs of tiles of 128 by 128 fp16: P and dS have 32 KiB each
            let of_key_tile = entries * nheads / nheads_k * s.query_tiles;
            assert!(s.heads * s.key_tiles * of_key_tile <= 2048 || (s.heads, s.key_tiles) == (1, 1), "{a:?}: {s:?}");
            // a sequence has its tiles after those of the sequences before it
            assert!(s.query_tiles >= if packed.is_some() { seqlen_q / TILE + batch } else { tiles(seqlen_q) });
            let group = nheads / nheads_k;
            assert!(i64::from(p.main.blocks[0]) >= tiles(seqlen_q) * s.key_tiles);
            assert_eq!(i64::from(p.main.blocks[1]), s.heads * group);
            let columns = [tiles(headdim), tiles(headdim_v)];
            let gradients = s.key_tiles * (columns[0] + columns[1]) + group * tiles(seqlen_q) * columns[0];
            assert_eq!(p.postprocess.unwrap().blocks, [(s.heads * gradients) as u32, 1]);
        }
    }
}

/// Up to headdim 256, plans store P and dS in memory where that is faster: above 192 on volta, with enough key tiles in a launch.
#[test]
fn stores_scores_where_that_is_faster() {
    let is_stored =
        |a: &Attention, d: &DeviceLimits| [DEFAULT, DETERMINISTIC].map(|mode| plan::backward(a, mode, d).unwrap().stored.is_some());
    let on_v100 = |a: Attention| is_stored(&a, &V100);
    for (headdim, headdim_v) in [(256, 256), (200, 200), (64, 256), (200, 8)] {
        for (seqlen_q, seqlen_k) in [(1, 1), (2048, 2048), (4096, 4096), (30_000, 129)] {
            let a = attention(seqlen_q, seqlen_k, headdim, headdim_v);
            assert_eq!(is_stored(&a, &T4), [false; 2]);
            assert_eq!(on_v100(a), [true; 2], "{headdim}/{headdim_v}, {seqlen_q}, {seqlen_k}");
        }
    }
    assert_eq!(on_v100(attention(2048, 2048, 192, 192)), [false; 2]);
    assert_eq!(on_v100(attention(32768, 32768, 256, 256)), [false; 2], "few key tiles");
    assert_eq!(on_v100(on_packed_tensors(Some([40_000, 40_000]), attention(4096, 4096, 256, 256))), [false; 2], "few key tiles");
    let features = RequestedFeatures { block_mask: true, ..Default::default() };
    assert_eq!(on_v100(Attention { features, ..attention(2048, 2048, 256, 256) }), [false; 2]);
}

/// The host adds a gradient of softmax_lse to the preprocess kernel's statistics. A fused pass has no such kernel, so it is not chosen.
#[test]
fn gradient_of_lse_takes_separate_kernels() {
    let a = attention(64, 40, 64, 64);
    for device in [V100, T4] {
        assert!(plan::backward(&a, DEFAULT, &device).unwrap().preprocess.is_none());
        assert!(plan::backward(&a, BackwardMode { has_dlse: true, ..DEFAULT }, &device).unwrap().preprocess.is_some());
    }
}

/// Plain problems with a block mask add dq by atomics; generic ones, and the deterministic mode, have a separate dq kernel.
#[test]
fn block_masks_have_atomics_without_other_features() {
    let blocks = RequestedFeatures { block_mask: true, ..RequestedFeatures::default() };
    let generic = RequestedFeatures { alibi: true, ..blocks };
    for (features, mode, atomics) in [(blocks, DEFAULT, true), (blocks, DETERMINISTIC, false), (generic, DEFAULT, false)] {
        for (headdim, device) in [64, 128, 256].into_iter().flat_map(|d| [V100, T4].map(|device| (d, device))) {
            let a = Attention { features, ..attention(1000, 1000, headdim, headdim) };
            let plan = plan::backward(&a, mode, &device).unwrap();
            let (main, other) = if atomics { (Pass::Backward, Pass::BackwardPostprocess) } else { (Pass::BackwardDkDv, Pass::BackwardDq) };
            assert_eq!([plan.main.variant.pass, plan.postprocess.unwrap().variant.pass], [main, other], "{headdim}");
            assert_eq!((plan.deterministic, plan.main_launches), (!atomics, 1));
        }
    }
}

/// Kernels without block masks never run a problem with one, on no grid.
#[test]
fn block_masks_need_kernels_of_their_own() {
    let features = RequestedFeatures { block_mask: true, ..RequestedFeatures::default() };
    for (seqlen_q, seqlen_k) in [(2000, 2000), (64, 40), (4000, 9000)] {
        let a = Attention { features, ..attention(seqlen_q, seqlen_k, 128, 128) };
        for device in [V100, T4] {
            let forward = plan::forward(&a, &device).map(|k| vec![k.variant]);
            // preprocess and postprocess kernels see no scores
            let of_scores = |v: &&Variant| v.pass.info().features.has(Feature::Blocks);
            let backward = |mode| plan::backward(&a, mode, &device).map(|p| p.kernels().map(|k| k.variant).filter(of_scores).collect());
            for planned in [forward, backward(DEFAULT), backward(DETERMINISTIC)] {
                match planned {
                    Ok(variants) => variants.iter().for_each(|v| assert!(v.features.has(Feature::Blocks), "{}", v.name)),
                    Err(e) => assert!(e.message.contains("with block_mask"), "{e}"),
                }
            }
        }
    }
}

/// Kernels place packed sequences in scratch memory (`rounded_row` in csrc/backward/scratch.cuh) without overlap.
#[test]
fn packed_sequences_do_not_overlap_in_scratch() {
    for lengths in [vec![1, 1, 1], vec![32, 32], vec![31, 33, 0, 0, 64], vec![0, 0], vec![5, 0, 95, 1, 127, 32, 2], vec![1000]] {
        let total_q = lengths.iter().sum();
        let longest = *lengths.iter().max().unwrap();
        let packed = Some([total_q, 10]); // of any number of keys
        let a = on_packed_tensors(packed, Attention { batch: lengths.len() as i64, ..attention(longest, 10, 64, 64) });
        let plan = plan::backward(&a, DEFAULT, &V100).unwrap();
        let rounding = i64::from(plan.scratch.row_rounding);
        let (mut first_row, mut free) = (0, 0);
        for (i, length) in lengths.iter().enumerate() {
            let start = (first_row + i as i64 * rounding) / rounding * rounding;
            assert!(start >= free, "{lengths:?}: sequence {i}");
            free = start + (length + rounding - 1) / rounding * rounding;
            first_row += length;
        }
        assert!(free <= plan.scratch_rows, "{lengths:?}");
    }
}

//! Tests of the planner, which is a pure function: no device, no tensors.

use volta_fa::error::ErrorKind;
use volta_fa::kernels::{self, Code, Family, Feature, FeatureSet, Kernels, ParamBlock, Pass, RowKind, Scratch, Variant, COMPILED, VOLTA};
use volta_fa::params::StreamKSplit;
use volta_fa::plan::{self, BackwardMode, DeviceLimits, PlannedKernel, Reason};
use volta_fa::problem::{
    self, Appended, Attention, Backend, DType, Device, Keys, MergedStates, Options, Queries, RequestedFeatures, ScoreFunction, TensorDesc,
    Window,
};
use volta_fa::tuning::{Card, Tuning, MAX_CHOICES};

fn attention(seqlen_q: i64, seqlen_k: i64, headdim: i64, headdim_v: i64) -> Attention {
    Attention {
        batch: 2,
        seqlen_q,
        seqlen_k,
        nheads: 8,
        nheads_k: 2,
        headdim,
        headdim_v,
        softmax_scale: 0.125,
        window: Window { left: None, right: None },
        dtype: DType::Half,
        queries: Queries::Dense,
        keys: Keys::Dense,
        features: RequestedFeatures::default(),
        appended: Appended::default(),
        num_splits: 0,
    }
}

const DEFAULT: BackwardMode = BackwardMode { deterministic: false, fp32_gradients: false, has_dlse: false, split: false };
const DETERMINISTIC: BackwardMode = BackwardMode { deterministic: true, ..DEFAULT };
const SPLIT: BackwardMode = BackwardMode { fp32_gradients: true, split: true, ..DEFAULT };

/// Returns the problem on packed tensors with these rows of queries and keys, if any.
fn stored(packed: Option<[i64; 2]>, a: Attention) -> Attention {
    let Some([total_q, total_k]) = packed else { return a };
    Attention { queries: Queries::Packed { total: total_q }, keys: Keys::Packed { total: total_k }, ..a }
}

/// Returns requested features, packed rows, and the feature set of kernels that results.
fn feature_requests() -> [(RequestedFeatures, Option<[i64; 2]>, FeatureSet); 14] {
    let packed = Some([150, 170]);
    let features = RequestedFeatures::default();
    [
        (features, None, FeatureSet::NONE),
        (features, packed, FeatureSet::of(&[Feature::Lengths])),
        (RequestedFeatures { seqused_k: true, ..features }, None, FeatureSet::of(&[Feature::Lengths])),
        (RequestedFeatures { sinks: true, ..features }, None, FeatureSet::of(&[Feature::Sinks])),
        (RequestedFeatures { alibi: true, ..features }, None, FeatureSet::of(&[Feature::Alibi])),
        (RequestedFeatures { score_function: Some(ScoreFunction::Softcap(3.0)), ..features }, None, FeatureSet::of(&[Feature::Softcap])),
        (RequestedFeatures { attn_bias: true, ..features }, None, FeatureSet::of(&[Feature::Bias])),
        (RequestedFeatures { attn_bias: true, fp32_bias: true, ..features }, None, FeatureSet::of(&[Feature::Bias, Feature::Fp32Bias])),
        (RequestedFeatures { dropout_p: 0.1, ..features }, None, FeatureSet::of(&[Feature::Dropout])),
        (RequestedFeatures { attn_bias: true, dropout_p: 0.1, ..features }, None, FeatureSet::of(&[Feature::Bias, Feature::Dropout])),
        (
            RequestedFeatures { alibi: true, score_function: Some(ScoreFunction::Softcap(3.0)), ..features },
            None,
            FeatureSet::of(&[Feature::Alibi, Feature::Softcap]),
        ),
        (RequestedFeatures { attn_bias: true, sinks: true, ..features }, None, FeatureSet::of(&[Feature::Bias, Feature::Sinks])),
        (RequestedFeatures { dropout_p: 0.1, ..features }, packed, FeatureSet::of(&[Feature::Dropout, Feature::Lengths])),
        (RequestedFeatures { alibi: true, attn_bias: true, ..features }, None, FeatureSet::of(&[Feature::Alibi, Feature::Bias])),
    ]
}

/// Returns the same of block masks: plain and generic.
fn block_mask_requests() -> [(RequestedFeatures, Option<[i64; 2]>, FeatureSet); 2] {
    let blocks = RequestedFeatures { block_mask: true, ..RequestedFeatures::default() };
    [
        (blocks, None, FeatureSet::of(&[Feature::Blocks])),
        (RequestedFeatures { alibi: true, ..blocks }, None, FeatureSet::of(&[Feature::Blocks, Feature::Alibi])),
    ]
}

/// Returns the separate kernels of a backward pass.
fn parts(plan: &plan::BackwardPlan) -> [PlannedKernel; 3] {
    [plan.prepare.unwrap(), plan.main, plan.finish.unwrap()]
}

/// Returns a GPU of a family's own architecture.
fn own_device(family: &Family) -> DeviceLimits {
    let capability = (family.sm as i32 / 10, family.sm as i32 % 10);
    DeviceLimits { capability, shared_bytes_per_block: family.shared_bytes, ..DeviceLimits::V100 }
}

#[test]
fn plans_least_padding_for_every_headdim() {
    for (headdim, headdim_v) in (8..=256).step_by(8).flat_map(|d| (8..=256).step_by(8).map(move |v| (d, v))) {
        for (features, packed, asked) in feature_requests() {
            let a = stored(packed, Attention { features, ..attention(100, 100, headdim, headdim_v) });
            let forward = plan::forward(&a, &DeviceLimits::V100).unwrap().variant;
            let [backward, deterministic] = [DEFAULT, DETERMINISTIC].map(|m| plan::backward(&a, m, &DeviceLimits::V100).unwrap());
            for v in [forward].into_iter().chain([backward, deterministic].iter().flat_map(|b| b.kernels().map(|k| k.variant))) {
                let asked = asked.intersection(v.pass.info().features);
                let fits = |v: &Variant| v.headdim as i64 >= headdim && v.headdim_v as i64 >= headdim_v;
                let is_applicable = |v: &Variant| fits(v) && v.features.contains(asked);
                assert!(is_applicable(v), "{} for {headdim}, {headdim_v}, {features:?}", v.name);
                let others = || COMPILED.of(&v.family, v.pass).filter(|o| is_applicable(o));
                // features outside the loop count less than padding
                let of_scores = |v: &Variant| v.features.without(FeatureSet::VARLEN);
                let less_padded = others().any(|o| of_scores(o) == of_scores(v) && o.headdim + o.headdim_v < v.headdim + v.headdim_v);
                let is_padded_as = |o: &Variant| o.headdim + o.headdim_v <= v.headdim + v.headdim_v;
                let cheaper = others().any(|o| {
                    v.features.contains(o.features) && (of_scores(o) != of_scores(v) || (o.features != v.features && is_padded_as(o)))
                });
                assert!(!cheaper, "{} for {features:?}", v.name);
                assert!(!less_padded, "{} for {headdim}, {headdim_v}", v.name);
            }
        }
    }
}

const CACHED: [Pass; 9] = [
    Pass::Append,
    Pass::Dequantize,
    Pass::Decode,
    Pass::DecodeMla,
    Pass::Prefill,
    Pass::PrefillStreamK,
    Pass::SparseSelect,
    Pass::SparseMla,
    Pass::Indexer,
];

#[test]
fn every_variant_is_chosen_for_some_problem() {
    // tests/plan_decode.rs has the variants for KV caches
    let mut unused: Vec<_> = kernels::variants().filter(|v| !CACHED.contains(&v.pass)).map(|v| v.name).collect();
    let states = MergedStates { batch: 1, seqlen_q: 100, nheads: 3, headdim_v: 512 };
    let merge = plan::merge(&states, &DeviceLimits::V100).unwrap();
    assert_eq!(merge.blocks, [100_u32.div_ceil(merge.variant.block_rows), 3]);
    unused.retain(|name| *name != merge.variant.name);
    for family in COMPILED.families() {
        let cast = plan::cast(100, 3, &DeviceLimits { only: Some(family), ..own_device(family) }).unwrap();
        assert_eq!(cast.blocks, [100_u32.div_ceil(cast.variant.block_rows), 3]);
        unused.retain(|name| *name != cast.variant.name);
    }
    // few key blocks of many steps
    for headdim in [64, 128] {
        let a = Attention { batch: 1, nheads: 32, nheads_k: 8, ..attention(2048, 2048, headdim, headdim) };
        let main = plan::backward(&a, DEFAULT, &DeviceLimits::V100).unwrap().main;
        unused.retain(|name| *name != main.variant.name);
    }
    let headdims = || (8..=256).step_by(8).chain([512]);
    for headdim in headdims() {
        for headdim_v in headdims() {
            for (seqlen, nheads) in [(64, 2), (100, 200), (512, 8), (1024, 8), (1024, 16), (4096, 32), (20_000, 1)] {
                let requests = feature_requests().into_iter().chain(block_mask_requests());
                for ((features, packed, _), family) in requests.flat_map(|w| COMPILED.families().map(move |f| (w, f))) {
                    let a = stored(
                        packed,
                        Attention { nheads, nheads_k: nheads, batch: 1, features, ..attention(seqlen, seqlen, headdim, headdim_v) },
                    );
                    let device = DeviceLimits { only: Some(family), ..own_device(family) };
                    // of fp16 and of fp32 tensors
                    let invariant = Attention { features: RequestedFeatures { batch_invariant: true, ..features }, ..a };
                    let forward = [plan::forward(&a, &device), plan::forward_split(&a, &device), plan::forward(&invariant, &device)];
                    let forward = forward.into_iter().flatten();
                    let backward = [DEFAULT, DETERMINISTIC, SPLIT].into_iter().filter_map(|mode| plan::backward(&a, mode, &device).ok());
                    let fast = plan::fast(&a, false, &device).unwrap().into_iter().flat_map(|f| [f.prepare, f.forward]);
                    let used: Vec<_> =
                        forward.chain(fast).chain(backward.flat_map(|b| b.kernels().collect::<Vec<_>>())).map(|k| k.variant.name).collect();
                    unused.retain(|name| !used.contains(name));
                }
            }
        }
    }
    assert!(unused.is_empty(), "compiled but never planned: {unused:?}");
}

/// Under a causal mask the long blocks of all heads start before short ones, if kernels support it. Else a head's blocks stay together.
#[test]
fn orders_long_blocks_first_under_causal_masks() {
    let turing = Kernels(COMPILED.0.iter().copied().filter(|table| table[0].family.name == "turing").collect::<Vec<_>>().leak());
    let a = Attention { nheads: 8, ..attention(2048, 2048, 128, 128) };
    let right = |bound| Attention { window: Window { left: None, right: bound }, ..a };
    for (a, expected) in [(right(None), [8, 8]), (right(Some(0)), [8, 8]), (Attention { nheads: 3, ..right(Some(0)) }, [3, 8])] {
        let plan = plan::forward_among(turing, &Attention { batch: 64, nheads_k: a.nheads, ..a }, &T4).unwrap();
        assert_eq!((plan.variant.block_rows, plan.blocks), (256, expected));
    }
    let volta = plan::forward(&Attention { nheads: 3, nheads_k: 3, batch: 64, ..right(Some(0)) }, &DeviceLimits::V100).unwrap();
    assert_eq!((volta.variant.block_rows, volta.blocks), (128, [3, 16]));
    let a = Attention { nheads: 6, nheads_k: 3, ..a };
    // (without a causal mask, a tail computes the last keys)
    for (right, expected) in [(None, [13, 3]), (Some(0), [3, 16])] {
        let a = Attention { window: Window { left: None, right }, ..a };
        let plan = plan::backward(&a, DEFAULT, &without_splits()).unwrap();
        assert_eq!(
            (plan.prepare.unwrap().blocks[1], plan.main.blocks, plan.finish.unwrap().blocks[1]),
            (6, expected, 6),
            "dq's kernels keep their order"
        );
    }
}

/// Under a causal mask the longest block of a resident grid decides, and small blocks with more warps per row are shorter.
#[test]
fn plans_small_blocks_for_resident_causal_grids() {
    let of = |nheads, seqlen_k, headdim, window| {
        let a = Attention { batch: 1, nheads, nheads_k: nheads, window, ..attention(512, seqlen_k, headdim, headdim) };
        let plan = plan::forward(&a, &DeviceLimits::V100).unwrap();
        (plan.variant.block_rows, plan.reason)
    };
    let rows = |nheads, headdim, right| of(nheads, 512, headdim, Window { left: None, right });
    // four blocks of 128 rows per head, 160 resident blocks
    for headdim in [64, 128] {
        assert_eq!(rows(40, headdim, None), (128, Reason::Cheapest));
        assert_eq!(rows(40, headdim, Some(0)), (64, Reason::ShorterLongest));
    }
    assert_eq!(rows(41, 64, Some(0)), (128, Reason::Cheapest));
    // all blocks take about as long
    for (seqlen_k, left, right) in [(16384, None, 0), (1025, None, 0), (512, None, 200), (512, Some(64), 0)] {
        assert_eq!(of(40, seqlen_k, 64, Window { left, right: Some(right) }), (128, Reason::Cheapest));
    }
    assert_eq!(of(40, 1024, 64, Window { left: Some(1024), right: Some(0) }), (64, Reason::ShorterLongest));
}

/// Rows far before their keys have large biases, and kernels of ALiBi alone would start their sums with these.
#[test]
fn plans_generic_kernels_for_far_rows_with_alibi() {
    let requires = |seqlen_q, seqlen_k, right, seqused_k| {
        let features = RequestedFeatures { alibi: true, seqused_k, ..RequestedFeatures::default() };
        let a = Attention { features, window: Window { left: None, right }, ..attention(seqlen_q, seqlen_k, 64, 64) };
        let kernels = [plan::forward(&a, &DeviceLimits::V100).unwrap(), plan::backward(&a, DEFAULT, &DeviceLimits::V100).unwrap().main];
        let [forward, backward] = kernels.map(|k| k.variant.required_features.iter().any(|feature| feature == Feature::Alibi));
        assert_eq!(forward, backward);
        forward
    };
    assert!(requires(4096, 4096, None, false) && requires(4096, 3584, None, false));
    assert!(!requires(4096, 3583, None, false));
    // rows before the first key see no keys, or only near ones
    assert!(requires(30000, 16, Some(0), false) && requires(30000, 16, Some(512), false));
    assert!(!requires(30000, 16, Some(513), false));
    // seqused_k may leave fewer keys than seqlen_k
    assert!(!requires(4096, 4096, None, true));
}

/// Key blocks of the backward pass count per KV head.
#[test]
fn plans_small_blocks_for_small_backward_grids() {
    let keys = |nheads, nheads_k, seqlen, headdim, right| {
        let window = Window { left: None, right };
        let a = Attention { batch: 1, nheads, nheads_k, window, ..attention(300, seqlen, headdim, headdim) };
        let plan = plan::backward(&a, DEFAULT, &without_splits()).unwrap();
        assert_eq!((plan.prepare.unwrap().reason, plan.finish.unwrap().reason), (Reason::Cheapest, Reason::Cheapest));
        assert_eq!(
            plan.main.blocks.iter().product::<u32>() as i64,
            (seqlen as u64).div_ceil(plan.main.variant.block_rows.into()) as i64 * nheads_k
        );
        (plan.main.variant.block_rows, plan.main.reason)
    };
    for headdim in [64, 128] {
        assert_eq!(keys(8, 8, 512, headdim, None), (64, Reason::Resident));
        assert_eq!(keys(40, 40, 512, headdim, None), (128, Reason::Cheapest));
    }
    assert_eq!(keys(40, 10, 512, 128, None), (64, Reason::Resident), "80 blocks on as many places");
    assert_eq!(keys(40, 11, 512, 128, None), (128, Reason::Cheapest));
    assert_eq!(keys(40, 40, 512, 64, Some(0)), (64, Reason::ShorterLongest), "160 places for blocks of 128 keys");
    assert_eq!(keys(41, 41, 512, 64, Some(0)), (128, Reason::Cheapest));
    assert_eq!(keys(40, 40, 512, 96, Some(0)), (128, Reason::Cheapest), "there are no smaller ones");
}

/// Turing's blocks at headdim 64 have 192, 128 or 64 rows. The number of resident blocks decides.
#[test]
fn chooses_among_three_block_sizes_of_turing() {
    let rows = |batch, nheads, seqlen, headdim| {
        let a = Attention { batch, nheads, nheads_k: nheads, ..attention(seqlen, seqlen, headdim, headdim) };
        plan::forward(&a, &H200).unwrap().variant.block_rows
    };
    assert_eq!(rows(4, 32, 8192, 64), 192);
    assert_eq!(rows(1, 32, 2048, 64), 128, "512 blocks in two rounds of 264 instead of 352 in as many");
    assert_eq!(rows(1, 8, 512, 64), 64, "all resident");
    assert_eq!(rows(4, 32, 8192, 128), 256);
    assert_eq!(rows(1, 32, 2048, 128), 256);
    assert_eq!(rows(1, 16, 1024, 128), 128);
    assert_eq!(rows(1, 8, 512, 128), 64);
}

#[test]
fn plans_small_blocks_for_small_grids() {
    let blocks = |batch, nheads, seqlen, headdim, sms| {
        let a = Attention { batch, nheads, nheads_k: nheads, ..attention(seqlen, seqlen, headdim, headdim) };
        let s = plan::forward(&a, &DeviceLimits { sms, ..DeviceLimits::V100 }).unwrap();
        (s.variant.block_rows, s.blocks[0])
    };
    // 64 blocks of 64 rows fit 80 SMs, instead of 32 blocks of 128
    assert_eq!(blocks(1, 8, 512, 128, 80), (64, 8));
    assert_eq!(blocks(1, 8, 512, 64, 80), (64, 8));
    // exactly all resident, and one more: two blocks per SM at headdim 64, one at 128
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

#[test]
fn grids_cover_every_row() {
    for seqlen in [1, 31, 32, 127, 128, 129, 4096] {
        let a = attention(seqlen, seqlen + 5, 64, 64);
        let f = plan::forward(&a, &DeviceLimits::V100).unwrap();
        // one tile per block; a stream-K grid has the tiles of all heads and entries on one axis
        let [of_head, heads] = f.stream_k.map_or(f.blocks, |s| [(s.data_parallel_tiles + s.stream_k_tiles) / 16, 8]);
        assert_eq!((f.stream_k.is_some(), heads), (seqlen == 4096, 8));
        assert!((of_head * f.variant.block_rows) as i64 >= seqlen);
        assert!((((of_head - 1) * f.variant.block_rows) as i64) < seqlen);
        let b = plan::backward(&a, DEFAULT, &without_splits()).unwrap();
        assert_eq!(b.main.blocks[1], 2, "the grid of the backward pass has the key heads");
        assert!((b.main.blocks[0] * b.main.variant.block_rows) as i64 >= seqlen + 5);
        assert!(b.scratch_rows >= seqlen && b.scratch_rows % b.main.variant.step as i64 == 0);
        assert_eq!(b.prepare.is_none(), seqlen + 5 <= 64);
        assert!(b.prepare.is_none_or(|k| i64::from(k.blocks[0] * k.variant.block_rows) >= b.scratch_rows));
    }
}

#[test]
fn separate_dq_kernel_has_no_accumulator() {
    let own = tuned(&[], &[r#""pass": "Backward", "deterministic": true"#]);
    for headdim in [32, 64, 96, 128, 192, 256] {
        // enough heads for large blocks
        let a = Attention { nheads: 40, nheads_k: 20, ..attention(1000, 500, headdim, headdim) };
        let p = plan::backward(&a, DETERMINISTIC, &own).unwrap();
        assert_eq!((p.main.variant.pass, p.finish.unwrap().variant.pass), (Pass::BackwardDkDv, Pass::BackwardDq));
        assert_eq!((p.headdim_rounded, p.dq_accum_splits, p.main_launches), (0, 0, 1));
        assert_eq!((p.main.blocks[1], p.finish.unwrap().blocks[1]), (20, 40), "heads of keys, heads of queries");
        assert!((p.finish.unwrap().blocks[0] * p.finish.unwrap().variant.block_rows) as i64 >= 1000);
        // the same tiles of dk and dv, unless P and dS are stored
        let default = plan::backward(&a, DEFAULT, &DeviceLimits::V100).unwrap();
        if default.stored.is_none() {
            assert_eq!(p.main.blocks, default.main.blocks);
            assert_eq!(p.main.variant.shared_bytes, default.main.variant.shared_bytes);
        }
    }
}

/// If one block has all keys of a head, and it pays, the plan launches one kernel.
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
        assert_eq!((plan.prepare, plan.finish.is_none()), (None, true), "{a:?}");
        assert_eq!((plan.deterministic, plan.main_launches, plan.dq_accum_splits, plan.headdim_rounded), (true, 1, 0, 0));
        assert_eq!(plan.main.blocks, [1, a.nheads_k as u32]);
        assert!(plan.scratch_rows >= a.seqlen_q && plan.kernels().count() == 1);
        assert_eq!(plan, plan::backward(a, DETERMINISTIC, d).unwrap(), "one block adds in one order");
        plan.main.variant.name
    };
    let v100 = &DeviceLimits::V100;
    assert_eq!(name(&with(4, (64, 64), 64), v100), "volta_bwd_varlen_fused_64_small");
    assert_eq!(name(&with(1, (512, 1), 40), v100), "volta_bwd_varlen_fused_64_small");
    assert_eq!(name(&with(200, (128, 128), 128), v100), "volta_bwd_varlen_fused_128");
    assert_eq!(name(&with(200, (100, 64), 128), v100), "volta_bwd_varlen_fused_128_small");
    assert_eq!(name(&Attention { nheads_k: 1, ..with(4, (64, 64), 64) }, v100), "volta_bwd_varlen_fused_64_small");
    assert_eq!(name(&with(1, (128, 128), 64), &T4), "turing_bwd_varlen_fused_64");
    let packed = Some([100, 100]);
    assert_eq!(name(&stored(packed, with(3, (60, 60), 64)), v100), "volta_bwd_varlen_fused_64_small");
    // many rows need enough blocks to fill the GPU
    assert_eq!(name(&with(400, (4096, 64), 64), v100), "volta_bwd_varlen_fused_64_small");
    let in_parts = |a: Attention, d: &DeviceLimits| plan::backward(&a, DEFAULT, d).unwrap().kernels().count() >= 3;
    assert!(in_parts(with(8, (4096, 64), 64), v100));
    assert!(in_parts(Attention { nheads_k: 1, ..with(16, (64, 64), 64) }, v100));
    // one key too many; smaller blocks that fill the GPU; half of the columns padding
    assert!(in_parts(with(4, (64, 65), 64), v100) && in_parts(with(4, (64, 129), 64), &T4));
    assert!(in_parts(with(4, (128, 128), 128), v100));
    assert!(in_parts(with(4, (64, 64), 32), v100) && in_parts(with(4, (64, 64), 96), v100));
    // scores with modifiers
    let features = RequestedFeatures { dropout_p: 0.1, ..RequestedFeatures::default() };
    assert!(in_parts(Attention { features, ..with(4, (64, 64), 64) }, v100));
    // a tuning decides first: its choices and its failed kernels
    let a = || with(4, (64, 64), 64);
    assert!(in_parts(a(), &tuned(&[], &[r#""pass": "Backward", "variant": "volta_bwd_64""#])));
    assert!(in_parts(a(), &tuned(&["volta_bwd_varlen_fused_64_small"], &[])));
    let newer = DeviceLimits { capability: (9, 0), ..*v100 };
    assert_eq!(name(&a(), &newer), "turing_bwd_varlen_fused_64");
    assert!(in_parts(a(), &tuned_with(*COMPILED, &["turing_bwd_varlen_fused_64"], &[], newer)), "not Volta's");
    assert!(in_parts(a(), &tuned(&[], &[r#""pass": "Backward", "deterministic": true"#])));
    assert_eq!(
        name(&with(8, (4096, 64), 64), &tuned(&[], &[r#""pass": "BackwardFused", "variant": "volta_bwd_varlen_fused_64_small""#])),
        "volta_bwd_varlen_fused_64_small"
    );
    assert!(in_parts(with(8, (64, 65), 64), &tuned(&[], &[r#""pass": "BackwardFused", "variant": "volta_bwd_varlen_fused_64_small""#])));
}

/// A deterministic pass launches the main kernel several times, and each block of a launch has its own accumulator.
#[test]
fn deterministic_backward_takes_several_main_launches() {
    let heads = |nheads, a| Attention { batch: 1, nheads, nheads_k: nheads, ..a };
    let planned = |a: &Attention, d: &DeviceLimits| plan::backward(a, DETERMINISTIC, d).unwrap();
    for (nheads, seqlen, headdim, rounds, sums) in [
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
        let (p, default) = (planned(&a, &DeviceLimits::V100), plan::backward(&a, DEFAULT, &without_splits()).unwrap());
        assert_eq!((p.main_launches, p.dq_accum_splits, p.deterministic), (rounds, sums, true), "{a:?}");
        assert_eq!(p.main.blocks, [sums, nheads as u32], "one sum for each block of a launch");
        assert!(rounds * sums >= default.main.blocks[0] && (rounds - 1) * sums < default.main.blocks[0], "each block of keys once");
        let tail_blocks = p.tail.map(|tail| tail.kernel.blocks[0]);
        assert_eq!(p.tail.map(|tail| tail.first_block), default.tail.map(|tail| tail.first_block));
        assert!(tail_blocks.is_none_or(|n| n <= sums), "and one for each of the tail");
        let kernels = |p: &plan::BackwardPlan| parts(p).map(|k| k.variant.name);
        assert_eq!(kernels(&p), kernels(&default), "the same bits of dk and dv");
        assert_eq!((p.headdim_rounded, default.main_launches, default.dq_accum_splits), (default.headdim_rounded, 1, 1));
        let causal = planned(&Attention { window: Window { left: None, right: Some(0) }, ..a }, &DeviceLimits::V100);
        assert!(causal.main.blocks == [nheads as u32, causal.dq_accum_splits] || causal.dq_accum_splits == 0);
    }
    // few heads with many blocks would need more memory, or leave most of the GPU idle
    for a in [heads(1, attention(65536, 65536, 64, 64)), heads(4, attention(8192, 8192, 128, 128))] {
        assert_eq!(planned(&a, &DeviceLimits::V100).main.variant.pass, Pass::BackwardDkDv);
    }
    // under a narrow window each block meets few rows, so zeroing and adding accumulators of all rows would take most of the time
    let narrow = Attention { window: Window { left: Some(64), right: Some(0) }, ..heads(40, attention(8192, 8192, 64, 64)) };
    assert_eq!(planned(&narrow, &DeviceLimits::V100).dq_accum_splits, 0);
    // T4: Turing's kernels have no key block offset
    let t4 = DeviceLimits { capability: (7, 5), shared_bytes_per_block: 64 * 1024, ..DeviceLimits::V100 };
    assert_eq!(planned(&heads(40, attention(2048, 2048, 64, 64)), &t4).main.variant.pass, Pass::BackwardDkDv);
    // after a failed dq kernel, several launches at any cost
    let names = |pass: Pass| COMPILED.of(&VOLTA, pass).map(|v| v.name).collect::<Vec<_>>();
    assert!(planned(&narrow, &tuned(&names(Pass::BackwardDq), &[])).dq_accum_splits > 0);
}

/// Without a causal mask, small blocks compute the last keys if large blocks would need another wave.
#[test]
fn plans_small_blocks_for_last_keys() {
    let with = |nheads, seqlen, headdim| Attention { batch: 1, nheads, nheads_k: nheads, ..attention(seqlen, seqlen, headdim, headdim) };
    let planned = |a: &Attention| plan::backward(a, DEFAULT, &without_splits()).unwrap();
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
        Attention { window: Window { left: None, right: Some(0) }, ..with(32, 2048, 64) },
    ] {
        assert_eq!(planned(&whole).tail, None);
    }
    // the small blocks failed
    assert_eq!(
        plan::backward(&with(32, 2048, 64), DEFAULT, &tuned(&["volta_bwd_64_small", "volta_bwd_streamk_64"], &[])).unwrap().tail,
        None
    );
}

/// Plain kernels write fp16 only.
#[test]
fn fp32_gradients_get_kernels_that_write_bf16() {
    for mode in [DEFAULT, DETERMINISTIC] {
        for headdim in (8..=256).step_by(8) {
            for (features, packed, asked) in feature_requests() {
                let a = stored(packed, Attention { features, ..attention(100, 100, headdim, headdim) });
                let plan = plan::backward(&a, BackwardMode { fp32_gradients: true, ..mode }, &DeviceLimits::V100).unwrap();
                for v in [plan.main.variant, plan.finish.unwrap().variant] {
                    assert!(v.features.contains(FeatureSet::of(&[Feature::Fp32Gradients])), "{} for {features:?}", v.name);
                }
                let fp16 = plan::backward(&a, mode, &DeviceLimits::V100).unwrap();
                assert_eq!(plan.prepare, fp16.prepare, "writes no gradient");
                let prepared = asked.intersection(plan.main.variant.pass.info().features) != FeatureSet::NONE;
                assert!(!prepared || plan.main == fp16.main, "nothing else changes");
            }
        }
    }
}

#[test]
fn rejects_devices_without_kernels() {
    let a = attention(10, 10, 64, 64);
    let pascal = DeviceLimits { capability: (6, 1), ..DeviceLimits::V100 };
    let e = plan::forward(&a, &pascal).unwrap_err();
    assert!(e.message.contains("6.1") && e.message.contains("7.0"), "{e}");
    let turing = T4;
    for headdim in [64, 128, 256] {
        // with less shared memory a plan fits, or the error gives the reason
        match plan::backward(&attention(10, 10, headdim, headdim), DEFAULT, &turing) {
            Ok(p) => assert!(p.main.variant.shared_bytes <= turing.shared_bytes_per_block),
            Err(e) => assert!(e.message.contains("shared memory"), "{e}"),
        }
    }
}

#[test]
fn splits_huge_batches_into_launches() {
    let chunks: Vec<_> = plan::batch_chunks(150_000).collect();
    assert_eq!(chunks, [(0, 65535), (65535, 65535), (131_070, 18_930)]);
    assert_eq!(plan::batch_chunks(3).collect::<Vec<_>>(), [(0, 3)]);
}

#[test]
fn fills_problem_parameters() {
    let mut a = attention(100, 130, 64, 64);
    let p = plan::problem_block(&a, 2);
    assert_eq!((p.window_left, p.window_right, p.sign_flip), (230, 230, 0));
    a.window = Window { left: Some(i64::MAX), right: Some(0) };
    a.softmax_scale = -0.25;
    let p = plan::problem_block(&a, 2);
    assert_eq!((p.window_left, p.window_right, p.sign_flip, p.scale), (230, 0, 0x8000_8000, 0.25));
    a.softmax_scale = 0.0;
    assert!(plan::problem_block(&a, 2).scale > 0.0);
}

fn described(dtype: DType, sizes: &[i64]) -> TensorDesc {
    let strides = (1..=sizes.len()).map(|i| sizes[i..].iter().product()).collect::<Vec<i64>>().into();
    TensorDesc { dtype, device: Device::Cuda(0), sizes: sizes.into(), strides }
}

/// max_seqlen may exceed the problem: grids cover the actual rows, and all bounds fit int32.
#[test]
fn max_seqlen_does_not_enlarge_grids() {
    let cu = || Some(described(DType::Int32, &[4]));
    let (q, k) = (described(DType::Half, &[300, 8, 64]), described(DType::Half, &[500, 2, 64]));
    let longest = Some(1 << 30);
    let o = Options { cu_seqlens_q: cu(), cu_seqlens_k: cu(), max_seqlen_q: longest, max_seqlen_k: longest, ..Options::default() };
    let a = problem::validate(&q, &k, &k, &Options { window_left: -1, window_right: -1, ..o }, Backend::Kernels).unwrap();
    let block = plan::problem_block(&a, 3);
    assert_eq!((block.seqlen_q, block.seqlen_k, block.window_left, block.window_right), (300, 500, 800, 800));
    let forward = plan::forward(&a, &DeviceLimits::V100).unwrap();
    assert_eq!(forward.blocks[0], 300_u32.div_ceil(forward.variant.block_rows));
    let backward = plan::backward(&a, DEFAULT, &DeviceLimits::V100).unwrap();
    for (step, rows) in parts(&backward).into_iter().zip([320, 500, 300_u32]) {
        assert_eq!(step.blocks[0], rows.div_ceil(step.variant.block_rows), "{}", step.variant.name);
    }
}

/// Adds what masks add for a row, a key and a tile beyond the end, in the largest problem that validation accepts.
#[test]
fn bounds_of_longest_sequences_fit_int32() {
    let longest = described(DType::Half, &[1, (1 << 29) - 1, 1, 8]);
    let o = Options { window_left: -1, window_right: -1, ..Options::default() };
    let a = problem::validate(&longest, &longest, &longest, &o, Backend::Kernels).unwrap();
    let block = plan::problem_block(&a, 1);
    let (rows, keys, tile) = (i64::from(block.seqlen_q), i64::from(block.seqlen_k), 1024);
    let (low, high) = (keys - rows - i64::from(block.window_left), keys - rows + i64::from(block.window_right));
    for bound in [rows + tile + high, rows + tile + low, keys + tile - low, keys + tile - high, 4 * (keys - 1)] {
        assert!(i32::try_from(bound).is_ok(), "{bound}");
    }
    assert!(low <= 1 - rows && high >= keys - 1, "every row sees every key");
}

#[test]
fn kernel_names_are_unique_and_blocks_fit_gpus() {
    let mut names: Vec<_> = kernels::variants().map(|v| v.name).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
    for v in kernels::variants() {
        assert!(v.shared_bytes * v.blocks_per_sm <= v.family.shared_bytes, "{}", v.name);
        assert!(v.threads % 32 == 0 && v.threads <= 1024 && v.threads * v.blocks_per_sm <= v.family.threads, "{}", v.name);
        assert!(v.pass != Pass::Forward || v.step > 0, "{}", v.name);
        assert!(v.pass.info().features.contains(v.features), "{}: no problem asks for all that it covers", v.name);
    }
}

/// Checks the assumptions of device.rs and the kernels about a family's scratch layout.
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
            assert_eq!(
                all.len(),
                s.copy_distances.len() * 2 * s.group_rows as usize,
                "{}: each value has a place of its own",
                v.family.name
            );
            assert!(all.iter().all(|&at| at < s.group_floats), "{}", v.family.name);
            // kernels with key blocks step through queries
            assert!(v.pass.info().rows != RowKind::Keys || s.row_rounding % v.step == 0, "{}", v.name);
        }
    }
}

/// P and dS travel through memory for large headdims: in at most 128 MiB while the queries of a KV head leave room for one key tile.
#[test]
fn stores_scores_for_large_headdims() {
    const TILE: i64 = 128;
    let tiles = |rows: i64| (rows + TILE - 1) / TILE;
    let packed = |rows: i64| Some([rows, 3 * rows]);
    for (batch, nheads, nheads_k, seqlen_q, seqlen_k, total) in [
        (1, 32, 8, 2048, 2048, None),
        (3, 32, 8, 4096, 4096, None),
        (1, 1, 1, 16384, 16384, None),
        (2, 1, 1, 1, 1, None),
        (5000, 4, 4, 100, 129, None),
        (1, 16, 1, 131072, 1000, None),
        (70, 4, 2, 300, 900, packed(5000)),
        (1500, 4, 2, 300, 900, packed(5000)),
    ] {
        for (headdim, headdim_v) in [(512, 512), (264, 8), (64, 320)] {
            let a = stored(total, Attention { batch, nheads, nheads_k, ..attention(seqlen_q, seqlen_k, headdim, headdim_v) });
            let p = plan::backward(&a, DEFAULT, &DeviceLimits::V100).unwrap();
            assert_eq!(p, plan::backward(&a, DETERMINISTIC, &DeviceLimits::V100).unwrap(), "no atomics");
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
            let entries = if total.is_some() { 1 } else { entries.iter().map(|e| e.1).max().unwrap() };
            let of_key_tile = entries * nheads / nheads_k * s.query_tiles;
            assert!(s.heads * s.key_tiles * of_key_tile <= 2048 || (s.heads, s.key_tiles) == (1, 1), "{a:?}: {s:?}");
            // a sequence has its tiles after those of the sequences before it
            assert!(s.query_tiles >= if total.is_some() { seqlen_q / TILE + batch } else { tiles(seqlen_q) });
            let group = nheads / nheads_k;
            assert!(i64::from(p.main.blocks[0]) >= tiles(seqlen_q) * s.key_tiles);
            assert_eq!(i64::from(p.main.blocks[1]), s.heads * group);
            let columns = [tiles(headdim), tiles(headdim_v)];
            let gradients = s.key_tiles * (columns[0] + columns[1]) + group * tiles(seqlen_q) * columns[0];
            assert_eq!(p.finish.unwrap().blocks, [(s.heads * gradients) as u32, 1]);
        }
    }
}

/// Up to headdim 256, P and dS travel through memory where a family is faster so: with enough key tiles in a launch.
#[test]
fn stores_scores_where_that_is_faster() {
    let is_stored =
        |a: &Attention, d: &DeviceLimits| [DEFAULT, DETERMINISTIC].map(|mode| plan::backward(a, mode, d).unwrap().stored.is_some());
    let v100 = |a: Attention| is_stored(&a, &DeviceLimits::V100);
    for (headdim, headdim_v) in [(256, 256), (200, 200), (64, 256), (200, 8)] {
        for (seqlen_q, seqlen_k) in [(1, 1), (2048, 2048), (4096, 4096), (30_000, 129)] {
            let a = attention(seqlen_q, seqlen_k, headdim, headdim_v);
            assert_eq!(is_stored(&a, &T4), [false; 2]);
            assert_eq!(v100(a), [true; 2], "{headdim}/{headdim_v}, {seqlen_q}, {seqlen_k}");
        }
    }
    assert_eq!(v100(attention(2048, 2048, 192, 192)), [false; 2]);
    assert_eq!(v100(attention(32768, 32768, 256, 256)), [false; 2], "few key tiles");
    assert_eq!(v100(stored(Some([40_000, 40_000]), attention(4096, 4096, 256, 256))), [false; 2], "few key tiles");
    let features = RequestedFeatures { block_mask: true, ..Default::default() };
    assert_eq!(v100(Attention { features, ..attention(2048, 2048, 256, 256) }), [false; 2]);
}

/// The host adds a gradient of softmax_lse to what the preprocess kernel wrote, and a fused pass has none.
#[test]
fn gradient_of_lse_takes_separate_kernels() {
    let a = attention(64, 40, 64, 64);
    for device in [DeviceLimits::V100, T4] {
        assert!(plan::backward(&a, DEFAULT, &device).unwrap().prepare.is_none());
        assert!(plan::backward(&a, BackwardMode { has_dlse: true, ..DEFAULT }, &device).unwrap().prepare.is_some());
    }
}

/// Plain problems with a block mask add dq by atomics; generic ones, and the deterministic mode, have a separate dq kernel.
#[test]
fn block_masks_have_atomics_without_other_features() {
    let blocks = RequestedFeatures { block_mask: true, ..RequestedFeatures::default() };
    let generic = RequestedFeatures { alibi: true, ..blocks };
    for (features, mode, atomics) in [(blocks, DEFAULT, true), (blocks, DETERMINISTIC, false), (generic, DEFAULT, false)] {
        for (headdim, device) in [64, 128, 256].into_iter().flat_map(|d| [DeviceLimits::V100, T4].map(|device| (d, device))) {
            let a = Attention { features, ..attention(1000, 1000, headdim, headdim) };
            let plan = plan::backward(&a, mode, &device).unwrap();
            let (main, other) = if atomics { (Pass::Backward, Pass::BackwardPostprocess) } else { (Pass::BackwardDkDv, Pass::BackwardDq) };
            assert_eq!([plan.main.variant.pass, plan.finish.unwrap().variant.pass], [main, other], "{headdim}");
            assert_eq!((plan.deterministic, plan.main_launches), (!atomics, 1));
        }
    }
}

/// Kernels without block masks never run a problem with one, on no grid.
#[test]
fn block_masks_need_kernels_of_their_own() {
    let blocks = FeatureSet::of(&[Feature::Blocks]);
    let features = RequestedFeatures { block_mask: true, ..RequestedFeatures::default() };
    for (seqlen_q, seqlen_k) in [(2000, 2000), (64, 40), (4000, 9000)] {
        let a = Attention { features, ..attention(seqlen_q, seqlen_k, 128, 128) };
        for device in [DeviceLimits::V100, T4] {
            match plan::forward(&a, &device) {
                Ok(planned) => assert!(planned.variant.features.contains(blocks), "{}", planned.variant.name),
                Err(e) => assert!(e.message.contains("with block_mask"), "{e}"),
            }
            for mode in [DEFAULT, DETERMINISTIC] {
                match plan::backward(&a, mode, &device) {
                    // preprocess and postprocess kernels see no scores
                    Ok(plan) => {
                        let of_scores = plan.kernels().filter(|k| k.variant.pass.info().features.contains(blocks));
                        let names: Vec<_> = of_scores.filter(|k| !k.variant.features.contains(blocks)).map(|k| k.variant.name).collect();
                        assert!(names.is_empty(), "{names:?}");
                    }
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
        let packed = Some([total_q, 10]);
        let a = stored(packed, Attention { batch: lengths.len() as i64, ..attention(longest, 10, 64, 64) });
        let plan = plan::backward(&a, DEFAULT, &DeviceLimits::V100).unwrap();
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

// ---- made-up families beside Volta ---------------------------------------------------------------------------------------

const TURING: Family = Family {
    name: "made-up turing",
    sm: 75,
    native: &[75],
    shared_bytes: 64 * 1024,
    threads: 1024,
    scratch: None,
    either_order: &[],
    has_key_block_offset: false,
    stores_dbias: false,
    stored_above: 256,
};
const T4: DeviceLimits = DeviceLimits { capability: (7, 5), sms: 40, shared_bytes_per_block: 64 * 1024, only: None, tuning: None };
const H200: DeviceLimits = DeviceLimits { capability: (9, 0), sms: 132, shared_bytes_per_block: 227 * 1024, only: None, tuning: None };

/// Returns Volta's kernels after these tables, without other compiled families.
fn volta_and(tables: &[&[Variant]]) -> Kernels {
    let others = tables.iter().map(|rows| &*rows.to_vec().leak());
    let volta = COMPILED.0.iter().copied().filter(|table| table[0].family == VOLTA);
    Kernels(others.chain(volta).collect::<Vec<_>>().leak())
}

/// Returns Volta's kernel of this name as a kernel of another family.
fn like(name: &str, family: Family) -> Variant {
    Variant { family, ..*kernels::variants().find(|v| v.name == name).unwrap() }
}

fn chosen(plan: plan::PlannedKernel) -> (&'static str, &'static str) {
    (plan.variant.family.name, plan.variant.name)
}

#[test]
fn prefers_families_in_order() {
    let next = Family { name: "made-up ampere", sm: 80, native: &[80, 86], ..TURING };
    let named = |family| like("volta_fwd_64x64", family);
    let found = |kernels: Kernels, sm| kernels.families_for(sm).into_iter().map(|(f, code)| (f.name, code)).collect::<Vec<_>>();
    let [one, two, three] = [volta_and(&[]), volta_and(&[&[named(TURING)]]), volta_and(&[&[named(TURING)], &[named(next)]])];
    let (volta, turing, next) = (VOLTA.name, TURING.name, next.name);
    for sm in [60, 61, 69] {
        assert_eq!(found(three, sm), []);
    }
    for sm in [70, 72] {
        assert_eq!(found(three, sm), [(volta, Code::Cubin)]);
    }
    assert_eq!(found(two, 75), [(turing, Code::Cubin), (volta, Code::Ptx)]);
    assert_eq!(found(one, 80), [(volta, Code::Ptx)]);
    for sm in [80, 86, 90, 120] {
        assert_eq!(found(two, sm), [(turing, Code::Ptx), (volta, Code::Ptx)]);
    }
    for (sm, code) in [(80, Code::Cubin), (86, Code::Cubin), (89, Code::Ptx), (120, Code::Ptx)] {
        assert_eq!(found(three, sm), [(next, code), (turing, Code::Ptx), (volta, Code::Ptx)]);
    }
}

/// A family with only a forward pass computes that, if its kernel is applicable.
#[test]
fn chooses_forward_family_alone() {
    let kernels = volta_and(&[&[like("volta_fwd_64x64", TURING)]]);
    let family = |a: &Attention, d: &DeviceLimits| plan::forward_among(kernels, a, d).unwrap().variant.family.name;
    let a = attention(2000, 2000, 64, 64);
    for (device, expected) in [(T4, TURING.name), (H200, TURING.name), (DeviceLimits::V100, VOLTA.name)] {
        assert_eq!(family(&a, &device), expected);
        let backward = plan::backward_among(kernels, &a, DEFAULT, &device).unwrap();
        for kernel in parts(&backward) {
            assert_eq!(kernel.variant.family.name, "volta");
        }
        assert_eq!(backward.scratch, VOLTA.scratch.unwrap());
    }
    assert_eq!(family(&attention(2000, 2000, 40, 24), &T4), TURING.name, "padded");
    assert_eq!(family(&attention(2000, 2000, 72, 64), &T4), "volta");
    assert_eq!(family(&Attention { features: RequestedFeatures { sinks: true, ..a.features }, ..a }, &T4), "volta");
    assert_eq!(family(&a, &DeviceLimits { shared_bytes_per_block: 20 * 1024, ..T4 }), TURING.name, "18 KB");
}

/// The kernels of a backward pass share scratch memory, so a family that lacks one of them computes none.
#[test]
fn chooses_backward_kernels_from_one_family() {
    let scratch = Scratch {
        row_rounding: 16,
        group_rows: 2,
        group_floats: 4,
        neg_lse_offsets: &[0, 1],
        neg_delta_offsets: &[2, 3],
        copy_distances: &[0],
    };
    let turing = Family { scratch: Some(scratch), ..TURING };
    let mut rows: Vec<_> = ["volta_bwd_64", "volta_bwd_varlen_postprocess"].map(|name| like(name, turing)).to_vec();
    let a = attention(1000, 1000, 64, 64);
    let of = |rows: &[Variant], a: &Attention, mode| {
        let plan = plan::backward_among(volta_and(&[rows]), a, mode, &T4).unwrap();
        let names = parts(&plan).map(|k| k.variant.family.name);
        assert!(names.iter().all(|n| *n == names[0]), "{names:?}");
        assert_eq!(plan.scratch, plan.main.variant.family.scratch.unwrap());
        (names[0], plan.scratch_rows, plan.prepare.unwrap().blocks[0])
    };
    assert_eq!(of(&rows, &a, DEFAULT), ("volta", 1024, 16));
    rows.push(like("volta_bwd_varlen_preprocess", turing));
    assert_eq!(of(&rows, &a, DEFAULT), (TURING.name, 1008, 16));
    assert_eq!(of(&rows, &a, DETERMINISTIC).0, "volta", "it has no such kernels");
    let bf16 = BackwardMode { fp32_gradients: true, ..DEFAULT };
    assert_eq!(of(&rows, &a, bf16).0, "volta", "nor bf16");
}

#[test]
fn environment_restricts_families() {
    let kernels = volta_and(&[&[like("volta_fwd_64x64", TURING)]]);
    let only = |name: &str, device: DeviceLimits| DeviceLimits { only: kernels.families().find(|f| f.name == name), ..device };
    let a = Attention { nheads: 10, nheads_k: 10, ..attention(2000, 2000, 64, 64) }; // full waves
    let volta = plan::forward_among(kernels, &a, &only("volta", T4)).unwrap();
    assert_eq!(chosen(volta), ("volta", "volta_fwd_64x64"));
    assert_eq!(chosen(plan::forward_among(kernels, &a, &only(TURING.name, T4)).unwrap()).0, TURING.name);
    let e = plan::forward_among(kernels, &a, &only(TURING.name, DeviceLimits::V100)).unwrap_err();
    assert_eq!(
        e.message,
        "VOLTA_FA_FAMILY: got `made-up turing`, expected a kernel family that a GPU of compute capability 7.0 runs: volta"
    );
    let e = plan::backward_among(kernels, &a, DEFAULT, &only(TURING.name, T4)).unwrap_err();
    for part in ["turing", "headdim 64", "65536 bytes", "VOLTA_FA_FAMILY"] {
        assert!(e.message.contains(part) && !e.message.contains("volta kernels"), "{e}");
    }
}

/// A kernel of only the requested features is preferred to one with more, at any position in the tables.
#[test]
fn chooses_kernel_with_fewest_features() {
    let of_kernel = FeatureSet::of(&[Feature::Alibi, Feature::Sinks]);
    let two = Variant { name: "two", features: of_kernel, ..like("volta_fwd_generic_64x64", VOLTA) };
    let kernels = volta_and(&[&[two]]);
    let name = |features| {
        // full waves
        let a = Attention { nheads: 10, nheads_k: 10, features, ..attention(2000, 2000, 64, 64) };
        plan::forward_among(kernels, &a, &DeviceLimits::V100).unwrap().variant.name
    };
    let alibi = RequestedFeatures { alibi: true, ..RequestedFeatures::default() };
    assert_eq!(name(RequestedFeatures { sinks: true, ..alibi }), "two");
    assert_eq!(name(alibi), "volta_fwd_alibi_64x64");
    assert_eq!(name(RequestedFeatures::default()), "volta_fwd_64x64");
    assert_eq!(
        name(RequestedFeatures { sinks: true, ..RequestedFeatures::default() }),
        "volta_fwd_varlen_64x64",
        "features outside the loop cost less than one of scores"
    );
    for both in [RequestedFeatures { dropout_p: 0.5, ..alibi }, RequestedFeatures { seqused_k: true, ..alibi }] {
        assert_eq!(name(both), "volta_fwd_generic_64x64");
    }
    let biased = RequestedFeatures { attn_bias: true, ..RequestedFeatures::default() };
    let capped = RequestedFeatures { score_function: Some(ScoreFunction::Softcap(3.0)), ..alibi };
    assert_eq!(name(capped), "volta_fwd_generic_64x64");
    assert_eq!(name(RequestedFeatures { dropout_p: 0.5, ..biased }), "volta_fwd_bias_dropout_64x64");
    for other in [
        RequestedFeatures { attn_bias: true, ..capped },
        RequestedFeatures { sinks: true, ..capped },
        RequestedFeatures { score_function: Some(ScoreFunction::Softcap(3.0)), ..biased },
    ] {
        assert_eq!(name(other), "volta_fwd_generic_64x64");
    }
}

/// Volta's forward kernels of one or two features have no registers for an fp32 bias. All others with a bias read both types.
#[test]
fn fp32_bias_gets_kernels_that_read_it() {
    let [bias, fp32] = [Feature::Bias, Feature::Fp32Bias].map(|feature| FeatureSet::of(&[feature]));
    assert!(kernels::variants().all(|v| v.features.contains(bias) || !v.features.contains(fp32)), "a type without a bias");
    // the bias of fwd_fast is a boolean mask
    let of_fp16: Vec<_> =
        kernels::variants().filter(|v| v.features.contains(bias) && !v.features.contains(fp32) && v.pass != Pass::FastForward).collect();
    let of_pass = |pass| of_fp16.iter().filter(|v| v.pass == pass && v.required_features.contains(bias)).count();
    assert_eq!((of_fp16.len(), of_pass(Pass::Forward), of_pass(Pass::ForwardStreamK)), (6, 4, 2), "{of_fp16:?}");
    for (dropout_p, headdim) in [(0.0, 64), (0.5, 64), (0.0, 128), (0.5, 128)] {
        let [(half, on_t4), (float, float_on_t4)] = [false, true].map(|fp32_bias| {
            let features = RequestedFeatures { attn_bias: true, fp32_bias, dropout_p, ..RequestedFeatures::default() };
            let a = Attention { features, ..attention(2000, 2000, headdim, headdim) };
            assert_eq!(plan::features(&a, DEFAULT).contains(bias.union(fp32)), fp32_bias);
            let name = |d| plan::forward(&a, d).unwrap().variant.name;
            (name(&DeviceLimits::V100), name(&T4))
        });
        assert!(of_fp16.iter().any(|v| v.name == half));
        assert_eq!(float, format!("volta_fwd_generic_{headdim}x{headdim}"));
        assert_eq!(on_t4, float_on_t4);
    }
}

/// `bias` in a tuning means an fp16 bias. An fp32 bias needs `fp32_bias` too.
#[test]
fn tuning_choice_for_bias_names_its_type() {
    let of = |names: &str| format!(r#""pass": "Forward", "features": [{names}], "variant": "volta_fwd_generic_96x96""#);
    let reason = |names: &str, fp32_bias| {
        let features = RequestedFeatures { attn_bias: true, fp32_bias, ..RequestedFeatures::default() };
        forward_of(&Attention { features, ..attention(2000, 2000, 64, 64) }, &tuned(&[], &[&of(names)])).1
    };
    let (half, float) = (r#""bias""#, r#""fp32_bias", "bias""#);
    assert_eq!((reason(half, false), reason(half, true)), (Reason::Tuned, Reason::Cheapest));
    assert_eq!((reason(float, false), reason(float, true)), (Reason::StreamK, Reason::Tuned));
}

/// A kernel with required features never computes a problem without them.
#[test]
fn plans_kernels_only_with_required_features() {
    let of_kernel = FeatureSet::of(&[Feature::Alibi]);
    let alibi = Variant { name: "alibi", features: of_kernel, required_features: of_kernel, ..like("volta_fwd_64x64", VOLTA) };
    let name = |kernels, features| {
        let a = Attention { features, ..attention(2000, 2000, 64, 64) };
        plan::forward_among(kernels, &a, &DeviceLimits::V100).map(|planned| planned.variant.name)
    };
    let alone: &'static [&'static [Variant]] = Vec::leak(vec![&*Vec::leak(vec![alibi])]);
    assert_eq!(name(Kernels(alone), RequestedFeatures { alibi: true, ..RequestedFeatures::default() }).unwrap(), "alibi");
    assert!(name(Kernels(alone), RequestedFeatures::default()).is_err());
}

/// VOLTA_FA_ENABLE_SDPA=1 enables devices with complete native families only; `force` enables newer ones.
#[test]
fn serves_devices_with_complete_native_families() {
    let served = |kernels: Kernels, newer_too| [61, 70, 72, 75, 86, 90].map(|sm| kernels.serve(sm, newer_too));
    let volta = [false, true, true, false, false, false];
    assert_eq!(served(volta_and(&[]), false), volta);
    assert_eq!(served(volta_and(&[]), true), [false, true, true, true, true, true]);
    assert_eq!(served(volta_and(&[&[like("volta_fwd_64x64", TURING)]]), false), volta, "one kernel is no family");
    let whole = |family: Family, without: &str| {
        // nor its like of headdim 512, which would stand in for it
        let is_there = |v: &&Variant| v.name.replace("_small", "").replace("512x512", "256x256") != without;
        let rows = volta_and(&[]).variants().filter(is_there).map(|v| Variant { family, ..*v });
        served(volta_and(&[&rows.collect::<Vec<_>>()]), false)
    };
    let turing = Family { shared_bytes: 96 * 1024, ..TURING };
    assert_eq!(whole(turing, ""), [false, true, true, true, false, false]);
    for missing in ["volta_fwd_generic_256x256", "volta_bwd_generic_256", "volta_bwd_varlen_postprocess", "volta_bwd_generic_dq_256"] {
        assert_eq!(whole(turing, missing), volta, "without {missing}");
    }
    assert_eq!(whole(TURING, ""), volta, "in 64 KB it would not fit");
}

#[test]
fn feature_sets_follow_set_algebra() {
    let [a, b] = [FeatureSet::of(&[Feature::Alibi, Feature::Sinks]), FeatureSet::of(&[Feature::Sinks])];
    assert!(a.contains(b) && !b.contains(a) && b.contains(FeatureSet::NONE) && a.contains(a));
    assert_eq!((a.count(), a.without(b), a.intersection(b), b.union(a)), (2, FeatureSet::of(&[Feature::Alibi]), b, a));
    assert_eq!(a.iter().collect::<Vec<_>>(), [Feature::Sinks, Feature::Alibi]);
    let mut names = Feature::ALL.map(Feature::name).to_vec();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), Feature::ALL.len());
    assert_eq!(FeatureSet::of(&Feature::ALL).count() as usize, Feature::ALL.len());
}

// ---- tunings -------------------------------------------------------------------------------------------------------------

/// Returns a device with a tuning of these failed kernels and choices. Each choice is the inside of a JSON object.
fn tuned_with(kernels: Kernels, failed: &[&str], choices: &[&str], d: DeviceLimits) -> DeviceLimits {
    let failed: Vec<_> = failed.iter().map(|name| format!("\"{name}\"")).collect();
    let choices: Vec<_> = choices.iter().map(|choice| format!("{{{choice}}}")).collect();
    let text = format!(r#"{{"format": 1, "failed": [{}], "choices": [{}]}}"#, failed.join(","), choices.join(","));
    DeviceLimits { tuning: Some(Box::leak(Box::new(Tuning::parse(&text, kernels).unwrap()))), ..d }
}

fn tuned(failed: &[&str], choices: &[&str]) -> DeviceLimits {
    tuned_with(*COMPILED, failed, choices, DeviceLimits::V100)
}

/// Returns a V100 without stream-K kernels of the backward pass, whose grids have a block for each key block.
fn without_splits() -> DeviceLimits {
    tuned(&["volta_bwd_streamk_64", "volta_bwd_streamk_128"], &[])
}

fn forward_of(a: &Attention, d: &DeviceLimits) -> (&'static str, Reason) {
    let planned = plan::forward(a, d).unwrap();
    (planned.variant.name, planned.reason)
}

fn backward_of(a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> ([&'static str; 3], bool) {
    let plan = plan::backward(a, mode, d).unwrap();
    assert_eq!(plan.headdim_rounded == 0, plan.dq_accum_splits == 0, "an accumulator where there are sums");
    assert_eq!(plan.dq_accum_splits == 0, plan.main.variant.pass == Pass::BackwardDkDv);
    assert!(plan.deterministic || !mode.deterministic, "what is asked for is kept");
    (parts(&plan).map(|k| k.variant.name), plan.deterministic)
}

/// Returns many different problems.
fn problems() -> impl Iterator<Item = Attention> {
    let headdims = (8..=256).step_by(8).map(|d| (d, d)).chain([(192, 128), (40, 200)]);
    let shapes = headdims.flat_map(|(d, v)| [(64, 2), (1000, 16)].map(|(seqlen, nheads)| (d, v, seqlen, nheads)));
    shapes.flat_map(|(d, v, seqlen, nheads)| {
        feature_requests().map(|(features, packed, _)| {
            stored(packed, Attention { nheads, nheads_k: nheads, features, ..attention(seqlen, seqlen, d, v) })
        })
    })
}

#[test]
fn empty_tuning_changes_no_plan() {
    let empty = tuned(&[], &[]);
    for a in problems() {
        assert_eq!(plan::forward(&a, &empty).unwrap(), plan::forward(&a, &DeviceLimits::V100).unwrap());
        for mode in [DEFAULT, DETERMINISTIC] {
            assert_eq!(plan::backward(&a, mode, &empty).unwrap(), plan::backward(&a, mode, &DeviceLimits::V100).unwrap());
        }
    }
}

#[test]
fn takes_tuning_choices_for_their_class() {
    let d = tuned(
        &[],
        &[r#""pass": "Forward", "headdim": [64, 64], "seqlen_q": [100, 1000], "rows": [2000, 16000], "variant": "volta_fwd_128x128""#],
    );
    let own = |a: &Attention| assert_eq!(plan::forward(a, &d).unwrap(), plan::forward(a, &DeviceLimits::V100).unwrap());
    let forced = |a: &Attention| assert_eq!(forward_of(a, &d), ("volta_fwd_128x128", Reason::Tuned));
    // batch 2, 8 heads
    for seqlen in [125, 999, 1000] {
        forced(&attention(seqlen, 5, 64, 64));
        forced(&attention(seqlen, 5, 64, 128));
    }
    for a in [attention(124, 5, 64, 64), attention(1001, 5, 64, 64), attention(500, 5, 56, 64), attention(500, 5, 72, 64)] {
        own(&a);
    }
    own(&Attention { nheads: 16, ..attention(501, 5, 64, 64) });
    // and a feature that the kernel lacks
    own(&Attention {
        features: RequestedFeatures { score_function: Some(ScoreFunction::Softcap(1.0)), ..RequestedFeatures::default() },
        ..attention(500, 5, 64, 64)
    });
}

/// `rows` counts actual rows, not max_seqlen times batch.
#[test]
fn counts_actual_rows_of_packed_tensors() {
    let d = tuned(&[], &[r#""pass": "Forward", "rows": [2000, 2000], "variant": "volta_fwd_generic_96x96""#]);
    for (total_q, expected) in [(249, false), (250, true), (1000, false)] {
        let a = stored(Some([total_q, 9]), attention(125, 5, 64, 64));
        assert_eq!(forward_of(&a, &d).1 == Reason::Tuned, expected, "{total_q}");
    }
}

#[test]
fn tuning_classes_select_mask_and_features() {
    let causal = tuned(&[], &[r#""pass": "Forward", "is_causal": true, "variant": "volta_fwd_generic_96x96""#]);
    let full = tuned(&[], &[r#""pass": "Forward", "is_causal": false, "variant": "volta_fwd_generic_96x96""#]);
    let plain = tuned(&[], &[r#""pass": "Forward", "features": [], "variant": "volta_fwd_generic_96x96""#]);
    let alibi = tuned(&[], &[r#""pass": "Forward", "features": ["alibi"], "variant": "volta_fwd_generic_96x96""#]);
    let windows = [(None, Some(0)), (None, None), (Some(9), Some(0)), (None, Some(3))];
    for (i, (left, right)) in windows.into_iter().enumerate() {
        let a = Attention { window: Window { left, right }, ..attention(500, 500, 64, 64) };
        let is_tuned = [causal, full, plain, alibi].map(|d| forward_of(&a, &d).1 == Reason::Tuned);
        assert_eq!(is_tuned, [i == 0, i == 1, true, false]);
        let a = Attention { features: RequestedFeatures { alibi: true, ..a.features }, ..a };
        assert_eq!([plain, alibi].map(|d| forward_of(&a, &d).1 == Reason::Tuned), [false, true]);
    }
}

/// The first applicable choice wins.
#[test]
fn skips_inapplicable_tuning_choices() {
    let any = |name: &str| format!(r#""pass": "Forward", "variant": "{name}""#);
    let choices = ["volta_fwd_32x32", "volta_fwd_64x64", "volta_fwd_96x96", "volta_fwd_generic_64x64"].map(any);
    let d = tuned(&["volta_fwd_64x64"], &choices.each_ref().map(String::as_str));
    let name = |headdim, features| forward_of(&Attention { features, ..attention(900, 900, headdim, headdim) }, &d).0;
    let (plain, alibi) = (RequestedFeatures::default(), RequestedFeatures { alibi: true, ..RequestedFeatures::default() });
    assert_eq!(name(32, plain), "volta_fwd_32x32");
    assert_eq!(name(64, plain), "volta_fwd_96x96", "volta_fwd_64x64 failed");
    assert_eq!(name(64, alibi), "volta_fwd_generic_64x64");
    assert_eq!(name(104, plain), plan::forward(&attention(900, 900, 104, 104), &DeviceLimits::V100).unwrap().variant.name);
    let bytes = kernels::variants().find(|v| v.name == "volta_fwd_96x96").unwrap().shared_bytes;
    let little = DeviceLimits { shared_bytes_per_block: bytes - 1, ..d };
    assert_ne!(forward_of(&attention(900, 900, 64, 64), &little).0, "volta_fwd_96x96", "does not fit");
}

#[test]
fn tuned_kernel_selects_its_family() {
    let named = |name, like: Variant| Variant { name, ..like };
    let turing = Family { scratch: VOLTA.scratch, ..TURING };
    let rows = [
        named("forward", like("volta_fwd_64x64", turing)),
        named("prepare", like("volta_bwd_varlen_preprocess", turing)),
        named("main", like("volta_bwd_64", turing)),
        named("finish", like("volta_bwd_varlen_postprocess", turing)),
    ];
    let kernels = volta_and(&[&rows]);
    // enough heads for large blocks
    let a = Attention { nheads: 40, nheads_k: 40, ..attention(1000, 1000, 64, 64) };
    let backward = |d: &DeviceLimits| {
        let plan = plan::backward_among(kernels, &a, DEFAULT, d).unwrap();
        parts(&plan).map(|k| k.variant.name)
    };
    assert_eq!(backward(&T4), ["prepare", "main", "finish"]);
    let d = tuned_with(
        kernels,
        &[],
        &[r#""pass": "Backward", "variant": "volta_bwd_96""#, r#""pass": "Forward", "variant": "volta_fwd_128x128""#],
        H200,
    );
    assert_eq!(backward(&d), ["volta_bwd_varlen_preprocess", "volta_bwd_96", "volta_bwd_varlen_postprocess"]);
    assert_eq!(plan::forward_among(kernels, &a, &d).unwrap().variant.name, "volta_fwd_128x128");
    // not if the family is excluded or does not run on the device
    let only = DeviceLimits { only: kernels.families().find(|f| f.name == TURING.name), ..d };
    assert_eq!(backward(&only), ["prepare", "main", "finish"]);
    let d = tuned_with(kernels, &[], &[r#""pass": "Backward", "variant": "main""#], DeviceLimits::V100);
    assert_eq!(backward(&d), ["volta_bwd_varlen_preprocess", "volta_bwd_64", "volta_bwd_varlen_postprocess"]);
    // a stream-K kernel takes the others with it, unless the tuning chooses a main kernel too
    let stream_k = r#""pass": "BackwardStreamK", "variant": "volta_bwd_streamk_64""#;
    let d = tuned_with(kernels, &[], &[stream_k], H200);
    assert_eq!(backward(&d), ["volta_bwd_varlen_preprocess", "volta_bwd_streamk_64", "volta_bwd_varlen_postprocess"]);
    let d = tuned_with(kernels, &[], &[stream_k, r#""pass": "Backward", "variant": "main""#], H200);
    assert_eq!(backward(&d), ["prepare", "main", "finish"]);
    // after one failure, all kernels of the other family
    let d = tuned_with(kernels, &["prepare"], &[], H200);
    assert_eq!(backward(&d), ["volta_bwd_varlen_preprocess", "volta_bwd_64", "volta_bwd_varlen_postprocess"]);
    let plan = plan::backward_among(kernels, &a, DEFAULT, &d).unwrap();
    assert_eq!(plan.main.reason, Reason::FailedAvoided);
}

#[test]
fn tuning_removes_atomics_but_never_adds_them() {
    let d = tuned(&[], &[r#""pass": "Backward", "headdim": [64, 64], "deterministic": true"#]);
    let without = ["volta_bwd_varlen_preprocess", "volta_bwd_dkdv_64", "volta_bwd_varlen_dq_64"];
    let a = Attention { nheads: 40, nheads_k: 40, ..attention(1000, 1000, 64, 64) };
    assert_eq!(backward_of(&a, DEFAULT, &d), (without, true));
    assert_eq!(backward_of(&a, DETERMINISTIC, &d), (without, true));
    assert!(!backward_of(&attention(1000, 1000, 72, 72), DEFAULT, &d).1);
    assert_eq!(plan::backward(&a, DEFAULT, &d).unwrap().main.reason, Reason::TunedMode);
    // a kernel with atomics, in deterministic mode
    let atomics = tuned(&[], &[r#""pass": "Backward", "variant": "volta_bwd_128""#]);
    assert_eq!(
        backward_of(&a, DEFAULT, &atomics),
        (["volta_bwd_varlen_preprocess", "volta_bwd_128", "volta_bwd_varlen_postprocess"], false)
    );
    assert_eq!(
        backward_of(&a, DETERMINISTIC, &atomics),
        (["volta_bwd_varlen_preprocess", "volta_bwd_128", "volta_bwd_varlen_postprocess"], true)
    );
    assert!(plan::backward(&a, DETERMINISTIC, &atomics).unwrap().dq_accum_splits > 0);
    // both kinds of choice at once
    let both = tuned(&[], &[r#""pass": "BackwardDq", "variant": "volta_bwd_dq_96""#, r#""pass": "Backward", "deterministic": true"#]);
    assert_eq!(backward_of(&a, DEFAULT, &both).0, ["volta_bwd_varlen_preprocess", "volta_bwd_dkdv_64", "volta_bwd_dq_96"]);
}

/// Plans avoid each failed kernel, even if a choice names it. Else an error names the kernel.
#[test]
fn never_plans_failed_kernels() {
    let all: Vec<_> = problems().collect();
    for failed in kernels::variants().filter(|v| v.family == VOLTA) {
        let choice = format!(r#""pass": "{:?}", "variant": "{}""#, failed.pass, failed.name);
        let d = tuned(&[failed.name], &[&choice]);
        for a in all.iter().filter(|a| a.headdim <= failed.headdim as i64) {
            let named = |e: volta_fa::error::Error| assert!(e.message.contains(failed.name), "{e}");
            match plan::forward(a, &d) {
                Ok(k) => assert_ne!(k.variant.name, failed.name),
                Err(e) => named(e),
            }
            for mode in [DEFAULT, DETERMINISTIC] {
                match plan::backward(a, mode, &d) {
                    Ok(p) => assert!(p.kernels().all(|k| k.variant.name != failed.name)),
                    Err(e) => named(e),
                }
            }
        }
    }
    let merge = plan::merge(&MergedStates { batch: 1, seqlen_q: 1, nheads: 1, headdim_v: 8 }, &tuned(&["volta_merge"], &[])).unwrap_err();
    assert!(merge.message.contains("volta_merge"), "{merge}");
}

#[test]
fn replaces_failed_kernels() {
    let a = attention(900, 900, 64, 64);
    assert_eq!(forward_of(&a, &tuned(&["volta_fwd_64x64"], &[])), ("volta_fwd_64x64_small", Reason::FailedAvoided));
    let small = attention(64, 64, 64, 64);
    assert_eq!(forward_of(&small, &DeviceLimits::V100), ("volta_fwd_64x64_small", Reason::Resident));
    assert_eq!(forward_of(&small, &tuned(&["volta_fwd_64x64_small"], &[])), ("volta_fwd_64x64", Reason::Cheapest));
    assert_eq!(backward_of(&a, DEFAULT, &tuned(&["volta_bwd_64"], &[])).0[1], "volta_bwd_64_small");
    assert_eq!(backward_of(&a, DEFAULT, &tuned(&["volta_bwd_64", "volta_bwd_64_small"], &[])).0[1], "volta_bwd_varlen_64");
    // if all kernels with atomics failed, kernels without; if those failed, an error, because the mode excludes atomics
    let of = |pass: Pass| COMPILED.of(&VOLTA, pass).map(|v| v.name).collect::<Vec<_>>();
    let no_atomics = tuned(&of(Pass::Backward), &[]);
    assert_eq!(
        backward_of(&a, DEFAULT, &no_atomics),
        (["volta_bwd_varlen_preprocess", "volta_bwd_dkdv_64_small", "volta_bwd_varlen_dq_64"], true)
    );
    assert_eq!(
        backward_of(&a, DETERMINISTIC, &no_atomics),
        (["volta_bwd_varlen_preprocess", "volta_bwd_dkdv_64_small", "volta_bwd_varlen_dq_64"], true)
    );
    let neither = [of(Pass::Backward), of(Pass::BackwardDq)].concat();
    let e = plan::backward(&attention(900, 900, 72, 72), DETERMINISTIC, &tuned(&neither, &[])).unwrap_err();
    assert!(e.message.contains("volta_bwd_dq_96") && !e.message.contains("volta_bwd_varlen_dq_64"), "{e}");
}

#[test]
fn rejects_invalid_tuning_with_its_location() {
    let choice = |inside: &str| format!(r#"{{"format": 1, "choices": [{{{inside}}}]}}"#);
    let long =
        format!(r#"{{"format": 1, "choices": [{}]}}"#, vec![r#"{"pass": "Backward", "deterministic": true}"#; MAX_CHOICES + 1].join(","));
    for (text, expected) in [
        ("nonsense".into(), "tuning: got expected"),
        ("[1]".into(), "tuning: got"),
        (r#"{"choices": []}"#.into(), "missing field `format`"),
        (r#"{"format": 2}"#.into(), "tuning: format: got 2, expected 1"),
        (r#"{"format": 1, "more": 1}"#.into(), "unknown field `more`"),
        (r#"{"format": 1, "failed": ["nosuch"]}"#.into(), "tuning: failed: got `nosuch`, expected a kernel of this build"),
        (long, "tuning: choices: got 513 of them, expected 512 at most"),
        (choice(r#""pass": "Sideways", "variant": "volta_fwd_64x64""#), "tuning: choices[0].pass: got `Sideways`, expected Forward, "),
        (choice(r#""pass": "Forward", "variant": "nosuch""#), "tuning: choices[0].variant: got `nosuch`"),
        (choice(r#""pass": "Forward", "variant": "volta_bwd_64""#), "expected a kernel of pass Forward"),
        (choice(r#""pass": "Forward", "variant": "volta_fwd_64x64", "headdim": [65, 70]"#), "with the headdims and features of the class"),
        (choice(r#""pass": "Forward", "variant": "volta_fwd_64x64", "features": ["bias"]"#), "with the headdims and features of the class"),
        (
            choice(r#""pass": "Forward", "variant": "volta_fwd_bias_64x64", "features": ["bias", "fp32_bias"]"#),
            "with the headdims and features of the class",
        ),
        (
            choice(r#""pass": "Forward", "variant": "volta_fwd_64x64", "features": ["fp32_gradients"]"#),
            "choices[0].features: got `fp32_gradients`",
        ),
        (choice(r#""pass": "Forward", "variant": "volta_fwd_64x64", "rows": [2, 1]"#), "tuning: choices[0].rows: got [2, 1]"),
        (choice(r#""pass": "Forward", "variant": "volta_fwd_64x64", "rows": [-1, 1]"#), "tuning: choices[0].rows: got [-1, 1]"),
        (choice(r#""pass": "Forward", "deterministic": true"#), "choices[0].deterministic: got true for pass Forward"),
        (choice(r#""pass": "Backward", "deterministic": false"#), "choices[0].deterministic: got false for pass Backward"),
        (choice(r#""pass": "Backward""#), "choices[0]: got neither, expected either `variant` or `deterministic`"),
        (choice(r#""pass": "Backward", "variant": "volta_bwd_64", "deterministic": true"#), "choices[0]: got both"),
    ] {
        let e = Tuning::parse(&text, *COMPILED).expect_err(&text);
        assert!(e.kind == ErrorKind::Value && e.message.contains(expected), "{text}: {e}");
    }
}

#[test]
fn rejects_tuning_of_another_gpu() {
    let card = Card { device: "Tesla V100-SXM2-16GB".into(), driver: "580.159.04".into(), volta_fa: "0.1.0".into() };
    assert_eq!(card.file_name(), "Tesla_V100_SXM2_16GB-580.159.04-0.1.0.json");
    assert_eq!(Card { device: "../a b/\u{e9}".into(), ..card.clone() }.file_name(), ".._a_b__-580.159.04-0.1.0.json");
    let text = r#"{"format": 1, "volta_fa": "0.1.0", "device": "Tesla V100-SXM2-16GB", "driver": "580.159.04", "note": {"any": [1]}}"#;
    Tuning::parse(text, *COMPILED).unwrap().check_made_on(&card).unwrap();
    for (from, to, expected) in [
        ("SXM2", "PCIE", "tuning: device: got `Tesla V100-PCIE-16GB`, expected `Tesla V100-SXM2-16GB`"),
        ("580.", "470.", "tuning: driver: got `470.159.04`"),
        ("0.1.0", "0.0.9", "tuning: volta_fa: got `0.0.9`"),
        (r#""driver": "580.159.04", "#, "", "tuning: driver: got nothing"),
    ] {
        let e = Tuning::parse(&text.replace(from, to), *COMPILED).unwrap().check_made_on(&card).unwrap_err();
        assert!(e.message.contains(expected), "{e}");
    }
}

#[test]
fn names_tuning_choices_unusable_on_a_device() {
    let text = r#"{"format": 1, "choices": [
        {"pass": "Forward", "variant": "turing_fwd_64x64"},
        {"pass": "Forward", "variant": "volta_fwd_128x128"},
        {"pass": "Backward", "deterministic": true}]}"#;
    let usable = |d: &DeviceLimits| Tuning::parse(text, *COMPILED).unwrap().usable_on(*COMPILED, d.sm(), d.shared_bytes_per_block);
    let (tuning, refused) = usable(&DeviceLimits::V100);
    assert_eq!((tuning.choices(), refused.len()), (2, 1));
    assert!(refused[0].contains("turing_fwd_64x64") && refused[0].contains("family turing"), "{refused:?}");
    assert_eq!(usable(&H200).0.choices(), 3);
    let (tuning, refused) = usable(&DeviceLimits { shared_bytes_per_block: 40 * 1024, ..H200 });
    assert_eq!((tuning.choices(), refused.len()), (2, 1));
    assert!(refused[0].contains("volta_fwd_128x128") && refused[0].contains("of 40960"), "{refused:?}");
}

/// Prefill has the same shape, and stream-K kernels of its own.
#[test]
fn prefill_ignores_stream_k_choices() {
    let d = tuned(&[], &[r#""pass": "ForwardStreamK", "variant": "volta_fwd_streamk_64x64""#]);
    let a = Attention { nheads: 6, nheads_k: 6, ..attention(2048, 2048, 64, 64) };
    assert_eq!(forward_of(&a, &d), ("volta_fwd_streamk_64x64", Reason::Tuned));
    assert_ne!(plan::prefill(&a, &d).unwrap().variant.pass, Pass::ForwardStreamK);
}

/// Splits of a key block have consecutive numbers and steps, up to the last query that sees one of its keys. Longer ones start first.
#[test]
fn backward_stream_k_splits_cover_all_steps_once() {
    let window = |left, right| Window { left, right };
    let problems = [
        Attention { nheads: 32, nheads_k: 8, ..attention(2048, 2048, 64, 64) },
        Attention { nheads: 32, nheads_k: 8, window: window(None, Some(0)), ..attention(4096, 4096, 128, 128) },
        Attention { nheads: 12, nheads_k: 2, window: window(None, Some(0)), ..attention(1000, 1300, 64, 64) },
        Attention { nheads: 12, nheads_k: 2, window: window(Some(200), Some(3)), ..attention(1300, 1000, 128, 128) },
    ];
    for a in problems.map(|a| Attention { batch: 1, ..a }) {
        let d = tuned(&[], &[&format!(r#""pass": "BackwardStreamK", "variant": "volta_bwd_streamk_{}""#, a.headdim)]);
        let main = plan::backward(&a, DEFAULT, &d).unwrap().main;
        let (plan, v) = (main.backward_stream_k.unwrap(), main.variant);
        let schedule = plan.schedule();
        assert_eq!((main.blocks, main.grid(1)[2]), ([a.nheads_k as u32, schedule.splits.len() as u32], 1));
        assert!(schedule.splits.windows(2).all(|pair| pair[0].end - pair[0].first >= pair[1].end - pair[1].first));
        let is_visible = |i: i64, j: i64| {
            let place = i + a.seqlen_k - a.seqlen_q;
            j < a.seqlen_k && a.window.left.is_none_or(|left| j >= place - left) && a.window.right.is_none_or(|right| j <= place + right)
        };
        for block in 0..plan.key_blocks {
            let keys = || (0..v.block_rows).map(|key| i64::from(block * v.block_rows + key));
            let rows: Vec<_> = (0..a.seqlen_q).filter(|&i| keys().any(|j| is_visible(i, j))).collect();
            let step = i64::from(v.step);
            let steps = rows.first().map_or(0, |first| (rows[rows.len() - 1] + step - first / step * step) / step);
            let mut splits: Vec<_> = schedule.splits.iter().filter(|split| u32::from(split.tile) == block).collect();
            splits.sort_by_key(|split| split.part);
            assert_eq!((splits[0].first, i64::from(splits[splits.len() - 1].end)), (0, steps * a.nheads / a.nheads_k), "{a:?} {block}");
            assert!(splits.windows(2).all(|pair| pair[0].end == pair[1].first && pair[0].end > pair[0].first));
            assert!(splits.iter().enumerate().all(|(i, split)| split.part == i as u16 * 256 + splits.len() as u16));
            let is_in_scratch = (schedule.first_tile..schedule.first_tile + schedule.tiles).contains(&block);
            assert!((splits.len() == 1 || is_in_scratch) && splits.len() as u32 <= schedule.max_splits);
        }
    }
}

/// Splits cover every iteration of every stream-K tile once, have consecutive numbers, and start in the order of their length.
#[test]
fn stream_k_splits_cover_all_iterations_once() {
    let grids = [(170, 411, 16, 2), (256, 1024, 16, 2), (512, 2048, 32, 2), (512, 2048, 32, 1), (3, 70, 16, 2)];
    for (tiles, keys, step, blocks_per_sm) in grids {
        let resident_blocks = 80 * blocks_per_sm;
        let (plan, _) = plan::StreamKPlan::of(tiles, keys, step, 80, blocks_per_sm).unwrap();
        assert_eq!((plan.data_parallel_tiles + plan.stream_k_tiles) as u64, tiles);
        assert!(plan.data_parallel_tiles % resident_blocks == 0 && plan.stream_k_tiles < resident_blocks);
        let schedule = plan.schedule();
        assert_eq!(plan.blocks(), plan.data_parallel_tiles + schedule.splits.len() as u32);
        for tile in 0..plan.stream_k_tiles {
            let mut splits: Vec<_> = schedule.splits.iter().filter(|split| u32::from(split.tile) == tile).collect();
            splits.sort_by_key(|split| split.first);
            let (mut at, all) = (0, splits.len() as u16);
            for (number, split) in splits.into_iter().enumerate() {
                assert_eq!((split.first, split.part), (at, StreamKSplit::part(number as u16, all)), "{plan:?}");
                assert!(split.end > split.first && u32::from(all) <= schedule.max_splits);
                at = split.end;
            }
            assert_eq!(u32::from(at), plan.iterations);
        }
        let longest_first =
            schedule.splits.windows(2).take(plan.shares as usize - 1).all(|p| p[0].end - p[0].first >= p[1].end - p[1].first);
        assert!(longest_first, "{plan:?}");
    }
    assert_eq!(plan::StreamKPlan::of(320, 1024, 16, 80, 2), None, "full waves");
}

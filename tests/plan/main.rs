//! Tests of the planner, which chooses kernels, grids and scratch memory of a call. It is a pure function of a problem (`Attention`) and
//! a GPU (`DeviceLimits`, here a V100, T4 or H200), so the tests need neither GPU nor tensors.
//!
//! A variant is a compiled kernel: of a pass (forward, main backward, ...), for headdims up to its own, with some features. A family is the
//! variants of one architecture (volta, turing). A block has a tile of query rows and loops over the keys in steps; in the main kernel of
//! the backward pass it has a key block and steps of query rows. Resident blocks are those that the GPU holds at once; each wave of a grid
//! has that many. A stream-K grid divides the steps of its last wave's tiles among all resident blocks. `Reason` says why a kernel was
//! chosen.

mod backward;
mod decode;
mod families;
mod sizes;
mod tunings;

use volta_fa::error::ErrorKind;
use volta_fa::kernels::{self, Code, Family, Feature, FeatureSet, Kernels, ParamBlock, Pass, RowKind, Scratch, Variant, COMPILED, VOLTA};
use volta_fa::params::StreamKSplit;
use volta_fa::plan::{self, BackwardMode, DeviceLimits, PlannedKernel, Reason};
use volta_fa::problem::{
    self, Attention, Backend, DType, Device, Keys, MergedStates, Options, Queries, RequestedFeatures, ScoreFunction, TensorDesc, Window,
};
use volta_fa::tuning::{Card, Tuning, MAX_CHOICES};

/// Returns a problem of two batch entries, with eight query heads on two KV heads, without a mask or a feature.
fn attention(seqlen_q: i64, seqlen_k: i64, headdim: i64, headdim_v: i64) -> Attention {
    Attention { batch: 2, seqlen_q, seqlen_k, nheads: 8, nheads_k: 2, headdim, headdim_v, softmax_scale: 0.125, ..Attention::default() }
}

const DEFAULT: BackwardMode = BackwardMode { deterministic: false, fp32_gradients: false, has_dlse: false, split: false };
const DETERMINISTIC: BackwardMode = BackwardMode { deterministic: true, ..DEFAULT };
/// fp32 tensors in full precision: each number is split into two fp16 parts.
const SPLIT: BackwardMode = BackwardMode { fp32_gradients: true, split: true, ..DEFAULT };

const V100: DeviceLimits = DeviceLimits::V100;
const T4: DeviceLimits = DeviceLimits { capability: (7, 5), sms: 40, shared_bytes_per_block: 64 * 1024, only: None, tuning: None };
const H200: DeviceLimits = DeviceLimits { capability: (9, 0), sms: 132, shared_bytes_per_block: 227 * 1024, only: None, tuning: None };

/// Returns a device with a tuning: kernels that failed on it, and choices for classes of problems, each the inside of a JSON object.
fn tuned_with(kernels: Kernels, failed: &[&str], choices: &[&str], d: DeviceLimits) -> DeviceLimits {
    let failed: Vec<_> = failed.iter().map(|name| format!("\"{name}\"")).collect();
    let choices: Vec<_> = choices.iter().map(|choice| format!("{{{choice}}}")).collect();
    let text = format!(r#"{{"format": 1, "failed": [{}], "choices": [{}]}}"#, failed.join(","), choices.join(","));
    DeviceLimits { tuning: Some(Box::leak(Box::new(Tuning::parse(&text, kernels).unwrap()))), ..d }
}

/// Returns a V100 with a tuning, as tuned_with().
fn tuned(failed: &[&str], choices: &[&str]) -> DeviceLimits {
    tuned_with(*COMPILED, failed, choices, V100)
}

/// Returns a V100 whose backward pass uses no stream-K kernels: its grid has a block for each key block.
fn without_backward_stream_k() -> DeviceLimits {
    tuned(&["volta_bwd_streamk_64", "volta_bwd_streamk_128"], &[])
}

/// Returns the name of the forward kernel, and why it was chosen.
fn forward_of(a: &Attention, d: &DeviceLimits) -> (&'static str, Reason) {
    let planned = plan::forward(a, d).unwrap();
    (planned.variant.name, planned.reason)
}

/// A made-up family beside Volta, for sm_75. The name is not that of the real Turing family. Its kernels lack what only some families have.
const MADE_UP: Family = Family {
    name: "made-up turing",
    sm: 75,
    native: &[75],               // GPUs that run its machine code
    shared_bytes: 64 * 1024,     // of an SM
    threads: 1024,               // that an SM holds
    scratch: None,               // no backward kernels, so no layout of their scratch memory
    either_order: &[],           // no pass may have heads as the first axis of its grid
    has_key_block_offset: false, // no backward pass in several launches
    stores_dbias: false,         // the gradient of a bias is added to fp32
    stored_above: 256,           // headdims above it store P and dS in memory
};

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

/// Returns the problem on packed tensors with these total rows of queries and keys; None: unchanged.
fn on_packed_tensors(packed: Option<[i64; 2]>, a: Attention) -> Attention {
    let Some([total_q, total_k]) = packed else { return a };
    Attention { queries: Queries::Packed { total: total_q }, keys: Keys::Packed { total: total_k }, ..a }
}

/// A request: features, total rows of packed tensors (queries and keys), and the features that a kernel needs for them.
type Request = (RequestedFeatures, Option<[i64; 2]>, FeatureSet);

/// Returns requests of each feature, and of combinations with kernels of their own or generic ones.
fn feature_requests() -> [Request; 14] {
    use Feature::*;
    let packed = Some([150, 170]);
    let none = RequestedFeatures::default();
    let softcap = Some(ScoreFunction::Softcap(3.0));
    let dense = |features, needed: &[Feature]| (features, None, FeatureSet::of(needed));
    [
        dense(none, &[]),
        (none, packed, FeatureSet::of(&[Lengths])),
        dense(RequestedFeatures { seqused_k: true, ..none }, &[Lengths]),
        dense(RequestedFeatures { sinks: true, ..none }, &[Sinks]),
        dense(RequestedFeatures { alibi: true, ..none }, &[Alibi]),
        dense(RequestedFeatures { score_function: softcap, ..none }, &[Softcap]),
        dense(RequestedFeatures { attn_bias: true, ..none }, &[Bias]),
        dense(RequestedFeatures { attn_bias: true, fp32_bias: true, ..none }, &[Bias, Fp32Bias]),
        dense(RequestedFeatures { dropout_p: 0.1, ..none }, &[Dropout]),
        dense(RequestedFeatures { attn_bias: true, dropout_p: 0.1, ..none }, &[Bias, Dropout]),
        dense(RequestedFeatures { alibi: true, score_function: softcap, ..none }, &[Alibi, Softcap]),
        dense(RequestedFeatures { attn_bias: true, sinks: true, ..none }, &[Bias, Sinks]),
        (RequestedFeatures { dropout_p: 0.1, ..none }, packed, FeatureSet::of(&[Dropout, Lengths])),
        dense(RequestedFeatures { alibi: true, attn_bias: true, ..none }, &[Alibi, Bias]),
    ]
}

/// Returns requests with block masks: a mask alone, and with ALiBi, which only generic kernels compute.
fn block_mask_requests() -> [Request; 2] {
    let blocks = RequestedFeatures { block_mask: true, ..RequestedFeatures::default() };
    let with_alibi = RequestedFeatures { alibi: true, ..blocks };
    [(blocks, None, FeatureSet::of(&[Feature::Blocks])), (with_alibi, None, FeatureSet::of(&[Feature::Blocks, Feature::Alibi]))]
}

/// Returns the kernels of a backward pass that is not fused into one: preprocess, main, postprocess.
fn parts(plan: &plan::BackwardPlan) -> [PlannedKernel; 3] {
    [plan.preprocess.unwrap(), plan.main, plan.postprocess.unwrap()]
}

/// Returns a GPU of a family's own architecture.
fn own_device(family: &Family) -> DeviceLimits {
    let capability = (family.sm as i32 / 10, family.sm as i32 % 10);
    DeviceLimits { capability, shared_bytes_per_block: family.shared_bytes, ..V100 }
}

/// Kernels pad headdims to their own. Of the applicable ones, none has fewer features of scores, or as many and less padding.
#[test]
fn plans_least_padding_for_every_headdim() {
    for (headdim, headdim_v) in (8..=256).step_by(8).flat_map(|d| (8..=256).step_by(8).map(move |v| (d, v))) {
        for (features, packed, asked) in feature_requests() {
            let a = on_packed_tensors(packed, Attention { features, ..attention(100, 100, headdim, headdim_v) });
            let forward = plan::forward(&a, &V100).unwrap().variant;
            let [backward, deterministic] = [DEFAULT, DETERMINISTIC].map(|m| plan::backward(&a, m, &V100).unwrap());
            for v in [forward].into_iter().chain([backward, deterministic].iter().flat_map(|b| b.kernels().map(|k| k.variant))) {
                let asked = asked.intersection(v.pass.info().features);
                let fits = |v: &Variant| v.headdim as i64 >= headdim && v.headdim_v as i64 >= headdim_v;
                let is_applicable = |v: &Variant| fits(v) && v.features.contains(asked);
                assert!(is_applicable(v), "{} for {headdim}, {headdim_v}, {features:?}", v.name);
                let others = || COMPILED.of(&v.family, v.pass).filter(|o| is_applicable(o));
                // VARLEN features (outside the loop over keys) count less than padding
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

/// Passes over KV caches, whose variants decode.rs tests.
const CACHED: [Pass; 9] = {
    use Pass::*;
    [Append, Dequantize, Decode, DecodeMla, Prefill, PrefillStreamK, SparseSelect, SparseMla, Indexer]
};

/// A kernel that no plan takes only makes the library larger.
#[test]
fn every_variant_is_chosen_for_some_problem() {
    let mut unused: Vec<_> = kernels::variants().filter(|v| !CACHED.contains(&v.pass)).map(|v| v.name).collect();
    let states = MergedStates { batch: 1, seqlen_q: 100, nheads: 3, headdim_v: 512 };
    let merge = plan::merge(&states, &V100).unwrap();
    assert_eq!(merge.blocks, [100_u32.div_ceil(merge.variant.block_rows), 3]);
    unused.retain(|name| *name != merge.variant.name);
    for family in COMPILED.families() {
        // 100 rows of 3 heads
        let cast = plan::cast(100, 3, &DeviceLimits { only: Some(family), ..own_device(family) }).unwrap();
        assert_eq!(cast.blocks, [100_u32.div_ceil(cast.variant.block_rows), 3]);
        unused.retain(|name| *name != cast.variant.name);
    }
    // few key blocks of many steps get the backward pass's stream-K kernels
    for headdim in [64, 128] {
        let a = Attention { batch: 1, nheads: 32, nheads_k: 8, ..attention(2048, 2048, headdim, headdim) };
        let main = plan::backward(&a, DEFAULT, &V100).unwrap().main;
        unused.retain(|name| *name != main.variant.name);
    }
    // many rows past the last query get Volta's medium blocks
    for sinks in [false, true] {
        let a = attention(257, 257, 64, 64);
        let a = Attention { nheads: 256, features: RequestedFeatures { sinks, ..a.features }, ..a };
        let forward = plan::forward(&a, &V100).unwrap();
        unused.retain(|name| *name != forward.variant.name);
    }
    // short windows with sinks get blocks of several heads
    for d in [V100, T4] {
        let a = attention(4096, 4096, 64, 64);
        let window = Window { left: Some(127), right: Some(0) };
        let a = Attention { nheads: 64, nheads_k: 8, window, features: RequestedFeatures { sinks: true, ..a.features }, ..a };
        let forward = plan::forward(&a, &d).unwrap();
        unused.retain(|name| *name != forward.variant.name);
    }
    let headdims = || (8..=256).step_by(8).chain([512]);
    for headdim in headdims() {
        for headdim_v in headdims() {
            for (seqlen, nheads) in [(64, 2), (100, 200), (512, 8), (1024, 8), (1024, 16), (4096, 32), (20_000, 1)] {
                let requests = feature_requests().into_iter().chain(block_mask_requests());
                for ((features, packed, _), family) in requests.flat_map(|w| COMPILED.families().map(move |f| (w, f))) {
                    let a = Attention { nheads, nheads_k: nheads, batch: 1, ..attention(seqlen, seqlen, headdim, headdim_v) };
                    let a = on_packed_tensors(packed, Attention { features, ..a });
                    let device = DeviceLimits { only: Some(family), ..own_device(family) };
                    // fp16 tensors; then fp32 tensors, cast to fp16 (fp32_output) or in full precision (SPLIT)
                    let invariant = Attention { features: RequestedFeatures { batch_invariant: true, ..features }, ..a };
                    let cast = Attention { features: RequestedFeatures { fp32_output: true, ..features }, ..a };
                    let forward = [a, invariant, cast].into_iter().map(|a| plan::forward(&a, &device));
                    let forward = forward.chain([plan::forward_split(&a, &device)]).flatten();
                    let backward = [DEFAULT, DETERMINISTIC, SPLIT].into_iter().filter_map(|mode| plan::backward(&a, mode, &device).ok());
                    // false: the call brings no prepared keys and values
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
    let longer = |a| Attention { seqlen_q: 4096, seqlen_k: 4096, ..a };
    for (a, expected) in [(right(None), [16, 8]), (right(Some(0)), [8, 16]), (Attention { nheads: 3, ..right(Some(0)) }, [3, 16])] {
        let a = longer(a);
        let plan = plan::forward_among(turing, &Attention { batch: 64, nheads_k: a.nheads, ..a }, &T4).unwrap();
        assert_eq!((plan.variant.block_rows, plan.blocks), (256, expected));
    }
    let volta = plan::forward(&Attention { nheads: 3, nheads_k: 3, batch: 64, ..right(Some(0)) }, &V100).unwrap();
    assert_eq!((volta.variant.block_rows, volta.blocks), (128, [3, 16]));
    let a = Attention { nheads: 6, nheads_k: 3, ..a };
    // without a causal mask, a second launch of smaller blocks (a tail) computes the last keys: 13 blocks instead of 16
    for (right, expected) in [(None, [13, 3]), (Some(0), [3, 16])] {
        let a = Attention { window: Window { left: None, right }, ..a };
        let plan = plan::backward(&a, DEFAULT, &without_backward_stream_k()).unwrap();
        let [preprocess, main, postprocess] = parts(&plan);
        assert_eq!((preprocess.blocks[1], main.blocks, postprocess.blocks[1]), (6, expected, 6), "dq's kernels keep their order");
    }
}

/// Kernels compiled for ALiBi alone start their sums with a row's bias, which takes bits from them where it is large: in rows more than 512
/// positions before their keys. These get generic kernels.
/// `requires`: whether the plan has such kernels (ALiBi is a required feature), not generic ones.
#[test]
fn plans_generic_kernels_for_far_rows_with_alibi() {
    let requires = |seqlen_q, seqlen_k, right, seqused_k| {
        let features = RequestedFeatures { alibi: true, seqused_k, ..RequestedFeatures::default() };
        let a = Attention { features, window: Window { left: None, right }, ..attention(seqlen_q, seqlen_k, 64, 64) };
        let kernels = [plan::forward(&a, &V100).unwrap(), plan::backward(&a, DEFAULT, &V100).unwrap().main];
        let [forward, backward] = kernels.map(|k| k.variant.required_features.has(Feature::Alibi));
        assert_eq!(forward, backward);
        forward
    };
    assert!(requires(4096, 4096, None, false) && requires(4096, 3584, None, false));
    assert!(!requires(4096, 3583, None, false));
    // rows before the first key see no keys, or only keys at most `right` positions after them
    assert!(requires(30000, 16, Some(0), false) && requires(30000, 16, Some(512), false));
    assert!(!requires(30000, 16, Some(513), false));
    // seqused_k may leave fewer keys than seqlen_k
    assert!(!requires(4096, 4096, None, true));
}

#[test]
fn grids_cover_every_row() {
    for seqlen in [1, 31, 32, 127, 128, 129, 4096] {
        let a = attention(seqlen, seqlen + 5, 64, 64);
        let f = plan::forward(&a, &V100).unwrap();
        // one tile per block; a stream-K grid has the tiles of all heads and entries, here 8 * 2, on one axis
        let [of_head, heads] = f.stream_k.map_or(f.blocks, |s| [(s.data_parallel_tiles + s.stream_k_tiles) / 16, 8]);
        assert_eq!((f.stream_k.is_some(), heads), (seqlen == 4096, 8));
        assert!((of_head * f.variant.block_rows) as i64 >= seqlen);
        assert!((((of_head - 1) * f.variant.block_rows) as i64) < seqlen);
        let b = plan::backward(&a, DEFAULT, &without_backward_stream_k()).unwrap();
        assert_eq!(b.main.blocks[1], 2, "the grid of the backward pass has the KV heads");
        assert!((b.main.blocks[0] * b.main.variant.block_rows) as i64 >= seqlen + 5);
        assert!(b.scratch_rows >= seqlen && b.scratch_rows % b.main.variant.step as i64 == 0);
        assert_eq!(b.preprocess.is_none(), seqlen + 5 <= 64);
        assert!(b.preprocess.is_none_or(|k| i64::from(k.blocks[0] * k.variant.block_rows) >= b.scratch_rows));
    }
}

#[test]
fn separate_dq_kernel_has_no_accumulator() {
    let own = tuned(&[], &[r#""pass": "Backward", "deterministic": true"#]);
    for headdim in [32, 64, 96, 128, 192, 256] {
        // enough heads for large blocks
        let a = Attention { nheads: 40, nheads_k: 20, ..attention(1000, 500, headdim, headdim) };
        let p = plan::backward(&a, DETERMINISTIC, &own).unwrap();
        assert_eq!((p.main.variant.pass, p.postprocess.unwrap().variant.pass), (Pass::BackwardDkDv, Pass::BackwardDq));
        // no fp32 accumulator of dq: it has no columns and no splits
        assert_eq!((p.headdim_rounded, p.dq_accum_splits, p.main_launches), (0, 0, 1));
        assert_eq!((p.main.blocks[1], p.postprocess.unwrap().blocks[1]), (20, 40), "heads of keys, heads of queries");
        assert!((p.postprocess.unwrap().blocks[0] * p.postprocess.unwrap().variant.block_rows) as i64 >= 1000);
        // the same tiles of dk and dv, unless P and dS are stored
        let default = plan::backward(&a, DEFAULT, &V100).unwrap();
        if default.stored.is_none() {
            assert_eq!(p.main.blocks, default.main.blocks);
            assert_eq!(p.main.variant.shared_bytes, default.main.variant.shared_bytes);
        }
    }
}

#[test]
fn rejects_devices_without_kernels() {
    let a = attention(10, 10, 64, 64);
    let pascal = DeviceLimits { capability: (6, 1), ..V100 };
    let e = plan::forward(&a, &pascal).unwrap_err();
    assert!(e.message.contains("6.1") && e.message.contains("7.0"), "{e}");
}

#[test]
fn splits_huge_batches_into_launches() {
    let chunks: Vec<_> = plan::batch_chunks(150_000).collect();
    assert_eq!(chunks, [(0, 65535), (65535, 65535), (131_070, 18_930)]);
    assert_eq!(plan::batch_chunks(3).collect::<Vec<_>>(), [(0, 3)]);
}

/// The second argument of `problem_block` is the number of batch entries of a launch.
#[test]
fn fills_problem_parameters() {
    let mut a = attention(100, 130, 64, 64);
    let p = plan::problem_block(&a, 2);
    // no bound is 100 + 130, beyond every distance. A negative scale becomes positive: kernels XOR sign_flip into pairs of fp16
    assert_eq!((p.window_left, p.window_right, p.sign_flip), (230, 230, 0));
    a.window = Window { left: Some(i64::MAX), right: Some(0) };
    a.softmax_scale = -0.25;
    let p = plan::problem_block(&a, 2);
    assert_eq!((p.window_left, p.window_right, p.sign_flip, p.scale), (230, 0, 0x8000_8000, 0.25));
    a.softmax_scale = 0.0;
    assert!(plan::problem_block(&a, 2).scale > 0.0);
}

/// Describes a contiguous tensor of a GPU.
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
    let forward = plan::forward(&a, &V100).unwrap();
    assert_eq!(forward.blocks[0], 300_u32.div_ceil(forward.variant.block_rows));
    let backward = plan::backward(&a, DEFAULT, &V100).unwrap();
    // preprocess has the rows in scratch memory, 300 rounded to 32; main has keys, postprocess queries
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
fn kernels_have_unique_names_and_valid_rows() {
    let mut names: Vec<_> = kernels::variants().map(|v| v.name).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
    for v in kernels::variants() {
        assert!(v.threads % 32 == 0 && v.threads <= 1024, "{}", v.name);
        assert!(v.pass != Pass::Forward || v.step > 0, "{}", v.name);
        assert!(v.pass.info().features.contains(v.features), "{}: it has features that its pass never requests", v.name);
    }
}

/// A feature that a pass is not asked for is dropped, as main kernels leave some to the postprocess. A stream-K grid computes all that the
/// usual grid does.
#[test]
fn passes_on_stream_k_grids_are_asked_for_what_the_usual_ones_are() {
    use Pass::{Backward, BackwardStreamK, Forward, ForwardSplit, ForwardSplitStreamK, ForwardStreamK, Prefill, PrefillStreamK};
    let pairs = [(Forward, ForwardStreamK), (ForwardSplit, ForwardSplitStreamK), (Backward, BackwardStreamK), (Prefill, PrefillStreamK)];
    for (usual, stream_k) in pairs {
        assert_eq!(usual.info().features, stream_k.info().features, "{stream_k:?}");
    }
}

/// A split is a block's part of the steps (query tiles of all heads) of a key block. Splits of a key block have consecutive numbers and
/// steps, up to the last query that sees one of its keys. Longer ones start first. `part` is number * 256 + splits of the key block.
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
            let diagonal = i + a.seqlen_k - a.seqlen_q;
            let (left, right) = (a.window.left, a.window.right);
            j < a.seqlen_k && left.is_none_or(|left| j >= diagonal - left) && right.is_none_or(|right| j <= diagonal + right)
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

/// Splits cover every iteration (step of keys) of every stream-K tile once and have consecutive numbers. The longest start first.
#[test]
fn stream_k_splits_cover_all_iterations_once() {
    // row tiles, keys, keys of a step, resident blocks per SM
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
        // each of the `shares` (equal parts of all iterations, one for a resident block) begins with a split: these splits come first
        let mut pairs = schedule.splits.windows(2).take(plan.shares as usize - 1);
        assert!(pairs.all(|p| p[0].end - p[0].first >= p[1].end - p[1].first), "{plan:?}");
    }
    assert_eq!(plan::StreamKPlan::of(320, 1024, 16, 80, 2), None, "full waves");
}

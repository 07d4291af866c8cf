//! Planning is a pure function: no device, no tensors.

use volta_fa::kernels::{self, Flavor, Pass};
use volta_fa::plan::{self, BackwardMode, DeviceLimits};
use volta_fa::problem::{self, Attention, Backend, DType, Device, Features, Options, Packed, TensorDesc, Window};

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
        packed: None,
        features: Features::default(),
    }
}

const DEFAULT: BackwardMode = BackwardMode { deterministic: false, bf16_gradients: false };
const DETERMINISTIC: BackwardMode = BackwardMode { deterministic: true, ..DEFAULT };

/// What a problem asks for, and the kernels that are prepared for no more than that: forward's and backward's.
fn wishes() -> [(Features, Option<Packed>, [Flavor; 2]); 6] {
    let packed = Some(Packed { total_q: 150, total_k: 170 });
    [
        (Features::default(), None, [Flavor::Plain; 2]),
        (Features::default(), packed, [Flavor::Ragged; 2]),
        (Features { seqused_k: true, ..Features::default() }, None, [Flavor::Ragged; 2]),
        (Features { sinks: true, ..Features::default() }, None, [Flavor::Ragged, Flavor::Plain]),
        (Features { alibi: true, ..Features::default() }, None, [Flavor::General; 2]),
        (Features { dropout_p: 0.1, ..Features::default() }, packed, [Flavor::General; 2]),
    ]
}

#[test]
fn every_headdim_has_kernels_and_padding_is_least() {
    for (headdim, headdim_v) in (8..=256).step_by(8).flat_map(|d| (8..=256).step_by(8).map(move |v| (d, v))) {
        for (features, packed, flavors) in wishes() {
            let a = Attention { features, packed, ..attention(100, 100, headdim, headdim_v) };
            let forward = plan::forward(&a, &DeviceLimits::V100).unwrap().variant;
            let [backward, deterministic] = [DEFAULT, DETERMINISTIC].map(|m| plan::backward(&a, m, &DeviceLimits::V100).unwrap());
            for v in [forward, backward.main.variant, deterministic.main.variant, deterministic.finish.variant] {
                assert!(v.headdim as i64 >= headdim && v.headdim_v as i64 >= headdim_v, "{} for {headdim}, {headdim_v}", v.name);
                let flavor = flavors[(v.pass != Pass::Forward) as usize];
                // the last pass sees no score unless it computes dq
                let flavor = if v.pass == Pass::BackwardFinish { flavor.min(Flavor::Ragged) } else { flavor };
                assert!(v.flavor >= flavor, "{} for {features:?}", v.name);
                let less_padded = kernels::of(v.family, v.pass).filter(|o| o.flavor == v.flavor).any(|o| {
                    o.headdim as i64 >= headdim && o.headdim_v as i64 >= headdim_v && o.headdim + o.headdim_v < v.headdim + v.headdim_v
                });
                let cheaper = kernels::of(v.family, v.pass)
                    .any(|o| o.headdim as i64 >= headdim && o.headdim_v as i64 >= headdim_v && (flavor..v.flavor).contains(&o.flavor));
                assert!(!cheaper, "{} for {features:?}", v.name);
                assert!(!less_padded, "{} for {headdim}, {headdim_v}", v.name);
            }
        }
    }
}

#[test]
fn every_variant_is_chosen_for_some_problem() {
    let mut unused: Vec<_> = kernels::variants().map(|v| v.name).collect();
    for headdim in (8..=256).step_by(8) {
        for headdim_v in (8..=256).step_by(8) {
            for (seqlen, nheads) in [(64, 2), (512, 8), (1024, 16), (4096, 32)] {
                for (features, packed, _) in wishes() {
                    let a =
                        Attention { nheads, nheads_k: nheads, batch: 1, features, packed, ..attention(seqlen, seqlen, headdim, headdim_v) };
                    let forward = plan::forward(&a, &DeviceLimits::V100).unwrap();
                    unused.retain(|&name| name != forward.variant.name);
                    for mode in [DEFAULT, DETERMINISTIC] {
                        let b = plan::backward(&a, mode, &DeviceLimits::V100).unwrap();
                        let used = [b.prepare, b.main, b.finish].map(|s| s.variant.name);
                        unused.retain(|name| !used.contains(name));
                    }
                }
            }
        }
    }
    assert!(unused.is_empty(), "compiled but never planned: {unused:?}");
}

#[test]
fn small_grids_get_small_blocks() {
    let blocks = |batch, nheads, seqlen, headdim, sms| {
        let a = Attention { batch, nheads, nheads_k: nheads, ..attention(seqlen, seqlen, headdim, headdim) };
        let s = plan::forward(&a, &DeviceLimits { sms, ..DeviceLimits::V100 }).unwrap();
        (s.variant.block_rows, s.blocks[0])
    };
    // 64 blocks of 64 rows, one or two on each of 80 SMs, instead of 32 of 128
    assert_eq!(blocks(1, 8, 512, 128, 80), (64, 8));
    assert_eq!(blocks(1, 8, 512, 64, 80), (64, 8));
    // exactly all resident, and one more: headdim 64 has two blocks an SM, 128 one
    assert_eq!(blocks(1, 20, 512, 64, 80), (64, 8));
    assert_eq!(blocks(1, 21, 512, 64, 80), (128, 4));
    assert_eq!(blocks(1, 10, 512, 128, 80), (64, 8));
    assert_eq!(blocks(1, 11, 512, 128, 80), (128, 4));
    // fewer SMs are filled by fewer blocks; the batch counts like heads
    assert_eq!(blocks(1, 8, 512, 128, 40), (128, 4));
    assert_eq!(blocks(2, 8, 512, 128, 80), (128, 4));
    // two large blocks an SM: nothing to gain
    assert_eq!(blocks(1, 16, 1024, 64, 80), (128, 8));
    // one block of rows a head: no more small blocks than large ones
    assert_eq!(blocks(64, 32, 64, 128, 80), (64, 1));
    assert_eq!(blocks(64, 32, 65, 128, 80), (128, 1));
}

#[test]
fn grids_cover_every_row() {
    for seqlen in [1, 31, 32, 127, 128, 129, 4096] {
        let a = attention(seqlen, seqlen + 5, 64, 64);
        let f = plan::forward(&a, &DeviceLimits::V100).unwrap();
        assert_eq!(f.blocks[1], 8);
        assert!((f.blocks[0] * f.variant.block_rows) as i64 >= seqlen);
        assert!((((f.blocks[0] - 1) * f.variant.block_rows) as i64) < seqlen);
        let b = plan::backward(&a, DEFAULT, &DeviceLimits::V100).unwrap();
        assert_eq!(b.main.blocks[1], 2, "the grid of the backward pass has the key heads");
        assert!((b.main.blocks[0] * b.main.variant.block_rows) as i64 >= seqlen + 5);
        assert!(b.scratch_rows >= seqlen && b.scratch_rows % b.main.variant.step as i64 == 0);
        assert!((b.prepare.blocks[0] * b.prepare.variant.block_rows) as i64 >= b.scratch_rows);
    }
}

#[test]
fn the_deterministic_backward_has_no_accumulator() {
    for headdim in [32, 64, 96, 128, 192, 256] {
        let a = attention(1000, 700, headdim, headdim);
        let p = plan::backward(&a, DETERMINISTIC, &DeviceLimits::V100).unwrap();
        assert_eq!((p.main.variant.pass, p.finish.variant.pass), (Pass::BackwardKeys, Pass::BackwardQueries));
        assert_eq!(p.headdim_rounded, 0);
        assert_eq!((p.main.blocks[1], p.finish.blocks[1]), (2, 8), "heads of keys, heads of queries");
        assert!((p.finish.blocks[0] * p.finish.variant.block_rows) as i64 >= 1000);
        // the same tiles of dk and dv
        let default = plan::backward(&a, DEFAULT, &DeviceLimits::V100).unwrap().main;
        assert_eq!(p.main.blocks, default.blocks);
        assert_eq!(p.main.variant.shared_bytes, default.variant.shared_bytes);
    }
}

/// Plain kernels write fp16 only.
#[test]
fn gradients_in_bf16_take_kernels_that_write_it() {
    for mode in [DEFAULT, DETERMINISTIC] {
        for headdim in (8..=256).step_by(8) {
            for (features, packed, [_, flavor]) in wishes() {
                let a = Attention { features, packed, ..attention(100, 100, headdim, headdim) };
                let plan = plan::backward(&a, BackwardMode { bf16_gradients: true, ..mode }, &DeviceLimits::V100).unwrap();
                for v in [plan.main.variant, plan.finish.variant] {
                    assert!(v.flavor >= Flavor::Ragged, "{} for {features:?}", v.name);
                }
                let fp16 = plan::backward(&a, mode, &DeviceLimits::V100).unwrap();
                assert_eq!(plan.prepare, fp16.prepare, "writes no gradient");
                assert!(flavor == Flavor::Plain || plan.main == fp16.main, "nothing else changes");
            }
        }
    }
}

#[test]
fn devices_that_cannot_run_the_kernels_are_refused() {
    let a = attention(10, 10, 64, 64);
    let pascal = DeviceLimits { capability: (6, 1), ..DeviceLimits::V100 };
    let e = plan::forward(&a, &pascal).unwrap_err();
    assert!(e.message.contains("6.1") && e.message.contains("7.0"), "{e}");
    let turing = DeviceLimits { capability: (7, 5), sms: 40, shared_bytes_per_block: 64 * 1024 };
    for headdim in [64, 128, 256] {
        // on a device with less shared memory, a plan fits or is refused, with the reason
        match plan::backward(&attention(10, 10, headdim, headdim), DEFAULT, &turing) {
            Ok(p) => assert!(p.main.variant.shared_bytes <= turing.shared_bytes_per_block),
            Err(e) => assert!(e.message.contains("shared memory"), "{e}"),
        }
    }
}

#[test]
fn huge_batches_are_cut_to_the_grid() {
    let chunks: Vec<_> = plan::batch_chunks(150_000).collect();
    assert_eq!(chunks, [(0, 65535), (65535, 65535), (131_070, 18_930)]);
    assert_eq!(plan::batch_chunks(3).collect::<Vec<_>>(), [(0, 3)]);
}

#[test]
fn parameter_block_of_the_problem() {
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
    let strides = (1..=sizes.len()).map(|i| sizes[i..].iter().product()).collect();
    TensorDesc { dtype, device: Device::Cuda(0), sizes: sizes.to_vec(), strides }
}

/// max_seqlen says nothing about the size of the problem: grids cover the rows that there are, and no bound leaves int32.
#[test]
fn max_seqlen_does_not_make_the_grid() {
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
    for (step, rows) in [(backward.prepare, 320), (backward.main, 500), (backward.finish, 300_u32)] {
        assert_eq!(step.blocks[0], rows.div_ceil(step.variant.block_rows), "{}", step.variant.name);
    }
}

/// The largest problem that validation lets through: what the mask of a row, of a key and of a tile beyond the end adds up.
#[test]
fn bounds_of_the_longest_sequences_stay_in_int32() {
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
fn names_are_unique_and_blocks_fit_a_v100() {
    let mut names: Vec<_> = kernels::variants().map(|v| v.name).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
    for v in kernels::variants() {
        assert!(v.shared_bytes * v.blocks_per_sm <= 96 * 1024, "{}", v.name);
        assert!(v.threads % 32 == 0 && v.threads <= 1024, "{}", v.name);
        assert!(v.pass != Pass::Forward || v.step > 0, "{}", v.name);
    }
}

/// Where the kernels put a packed sequence's rows in the scratch memory (csrc/sequence.cuh), none overlaps another.
#[test]
fn packed_sequences_have_room_in_the_scratch_memory() {
    const ROUNDING: i64 = 32;
    for lengths in [vec![1, 1, 1], vec![32, 32], vec![31, 33, 0, 0, 64], vec![0, 0], vec![5, 0, 95, 1, 127, 32, 2], vec![1000]] {
        let total_q = lengths.iter().sum();
        let longest = *lengths.iter().max().unwrap();
        let packed = Some(Packed { total_q, total_k: 10 });
        let a = Attention { packed, batch: lengths.len() as i64, ..attention(longest, 10, 64, 64) };
        let plan = plan::backward(&a, DEFAULT, &DeviceLimits::V100).unwrap();
        let (mut first_row, mut free) = (0, 0);
        for (i, length) in lengths.iter().enumerate() {
            let start = (first_row + i as i64 * ROUNDING) / ROUNDING * ROUNDING;
            assert!(start >= free, "{lengths:?}: sequence {i}");
            free = start + (length + ROUNDING - 1) / ROUNDING * ROUNDING;
            first_row += length;
        }
        assert!(free <= plan.scratch_rows, "{lengths:?}");
    }
}

//! Tests how the planner chooses among families (the kernels of one architecture) and among kernels with different features.
//!
//! A GPU prefers the newest family that it runs: natively as machine code (Cubin), else as PTX that the driver compiles. The real Turing
//! family takes part only where a test uses `plan::forward` or `kernels::variants`; others use made-up families. Helpers of main.rs:
//! - MADE_UP: a family of sm_75; like(name, family): a kernel's copy in a family; volta_and(tables): kernels, these tables before Volta's
//! - attention(seqlen_q, seqlen_k, headdim, headdim_v): a problem without mask, batch 2, 8 query heads on 2 KV heads
//! - parts(plan): kernels of a backward pass: preprocess, main, postprocess; DEFAULT, DETERMINISTIC (the same bits in each run): its modes
//! - tuned(failed, choices): a V100 whose tuning has these failed kernels and choices; forward_of(): a forward kernel's name and its Reason

use super::*;

#[test]
fn prefers_families_in_order() {
    let ampere = Family { name: "made-up ampere", sm: 80, native: &[80, 86], ..MADE_UP };
    let [of_75, of_80] = [MADE_UP, ampere].map(|family| [like("volta_fwd_64x64", family)]);
    // kernels of Volta alone, of two families and of three
    let [one, two, three] = [volta_and(&[]), volta_and(&[&of_75]), volta_and(&[&of_75, &of_80])];
    let found = |kernels: Kernels, sm| kernels.families_for(sm).into_iter().map(|(f, code)| (f.name, code)).collect::<Vec<_>>();
    let (volta, turing, ampere) = (VOLTA.name, MADE_UP.name, ampere.name);
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
        assert_eq!(found(three, sm), [(ampere, code), (turing, Code::Ptx), (volta, Code::Ptx)]);
    }
}

/// A family with only a forward pass computes that, if its kernel is applicable.
#[test]
fn chooses_forward_family_alone() {
    let kernels = volta_and(&[&[like("volta_fwd_64x64", MADE_UP)]]);
    let family = |a: &Attention, d: &DeviceLimits| plan::forward_among(kernels, a, d).unwrap().variant.family.name;
    let a = attention(2000, 2000, 64, 64);
    for (device, expected) in [(T4, MADE_UP.name), (H200, MADE_UP.name), (V100, VOLTA.name)] {
        assert_eq!(family(&a, &device), expected);
        let backward = plan::backward_among(kernels, &a, DEFAULT, &device).unwrap();
        for kernel in parts(&backward) {
            assert_eq!(kernel.variant.family.name, "volta");
        }
        assert_eq!(backward.scratch, VOLTA.scratch.unwrap());
    }
    assert_eq!(family(&attention(2000, 2000, 40, 24), &T4), MADE_UP.name, "padded");
    assert_eq!(family(&attention(2000, 2000, 72, 64), &T4), "volta");
    assert_eq!(family(&Attention { features: RequestedFeatures { sinks: true, ..a.features }, ..a }, &T4), "volta");
    assert_eq!(family(&a, &DeviceLimits { shared_bytes_per_block: 20 * 1024, ..T4 }), MADE_UP.name, "18 KB");
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
    let turing = Family { scratch: Some(scratch), ..MADE_UP };
    let mut rows: Vec<_> = ["volta_bwd_64", "volta_bwd_varlen_postprocess"].map(|name| like(name, turing)).to_vec();
    let a = attention(1000, 1000, 64, 64);
    let of = |rows: &[Variant], a: &Attention, mode| {
        let plan = plan::backward_among(volta_and(&[rows]), a, mode, &T4).unwrap();
        let names = parts(&plan).map(|k| k.variant.family.name);
        assert!(names.iter().all(|n| *n == names[0]), "{names:?}");
        assert_eq!(plan.scratch, plan.main.variant.family.scratch.unwrap());
        (names[0], plan.scratch_rows, plan.preprocess.unwrap().blocks[0])
    };
    // scratch rows: 1000 rounded up to Volta's 32, or to the made-up family's 16; preprocess has blocks of 64 of them: 16 either way
    assert_eq!(of(&rows, &a, DEFAULT), ("volta", 1024, 16), "the made-up family lacks a kernel, preprocess");
    rows.push(like("volta_bwd_varlen_preprocess", turing));
    assert_eq!(of(&rows, &a, DEFAULT), (MADE_UP.name, 1008, 16));
    assert_eq!(of(&rows, &a, DETERMINISTIC).0, "volta", "the made-up family has no such kernels");
    let bf16 = BackwardMode { fp32_gradients: true, ..DEFAULT };
    assert_eq!(of(&rows, &a, bf16).0, "volta", "nor bf16");
}

/// VOLTA_FA_FAMILY (`DeviceLimits::only`) excludes all other families.
#[test]
fn environment_restricts_families() {
    let kernels = volta_and(&[&[like("volta_fwd_64x64", MADE_UP)]]);
    let only = |name: &str, device: DeviceLimits| DeviceLimits { only: kernels.families().find(|f| f.name == name), ..device };
    let a = Attention { nheads: 10, nheads_k: 10, ..attention(2000, 2000, 64, 64) };
    // full waves, so no stream-K grid: 16 tiles of 128 rows for each of 2 * 10 heads are 4 waves of the T4's 80 resident blocks
    let volta = plan::forward_among(kernels, &a, &only("volta", T4)).unwrap();
    assert_eq!((volta.variant.family.name, volta.variant.name), ("volta", "volta_fwd_64x64"));
    assert_eq!(plan::forward_among(kernels, &a, &only(MADE_UP.name, T4)).unwrap().variant.family.name, MADE_UP.name);
    let message = plan::forward_among(kernels, &a, &only(MADE_UP.name, V100)).unwrap_err().message;
    assert_eq!(message, "VOLTA_FA_FAMILY: got `made-up turing`, expected a kernel family that a GPU of compute capability 7.0 runs: volta");
    let e = plan::backward_among(kernels, &a, DEFAULT, &only(MADE_UP.name, T4)).unwrap_err();
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
        plan::forward_among(kernels, &a, &V100).unwrap().variant.name
    };
    let alibi = RequestedFeatures { alibi: true, ..RequestedFeatures::default() };
    assert_eq!(name(RequestedFeatures { sinks: true, ..alibi }), "two");
    assert_eq!(name(alibi), "volta_fwd_alibi_64x64");
    assert_eq!(name(RequestedFeatures::default()), "volta_fwd_64x64");
    assert_eq!(
        name(RequestedFeatures { sinks: true, ..RequestedFeatures::default() }),
        "volta_fwd_varlen_64x64",
        "features outside the loop over keys (sinks, varlen) cost less than a feature of scores"
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

/// Volta's forward kernels that require a bias (`fwd_bias`, `fwd_bias_dropout`) lack the registers for an fp32 one. Others read both types.
#[test]
fn fp32_bias_gets_kernels_that_read_it() {
    let [bias, fp32] = [Feature::Bias, Feature::Fp32Bias].map(|feature| FeatureSet::of(&[feature]));
    assert!(kernels::variants().all(|v| v.features.contains(bias) || !v.features.contains(fp32)), "fp32_bias without bias");
    for (dropout_p, headdim) in [(0.0, 64), (0.5, 64), (0.0, 128), (0.5, 128)] {
        let [(half, on_t4), (float, float_on_t4)] = [false, true].map(|fp32_bias| {
            let features = RequestedFeatures { attn_bias: true, fp32_bias, dropout_p, ..RequestedFeatures::default() };
            let a = Attention { features, ..attention(2000, 2000, headdim, headdim) };
            assert_eq!(plan::features(&a, DEFAULT).contains(bias.union(fp32)), fp32_bias);
            let name = |d| plan::forward(&a, d).unwrap().variant.name;
            (name(&V100), name(&T4))
        });
        let has_fp32 = |name| kernels::variants().any(|v| v.name == name && v.features.contains(fp32));
        assert!(!has_fp32(half) && has_fp32(float), "{half}, {float}");
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
    // where the choice does not match, the planner takes stream-K for an fp16 bias, and the cheapest kernel for an fp32 one
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
        plan::forward_among(kernels, &a, &V100).map(|planned| planned.variant.name)
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
    assert_eq!(served(volta_and(&[&[like("volta_fwd_64x64", MADE_UP)]]), false), volta, "one kernel is no family");
    let whole = |family: Family, without: &str| {
        // without it, its small variant, and the variant of headdim 512, which would replace it
        let is_there = |v: &&Variant| v.name.replace("_small", "").replace("512x512", "256x256") != without;
        let rows = volta_and(&[]).variants().filter(is_there).map(|v| Variant { family, ..*v });
        served(volta_and(&[&rows.collect::<Vec<_>>()]), false)
    };
    let turing = Family { shared_bytes: 96 * 1024, ..MADE_UP };
    assert_eq!(whole(turing, ""), [false, true, true, true, false, false]);
    for missing in ["volta_fwd_generic_256x256", "volta_bwd_generic_256", "volta_bwd_varlen_postprocess", "volta_bwd_generic_dq_256"] {
        assert_eq!(whole(turing, missing), volta, "without {missing}");
    }
    assert_eq!(whole(MADE_UP, ""), volta, "in 64 KB it would not fit");
}

//! Tests of tunings: measured settings of one GPU, from JSON that `python -m volta_fa check --tune` writes.
//!
//! A tuning lists failed kernels, which no plan may use, and choices. A choice names a pass and a class of problems (ranges of headdim,
//! seqlen_q, rows = batch * seqlen_q * nheads; mask; features), and a variant for them, or `deterministic`: the plan of that mode.
//!
//! Helpers of main.rs:
//! - attention(seqlen_q, seqlen_k, headdim, headdim_v): a problem with batch 2, 8 query heads and 2 KV heads
//! - tuned(failed, choices): a V100 with that tuning; tuned_with(kernels, failed, choices, gpu): a GPU with a tuning of these kernels
//! - like(name, family): a kernel of Volta in another family, such as MADE_UP for sm_75; volta_and(tables): such kernels before Volta's
//! - forward_of(): the forward kernel's name and the `Reason` for it; parts(): a backward plan's kernels, preprocess, main, postprocess
//! - DEFAULT, DETERMINISTIC: modes of the backward pass; in the latter gradients have the same bits in each run

use super::*;

/// Returns the kernels' names and whether the plan is deterministic.
fn backward_of(a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> ([&'static str; 3], bool) {
    let plan = plan::backward(a, mode, d).unwrap();
    assert_eq!(plan.headdim_rounded == 0, plan.dq_accum_splits == 0, "no accumulators: no columns either");
    assert_eq!(plan.dq_accum_splits == 0, plan.main.variant.pass == Pass::BackwardDkDv);
    assert!(plan.deterministic || !mode.deterministic, "a tuning never removes the requested determinism");
    (parts(&plan).map(|k| k.variant.name), plan.deterministic)
}

/// Returns many different problems.
fn problems() -> impl Iterator<Item = Attention> {
    let headdims = (8..=256).step_by(8).map(|d| (d, d)).chain([(192, 128), (40, 200)]);
    let shapes = headdims.flat_map(|(d, v)| [(64, 2), (1000, 16)].map(|(seqlen, nheads)| (d, v, seqlen, nheads)));
    shapes.flat_map(|(d, v, seqlen, nheads)| {
        feature_requests().map(|(features, packed, _)| {
            on_packed_tensors(packed, Attention { nheads, nheads_k: nheads, features, ..attention(seqlen, seqlen, d, v) })
        })
    })
}

#[test]
fn empty_tuning_changes_no_plan() {
    let empty = tuned(&[], &[]);
    for a in problems() {
        assert_eq!(plan::forward(&a, &empty).unwrap(), plan::forward(&a, &V100).unwrap());
        for mode in [DEFAULT, DETERMINISTIC] {
            assert_eq!(plan::backward(&a, mode, &empty).unwrap(), plan::backward(&a, mode, &V100).unwrap());
        }
    }
}

#[test]
fn takes_tuning_choices_for_their_class() {
    let class = r#""pass": "Forward", "headdim": [64, 64], "seqlen_q": [100, 1000], "rows": [2000, 16000]"#;
    let d = tuned(&[], &[&format!(r#"{class}, "variant": "volta_fwd_128x128""#)]);
    let own = |a: &Attention| assert_eq!(plan::forward(a, &d).unwrap(), plan::forward(a, &V100).unwrap());
    let forced = |a: &Attention| assert_eq!(forward_of(a, &d), ("volta_fwd_128x128", Reason::Tuned));
    // rows = 16 * seqlen: batch 2, 8 heads
    for seqlen in [125, 999, 1000] {
        forced(&attention(seqlen, 5, 64, 64));
        forced(&attention(seqlen, 5, 64, 128));
    }
    for a in [attention(124, 5, 64, 64), attention(1001, 5, 64, 64), attention(500, 5, 56, 64), attention(500, 5, 72, 64)] {
        own(&a);
    }
    own(&Attention { nheads: 16, ..attention(501, 5, 64, 64) });
    // and a feature that the kernel lacks
    let features = RequestedFeatures { score_function: Some(ScoreFunction::Softcap(1.0)), ..RequestedFeatures::default() };
    own(&Attention { features, ..attention(500, 5, 64, 64) });
}

/// `rows` counts actual rows, not max_seqlen times batch.
#[test]
fn counts_actual_rows_of_packed_tensors() {
    let d = tuned(&[], &[r#""pass": "Forward", "rows": [2000, 2000], "variant": "volta_fwd_generic_96x96""#]);
    for (total_q, expected) in [(249, false), (250, true), (1000, false)] {
        let a = on_packed_tensors(Some([total_q, 9]), attention(125, 5, 64, 64));
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
    assert_eq!(name(104, plain), plan::forward(&attention(900, 900, 104, 104), &V100).unwrap().variant.name);
    let bytes = kernels::variants().find(|v| v.name == "volta_fwd_96x96").unwrap().shared_bytes;
    let little = DeviceLimits { shared_bytes_per_block: bytes - 1, ..d };
    assert_ne!(forward_of(&attention(900, 900, 64, 64), &little).0, "volta_fwd_96x96", "does not fit");
}

#[test]
fn tuned_kernel_selects_its_family() {
    let named = |name, like: Variant| Variant { name, ..like };
    // table rows (kernels) of Volta under Turing's name, which need the scratch memory of their own family
    let turing = Family { scratch: VOLTA.scratch, ..MADE_UP };
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
    let own = ["prepare", "main", "finish"];
    let volta = |main| ["volta_bwd_varlen_preprocess", main, "volta_bwd_varlen_postprocess"];
    let tuned = |choices: &[&str], device| tuned_with(kernels, &[], choices, device);
    assert_eq!(backward(&T4), own);
    let (main, forward) = (r#""pass": "Backward", "variant": "main""#, r#""pass": "Forward", "variant": "volta_fwd_128x128""#);
    let d = tuned(&[r#""pass": "Backward", "variant": "volta_bwd_96""#, forward], H200);
    assert_eq!(backward(&d), volta("volta_bwd_96"));
    assert_eq!(plan::forward_among(kernels, &a, &d).unwrap().variant.name, "volta_fwd_128x128");
    // not if the family is excluded or does not run on the device
    assert_eq!(backward(&DeviceLimits { only: kernels.families().find(|f| f.name == MADE_UP.name), ..d }), own);
    assert_eq!(backward(&tuned(&[main], V100)), volta("volta_bwd_64"));
    // a stream-K kernel takes the others with it, unless the tuning chooses a main kernel too
    let stream_k = r#""pass": "BackwardStreamK", "variant": "volta_bwd_streamk_64""#;
    assert_eq!(backward(&tuned(&[stream_k], H200)), volta("volta_bwd_streamk_64"));
    assert_eq!(backward(&tuned(&[stream_k, main], H200)), own);
    // dq's accumulators have the main kernel's columns, which a wider stream-K kernel would overrun
    let narrow = Attention { headdim: 24, headdim_v: 24, ..attention(1000, 1000, 24, 24) };
    let plan = plan::backward(&narrow, DEFAULT, &tuned_with(*COMPILED, &[], &[stream_k], V100)).unwrap();
    assert_eq!((plan.main.variant.name, plan.main.backward_stream_k), ("volta_bwd_varlen_32", None));
    // after one failure, all kernels of the other family
    let d = tuned_with(kernels, &["prepare"], &[], H200);
    assert_eq!(backward(&d), volta("volta_bwd_64"));
    let plan = plan::backward_among(kernels, &a, DEFAULT, &d).unwrap();
    assert_eq!(plan.main.reason, Reason::FailedAvoided);
}

#[test]
fn tuning_removes_atomics_but_never_adds_them() {
    let d = tuned(&[], &[r#""pass": "Backward", "headdim": [64, 64], "deterministic": true"#]);
    let no_atomics = ["volta_bwd_varlen_preprocess", "volta_bwd_dkdv_64", "volta_bwd_varlen_dq_64"];
    let a = Attention { nheads: 40, nheads_k: 40, ..attention(1000, 1000, 64, 64) };
    assert_eq!(backward_of(&a, DEFAULT, &d), (no_atomics, true));
    assert_eq!(backward_of(&a, DETERMINISTIC, &d), (no_atomics, true));
    assert!(!backward_of(&attention(1000, 1000, 72, 72), DEFAULT, &d).1);
    assert_eq!(plan::backward(&a, DEFAULT, &d).unwrap().main.reason, Reason::TunedMode);
    // a kernel with atomics: the deterministic mode launches it several times, each block with an accumulator of its own
    let atomics = tuned(&[], &[r#""pass": "Backward", "variant": "volta_bwd_128""#]);
    let names = ["volta_bwd_varlen_preprocess", "volta_bwd_128", "volta_bwd_varlen_postprocess"];
    assert_eq!(backward_of(&a, DEFAULT, &atomics), (names, false));
    assert_eq!(backward_of(&a, DETERMINISTIC, &atomics), (names, true));
    assert!(plan::backward(&a, DETERMINISTIC, &atomics).unwrap().dq_accum_splits > 0);
    // both kinds of choice at once
    let both = tuned(&[], &[r#""pass": "BackwardDq", "variant": "volta_bwd_dq_96""#, r#""pass": "Backward", "deterministic": true"#]);
    assert_eq!(backward_of(&a, DEFAULT, &both).0, ["volta_bwd_varlen_preprocess", "volta_bwd_dkdv_64", "volta_bwd_dq_96"]);
}

/// Plans avoid each failed kernel, even if a choice names it. If no other kernel fits, an error names the failed one.
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
    assert_eq!(forward_of(&a, &tuned(&["volta_fwd_64x64"], &[])), ("volta_fwd_64x64_medium", Reason::FailedAvoided));
    // Resident: all blocks run at once. NoMoreBlocks: smaller blocks, but no more of them
    let small = attention(64, 64, 64, 64);
    assert_eq!(forward_of(&small, &V100), ("volta_fwd_64x64_small", Reason::Resident));
    assert_eq!(forward_of(&small, &tuned(&["volta_fwd_64x64_small"], &[])), ("volta_fwd_64x64_medium", Reason::NoMoreBlocks));
    let both = tuned(&["volta_fwd_64x64_medium", "volta_fwd_64x64_small"], &[]);
    assert_eq!(forward_of(&small, &both), ("volta_fwd_64x64", Reason::Cheapest));
    assert_eq!(backward_of(&a, DEFAULT, &tuned(&["volta_bwd_64"], &[])).0[1], "volta_bwd_64_small");
    assert_eq!(backward_of(&a, DEFAULT, &tuned(&["volta_bwd_64", "volta_bwd_64_small"], &[])).0[1], "volta_bwd_varlen_64");
    // if all kernels with atomics failed, kernels without; if those failed, an error, because the mode excludes atomics
    let of = |pass: Pass| COMPILED.of(&VOLTA, pass).map(|v| v.name).collect::<Vec<_>>();
    let no_atomics = tuned(&of(Pass::Backward), &[]);
    let names = ["volta_bwd_varlen_preprocess", "volta_bwd_dkdv_64_small", "volta_bwd_varlen_dq_64"];
    for mode in [DEFAULT, DETERMINISTIC] {
        assert_eq!(backward_of(&a, mode, &no_atomics), (names, true));
    }
    let neither = [of(Pass::Backward), of(Pass::BackwardDq)].concat();
    let e = plan::backward(&attention(900, 900, 72, 72), DETERMINISTIC, &tuned(&neither, &[])).unwrap_err();
    assert!(e.message.contains("volta_bwd_dq_96") && !e.message.contains("volta_bwd_varlen_dq_64"), "{e}");
}

#[test]
fn rejects_invalid_tuning_with_its_location() {
    let file = |fields: &str| format!(r#"{{"format": 1, {fields}}}"#);
    let choices = |inside: &[&str]| file(&format!(r#""choices": [{}]"#, inside.join(",")));
    let choice = |pass: &str, field: &str| choices(&[&format!(r#"{{"pass": "{pass}", {field}}}"#)]);
    let forward = |variant: &str, field: &str| choice("Forward", &format!(r#""variant": "{variant}", {field}"#));
    let too_many = [r#"{"pass": "Backward", "deterministic": true}"#; MAX_CHOICES + 1];
    let not_of_class = "with the headdims and features of the class";
    for (text, expected) in [
        // the file
        ("nonsense".into(), "tuning: got expected"), // the JSON parser's message begins with "expected"
        ("[1]".into(), "tuning: got"),
        (r#"{"choices": []}"#.into(), "missing field `format`"),
        (r#"{"format": 2}"#.into(), "tuning: format: got 2, expected 1"),
        (file(r#""more": 1"#), "unknown field `more`"),
        (file(r#""failed": ["nosuch"]"#), "tuning: failed: got `nosuch`, expected a kernel of this build"),
        (choices(&too_many), "tuning: choices: got 513 of them, expected 512 at most"),
        // the kernel of a choice: of another pass, of headdim 64, without the features
        (choice("Sideways", r#""variant": "volta_fwd_64x64""#), "tuning: choices[0].pass: got `Sideways`, expected Forward, "),
        (choice("Forward", r#""variant": "nosuch""#), "tuning: choices[0].variant: got `nosuch`"),
        (choice("Forward", r#""variant": "volta_bwd_64""#), "expected a kernel of pass Forward"),
        (forward("volta_fwd_64x64", r#""headdim": [65, 70]"#), not_of_class),
        (forward("volta_fwd_64x64", r#""features": ["bias"]"#), not_of_class),
        (forward("volta_fwd_bias_64x64", r#""features": ["bias", "fp32_bias"]"#), not_of_class),
        // the class of a choice: features are those of the pass, a range has the minimum first
        (forward("volta_fwd_64x64", r#""features": ["fp32_gradients"]"#), "choices[0].features: got `fp32_gradients`"),
        (forward("volta_fwd_64x64", r#""rows": [2, 1]"#), "tuning: choices[0].rows: got [2, 1]"),
        (forward("volta_fwd_64x64", r#""rows": [-1, 1]"#), "tuning: choices[0].rows: got [-1, 1]"),
        // a choice has a variant, or takes atomics away
        (choice("Forward", r#""deterministic": true"#), "choices[0].deterministic: got true for pass Forward"),
        (choice("Backward", r#""deterministic": false"#), "choices[0].deterministic: got false for pass Backward"),
        (choices(&[r#"{"pass": "Backward"}"#]), "choices[0]: got neither, expected either `variant` or `deterministic`"),
        (choice("Backward", r#""variant": "volta_bwd_64", "deterministic": true"#), "choices[0]: got both"),
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
        {"pass": "Forward", "variant": "volta_fwd_invariant_generic_64x64", "rows": [0, 200]},
        {"pass": "Backward", "deterministic": true}]}"#;
    let usable = |d: &DeviceLimits| Tuning::parse(text, *COMPILED).unwrap().usable_on(*COMPILED, d.sm(), d.shared_bytes_per_block);
    let (tuning, refused) = usable(&V100);
    assert_eq!((tuning.choices(), refused.len()), (2, 2));
    assert!(refused[0].contains("turing_fwd_64x64") && refused[0].contains("family turing"), "{refused:?}");
    let (tuning, refused) = usable(&H200);
    assert_eq!((tuning.choices(), refused.len()), (3, 1));
    assert!(refused[0].contains("volta_fwd_invariant_generic_64x64: a batch-invariant call takes no choice"), "{refused:?}");
    let (tuning, refused) = usable(&DeviceLimits { shared_bytes_per_block: 40 * 1024, ..H200 });
    assert_eq!((tuning.choices(), refused.len()), (2, 2));
    assert!(refused[0].contains("volta_fwd_128x128") && refused[0].contains("of 40960"), "{refused:?}");
}

/// A choice for ForwardStreamK does not apply to prefill of the same shape, which has stream-K kernels of its own.
#[test]
fn prefill_ignores_stream_k_choices() {
    let d = tuned(&[], &[r#""pass": "ForwardStreamK", "variant": "volta_fwd_streamk_64x64""#]);
    let a = Attention { nheads: 6, nheads_k: 6, ..attention(2048, 2048, 64, 64) };
    assert_eq!(forward_of(&a, &d), ("volta_fwd_streamk_64x64", Reason::Tuned));
    assert_ne!(plan::prefill(&a, &d).unwrap().variant.pass, Pass::ForwardStreamK);
}

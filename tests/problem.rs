//! Tests of validation, without tensors. Each error gives the argument's name, the value and the expected values.

use volta_fa::error::ErrorKind;
use volta_fa::options::UNKNOWN;
use volta_fa::problem::*;

fn tensor(sizes: [i64; 4]) -> TensorDesc {
    let mut strides = vec![1; 4];
    for i in (0..3).rev() {
        strides[i] = strides[i + 1] * sizes[i + 1];
    }
    TensorDesc { dtype: DType::Half, device: Device::Cuda(0), sizes: Dims::from_slice(&sizes), strides: strides.into() }
}

fn options() -> Options {
    Options { window_left: -1, window_right: -1, ..Default::default() }
}

/// Checks that a valid call after `change` is rejected, with all `words` in the message.
fn rejected(kind: ErrorKind, words: &[&str], change: impl FnOnce(&mut TensorDesc, &mut TensorDesc, &mut TensorDesc, &mut Options)) {
    let (mut q, mut k, mut v, mut o) = (tensor([2, 10, 6, 64]), tensor([2, 12, 3, 64]), tensor([2, 12, 3, 32]), options());
    validate(&q, &k, &v, &o, Backend::Kernels).expect("valid before the change");
    change(&mut q, &mut k, &mut v, &mut o);
    let e = validate(&q, &k, &v, &o, Backend::Kernels).expect_err("must be rejected");
    assert_eq!(e.kind, kind, "{e}");
    for w in words {
        assert!(e.message.contains(w), "`{}` does not say `{w}`", e.message);
    }
}

#[test]
fn accepts_valid_problem() {
    let o = Options { is_causal: true, window_left: 4, ..options() };
    let a = validate(&tensor([2, 10, 6, 64]), &tensor([2, 12, 3, 64]), &tensor([2, 12, 3, 32]), &o, Backend::Kernels).unwrap();
    assert_eq!((a.batch, a.seqlen_q, a.seqlen_k, a.nheads, a.nheads_k, a.headdim, a.headdim_v), (2, 10, 12, 6, 3, 64, 32));
    assert_eq!(a.window, Window { left: Some(4), right: Some(0) });
    assert_eq!(a.softmax_scale, 0.125);
}

#[test]
fn rejects_invalid_tensors() {
    use ErrorKind::Value;
    rejected(Value, &["q", "torch.float32", "torch.float16"], |q, _, _, _| q.dtype = DType::Float);
    rejected(Value, &["k: got dtype torch.bfloat16", "torch.float16, that of q"], |_, k, _, _| k.dtype = DType::BFloat16);
    rejected(Value, &["k", "torch.int32", "torch.float16 or torch.bfloat16"], |_, k, _, _| k.dtype = DType::Int32);
    rejected(Value, &["v", "cpu", "cuda:0"], |_, _, v, _| v.device = Device::Cpu);
    rejected(Value, &["k", "cuda:1", "cuda:0"], |_, k, _, _| k.device = Device::Cuda(1));
    rejected(Value, &["q", "rank 3", "rank 4"], |q, _, _, _| {
        *q = TensorDesc { sizes: Dims::from_slice(&[10, 6, 64]), strides: Dims::from_slice(&[384, 64, 1]), ..q.clone() }
    });
    rejected(Value, &["k", "batch 3", "batch 2"], |_, k, _, _| *k = tensor([3, 12, 3, 64]));
    rejected(Value, &["v", "seqlen 13", "seqlen 12"], |_, _, v, _| *v = tensor([2, 13, 3, 32]));
    rejected(Value, &["v", "nheads 1", "nheads 3"], |_, _, v, _| *v = tensor([2, 12, 1, 32]));
    rejected(Value, &["k", "headdim 32", "headdim 64"], |_, k, _, _| *k = tensor([2, 12, 3, 32]));
    rejected(Value, &["q", "nheads 7", "multiple of nheads_k 3"], |q, _, _, _| *q = tensor([2, 10, 7, 64]));
    rejected(Value, &["q", "stride 6", "contiguous last dimension"], |q, _, _, _| q.strides[3] = 6);
    rejected(Value, &["k", "stride 4294967296 between rows", "4294967295"], |_, k, _, _| k.strides[1] = 1 << 32);
    rejected(Value, &["v: got headdim 520, expected a headdim from 1 to 512"], |_, _, v, _| *v = tensor([2, 12, 3, 520]));
    rejected(Value, &["q: got headdim 0, expected a headdim from 1 to 512"], |q, k, _, _| {
        (*q, *k) = (tensor([2, 10, 6, 0]), tensor([2, 12, 3, 0]))
    });
    rejected(Value, &["q", "seqlen 2000000000", "536870911"], |q, _, _, _| *q = tensor([2, 2_000_000_000, 6, 64]));
}

/// Validation accepts symbolic sizes and still checks known ones.
#[test]
fn accepts_symbolic_sizes_and_checks_known_ones() {
    let unknown = |mut d: TensorDesc, dims: &[usize]| {
        d.device = Device::Meta;
        dims.iter().for_each(|&i| d.sizes[i] = UNKNOWN);
        dims.iter().filter(|&&i| i > 0).for_each(|&i| d.strides[..i].fill(UNKNOWN));
        d
    };
    let q = unknown(tensor([2, 10, 6, 64]), &[0, 1]);
    let (k, v) = (unknown(tensor([2, 12, 3, 64]), &[1]), unknown(tensor([2, 12, 3, 32]), &[0, 1]));
    let check = |q: &TensorDesc, k: &TensorDesc, v: &TensorDesc, o: &Options| validate(q, k, v, o, Backend::Meta);
    let a = check(&q, &k, &v, &options()).unwrap();
    assert_eq!((a.seqlen_q, a.nheads, a.headdim, a.headdim_v), (UNKNOWN, 6, 64, 32));
    assert!(check(&q, &k, &v, &Options { window_left: UNKNOWN, ..options() }).is_ok());
    // for tensors with data, UNKNOWN is an ordinary number
    let real = |o: &Options| validate(&tensor([2, 10, 6, 64]), &tensor([2, 12, 3, 64]), &tensor([2, 12, 3, 32]), o, Backend::Kernels);
    assert!(real(&Options { window_left: UNKNOWN, ..options() }).is_err());
    let length = |backend| {
        let o = Options { max_seqlen_q: Some(UNKNOWN), ..packed_options() };
        validate(&packed([10, 6, 64]), &packed([20, 3, 64]), &packed([20, 3, 32]), &o, backend)
    };
    assert!(length(Backend::Kernels).is_err() && length(Backend::Meta).is_ok());
    let all = [0, 1, 2, 3].as_slice();
    assert!(check(&unknown(q.clone(), all), &unknown(k.clone(), all), &unknown(v.clone(), all), &options()).is_ok());

    let message = |q: &TensorDesc, k: &TensorDesc, o: &Options| check(q, k, &v, o).expect_err("must be rejected").message;
    assert!(message(&q, &unknown(tensor([2, 12, 4, 64]), &[1]), &options()).contains("v: got nheads 3, expected nheads 4"));
    assert!(message(&q, &TensorDesc { device: Device::Cpu, ..k.clone() }, &options()).contains("k: got device cpu, expected device meta"));
    let huge = || unknown(tensor([2, 12, 3, 520]), &[1]);
    assert!(message(&unknown(tensor([2, 10, 6, 520]), &[1]), &huge(), &options()).contains("q: got headdim 520"));
    let sinks = Some(TensorDesc { device: Device::Meta, ..vector(DType::Half, &[5]) });
    assert!(message(&q, &k, &Options { sinks, ..options() }).contains("sinks: got shape (5)"));
    let heads = unknown(q.clone(), &[2]);
    let slopes = Some(TensorDesc { device: Device::Meta, ..vector(DType::Float, &[1, 2, 3]) });
    assert!(message(&heads, &k, &Options { alibi_slopes: slopes, ..options() }).contains("here (?,) or (?, ?)"));
}

#[test]
fn rejects_invalid_scalars() {
    use ErrorKind::Value;
    rejected(Value, &["dropout_p", "1.5", "[0, 1)"], |_, _, _, o| o.dropout_p = 1.5);
    rejected(Value, &["dropout_p", "NaN"], |_, _, _, o| o.dropout_p = f64::NAN);
    for softcap in [-1.0, 9e-5, 1.1e4, f64::INFINITY, f64::NAN] {
        rejected(Value, &[&format!("softcap: got {softcap}"), "0 (off) or a number from 1e-4 to 1e4"], |_, _, _, o| o.softcap = softcap);
    }
    rejected(Value, &["softmax_scale", "inf"], |_, _, _, o| o.softmax_scale = Some(f64::INFINITY));
    rejected(Value, &["window_left", "-2"], |_, _, _, o| o.window_left = -2);
    rejected(Value, &["window_right", "-7"], |_, _, _, o| o.window_right = -7);
    rejected(Value, &["window_right: got 3 together with is_causal=True", "-1 or 0"], |_, _, _, o| {
        (o.is_causal, o.window_right) = (true, 3)
    });
}

fn vector(dtype: DType, sizes: &[i64]) -> TensorDesc {
    TensorDesc { dtype, device: Device::Cuda(0), sizes: sizes.into(), strides: vec![1; sizes.len()].into() }
}

fn ints(n: i64) -> Option<TensorDesc> {
    Some(vector(DType::Int32, &[n]))
}

fn packed(sizes: [i64; 3]) -> TensorDesc {
    let strides = Dims::from_slice(&[sizes[1] * sizes[2], sizes[2], 1]);
    TensorDesc { dtype: DType::Half, device: Device::Cuda(0), sizes: Dims::from_slice(&sizes), strides }
}

fn packed_options() -> Options {
    Options { cu_seqlens_q: ints(4), cu_seqlens_k: ints(4), max_seqlen_q: Some(7), max_seqlen_k: Some(9), ..options() }
}

/// Checks rejection as [`rejected`], from a valid packed call.
fn packed_rejected(words: &[&str], change: impl FnOnce(&mut TensorDesc, &mut TensorDesc, &mut TensorDesc, &mut Options)) {
    let (mut q, mut k, mut v, mut o) = (packed([10, 6, 64]), packed([20, 3, 64]), packed([20, 3, 32]), packed_options());
    validate(&q, &k, &v, &o, Backend::Kernels).expect("valid before the change");
    change(&mut q, &mut k, &mut v, &mut o);
    let e = validate(&q, &k, &v, &o, Backend::Kernels).expect_err("must be rejected");
    assert_eq!(e.kind, ErrorKind::Value, "{e}");
    for w in words {
        assert!(e.message.contains(w), "`{}` does not say `{w}`", e.message);
    }
}

#[test]
fn accepts_valid_packed_problem() {
    let a = validate(&packed([10, 6, 64]), &packed([20, 3, 64]), &packed([20, 3, 32]), &packed_options(), Backend::Kernels).unwrap();
    assert_eq!((a.batch, a.seqlen_q, a.seqlen_k, a.nheads, a.nheads_k, a.headdim, a.headdim_v), (3, 7, 9, 6, 3, 64, 32));
    assert_eq!((a.queries, a.keys), (Queries::Packed { total: 10 }, Keys::Packed { total: 20 }));
    assert_eq!((a.query_shape(32), a.lse_shape()), (vec![10, 6, 32], vec![6, 10]));
    assert!(a.is_varlen() && !a.is_empty());
}

/// max_seqlen may be any upper bound; grids and masks use at most the actual rows. The shape of a bias follows the argument.
#[test]
fn accepts_max_seqlen_beyond_all_rows() {
    let check = |o: Options| validate(&packed([10, 6, 64]), &packed([20, 3, 64]), &packed([20, 3, 32]), &o, Backend::Kernels);
    let o = Options { max_seqlen_q: Some(1 << 30), max_seqlen_k: Some(1 << 30), ..packed_options() };
    let a = check(o.clone()).unwrap();
    assert_eq!((a.seqlen_q, a.seqlen_k), (10, 20));
    assert!(check(Options { attn_bias: Some(vector(DType::Half, &[3, 6, 1, 1 << 30])), ..o.clone() }).is_ok());
    assert!(check(Options { attn_bias: Some(vector(DType::Half, &[3, 6, 1, 20])), ..o }).unwrap_err().message.contains("1073741824"));
}

/// max_seqlen may be 0 without rows.
#[test]
fn accepts_max_seqlen_0_without_rows() {
    let o = Options { max_seqlen_q: Some(0), ..packed_options() };
    assert!(validate(&packed([0, 6, 64]), &packed([20, 3, 64]), &packed([20, 3, 32]), &o, Backend::Kernels).unwrap().is_empty());
    let o = Options { max_seqlen_k: Some(0), ..packed_options() };
    assert!(validate(&packed([10, 6, 64]), &packed([0, 3, 64]), &packed([0, 3, 32]), &o, Backend::Kernels).unwrap().is_empty());
}

#[test]
fn rejects_invalid_packed_arguments() {
    packed_rejected(&["cu_seqlens_k: got None", "cu_seqlens_q"], |_, _, _, o| o.cu_seqlens_k = None);
    packed_rejected(&["cu_seqlens_q: got None"], |_, _, _, o| o.cu_seqlens_q = None);
    packed_rejected(&["cu_seqlens_q: got dtype torch.int64", "torch.int32"], |_, _, _, o| {
        o.cu_seqlens_q = Some(vector(DType::Int64, &[4]))
    });
    packed_rejected(&["cu_seqlens_q: got shape (4, 1)", "(batch + 1,)"], |_, _, _, o| o.cu_seqlens_q = Some(vector(DType::Int32, &[4, 1])));
    packed_rejected(&["cu_seqlens_q: got shape (0)"], |_, _, _, o| o.cu_seqlens_q = ints(0));
    packed_rejected(&["cu_seqlens_k: got shape (5)", "here (4,)"], |_, _, _, o| o.cu_seqlens_k = ints(5));
    packed_rejected(&["cu_seqlens_k: got stride 2", "contiguous"], |_, _, _, o| o.cu_seqlens_k.as_mut().unwrap().strides[0] = 2);
    packed_rejected(&["cu_seqlens_k: got device cpu", "cuda:0"], |_, _, _, o| o.cu_seqlens_k.as_mut().unwrap().device = Device::Cpu);
    packed_rejected(&["max_seqlen_q: got None", "longest sequence"], |_, _, _, o| o.max_seqlen_q = None);
    packed_rejected(&["max_seqlen_k: got None"], |_, _, _, o| o.max_seqlen_k = None);
    packed_rejected(&["max_seqlen_k: got -1", "0 to"], |_, _, _, o| o.max_seqlen_k = Some(-1));
    packed_rejected(&["max_seqlen_k: got 2147483648", "0 to 2147483647"], |_, _, _, o| o.max_seqlen_k = Some(1 << 31));
    packed_rejected(&["max_seqlen_q: got 0", "at least 1", "10 rows"], |_, _, _, o| o.max_seqlen_q = Some(0));
    packed_rejected(&["max_seqlen_k: got 0", "at least 1", "20 rows"], |_, _, _, o| o.max_seqlen_k = Some(0));
    packed_rejected(&["max_seqlen_k: got 0"], |_, _, _, o| (o.max_seqlen_k, o.seqused_k) = (Some(0), ints(3)));
    packed_rejected(&["cu_seqlens_q: got shape (1)", "10 rows"], |_, _, _, o| (o.cu_seqlens_q, o.cu_seqlens_k) = (ints(1), ints(1)));
    packed_rejected(&["cu_seqlens_q: got shape (33554434)", "at most 33554432 sequences"], |_, _, _, o| {
        (o.cu_seqlens_q, o.cu_seqlens_k) = (ints((1 << 25) + 2), ints((1 << 25) + 2))
    });
    packed_rejected(&["k: got total 536870912", "at most 536870911"], |_, k, v, _| {
        (*k, *v) = (packed([1 << 29, 3, 64]), packed([1 << 29, 3, 32]))
    });
    packed_rejected(&["q: got a tensor of rank 4", "rank 3"], |q, _, _, _| *q = tensor([2, 5, 6, 64]));
    packed_rejected(&["v: got total 19", "total 20"], |_, _, v, _| *v = packed([19, 3, 32]));
    packed_rejected(&["k: got headdim 32", "headdim 64"], |_, k, _, _| *k = packed([20, 3, 32]));
    packed_rejected(&["seqused_k: got shape (4)", "here (3,)"], |_, _, _, o| o.seqused_k = ints(4));
    packed_rejected(&["attn_bias: got shape (3, 6, 10, 20)", "(3, 6, 7, 9)"], |_, _, _, o| {
        o.attn_bias = Some(vector(DType::Half, &[3, 6, 10, 20]))
    });
    rejected(ErrorKind::Value, &["max_seqlen_q: got 10", "None"], |_, _, _, o| o.max_seqlen_q = Some(10));
    rejected(ErrorKind::Value, &["max_seqlen_k: got 12", "None"], |_, _, _, o| o.max_seqlen_k = Some(12));
    rejected(ErrorKind::Value, &["q: got a tensor of rank 3", "cu_seqlens_q"], |q, _, _, _| *q = packed([10, 6, 64]));
}

#[test]
fn rejects_invalid_features() {
    let wrong = |words: &[&str], change: &dyn Fn(&mut Options)| rejected(ErrorKind::Value, words, |_, _, _, o| change(o));
    wrong(&["seqused_k: got dtype torch.int64", "torch.int32"], &|o| o.seqused_k = Some(vector(DType::Int64, &[2])));
    wrong(&["seqused_k: got shape (3)", "(2,)"], &|o| o.seqused_k = ints(3));
    wrong(&["alibi_slopes: got dtype torch.float16", "torch.float32"], &|o| o.alibi_slopes = Some(vector(DType::Half, &[6])));
    wrong(&["alibi_slopes: got shape (3)", "(6,) or (2, 6)"], &|o| o.alibi_slopes = Some(vector(DType::Float, &[3])));
    wrong(&["alibi_slopes: got shape (1, 6)"], &|o| o.alibi_slopes = Some(vector(DType::Float, &[1, 6])));
    wrong(&["sinks: got dtype torch.bfloat16", "torch.float16 (q's) or torch.float32"], &|o| o.sinks = Some(vector(DType::BFloat16, &[6])));
    wrong(&["sinks: got shape (2, 6)", "(6,)"], &|o| o.sinks = Some(vector(DType::Float, &[2, 6])));
    wrong(&["attn_bias: got dtype torch.float64", "torch.bool"], &|o| o.attn_bias = Some(vector(DType::Double, &[2, 6, 10, 12])));
    wrong(&["attn_bias: got shape (10, 12)", "(2, 6, 10, 12)"], &|o| o.attn_bias = Some(vector(DType::Half, &[10, 12])));
    wrong(&["attn_bias: got shape (2, 6, 10, 11)", "(2, 6, 10, 12)"], &|o| o.attn_bias = Some(vector(DType::Half, &[2, 6, 10, 11])));
    wrong(&["attn_bias: got shape (2, 3, 10, 12)"], &|o| o.attn_bias = Some(vector(DType::Half, &[2, 3, 10, 12])));
    wrong(&["softcap: got 30 together with dropout_p 0.1"], &|o| (o.softcap, o.dropout_p) = (30.0, 0.1));
    let elsewhere = |t: TensorDesc| Some(TensorDesc { device: Device::Cuda(1), ..t });
    wrong(&["alibi_slopes: got device cuda:1", "cuda:0"], &|o| o.alibi_slopes = elsewhere(vector(DType::Float, &[6])));
    wrong(&["sinks: got device cuda:1", "cuda:0"], &|o| o.sinks = elsewhere(vector(DType::Float, &[6])));
    wrong(&["attn_bias: got device cuda:1", "cuda:0"], &|o| o.attn_bias = elsewhere(vector(DType::Half, &[1, 1, 1, 1])));
    wrong(&["seqused_k: got device cuda:1", "cuda:0"], &|o| o.seqused_k = elsewhere(vector(DType::Int32, &[2])));
}

#[test]
fn accepts_valid_features() {
    let accepted = |change: &dyn Fn(&mut Options)| {
        let mut o = options();
        change(&mut o);
        validate(&tensor([2, 10, 6, 64]), &tensor([2, 12, 3, 64]), &tensor([2, 12, 3, 32]), &o, Backend::Kernels).unwrap().features
    };
    assert_eq!(accepted(&|_| ()), RequestedFeatures::default());
    for sizes in [[2, 6, 10, 12], [1, 1, 1, 1], [1, 6, 1, 12], [2, 1, 10, 1]] {
        for dtype in [DType::Bool, DType::Half, DType::Float] {
            let found = accepted(&|o| o.attn_bias = Some(vector(dtype, &sizes)));
            assert!(found.attn_bias && found.fp32_bias == (dtype == DType::Float));
        }
    }
    for sizes in [&[6][..], &[2, 6]] {
        assert!(accepted(&|o| o.alibi_slopes = Some(vector(DType::Float, sizes))).alibi);
    }
    for dtype in [DType::Half, DType::Float] {
        assert!(accepted(&|o| o.sinks = Some(vector(dtype, &[6]))).sinks);
    }
    assert_eq!(accepted(&|o| o.dropout_p = 0.5).dropout_p, 0.5);
    for softcap in [1e-4, 30.0, 1e4] {
        assert_eq!(accepted(&|o| o.softcap = softcap).score_function, Some(ScoreFunction::Softcap(softcap)));
    }
    let used = accepted(&|o| o.seqused_k = ints(2));
    assert!(used.seqused_k && used == RequestedFeatures { seqused_k: true, ..RequestedFeatures::default() });
}

#[test]
fn rejects_invalid_lengths() {
    let a = validate(&packed([10, 6, 64]), &packed([20, 3, 64]), &packed([20, 3, 32]), &packed_options(), Backend::Kernels).unwrap();
    let (q, k) = ([0, 7, 7, 10], [0, 9, 11, 20]);
    let rejected = |words: &[&str], q: &[i32], k: &[i32], used: Option<&[i32]>| {
        let e = validate_lengths(&a, Some(q), Some(k), used).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Value);
        assert!(words.iter().all(|w| e.message.contains(w)), "{e}");
    };
    validate_lengths(&a, Some(&q), Some(&k), None).unwrap();
    validate_lengths(&a, Some(&q), Some(&k), Some(&[9, 0, 5])).unwrap();
    rejected(&["cu_seqlens_q: got 1 as its first", "expected 0"], &[1, 7, 7, 10], &k, None);
    rejected(&["cu_seqlens_k: got -1 as its first"], &q, &[-1, 9, 11, 20], None);
    rejected(&["cu_seqlens_q: got 6 after 7 (entry 2)", "never descend"], &[0, 7, 6, 10], &k, None);
    rejected(&["cu_seqlens_k: got 21 as its last", "20, the number of rows"], &q, &[0, 9, 12, 21], None);
    rejected(&["cu_seqlens_q: got 9 as its last", "10, the number of rows"], &[0, 7, 7, 9], &k, None);
    rejected(&["max_seqlen_q: got 7", "at least 8", "sequence 0"], &[0, 8, 8, 10], &k, None);
    rejected(&["max_seqlen_k: got 9", "at least 11", "sequence 2"], &q, &[0, 9, 9, 20], None);
    rejected(&["seqused_k: got 3 (entry 1)", "0 to 2"], &q, &k, Some(&[9, 3, 9]));
    rejected(&["seqused_k: got -1 (entry 0)"], &q, &k, Some(&[-1, 1, 1]));

    let o = Options { seqused_k: ints(2), ..options() };
    let dense = validate(&tensor([2, 10, 6, 64]), &tensor([2, 12, 3, 64]), &tensor([2, 12, 3, 32]), &o, Backend::Kernels).unwrap();
    validate_lengths(&dense, None, None, Some(&[12, 0])).unwrap();
    assert!(validate_lengths(&dense, None, None, Some(&[12, 13])).unwrap_err().message.contains("0 to 12"));
}

#[test]
fn requires_rng_state_exactly_with_dropout() {
    let q = tensor([2, 10, 6, 64]);
    let o = Options { dropout_p: 0.1, ..options() };
    let a = validate(&q, &tensor([2, 12, 3, 64]), &tensor([2, 12, 3, 32]), &o, Backend::Kernels).unwrap();
    let (out, lse) = (tensor([2, 10, 6, 32]), vector(DType::Float, &[2, 6, 10]));
    let check = |state: Option<TensorDesc>| validate_backward(&out, &out, &lse, state.as_ref(), &q, &a, Backend::Kernels);
    check(Some(vector(DType::Int64, &[2]))).unwrap();
    let without = validate(&q, &tensor([2, 12, 3, 64]), &tensor([2, 12, 3, 32]), &options(), Backend::Kernels).unwrap();
    let e = validate_backward(&out, &out, &lse, Some(&vector(DType::Int64, &[2])), &q, &without, Backend::Kernels).unwrap_err();
    assert!(e.message.contains("rng_state: got a tensor of shape (2), expected None, since dropout_p is 0"), "{e}");
    for (state, words) in [
        (None, "rng_state: got None"),
        (Some(vector(DType::Int64, &[3])), "rng_state: got shape (3) of dtype torch.int64, expected shape (2,)"),
        (Some(vector(DType::Int32, &[2])), "torch.int32"),
        (Some(TensorDesc { device: Device::Cpu, ..vector(DType::Int64, &[2]) }), "rng_state: got device cpu"),
    ] {
        let e = check(state).unwrap_err();
        assert!(e.kind == ErrorKind::Value && e.message.contains(words), "{e}");
    }
}

#[test]
fn checks_saved_tensors_of_packed_problems() {
    let q = packed([10, 6, 64]);
    let a = validate(&q, &packed([20, 3, 64]), &packed([20, 3, 32]), &packed_options(), Backend::Kernels).unwrap();
    let check = |out: &TensorDesc, lse: &[i64]| validate_backward(out, out, &vector(DType::Float, lse), None, &q, &a, Backend::Kernels);
    check(&packed([10, 6, 32]), &[6, 10]).unwrap();
    assert!(check(&packed([11, 6, 32]), &[6, 10]).unwrap_err().message.contains("(10, 6, 32)"));
    assert!(check(&packed([10, 6, 32]), &[10, 6]).unwrap_err().message.contains("softmax_lse: got shape (10, 6), expected shape (6, 10)"));
}

#[test]
fn cpu_backend_accepts_every_float_type() {
    for dtype in [DType::Half, DType::BFloat16, DType::Float, DType::Double] {
        let make = |s| TensorDesc { dtype, device: Device::Cpu, ..tensor(s) };
        validate(&make([1, 5, 2, 8]), &make([1, 5, 2, 8]), &make([1, 5, 2, 8]), &options(), Backend::Cpu).unwrap();
    }
}

#[test]
fn accepts_empty_problems() {
    for sizes in [[0, 10, 2, 64], [2, 0, 2, 64], [2, 10, 0, 64]] {
        let a = validate(&tensor(sizes), &tensor(sizes), &tensor(sizes), &options(), Backend::Kernels).unwrap();
        assert!(a.is_empty());
    }
}

#[test]
fn rejects_invalid_saved_tensors() {
    let q = tensor([2, 10, 6, 64]);
    let a = validate(&q, &tensor([2, 12, 3, 64]), &tensor([2, 12, 3, 32]), &options(), Backend::Kernels).unwrap();
    let out = tensor([2, 10, 6, 32]);
    let lse =
        |sizes: Vec<i64>, dtype| TensorDesc { dtype, device: Device::Cuda(0), strides: vec![1; sizes.len()].into(), sizes: sizes.into() };
    let good = lse(vec![2, 6, 10], DType::Float);
    let check = |dout: &TensorDesc, out: &TensorDesc, l: &TensorDesc| validate_backward(dout, out, l, None, &q, &a, Backend::Kernels);
    check(&out, &out, &good).unwrap();
    assert!(check(&tensor([2, 10, 6, 64]), &out, &good).unwrap_err().message.starts_with("dout: got shape (2, 10, 6, 64)"));
    assert!(check(&out, &tensor([2, 11, 6, 32]), &good).unwrap_err().message.starts_with("out: got shape"));
    assert!(check(&out, &out, &lse(vec![2, 6, 11], DType::Float)).unwrap_err().message.starts_with("softmax_lse: got shape"));
    assert!(check(&out, &out, &lse(vec![2, 6, 10], DType::Half)).unwrap_err().message.contains("torch.float32"));
}

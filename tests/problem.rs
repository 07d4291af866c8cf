//! Tests of `validate`, which turns an op's arguments into an `Attention` problem or an error, on descriptions of tensors (`TensorDesc`).
//! So tensors may have huge or symbolic sizes (UNKNOWN, as torch.compile traces them) and devices that this machine lacks. A `Backend` is
//! what would run the call, and decides which dtypes are valid: Kernels (of a GPU or the simulator), or Meta (tensors without data).
//! `tests/test_validation.py` tests the other arguments through every backend.

use volta_fa::error::{ErrorKind, Result};
use volta_fa::options::UNKNOWN;
use volta_fa::problem::*;

/// Describes a contiguous tensor of a GPU.
fn typed(dtype: DType, sizes: &[i64]) -> TensorDesc {
    let strides = (1..=sizes.len()).map(|i| sizes[i..].iter().product()).collect::<Vec<i64>>().into();
    TensorDesc { dtype, device: Device::Cuda(0), sizes: sizes.into(), strides }
}

/// Describes an fp16 tensor: (batch, seqlen, heads, headdim), or packed (rows of all sequences, heads, headdim).
fn tensor(sizes: &[i64]) -> TensorDesc {
    typed(DType::Half, sizes)
}

/// Describes an int32 tensor of n numbers.
fn ints(n: i64) -> Option<TensorDesc> {
    Some(typed(DType::Int32, &[n]))
}

/// Returns options without a window (-1: no bound).
fn options() -> Options {
    Options { window_left: -1, window_right: -1, ..Default::default() }
}

/// q, k, v and options of a call.
type Call = (TensorDesc, TensorDesc, TensorDesc, Options);

/// Returns a valid dense call.
fn dense() -> Call {
    (tensor(&[2, 10, 6, 64]), tensor(&[2, 12, 3, 64]), tensor(&[2, 12, 3, 32]), options())
}

/// Returns a valid call of three packed sequences.
fn packed() -> Call {
    let o = Options { cu_seqlens_q: ints(4), cu_seqlens_k: ints(4), max_seqlen_q: Some(7), max_seqlen_k: Some(9), ..options() };
    (tensor(&[10, 6, 64]), tensor(&[20, 3, 64]), tensor(&[20, 3, 32]), o)
}

/// Returns the call after `change`.
fn changed(mut call: Call, change: impl FnOnce(&mut Call)) -> Call {
    change(&mut call);
    call
}

/// Validates a call.
fn checked((q, k, v, o): &Call, backend: Backend) -> Result<Attention> {
    validate(q, k, v, o, backend)
}

/// Checks that a valid call is rejected after `change`, with a ValueError that contains all `words`.
fn rejected(call: Call, words: &[&str], change: impl FnOnce(&mut Call)) {
    checked(&call, Backend::Kernels).expect("valid before the change");
    let e = checked(&changed(call, change), Backend::Kernels).expect_err("must be rejected");
    assert_eq!(e.kind, ErrorKind::Value, "{e}");
    for w in words {
        assert!(e.message.contains(w), "`{}` does not say `{w}`", e.message);
    }
}

#[test]
fn rejects_invalid_tensors() {
    rejected(dense(), &["q", "torch.float32", "torch.float16 or torch.bfloat16"], |(q, ..)| q.dtype = DType::Float);
    rejected(dense(), &["v", "cpu", "cuda:0"], |(_, _, v, _)| v.device = Device::Cpu);
    rejected(dense(), &["k", "cuda:1", "cuda:0"], |(_, k, ..)| k.device = Device::Cuda(1));
    rejected(dense(), &["k", "stride 4294967296 between rows", "4294967295"], |(_, k, ..)| k.strides[1] = 1 << 32);
    rejected(dense(), &["q", "seqlen 2000000000", "536870911"], |(q, ..)| *q = tensor(&[2, 2_000_000_000, 6, 64]));
    rejected(dense(), &["q: got a tensor of rank 3", "cu_seqlens_q"], |(q, ..)| *q = tensor(&[10, 6, 64]));
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
    let q = unknown(tensor(&[2, 10, 6, 64]), &[0, 1]);
    let (k, v) = (unknown(tensor(&[2, 12, 3, 64]), &[1]), unknown(tensor(&[2, 12, 3, 32]), &[0, 1]));
    let check = |q: &TensorDesc, k: &TensorDesc, v: &TensorDesc, o: &Options| validate(q, k, v, o, Backend::Meta);
    let a = check(&q, &k, &v, &options()).unwrap();
    assert_eq!((a.seqlen_q, a.nheads, a.headdim, a.headdim_v), (UNKNOWN, 6, 64, 32));
    assert!(check(&q, &k, &v, &Options { window_left: UNKNOWN, ..options() }).is_ok());
    // for tensors with data, UNKNOWN is an ordinary number
    assert!(checked(&changed(dense(), |(.., o)| o.window_left = UNKNOWN), Backend::Kernels).is_err());
    let longest = changed(packed(), |(.., o)| o.max_seqlen_q = Some(UNKNOWN));
    assert!(checked(&longest, Backend::Kernels).is_err() && checked(&longest, Backend::Meta).is_ok());
    let all = [0, 1, 2, 3].as_slice();
    assert!(check(&unknown(q.clone(), all), &unknown(k.clone(), all), &unknown(v.clone(), all), &options()).is_ok());

    let message = |q: &TensorDesc, k: &TensorDesc, o: &Options| check(q, k, &v, o).expect_err("must be rejected").message;
    assert!(message(&q, &unknown(tensor(&[2, 12, 4, 64]), &[1]), &options()).contains("v: got nheads 3, expected nheads 4"));
    assert!(message(&q, &TensorDesc { device: Device::Cpu, ..k.clone() }, &options()).contains("k: got device cpu, expected device meta"));
    let huge = || unknown(tensor(&[2, 12, 3, 520]), &[1]);
    assert!(message(&unknown(tensor(&[2, 10, 6, 520]), &[1]), &huge(), &options()).contains("q: got headdim 520"));
    let sinks = Some(TensorDesc { device: Device::Meta, ..typed(DType::Half, &[5]) });
    assert!(message(&q, &k, &Options { sinks, ..options() }).contains("sinks: got shape (5)"));
    let heads = unknown(q.clone(), &[2]);
    let slopes = Some(TensorDesc { device: Device::Meta, ..typed(DType::Float, &[1, 2, 3]) });
    assert!(message(&heads, &k, &Options { alibi_slopes: slopes, ..options() }).contains("here (?,) or (?, ?)"));
}

/// max_seqlen may be 0 without rows.
#[test]
fn accepts_max_seqlen_0_without_rows() {
    let no_queries = changed(packed(), |(q, .., o)| (*q, o.max_seqlen_q) = (tensor(&[0, 6, 64]), Some(0)));
    let no_keys = changed(packed(), |(_, k, v, o)| (*k, *v, o.max_seqlen_k) = (tensor(&[0, 3, 64]), tensor(&[0, 3, 32]), Some(0)));
    for call in [no_queries, no_keys] {
        assert!(checked(&call, Backend::Kernels).unwrap().is_empty());
    }
}

#[test]
fn rejects_invalid_packed_arguments() {
    rejected(packed(), &["cu_seqlens_q: got shape (0)"], |(.., o)| o.cu_seqlens_q = ints(0));
    rejected(packed(), &["cu_seqlens_k: got device cpu", "cuda:0"], |(.., o)| o.cu_seqlens_k.as_mut().unwrap().device = Device::Cpu);
    rejected(packed(), &["cu_seqlens_q: got shape (33554434)", "at most 33554432 sequences"], |(.., o)| {
        (o.cu_seqlens_q, o.cu_seqlens_k) = (ints((1 << 25) + 2), ints((1 << 25) + 2))
    });
    rejected(packed(), &["k: got total 536870912", "at most 536870911"], |(_, k, v, _)| {
        (*k, *v) = (tensor(&[1 << 29, 3, 64]), tensor(&[1 << 29, 3, 32]))
    });
}

#[test]
fn rejects_invalid_features() {
    let wrong = |words: &[&str], change: &dyn Fn(&mut Options)| rejected(dense(), words, |(.., o)| change(o));
    wrong(&["sinks: got dtype torch.bfloat16", "torch.float16 (q's) or torch.float32"], &|o| o.sinks = Some(typed(DType::BFloat16, &[6])));
    let elsewhere = |t: TensorDesc| Some(TensorDesc { device: Device::Cuda(1), ..t });
    wrong(&["alibi_slopes: got device cuda:1", "cuda:0"], &|o| o.alibi_slopes = elsewhere(typed(DType::Float, &[6])));
    wrong(&["sinks: got device cuda:1", "cuda:0"], &|o| o.sinks = elsewhere(typed(DType::Float, &[6])));
    wrong(&["attn_bias: got device cuda:1", "cuda:0"], &|o| o.attn_bias = elsewhere(typed(DType::Half, &[1, 1, 1, 1])));
    wrong(&["seqused_k: got device cuda:1", "cuda:0"], &|o| o.seqused_k = elsewhere(typed(DType::Int32, &[2])));
}

#[test]
fn rejects_rng_state_of_another_device() {
    let call = changed(dense(), |(.., o)| o.dropout_p = 0.1);
    let a = checked(&call, Backend::Kernels).unwrap();
    let (out, lse) = (tensor(&[2, 10, 6, 32]), typed(DType::Float, &[2, 6, 10]));
    // dout, out, softmax_lse, rng_state, q, the problem
    let check = |state: &TensorDesc| validate_backward(&out, &out, &lse, Some(state), &call.0, &a, Backend::Kernels);
    let good = typed(DType::Int64, &[2]);
    check(&good).unwrap();
    let e = check(&TensorDesc { device: Device::Cpu, ..good }).unwrap_err();
    assert!(e.kind == ErrorKind::Value && e.message.contains("rng_state: got device cpu"), "{e}");
}

#[test]
fn checks_saved_tensors_of_packed_problems() {
    let call = packed();
    let a = checked(&call, Backend::Kernels).unwrap();
    let check = |out: &TensorDesc, lse: &[i64]| validate_backward(out, out, &typed(DType::Float, lse), None, &call.0, &a, Backend::Kernels);
    check(&tensor(&[10, 6, 32]), &[6, 10]).unwrap();
    assert!(check(&tensor(&[11, 6, 32]), &[6, 10]).unwrap_err().message.contains("(10, 6, 32)"));
    assert!(check(&tensor(&[10, 6, 32]), &[10, 6]).unwrap_err().message.contains("softmax_lse: got shape (10, 6), expected shape (6, 10)"));
}

//! Tests of `validate`, which turns an op's arguments into an `Attention` problem or an error, on descriptions of tensors (`TensorDesc`).
//! So tensors may have huge or symbolic sizes (UNKNOWN, as torch.compile traces them) and devices that this machine lacks.
//! `tests/test_validation.py` tests the other arguments through every backend.

use volta_fa::error::ErrorKind;
use volta_fa::options::UNKNOWN;
use volta_fa::problem::*;

/// Returns a contiguous fp16 tensor (batch, seqlen, heads, headdim) on a GPU.
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

/// q, k, v and options of a call.
type Call = (TensorDesc, TensorDesc, TensorDesc, Options);

/// Checks that a valid call is rejected after `change`, with a ValueError that contains all `words`.
fn rejected_after(
    change: impl FnOnce(&mut TensorDesc, &mut TensorDesc, &mut TensorDesc, &mut Options),
    (mut q, mut k, mut v, mut o): Call,
    words: &[&str],
) {
    validate(&q, &k, &v, &o, Backend::Kernels).expect("valid before the change");
    change(&mut q, &mut k, &mut v, &mut o);
    let e = validate(&q, &k, &v, &o, Backend::Kernels).expect_err("must be rejected");
    assert_eq!(e.kind, ErrorKind::Value, "{e}");
    for w in words {
        assert!(e.message.contains(w), "`{}` does not say `{w}`", e.message);
    }
}

/// Checks that a dense call is rejected after `change`.
fn rejected(words: &[&str], change: impl FnOnce(&mut TensorDesc, &mut TensorDesc, &mut TensorDesc, &mut Options)) {
    rejected_after(change, (tensor([2, 10, 6, 64]), tensor([2, 12, 3, 64]), tensor([2, 12, 3, 32]), options()), words);
}

#[test]
fn rejects_invalid_tensors() {
    rejected(&["q", "torch.float32", "torch.float16 or torch.bfloat16"], |q, _, _, _| q.dtype = DType::Float);
    rejected(&["v", "cpu", "cuda:0"], |_, _, v, _| v.device = Device::Cpu);
    rejected(&["k", "cuda:1", "cuda:0"], |_, k, _, _| k.device = Device::Cuda(1));
    rejected(&["k", "stride 4294967296 between rows", "4294967295"], |_, k, _, _| k.strides[1] = 1 << 32);
    rejected(&["q", "seqlen 2000000000", "536870911"], |q, _, _, _| *q = tensor([2, 2_000_000_000, 6, 64]));
    rejected(&["q: got a tensor of rank 3", "cu_seqlens_q"], |q, _, _, _| *q = packed([10, 6, 64]));
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

/// Describes a small tensor of a GPU.
fn vector(dtype: DType, sizes: &[i64]) -> TensorDesc {
    TensorDesc { dtype, device: Device::Cuda(0), sizes: sizes.into(), strides: vec![1; sizes.len()].into() }
}

fn ints(n: i64) -> Option<TensorDesc> {
    Some(vector(DType::Int32, &[n]))
}

/// Returns a contiguous fp16 tensor (rows of all sequences, heads, headdim) on a GPU.
fn packed(sizes: [i64; 3]) -> TensorDesc {
    let strides = Dims::from_slice(&[sizes[1] * sizes[2], sizes[2], 1]);
    TensorDesc { dtype: DType::Half, device: Device::Cuda(0), sizes: Dims::from_slice(&sizes), strides }
}

/// Returns the options of three packed sequences.
fn packed_options() -> Options {
    Options { cu_seqlens_q: ints(4), cu_seqlens_k: ints(4), max_seqlen_q: Some(7), max_seqlen_k: Some(9), ..options() }
}

/// As rejected(), for a packed call.
fn packed_rejected(words: &[&str], change: impl FnOnce(&mut TensorDesc, &mut TensorDesc, &mut TensorDesc, &mut Options)) {
    rejected_after(change, (packed([10, 6, 64]), packed([20, 3, 64]), packed([20, 3, 32]), packed_options()), words);
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
    packed_rejected(&["cu_seqlens_q: got shape (0)"], |_, _, _, o| o.cu_seqlens_q = ints(0));
    packed_rejected(&["cu_seqlens_k: got device cpu", "cuda:0"], |_, _, _, o| o.cu_seqlens_k.as_mut().unwrap().device = Device::Cpu);
    packed_rejected(&["cu_seqlens_q: got shape (33554434)", "at most 33554432 sequences"], |_, _, _, o| {
        (o.cu_seqlens_q, o.cu_seqlens_k) = (ints((1 << 25) + 2), ints((1 << 25) + 2))
    });
    packed_rejected(&["k: got total 536870912", "at most 536870911"], |_, k, v, _| {
        (*k, *v) = (packed([1 << 29, 3, 64]), packed([1 << 29, 3, 32]))
    });
}

#[test]
fn rejects_invalid_features() {
    let wrong = |words: &[&str], change: &dyn Fn(&mut Options)| rejected(words, |_, _, _, o| change(o));
    wrong(&["sinks: got dtype torch.bfloat16", "torch.float16 (q's) or torch.float32"], &|o| o.sinks = Some(vector(DType::BFloat16, &[6])));
    let elsewhere = |t: TensorDesc| Some(TensorDesc { device: Device::Cuda(1), ..t });
    wrong(&["alibi_slopes: got device cuda:1", "cuda:0"], &|o| o.alibi_slopes = elsewhere(vector(DType::Float, &[6])));
    wrong(&["sinks: got device cuda:1", "cuda:0"], &|o| o.sinks = elsewhere(vector(DType::Float, &[6])));
    wrong(&["attn_bias: got device cuda:1", "cuda:0"], &|o| o.attn_bias = elsewhere(vector(DType::Half, &[1, 1, 1, 1])));
    wrong(&["seqused_k: got device cuda:1", "cuda:0"], &|o| o.seqused_k = elsewhere(vector(DType::Int32, &[2])));
}

#[test]
fn rejects_rng_state_of_another_device() {
    let (q, o) = (tensor([2, 10, 6, 64]), Options { dropout_p: 0.1, ..options() });
    let a = validate(&q, &tensor([2, 12, 3, 64]), &tensor([2, 12, 3, 32]), &o, Backend::Kernels).unwrap();
    let (out, lse) = (tensor([2, 10, 6, 32]), vector(DType::Float, &[2, 6, 10]));
    let check = |state: &TensorDesc| validate_backward(&out, &out, &lse, Some(state), &q, &a, Backend::Kernels);
    let good = vector(DType::Int64, &[2]);
    check(&good).unwrap();
    let e = check(&TensorDesc { device: Device::Cpu, ..good }).unwrap_err();
    assert!(e.kind == ErrorKind::Value && e.message.contains("rng_state: got device cpu"), "{e}");
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

//! Validation without tensors: every rule refuses with the argument's name, what was given and what is allowed.

use volta_fa::error::ErrorKind;
use volta_fa::problem::*;

fn tensor(sizes: [i64; 4]) -> TensorDesc {
    let mut strides = vec![1; 4];
    for i in (0..3).rev() {
        strides[i] = strides[i + 1] * sizes[i + 1];
    }
    TensorDesc { dtype: DType::Half, device: Device::Cuda(0), sizes: sizes.into(), strides }
}

fn options() -> Options {
    Options { window_left: -1, window_right: -1, ..Default::default() }
}

/// A valid call, changed by `change`, must be refused with all of `words` in the message.
fn refused(kind: ErrorKind, words: &[&str], change: impl FnOnce(&mut TensorDesc, &mut TensorDesc, &mut TensorDesc, &mut Options)) {
    let (mut q, mut k, mut v, mut o) = (tensor([2, 10, 6, 64]), tensor([2, 12, 3, 64]), tensor([2, 12, 3, 32]), options());
    validate(&q, &k, &v, &o, Backend::Kernels).expect("valid before the change");
    change(&mut q, &mut k, &mut v, &mut o);
    let e = validate(&q, &k, &v, &o, Backend::Kernels).expect_err("must be refused");
    assert_eq!(e.kind, kind, "{e}");
    for w in words {
        assert!(e.message.contains(w), "`{}` does not say `{w}`", e.message);
    }
}

#[test]
fn accepted_problem() {
    let o = Options { is_causal: true, window_left: 4, ..options() };
    let a = validate(&tensor([2, 10, 6, 64]), &tensor([2, 12, 3, 64]), &tensor([2, 12, 3, 32]), &o, Backend::Kernels).unwrap();
    assert_eq!((a.batch, a.seqlen_q, a.seqlen_k, a.nheads, a.nheads_k, a.headdim, a.headdim_v), (2, 10, 12, 6, 3, 64, 32));
    assert_eq!(a.window, Window { left: Some(4), right: Some(0) });
    assert_eq!(a.softmax_scale, 0.125);
}

#[test]
fn wrong_tensors() {
    use ErrorKind::Value;
    refused(Value, &["q", "torch.float32", "torch.float16"], |q, _, _, _| q.dtype = DType::Float);
    refused(Value, &["k", "torch.bfloat16", "torch.float16"], |_, k, _, _| k.dtype = DType::BFloat16);
    refused(Value, &["v", "cpu", "cuda:0"], |_, _, v, _| v.device = Device::Cpu);
    refused(Value, &["k", "cuda:1", "cuda:0"], |_, k, _, _| k.device = Device::Cuda(1));
    refused(Value, &["q", "rank 3", "rank 4"], |q, _, _, _| {
        *q = TensorDesc { sizes: vec![10, 6, 64], strides: vec![384, 64, 1], ..q.clone() }
    });
    refused(Value, &["k", "batch 3", "batch 2"], |_, k, _, _| *k = tensor([3, 12, 3, 64]));
    refused(Value, &["v", "seqlen 13", "seqlen 12"], |_, _, v, _| *v = tensor([2, 13, 3, 32]));
    refused(Value, &["v", "nheads 1", "nheads 3"], |_, _, v, _| *v = tensor([2, 12, 1, 32]));
    refused(Value, &["k", "headdim 32", "headdim 64"], |_, k, _, _| *k = tensor([2, 12, 3, 32]));
    refused(Value, &["q", "nheads 7", "multiple of nheads_k 3"], |q, _, _, _| *q = tensor([2, 10, 7, 64]));
    refused(Value, &["q", "stride 6", "contiguous last dimension"], |q, _, _, _| q.strides[3] = 6);
    refused(Value, &["k", "stride 4294967296 between rows", "4294967295"], |_, k, _, _| k.strides[1] = 1 << 32);
    refused(Value, &["v", "headdim 264", "256"], |_, _, v, _| *v = tensor([2, 12, 3, 264]));
    refused(Value, &["v", "headdim 12", "multiple of 8"], |_, _, v, _| *v = tensor([2, 12, 3, 12]));
    refused(Value, &["q", "headdim 20", "multiple of 8"], |q, k, _, _| (*q, *k) = (tensor([2, 10, 6, 20]), tensor([2, 12, 3, 20])));
    refused(Value, &["q", "seqlen 2000000000", "1073741824"], |q, _, _, _| *q = tensor([2, 2_000_000_000, 6, 64]));
}

#[test]
fn wrong_scalars() {
    use ErrorKind::Value;
    refused(Value, &["dropout_p", "1.5", "[0, 1)"], |_, _, _, o| o.dropout_p = 1.5);
    refused(Value, &["dropout_p", "NaN"], |_, _, _, o| o.dropout_p = f64::NAN);
    refused(Value, &["softcap", "-1"], |_, _, _, o| o.softcap = -1.0);
    refused(Value, &["softmax_scale", "inf"], |_, _, _, o| o.softmax_scale = Some(f64::INFINITY));
    refused(Value, &["window_left", "-2"], |_, _, _, o| o.window_left = -2);
    refused(Value, &["window_right", "-7"], |_, _, _, o| o.window_right = -7);
    refused(Value, &["cu_seqlens_q", "torch.float16", "torch.int32"], |q, _, _, o| o.cu_seqlens_q = Some(q.clone()));
}

#[test]
fn features_to_come_are_refused_by_name() {
    use ErrorKind::Unsupported;
    let int = TensorDesc { dtype: DType::Int32, device: Device::Cuda(0), sizes: vec![3], strides: vec![1] };
    refused(Unsupported, &["cu_seqlens_q"], |_, _, _, o| o.cu_seqlens_q = Some(int.clone()));
    refused(Unsupported, &["cu_seqlens_k"], |_, _, _, o| o.cu_seqlens_k = Some(int.clone()));
    refused(Unsupported, &["seqused_k"], |_, _, _, o| o.seqused_k = Some(int.clone()));
    refused(Unsupported, &["attn_bias"], |q, _, _, o| o.attn_bias = Some(q.clone()));
    refused(Unsupported, &["alibi_slopes"], |q, _, _, o| o.alibi_slopes = Some(q.clone()));
    refused(Unsupported, &["sinks"], |q, _, _, o| o.sinks = Some(q.clone()));
    refused(Unsupported, &["dropout_p"], |_, _, _, o| o.dropout_p = 0.1);
    refused(Unsupported, &["softcap"], |_, _, _, o| o.softcap = 30.0);
    refused(Unsupported, &["max_seqlen_q"], |_, _, _, o| o.max_seqlen_q = Some(10));
}

#[test]
fn cpu_backend_takes_every_float() {
    for dtype in [DType::Half, DType::BFloat16, DType::Float, DType::Double] {
        let make = |s| TensorDesc { dtype, device: Device::Cpu, ..tensor(s) };
        validate(&make([1, 5, 2, 8]), &make([1, 5, 2, 8]), &make([1, 5, 2, 8]), &options(), Backend::Cpu).unwrap();
    }
}

#[test]
fn empty_problems_are_valid() {
    for sizes in [[0, 10, 2, 64], [2, 0, 2, 64], [2, 10, 0, 64]] {
        let a = validate(&tensor(sizes), &tensor(sizes), &tensor(sizes), &options(), Backend::Kernels).unwrap();
        assert!(a.is_empty());
    }
}

#[test]
fn wrong_saved_tensors() {
    let q = tensor([2, 10, 6, 64]);
    let a = validate(&q, &tensor([2, 12, 3, 64]), &tensor([2, 12, 3, 32]), &options(), Backend::Kernels).unwrap();
    let out = tensor([2, 10, 6, 32]);
    let lse = |sizes: Vec<i64>, dtype| TensorDesc { dtype, device: Device::Cuda(0), strides: vec![1; sizes.len()], sizes };
    let good = lse(vec![2, 6, 10], DType::Float);
    let check = |dout: &TensorDesc, out: &TensorDesc, l: &TensorDesc| validate_backward(dout, out, l, &q, &a, Backend::Kernels);
    check(&out, &out, &good).unwrap();
    assert!(check(&tensor([2, 10, 6, 64]), &out, &good).unwrap_err().message.starts_with("dout: got shape (2, 10, 6, 64)"));
    assert!(check(&out, &tensor([2, 11, 6, 32]), &good).unwrap_err().message.starts_with("out: got shape"));
    assert!(check(&out, &out, &lse(vec![2, 6, 11], DType::Float)).unwrap_err().message.starts_with("softmax_lse: got shape"));
    assert!(check(&out, &out, &lse(vec![2, 6, 10], DType::Half)).unwrap_err().message.contains("torch.float32"));
}

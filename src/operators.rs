//! The table of operators: a row has an operator's schema and the functions that compute and check a call. The C++ shim registers the rows
//! with PyTorch's dispatcher (torch_ops/operators.cpp), as `torch.ops.volta_fa.NAME`. Calls come through `ffi::volta_fa_call` as [`Value`]s
//! in the order of the schema: an operator's own arguments, then options. Functions below make them the structs of src/ops/.

use crate::error::{Error, Result};
use crate::limits::LATENT_HEADDIMS; // 512, then 64 columns
use crate::ops::{self, fast, indexer, kvcache, merge, sparse, Gradients, Inputs, Saved};
use crate::options::{Kind, Op, Options, Row}; // Kind: an argument's type; Op: an operator with options, which are Rows of their table
use crate::problem::IndexerArgs;
use crate::tensor::describe;
use crate::value::{arguments, Value};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use tch::Tensor;

/// Maximum number of results of an operator.
const MAX_RESULTS: usize = 5;

/// Results of a call, in the order of the schema; None for an absent one, and past the last.
pub type Results = [Option<Tensor>; MAX_RESULTS];

/// What `torch.autocast` does to the tensors of a call (torch_ops/autocast.cpp).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Autocast {
    /// nothing
    Keep,
    /// casts required tensors to the region's dtype
    Region,
    /// casts required tensors other than caches to the dtype of the first cache, or beside one-byte elements to the region's
    Cache,
}

/// A row of the table.
pub struct Operator {
    /// name in the schema, with its overload: `fwd_kvcache.append`
    pub name: &'static str,
    /// its required tensors, as in the schema
    tensors: &'static [&'static str],
    /// the keywords that it alone has, as in the schema
    keywords: &'static [&'static str],
    /// the operator whose options (src/options.rs) follow these; None: it has none
    options: Option<Op>,
    /// the results, as in the schema
    results: &'static str,
    pub autocast: Autocast,
    /// Computes a call.
    pub run: fn(&Call) -> Result<Results>,
    /// For meta tensors: rejects what `run` rejects, as far as sizes are known. Returns what the rule of the results' sizes
    /// (torch_ops/meta.cpp) cannot tell from arguments' sizes. Operators on KV caches: the columns that an element of the values has, 2 in
    /// int4, else 1. Operators on latents (compressed keys of multi-head latent attention, MLA): the columns of out. Others: 0.
    pub check: fn(&Call) -> Result<i64>,
}

/// Results of most operators.
const OUT_AND_LSE: &str = "(Tensor out, Tensor softmax_lse)";

/// All operators that compute attention or prepare it. `run` and `check` take a call's arguments apart in the order of the row.
pub const OPERATORS: &[Operator] = &[
    Operator {
        name: "fwd",
        tensors: &["Tensor q", "Tensor k", "Tensor v"],
        keywords: &["Generator? generator=None"],
        options: Some(Op::Fwd),
        // `run` returns the first two: the shim, which drew the random state of dropout, adds it
        results: "(Tensor out, Tensor softmax_lse, Tensor rng_state)",
        autocast: Autocast::Region,
        run: |call| ops::forward(&dense(call)).map(pair),
        check: |call| ops::check_forward(&dense(call)).map(|()| 0),
    },
    Operator {
        name: "bwd",
        tensors: &["Tensor dout", "Tensor q", "Tensor k", "Tensor v", "Tensor out", "Tensor softmax_lse"],
        keywords: &["Tensor? rng_state=None", "bool attn_bias_requires_grad=False", "Tensor? dlse=None"],
        options: Some(Op::Bwd),
        results: "(Tensor dq, Tensor dk, Tensor dv, Tensor dattn_bias, Tensor dsinks)",
        autocast: Autocast::Keep,
        run: |call| {
            let (inputs, saved) = saved(call)?;
            let Gradients { dq, dk, dv, dattn_bias, dsinks } = ops::backward(&inputs, &saved)?;
            Ok([Some(dq), Some(dk), Some(dv), dattn_bias, dsinks])
        },
        check: |call| {
            let (inputs, saved) = saved(call)?;
            ops::check_backward(&inputs, &saved).map(|()| 0)
        },
    },
    // int8 scores, not exact
    Operator {
        name: "fwd_fast",
        tensors: &["Tensor q", "Tensor k", "Tensor v"],
        keywords: &[],
        options: Some(Op::FwdFast),
        results: OUT_AND_LSE,
        autocast: Autocast::Region,
        run: |call| fast::forward(&attention(call)).map(pair),
        check: |call| fast::check(&attention(call)).map(|()| 0),
    },
    // the codes of K for many calls of fwd_fast
    Operator {
        name: "prepare_fast",
        tensors: &["Tensor k", "Tensor v"],
        keywords: &[],
        options: Some(Op::PrepareFast),
        results: "Tensor",
        autocast: Autocast::Region,
        run: |call| Ok(results([Some(fast::prepare(&keys_alone(call))?)])),
        check: |call| fast::check_prepare(&keys_alone(call)).map(|()| 0),
    },
    Operator {
        name: "indexer_logits",
        tensors: &["Tensor q", "Tensor k", "Tensor weights", "Tensor k_end"],
        keywords: &[
            "Tensor? k_start=None",
            "Tensor? k_scales=None",
            "Tensor? block_table=None",
            "SymInt? max_seqlen_k=None",
            "bool clean_logits=True",
        ],
        options: None,
        results: "Tensor",
        autocast: Autocast::Keep,
        run: |call| Ok(results([Some(indexer::logits(&indexer_call(call))?)])),
        check: |call| indexer::check(&indexer_call(call)).map(|()| 0),
    },
    Operator {
        name: "merge_attention_states",
        tensors: &["Tensor out_a", "Tensor softmax_lse_a", "Tensor out_b", "Tensor softmax_lse_b"],
        keywords: &[],
        options: None,
        results: OUT_AND_LSE,
        autocast: Autocast::Keep,
        run: |call| merge::merge(&states(call)).map(pair),
        check: |call| merge::check(&states(call), false).map(|()| 0), // false: not in place
    },
    Operator {
        name: "merge_attention_states_",
        tensors: &["Tensor(a!) out_a", "Tensor(b!) softmax_lse_a", "Tensor out_b", "Tensor softmax_lse_b"],
        keywords: &[],
        options: None,
        results: "()",
        autocast: Autocast::Keep,
        run: |call| merge::merge_in_place(&states(call)).map(|()| results([])),
        check: |call| merge::check(&states(call), true).map(|()| 0), // true: in place
    },
    Operator {
        name: "fwd_kvcache",
        tensors: &["Tensor q", "Tensor k_cache", "Tensor v_cache"],
        keywords: &[],
        options: Some(Op::FwdKvcache),
        results: OUT_AND_LSE,
        autocast: Autocast::Cache,
        run: |call| kvcache::forward(&attention(call)).map(pair),
        check: |call| Ok(kvcache::check(&attention(call))?.columns()),
    },
    // Declares its writes (`!`), so functionalization and torch.compile keep the order of reads of the caches.
    Operator {
        name: "fwd_kvcache.append",
        tensors: &["Tensor q", "Tensor(a!) k_cache", "Tensor(b!) v_cache", "Tensor k", "Tensor v"],
        keywords: &[],
        options: Some(Op::FwdKvcache),
        results: OUT_AND_LSE,
        autocast: Autocast::Cache,
        run: |call| kvcache::forward(&appending(call)).map(pair),
        check: |call| Ok(kvcache::check(&appending(call))?.columns()),
    },
    Operator {
        name: "fwd_mla",
        tensors: &["Tensor q", "Tensor latent_cache"],
        keywords: &[],
        options: Some(Op::FwdMla),
        results: OUT_AND_LSE,
        autocast: Autocast::Cache,
        run: |call| kvcache::forward_mla(&latents(call)).map(pair),
        check: |call| kvcache::check_mla(&latents(call)).map(|()| LATENT_HEADDIMS[0]), // out's columns, the values of a latent
    },
    Operator {
        name: "fwd_sparse_mla",
        tensors: &["Tensor q", "Tensor cache", "Tensor indices"],
        keywords: &[
            "Tensor? topk_length=None",
            "Tensor? extra_cache=None",
            "Tensor? extra_indices=None",
            "Tensor? extra_topk_length=None",
            "bool fp16_positions=False",
        ],
        options: Some(Op::FwdSparseMla),
        results: "(Tensor out, Tensor softmax_lse, Tensor max_logits)",
        autocast: Autocast::Keep,
        run: |call| {
            let [out, softmax_lse, max_logits] = sparse::forward(&*sparse_call(call)?)?;
            // from (total_q, nheads), as kernels write it, to (nheads, total_q), as all operators return softmax_lse of packed queries
            Ok(results([out, softmax_lse.f_transpose(0, 1)?, max_logits.f_transpose(0, 1)?].map(Some)))
        },
        check: |call| sparse::check(&*sparse_call(call)?).map(|()| LATENT_HEADDIMS[0]),
    },
];

/// Returns an option's default in the schema: Python's word for the row's Rust expression.
fn default(row: &Row) -> &'static str {
    match row.default {
        "false" => "False",
        "true" => "True",
        other => other,
    }
}

impl Operator {
    /// Returns the name without the overload.
    pub fn op(&self) -> &'static str {
        self.name.split('.').next().unwrap_or(self.name)
    }

    /// Returns the operator's schema, in PyTorch's language of schemas. An operator that writes into a required tensor, marked `(a!)`,
    /// writes into its options of [`Kind::Written`] too: they get the next letters.
    pub fn schema(&self) -> String {
        let written = self.tensors.iter().filter(|tensor| tensor.contains('!')).count();
        let mut alias_sets = ('a'..='z').skip(written);
        let options = self.options.into_iter().flat_map(Op::options).map(|row| {
            let of_kind = match row.kind {
                Kind::Written if written > 0 => {
                    let set = alias_sets.next().expect("few tensors are written");
                    return format!("Tensor({set}!)? {}={}", row.name, default(row));
                }
                Kind::Tensor | Kind::Written => "Tensor?",
                Kind::OptionalInt => "SymInt?",
                Kind::Int => "SymInt",
                Kind::OptionalFloat => "float?",
                Kind::Float => "float",
                Kind::Bool => "bool",
            };
            format!("{of_kind} {}={}", row.name, default(row))
        });
        let mut arguments: Vec<_> = self.tensors.iter().map(|tensor| tensor.to_string()).collect();
        let keywords: Vec<_> = self.keywords.iter().map(|keyword| keyword.to_string()).chain(options).collect();
        if !keywords.is_empty() {
            arguments.push("*".into());
        }
        format!("{}({}) -> {}", self.name, [arguments, keywords].concat().join(", "), self.results)
    }
}

/// Returns the type of a keyword's value. The shim replaces a generator by the random state that it draws, a tensor.
fn kind_of_keyword(keyword: &str) -> Kind {
    match keyword {
        bool if bool.starts_with("bool") => Kind::Bool,
        int if int.starts_with("SymInt?") => Kind::OptionalInt,
        _ => Kind::Tensor,
    }
}

/// Returns the name of an argument that is written as in the schema: type, name and perhaps a default.
fn name_in(argument: &str) -> &str {
    let named = argument.rsplit(' ').next().unwrap_or(argument);
    named.split('=').next().unwrap_or(named)
}

/// A call's arguments, which the caller owns.
pub struct Call<'a> {
    /// Required tensors, then the operator's own keywords.
    own: &'a [Value],
    options: Option<(Op, &'a [Value])>,
    stream: *mut c_void,
}

impl<'a> Call<'a> {
    /// Checks the types of a call's arguments. Rejects None for a required tensor: Python passes it as an undefined one.
    ///
    /// # Safety
    /// `values` has the arguments of the operator's schema, and their handles live as long as the call.
    pub unsafe fn read(operator: &Operator, values: &'a [Value], stream: *mut c_void) -> Result<Self> {
        let (own, options) = values.split_at(operator.tensors.len() + operator.keywords.len());
        // checks all types before a tensor is borrowed: a panic on a wrong type would drop, and so free, borrowed tensors
        let (tensors, keywords) = own.split_at(operator.tensors.len());
        for (&tensor, value) in operator.tensors.iter().zip(tensors) {
            Kind::Tensor.check(value, || name_in(tensor))?;
            if value.tensor().is_none() {
                return Err(Error::value(name_in(tensor), "None", "a tensor"));
            }
        }
        for (&keyword, value) in operator.keywords.iter().zip(keywords) {
            kind_of_keyword(keyword).check(value, || name_in(keyword))?;
        }
        if let Some(op) = operator.options {
            Options::<()>::check(op, options)?;
        }
        Ok(Call { own, options: operator.options.map(|op| (op, options)), stream })
    }

    /// Borrows the options, as [`optional`] does.
    fn options(&self) -> Options<Tensor> {
        let read = |(op, values)| Options::read(op, values, |handle| unsafe { Tensor::from_ptr(handle.cast()) });
        self.options.map_or_else(Options::default, read)
    }
}

/// Borrows an optional tensor of the caller without counting references, to save host time in a decode step. A drop would free the caller's
/// tensor, so the result belongs in a [`ManuallyDrop`], as the structs below are.
pub(crate) fn optional(value: &Value) -> Option<Tensor> {
    // SAFETY: the handle of the caller's tensor, which lives through the call.
    value.tensor().map(|handle| unsafe { Tensor::from_ptr(handle.cast()) })
}

/// Borrows a required tensor, as [`optional`] does.
fn tensor(value: &Value) -> Tensor {
    optional(value).expect("`read` rejects None")
}

/// Returns results and, past the last, None.
fn results<const N: usize>(found: [Option<Tensor>; N]) -> Results {
    let mut found = found.into_iter();
    std::array::from_fn(|_| found.next().flatten())
}

fn pair((out, softmax_lse): (Tensor, Tensor)) -> Results {
    results([out, softmax_lse].map(Some))
}

// Each of the following borrows the caller's tensors as the struct of one kind of operator.

fn states(call: &Call) -> ManuallyDrop<merge::States> {
    let [out_a, lse_a, out_b, lse_b] = arguments(call.own).each_ref().map(tensor);
    ManuallyDrop::new(merge::States { outs: [out_a, out_b], lses: [lse_a, lse_b], stream: call.stream })
}

/// Borrows q, k and v, in this order, and the options.
fn inputs(call: &Call, operands: [&Value; 3]) -> ManuallyDrop<Inputs> {
    ManuallyDrop::new(Inputs::new(operands.map(tensor), call.options(), call.stream))
}

/// Borrows q, k and v, or caches in place of the last two.
fn attention(call: &Call) -> ManuallyDrop<Inputs> {
    let [q, k, v] = arguments(call.own);
    inputs(call, [q, k, v])
}

/// Borrows the inputs of `prepare_fast`. There is no q: k stands in for it.
fn keys_alone(call: &Call) -> ManuallyDrop<Inputs> {
    let [k, v] = arguments(call.own);
    inputs(call, [k, k, v])
}

/// Borrows the inputs of `fwd`. In the place of the generator is a random state.
fn dense(call: &Call) -> ManuallyDrop<Inputs> {
    let [q, k, v, rng_state] = arguments(call.own);
    let mut inputs = inputs(call, [q, k, v]);
    inputs.rng_state = optional(rng_state);
    inputs
}

/// Borrows the inputs of `bwd`. A random state without elements, which `fwd` returns without dropout, counts as none.
fn saved(call: &Call) -> Result<(ManuallyDrop<Inputs>, ManuallyDrop<Saved>)> {
    let [dout, q, k, v, out, softmax_lse, rng_state, attn_bias_requires_grad, dlse] = arguments(call.own);
    let mut inputs = inputs(call, [q, k, v]);
    let rng_state = ManuallyDrop::new(optional(rng_state));
    if let Some(state) = rng_state.as_ref() {
        if !describe(state)?.sizes.contains(&0) {
            inputs.rng_state = ManuallyDrop::into_inner(rng_state);
        }
    }
    let [dout, out, softmax_lse] = [dout, out, softmax_lse].map(tensor);
    let (dlse, attn_bias_requires_grad) = (optional(dlse), attn_bias_requires_grad.bool());
    Ok((inputs, ManuallyDrop::new(Saved { dout, out, softmax_lse, dlse, attn_bias_requires_grad })))
}

/// Borrows the inputs of attention to caches that new keys and values are appended to.
fn appending(call: &Call) -> ManuallyDrop<Inputs> {
    let [q, k_cache, v_cache, k, v] = arguments(call.own);
    let mut inputs = inputs(call, [q, k_cache, v_cache]);
    inputs.appended = Some([k, v].map(tensor));
    inputs
}

/// Borrows the inputs of attention to latents, which are keys and values at once. Their scales go where those of keys are.
fn latents(call: &Call) -> ManuallyDrop<Inputs> {
    let [q, latent_cache] = arguments(call.own);
    let mut inputs = inputs(call, [q, latent_cache, latent_cache]);
    let o = &mut inputs.options;
    (o.k_scale, o.k_descale) = (o.latent_scale.take(), o.latent_descale.take());
    inputs
}

fn indexer_call(call: &Call) -> ManuallyDrop<indexer::Call> {
    let [q, k, weights, k_end, k_start, k_scales, block_table, max_seqlen_k, clean_logits] = arguments(call.own);
    let [q, k, weights, k_end] = [q, k, weights, k_end].map(tensor);
    let [k_start, k_scales, block_table] = [k_start, k_scales, block_table].map(optional);
    let args = IndexerArgs { q, k, weights, k_end, k_start, k_scales, block_table, max_seqlen_k: max_seqlen_k.optional_int() };
    ManuallyDrop::new(indexer::Call { args, clean_logits: clean_logits.bool(), stream: call.stream })
}

fn sparse_call(call: &Call) -> Result<ManuallyDrop<sparse::Call>> {
    let [q, cache, indices, lengths, extra_cache, extra_indices, extra_lengths, has_fp16_positions] = arguments(call.own);
    if extra_cache.tensor().is_some() && extra_indices.tensor().is_none() {
        return Err(Error::value("extra_indices", "None", "a tensor"));
    }
    let mut options = ManuallyDrop::new(call.options());
    // indices and lengths of a second cache that is not given are only validated
    let (extra, unused) = match ([extra_cache, extra_indices].map(optional), optional(extra_lengths)) {
        ([Some(cache), Some(indices)], lengths) => (Some(sparse::ChosenTokens { cache, indices, lengths }), [None, None]),
        ([_, indices], lengths) => (None, [indices, lengths]),
    };
    Ok(ManuallyDrop::new(sparse::Call {
        q: tensor(q),
        own: sparse::ChosenTokens { cache: tensor(cache), indices: tensor(indices), lengths: optional(lengths) },
        extra,
        unused,
        sinks: options.sinks.take(),
        softmax_scale: options.softmax_scale,
        has_fp16_positions: has_fp16_positions.bool(),
        stream: call.stream,
    }))
}

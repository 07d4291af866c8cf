//! The table of operators: a row has an operator's schema and the functions that compute and check a call. The C++ shim registers the rows
//! with PyTorch's dispatcher (torch_ops/operators.cpp), as `torch.ops.volta_fa.NAME`. Calls come through `ffi::volta_fa_call` as a slice of
//! [`Value`]s in the order of the schema: the operator's own arguments, then its options. The functions below turn them into the structs
//! that src/ops/ takes.

use crate::error::{Error, Result};
use crate::limits::LATENT_HEADDIMS;
use crate::ops::{self, fast, indexer, kvcache, merge, sparse, Gradients, Inputs, Saved};
use crate::options::{Kind, Op, Options, Row};
use crate::problem::IndexerArgs;
use crate::tensor::describe;
use crate::value::{Value, ValueTag};
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
    pub run: fn(&Call) -> Result<Results>,
    /// For meta tensors: rejects what `run` rejects, as far as sizes are known. Returns what the rule of the results' sizes
    /// (torch_ops/meta.cpp) cannot tell from arguments' sizes. Operators on KV caches: the columns that an element of the values has, 2 in
    /// int4. Operators on latents (compressed keys of multi-head latent attention, MLA): the columns of out. Others: 0.
    pub check: fn(&Call) -> Result<i64>,
}

const OUT_AND_LSE: &str = "(Tensor out, Tensor softmax_lse)";

/// All operators that compute attention or prepare it. Numbers in brackets below are places of q, k and v among the required tensors.
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
    Operator {
        name: "fwd_fast",
        tensors: &["Tensor q", "Tensor k", "Tensor v"],
        keywords: &[],
        options: Some(Op::FwdFast),
        results: OUT_AND_LSE,
        autocast: Autocast::Region,
        run: |call| fast::forward(&inputs(call, [0, 1, 2])).map(pair),
        check: |call| fast::check(&inputs(call, [0, 1, 2])).map(|()| 0),
    },
    Operator {
        name: "prepare_fast",
        tensors: &["Tensor k", "Tensor v"],
        keywords: &[],
        options: Some(Op::PrepareFast),
        results: "Tensor",
        autocast: Autocast::Region,
        run: |call| Ok(results([Some(fast::prepare(&inputs(call, [0, 0, 1]))?)])),
        check: |call| fast::check_prepare(&inputs(call, [0, 0, 1])).map(|()| 0),
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
        check: |call| merge::check(&states(call), true).map(|()| 0),
    },
    Operator {
        name: "fwd_kvcache",
        tensors: &["Tensor q", "Tensor k_cache", "Tensor v_cache"],
        keywords: &[],
        options: Some(Op::FwdKvcache),
        results: OUT_AND_LSE,
        autocast: Autocast::Cache,
        run: |call| kvcache::forward(&inputs(call, [0, 1, 2])).map(pair),
        check: |call| Ok(kvcache::check(&inputs(call, [0, 1, 2]))?.columns()),
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

/// Returns an option's default in the schema; the row has a Rust expression.
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

/// Returns the types that the value of a keyword may have. The shim replaces a generator by the random state that it draws, a tensor.
fn of_keyword(keyword: &str) -> &'static [ValueTag] {
    match keyword {
        bool if bool.starts_with("bool") => Kind::Bool.tags(),
        int if int.starts_with("SymInt?") => Kind::OptionalInt.tags(),
        _ => Kind::Tensor.tags(),
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
            value.check(&[ValueTag::Tensor], || name_in(tensor))?;
        }
        for (&keyword, value) in operator.keywords.iter().zip(keywords) {
            value.check(of_keyword(keyword), || name_in(keyword))?;
        }
        if let Some(op) = operator.options {
            Options::<()>::check(op, options)?;
        }
        Ok(Call { own, options: operator.options.map(|op| (op, options)), stream })
    }

    /// Borrows an optional tensor of the caller without counting references, to save host time in a decode step. A drop would free the
    /// caller's tensor, so the structs below are [`ManuallyDrop`].
    fn optional(&self, argument: usize) -> Option<Tensor> {
        self.own[argument].tensor().map(|handle| unsafe { Tensor::from_ptr(handle.cast()) })
    }

    /// Borrows a required tensor, as [`Call::optional`] does.
    fn tensor(&self, argument: usize) -> Tensor {
        self.optional(argument).expect("`read` rejects None")
    }

    fn options(&self) -> Options<Tensor> {
        let read = |(op, values)| Options::read(op, values, |handle| unsafe { Tensor::from_ptr(handle.cast()) });
        self.options.map_or_else(Options::default, read)
    }
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
    let [out_a, lse_a, out_b, lse_b] = [0, 1, 2, 3].map(|i| call.tensor(i));
    ManuallyDrop::new(merge::States { outs: [out_a, out_b], lses: [lse_a, lse_b], stream: call.stream })
}

/// Borrows the inputs of an attention operator. `operands` are the places of q, k and v.
fn inputs(call: &Call, operands: [usize; 3]) -> ManuallyDrop<Inputs> {
    let [q, k, v] = operands.map(|i| call.tensor(i));
    let (options, stream) = (call.options(), call.stream);
    ManuallyDrop::new(Inputs { q, k, v, appended: None, rng_state: None, options, stream })
}

/// Borrows the inputs of `fwd`. In the place of the generator is a random state.
fn dense(call: &Call) -> ManuallyDrop<Inputs> {
    let mut inputs = inputs(call, [0, 1, 2]);
    inputs.rng_state = call.optional(3);
    inputs
}

/// Borrows the inputs of `bwd`. A random state without elements, which `fwd` returns without dropout, counts as none.
fn saved(call: &Call) -> Result<(ManuallyDrop<Inputs>, ManuallyDrop<Saved>)> {
    let mut inputs = inputs(call, [1, 2, 3]);
    let rng_state = ManuallyDrop::new(call.optional(6));
    if let Some(state) = rng_state.as_ref() {
        if !describe(state)?.sizes.contains(&0) {
            inputs.rng_state = ManuallyDrop::into_inner(rng_state);
        }
    }
    let [dout, out, softmax_lse] = [0, 4, 5].map(|i| call.tensor(i));
    let (attn_bias_requires_grad, dlse) = (call.own[7].bool(), call.optional(8));
    Ok((inputs, ManuallyDrop::new(Saved { dout, out, softmax_lse, dlse, attn_bias_requires_grad })))
}

/// Borrows the inputs of attention to caches that new keys and values are appended to.
fn appending(call: &Call) -> ManuallyDrop<Inputs> {
    let mut inputs = inputs(call, [0, 1, 2]);
    inputs.appended = Some([3, 4].map(|i| call.tensor(i)));
    inputs
}

/// Borrows the inputs of attention to latents, which are keys and values at once. Their scales go where those of keys are.
fn latents(call: &Call) -> ManuallyDrop<Inputs> {
    let mut inputs = inputs(call, [0, 1, 1]);
    let o = &mut inputs.options;
    (o.k_scale, o.k_descale) = (o.latent_scale.take(), o.latent_descale.take());
    inputs
}

fn indexer_call(call: &Call) -> ManuallyDrop<indexer::Call> {
    let [q, k, weights, k_end] = [0, 1, 2, 3].map(|i| call.tensor(i));
    let [k_start, k_scales, block_table] = [4, 5, 6].map(|i| call.optional(i));
    let (max_seqlen_k, clean_logits) = (call.own[7].optional_int(), call.own[8].bool());
    let args = IndexerArgs { q, k, weights, k_end, k_start, k_scales, block_table, max_seqlen_k };
    ManuallyDrop::new(indexer::Call { args, clean_logits, stream: call.stream })
}

fn sparse_call(call: &Call) -> Result<ManuallyDrop<sparse::Call>> {
    let (extra_cache, extra_indices) = (call.own[4], call.own[5]);
    if extra_cache.tensor().is_some() && extra_indices.tensor().is_none() {
        return Err(Error::value("extra_indices", "None", "a tensor"));
    }
    let mut options = ManuallyDrop::new(call.options());
    let (extra_indices, extra_lengths) = (call.optional(5), call.optional(6));
    // indices and lengths of a second cache that is not given are only validated
    let (extra, unused) = match (call.optional(4), extra_indices) {
        (Some(cache), Some(indices)) => (Some(sparse::ChosenTokens { cache, indices, lengths: extra_lengths }), [None, None]),
        (_, extra_indices) => (None, [extra_indices, extra_lengths]),
    };
    Ok(ManuallyDrop::new(sparse::Call {
        q: call.tensor(0),
        own: sparse::ChosenTokens { cache: call.tensor(1), indices: call.tensor(2), lengths: call.optional(3) },
        extra,
        unused,
        sinks: options.sinks.take(),
        softmax_scale: options.softmax_scale,
        has_fp16_positions: call.own[7].bool(),
        stream: call.stream,
    }))
}

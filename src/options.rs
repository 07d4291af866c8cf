//! The keyword options that several operators share, one row each in `table!` below: name, kind, default, and the operators that have it.
//! The rows become the operators' schemas ([`crate::operators`]) and [`Options`], a struct with a field for each option: `Options<Tensor>`
//! holds a call's tensors, `Options<TensorDesc>` describes them for validation. python/volta_fa/__init__.py explains each option.

use crate::error::Error;
use crate::value::Value;
use std::convert::Infallible;
use std::ffi::c_void;

/// A size or number that is not known yet: symbolic, as in `torch.compile`'s dynamic shapes. Checks leave it out.
pub const UNKNOWN: i64 = i64::MIN;

/// Type of an option. Tensors are optional, and ints may be symbolic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Tensor,
    /// a tensor that in-place overloads may write
    Written,
    OptionalInt,
    Int,
    OptionalFloat,
    Float,
    Bool,
}

impl Kind {
    /// Rejects a value of another type, by the argument's name. Python and TorchScript pass the schema's types, a C++ caller's stack any.
    pub fn check<'a>(self, value: &Value, name: impl FnOnce() -> &'a str) -> Result<(), Error> {
        let (expected, has_type) = match self {
            Kind::Tensor | Kind::Written => ("a tensor", matches!(value, Value::Tensor(_) | Value::None)),
            Kind::OptionalInt => ("an int", matches!(value, Value::Int(_) | Value::None)),
            Kind::Int => ("an int", matches!(value, Value::Int(_))),
            Kind::OptionalFloat => ("a float", matches!(value, Value::Float(_) | Value::None)),
            Kind::Float => ("a float", matches!(value, Value::Float(_))),
            Kind::Bool => ("a bool", matches!(value, Value::Bool(_))),
        };
        match has_type {
            true => Ok(()),
            false => Err(Error::value(name(), value.type_name(), expected)),
        }
    }
}

/// An option: a row of [`TABLE`].
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// the keyword in Python, and the field in [`Options`]
    pub name: &'static str,
    pub kind: Kind,
    /// its default, as a Rust expression
    pub default: &'static str,
    pub operators: &'static [Op],
}

/// Operators with options. Both overloads of `fwd_kvcache` have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Fwd,
    Bwd,
    FwdFast,
    PrepareFast,
    FwdKvcache,
    FwdMla,
    FwdSparseMla,
}

impl Op {
    /// Returns the operator's options, in the order of its schema.
    pub fn options(self) -> impl Iterator<Item = &'static Row> {
        TABLE.iter().filter(move |row| row.operators.contains(&self))
    }
}

// What `table!` makes of an option by its kind:

/// The type of its field in [`Options`].
#[rustfmt::skip]
macro_rules! field {
    (Tensor) => { Option<T> };
    (Written) => { Option<T> };
    (OptionalInt) => { Option<i64> };
    (Int) => { i64 };
    (OptionalFloat) => { Option<f64> };
    (Float) => { f64 };
    (Bool) => { bool };
}

/// The field, from a [`Value`]. `tensor` makes a `T` of an `at::Tensor*`.
#[rustfmt::skip]
macro_rules! read {
    (Tensor, $value:expr, $tensor:expr) => { $value.tensor().map($tensor) };
    (Written, $value:expr, $tensor:expr) => { $value.tensor().map($tensor) };
    (OptionalInt, $value:expr, $tensor:expr) => { $value.optional_int() };
    (Int, $value:expr, $tensor:expr) => { $value.int() };
    (OptionalFloat, $value:expr, $tensor:expr) => { $value.optional_float() };
    (Float, $value:expr, $tensor:expr) => { $value.float() };
    (Bool, $value:expr, $tensor:expr) => { $value.bool() };
}

/// The field: of a tensor what `f` makes of it; numbers stay as they are.
#[rustfmt::skip]
macro_rules! mapped {
    (Tensor, $field:expr, $f:expr) => { $field.as_ref().map($f).transpose()? };
    (Written, $field:expr, $f:expr) => { $field.as_ref().map($f).transpose()? };
    ($scalar:ident, $field:expr, $f:expr) => { $field };
}
/// The field if it is a tensor, else None.
#[rustfmt::skip]
macro_rules! tensor {
    (Tensor, $field:expr) => { $field.as_ref() };
    (Written, $field:expr) => { $field.as_ref() };
    ($scalar:ident, $field:expr) => { None };
}

/// Defines the options of all operators: the rows, and the struct that the library works with.
macro_rules! table {
    ($($name:ident: $kind:ident = $default:expr => $($op:ident)+,)*) => {
        /// The options of all operators, in the order of the schemas.
        pub const TABLE: &[Row] = &[$(Row {
            name: stringify!($name),
            kind: Kind::$kind,
            default: stringify!($default),
            operators: &[$(Op::$op),+],
        }),*];

        /// Option values of a call: with tensors, or with descriptions of them. Options that an operator does not have keep their defaults.
        pub struct Options<T> {
            $(pub $name: field!($kind),)*
        }

        impl<T> Default for Options<T> {
            fn default() -> Self {
                Options { $($name: $default,)* }
            }
        }

        impl<T> Options<T> {
            /// Rejects values of other types than the options of `op`. They stand in the order of [`TABLE`].
            pub fn check(op: Op, values: &[Value]) -> Result<(), Error> {
                let mut values = values.iter();
                $(if matches!(op, $(Op::$op)|+) {
                    let value = values.next().expect("a value for each option");
                    Kind::$kind.check(value, || stringify!($name))?;
                })*
                Ok(())
            }

            /// Reads the values of the options of `op`, which stand in the order of [`TABLE`]. `tensor` makes a `T` of an `at::Tensor*`.
            pub fn read(op: Op, values: &[Value], tensor: impl Fn(*mut c_void) -> T) -> Self {
                let mut values = values.iter();
                Options {
                    $($name: match op {
                        $(Op::$op)|+ => read!($kind, values.next().expect("a value for each option"), &tensor),
                        #[allow(unreachable_patterns)] // an option of all operators
                        _ => $default,
                    },)*
                }
            }

            /// Returns the same options with `f` of each tensor.
            pub fn try_map<U, E>(&self, f: impl Fn(&T) -> Result<U, E>) -> Result<Options<U>, E> {
                Ok(Options { $($name: mapped!($kind, self.$name, &f),)* })
            }

            /// Returns the tensors that are given, by name.
            pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &T)> {
                [$((stringify!($name), tensor!($kind, self.$name)),)*].into_iter().filter_map(|(name, t)| Some((name, t?)))
            }
        }
    };
}

// Option: kind = default => operators that have it. None: not given.
table! {
    cache_seqlens: Tensor = None => FwdKvcache FwdMla,
    cu_seqlens_q: Tensor = None => Fwd Bwd FwdFast FwdKvcache FwdMla,
    cu_seqlens_k: Tensor = None => Fwd Bwd FwdFast PrepareFast,
    max_seqlen_q: OptionalInt = None => Fwd Bwd FwdFast FwdKvcache FwdMla,
    max_seqlen_k: OptionalInt = None => Fwd Bwd FwdFast PrepareFast,
    seqused_k: Tensor = None => Fwd Bwd,
    cu_seqlens_k_new: Tensor = None => FwdKvcache,
    block_table: Tensor = None => FwdKvcache FwdMla,
    cache_batch_idx: Tensor = None => FwdKvcache FwdMla,
    leftpad_k: Tensor = None => FwdKvcache,
    // of quantized caches: int8 and int4 have a scale for each token and head, int4 also a zero point, fp8 a descale for each head
    k_scale: Written = None => FwdKvcache,
    v_scale: Written = None => FwdKvcache,
    k_zero_point: Written = None => FwdKvcache,
    v_zero_point: Written = None => FwdKvcache,
    k_descale: Tensor = None => FwdKvcache,
    v_descale: Tensor = None => FwdKvcache,
    // of a cache of latents (MLA), which are keys and values at once
    latent_scale: Tensor = None => FwdMla,
    latent_descale: Tensor = None => FwdMla,
    rotary_cos: Tensor = None => FwdKvcache,
    rotary_sin: Tensor = None => FwdKvcache,
    rotary_interleaved: Bool = false => FwdKvcache,
    attn_bias: Tensor = None => Fwd Bwd,
    attn_mask: Tensor = None => FwdFast,
    alibi_slopes: Tensor = None => Fwd Bwd FwdKvcache,
    sinks: Tensor = None => Fwd Bwd FwdKvcache FwdSparseMla,
    // a block mask: lists of present blocks, bits of partial ones; _t: for gradients, with queries and keys exchanged
    block_lists: Tensor = None => Fwd Bwd,
    block_bits: Tensor = None => Fwd Bwd,
    block_lists_t: Tensor = None => Fwd Bwd,
    block_bits_t: Tensor = None => Fwd Bwd,
    tree_mask: Tensor = None => FwdKvcache, // which draft tokens a query sees
    kv_indices: Tensor = None => FwdKvcache FwdMla, // which blocks of tokens a query attends to
    kv_block: Int = 1 => FwdKvcache FwdMla, // tokens of such a block
    dropout_p: Float = 0.0 => Fwd Bwd, // off
    softmax_scale: OptionalFloat = None => Fwd Bwd FwdFast FwdKvcache FwdMla FwdSparseMla, // headdim ** -0.5
    is_causal: Bool = false => Fwd Bwd FwdFast FwdKvcache FwdMla,
    window_left: Int = -1 => Fwd Bwd FwdFast FwdKvcache,  // no bound
    window_right: Int = -1 => Fwd Bwd FwdFast FwdKvcache, // no bound
    softcap: Float = 0.0 => Fwd Bwd FwdKvcache,           // off
    num_splits: Int = 0 => FwdKvcache FwdMla,             // the kernel decides
    deterministic: Bool = false => Fwd Bwd,
    batch_invariant: Bool = false => Fwd Bwd FwdKvcache FwdMla,
    smooth_k: Bool = true => FwdFast PrepareFast, // subtracts K's mean before it quantizes K
    rotate: Bool = false => FwdFast PrepareFast,  // Hadamard transform of Q and K before it quantizes them
    prepared: Tensor = None => FwdFast,           // what prepare_fast returned
    check_lengths: Bool = false => Fwd Bwd FwdFast PrepareFast FwdKvcache FwdMla, // true synchronizes a GPU
}

impl<T: Clone> Clone for Options<T> {
    fn clone(&self) -> Self {
        let Ok(same) = self.try_map(|t| Ok::<_, Infallible>(t.clone()));
        same
    }
}

/// Returns the name that `fwd_mla` gives a scale of `fwd_kvcache`; None: latents, keys and values at once, have no such scale.
pub fn scale_of_latents(name: &str) -> Option<&'static str> {
    match name {
        "k_scale" => Some("latent_scale"),
        "k_descale" => Some("latent_descale"),
        _ => None,
    }
}

impl<T> Options<T> {
    /// Returns the scales and zero points of a quantized cache that have a number for each token and head; an append writes them.
    pub fn token_scales(&self) -> [(&'static str, &Option<T>); 4] {
        [("k_scale", &self.k_scale), ("v_scale", &self.v_scale), ("k_zero_point", &self.k_zero_point), ("v_zero_point", &self.v_zero_point)]
    }

    /// Returns the options of scores and probabilities, without lengths and cache. `share` returns another handle of a tensor.
    pub fn of_scores(&self, share: impl Fn(&T) -> T) -> Self {
        let &Options { dropout_p, softmax_scale, is_causal, window_left, window_right, softcap, batch_invariant, .. } = self;
        let [attn_bias, alibi_slopes, sinks] = [&self.attn_bias, &self.alibi_slopes, &self.sinks].map(|t| t.as_ref().map(&share));
        let scalars =
            Options { dropout_p, softmax_scale, is_causal, window_left, window_right, softcap, batch_invariant, ..Options::default() };
        Options { attn_bias, alibi_slopes, sinks, ..scalars }
    }
}

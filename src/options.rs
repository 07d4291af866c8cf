//! The keyword options of the operators, one row each: name, kind, default, and the operators that have it.
//!
//! The rows become the operators' schemas ([`crate::operators`]) and the struct that the library works with ([`Options`]). The package's
//! docstring explains each option; `problem` validates them.

use crate::error::Error;
use crate::value::{Value, ValueTag};
use std::ffi::c_void;

/// A size or number that is not known yet: symbolic, as in `torch.compile`'s dynamic shapes. Checks leave it out.
pub const UNKNOWN: i64 = i64::MIN;

/// Type of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// an optional tensor
    Tensor,
    /// an optional tensor that overloads which change their arguments in place may write
    Written,
    /// an int or None, perhaps symbolic
    OptionalInt,
    /// an int, perhaps symbolic
    Int,
    /// a float or None
    OptionalFloat,
    /// a float
    Float,
    /// a bool
    Bool,
}

impl Kind {
    /// Returns the types that a value may have; the first is not None.
    pub fn tags(self) -> &'static [ValueTag] {
        match self {
            Kind::Tensor | Kind::Written => &[ValueTag::Tensor, ValueTag::None],
            Kind::OptionalInt => &[ValueTag::Int, ValueTag::None],
            Kind::Int => &[ValueTag::Int],
            Kind::OptionalFloat => &[ValueTag::Float, ValueTag::None],
            Kind::Float => &[ValueTag::Float],
            Kind::Bool => &[ValueTag::Bool],
        }
    }
}

/// One option.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// the keyword in Python, and the field's here
    pub name: &'static str,
    /// its type in the schema
    pub kind: Kind,
    /// as a Rust expression
    pub default: &'static str,
    /// the operators that have it
    pub operators: &'static [Op],
}

/// Operators with options. Both overloads of `fwd_kvcache` have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // each has the operator's name
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

/// A [`Kind`] as a type: how a value of it is read and stands in [`Options`].
pub trait Typed {
    /// the kind that this type stands for
    const KIND: Kind;
    /// in [`Options`], with `T` for a tensor
    type Value<T>;
    /// Reads a value of a call; `tensor` makes a tensor of a handle.
    fn read<T>(value: &Value, tensor: &impl Fn(*mut c_void) -> T) -> Self::Value<T>;
    /// Returns the value with `f` of the tensor in its place; numbers stay as they are.
    fn try_map<T, U, E>(value: &Self::Value<T>, f: &impl Fn(&T) -> Result<U, E>) -> Result<Self::Value<U>, E>;
    /// Returns the tensor, if it is one and is there.
    fn tensor<T>(value: &Self::Value<T>) -> Option<&T>;
}

macro_rules! tensor_kind {
    ($kind:ident) => {
        impl Typed for kinds::$kind {
            const KIND: Kind = Kind::$kind;
            type Value<T> = Option<T>;
            fn read<T>(value: &Value, tensor: &impl Fn(*mut c_void) -> T) -> Option<T> {
                value.tensor().map(tensor)
            }
            fn try_map<T, U, E>(value: &Option<T>, f: &impl Fn(&T) -> Result<U, E>) -> Result<Option<U>, E> {
                value.as_ref().map(f).transpose()
            }
            fn tensor<T>(value: &Option<T>) -> Option<&T> {
                value.as_ref()
            }
        }
    };
}

macro_rules! scalar_kind {
    ($kind:ident, $value:ty, $read:expr) => {
        impl Typed for kinds::$kind {
            const KIND: Kind = Kind::$kind;
            type Value<T> = $value;
            fn read<T>(value: &Value, _: &impl Fn(*mut c_void) -> T) -> $value {
                $read(value)
            }
            fn try_map<T, U, E>(value: &$value, _: &impl Fn(&T) -> Result<U, E>) -> Result<$value, E> {
                Ok(*value)
            }
            fn tensor<T>(_: &$value) -> Option<&T> {
                None
            }
        }
    };
}

/// [`Kind`] as types.
#[allow(missing_docs)]
pub mod kinds {
    pub struct Tensor;
    pub struct Written;
    pub struct OptionalInt;
    pub struct Int;
    pub struct OptionalFloat;
    pub struct Float;
    pub struct Bool;
}
tensor_kind!(Tensor);
tensor_kind!(Written);
scalar_kind!(OptionalInt, Option<i64>, Value::optional_int);
scalar_kind!(Int, i64, Value::int);
scalar_kind!(OptionalFloat, Option<f64>, Value::optional_float);
scalar_kind!(Float, f64, Value::float);
scalar_kind!(Bool, bool, Value::bool);

/// Defines the options of all operators: the rows, and the struct that the library works with.
macro_rules! table {
    ($($name:ident: $kind:ident = $default:expr => $($op:ident)+,)*) => {
        /// The options of all operators, in the order of the schemas.
        pub const TABLE: &[Row] = &[$(Row {
            name: stringify!($name),
            kind: <kinds::$kind as Typed>::KIND,
            default: stringify!($default),
            operators: &[$(Op::$op),+],
        }),*];

        /// Option values of a call: with tensors, or with descriptions of them. Options that an operator does not have keep their
        /// defaults.
        #[derive(Clone, Debug)]
        #[allow(missing_docs)] // the package's docstring has them
        pub struct Options<T> {
            $(pub $name: <kinds::$kind as Typed>::Value<T>,)*
        }

        impl<T> Default for Options<T> {
            fn default() -> Self {
                Options { $($name: $default,)* }
            }
        }

        impl<T> Options<T> {
            /// Rejects values of other types than the options'. They stand in the order of [`TABLE`].
            ///
            /// # Errors
            /// [`Value::check`]
            pub fn check(op: Op, values: &[Value]) -> Result<(), Error> {
                let mut values = values.iter();
                $(if matches!(op, $(Op::$op)|+) {
                    let value = values.next().expect("a value for each option");
                    value.check(<kinds::$kind as Typed>::KIND.tags(), || stringify!($name))?;
                })*
                Ok(())
            }

            /// Reads the values of the operator's options, which stand in the order of [`TABLE`]. `tensor` makes a tensor of a handle.
            pub fn read(op: Op, values: &[Value], tensor: impl Fn(*mut c_void) -> T) -> Self {
                let mut values = values.iter();
                Options {
                    $($name: match op {
                        $(Op::$op)|+ => kinds::$kind::read(values.next().expect("a value for each option"), &tensor),
                        #[allow(unreachable_patterns)] // an option of all operators
                        _ => $default,
                    },)*
                }
            }

            /// Returns the same options with `f` of each tensor.
            ///
            /// # Errors
            /// The first error of `f`.
            pub fn try_map<U, E>(&self, f: impl Fn(&T) -> Result<U, E>) -> Result<Options<U>, E> {
                Ok(Options { $($name: kinds::$kind::try_map(&self.$name, &f)?,)* })
            }

            /// Returns the tensors that are given, by name.
            pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &T)> {
                [$((stringify!($name), kinds::$kind::tensor(&self.$name)),)*].into_iter().filter_map(|(name, t)| Some((name, t?)))
            }
        }
    };
}

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
    k_scale: Written = None => FwdKvcache,
    v_scale: Written = None => FwdKvcache,
    k_zero_point: Written = None => FwdKvcache,
    v_zero_point: Written = None => FwdKvcache,
    k_descale: Tensor = None => FwdKvcache,
    v_descale: Tensor = None => FwdKvcache,
    latent_scale: Tensor = None => FwdMla,
    latent_descale: Tensor = None => FwdMla,
    rotary_cos: Tensor = None => FwdKvcache,
    rotary_sin: Tensor = None => FwdKvcache,
    rotary_interleaved: Bool = false => FwdKvcache,
    attn_bias: Tensor = None => Fwd Bwd,
    attn_mask: Tensor = None => FwdFast,
    alibi_slopes: Tensor = None => Fwd Bwd FwdKvcache,
    sinks: Tensor = None => Fwd Bwd FwdKvcache FwdSparseMla,
    block_lists: Tensor = None => Fwd Bwd,
    block_bits: Tensor = None => Fwd Bwd,
    block_lists_t: Tensor = None => Fwd Bwd,
    block_bits_t: Tensor = None => Fwd Bwd,
    tree_mask: Tensor = None => FwdKvcache,
    kv_indices: Tensor = None => FwdKvcache FwdMla,
    kv_block: Int = 1 => FwdKvcache FwdMla,
    dropout_p: Float = 0.0 => Fwd Bwd,
    softmax_scale: OptionalFloat = None => Fwd Bwd FwdFast FwdKvcache FwdMla FwdSparseMla,
    is_causal: Bool = false => Fwd Bwd FwdFast FwdKvcache FwdMla,
    window_left: Int = -1 => Fwd Bwd FwdFast FwdKvcache,
    window_right: Int = -1 => Fwd Bwd FwdFast FwdKvcache,
    softcap: Float = 0.0 => Fwd Bwd FwdKvcache,
    num_splits: Int = 0 => FwdKvcache FwdMla,
    deterministic: Bool = false => Fwd Bwd,
    batch_invariant: Bool = false => Fwd Bwd FwdKvcache FwdMla,
    smooth_k: Bool = true => FwdFast PrepareFast,
    rotate: Bool = false => FwdFast PrepareFast,
    prepared: Tensor = None => FwdFast,
    check_lengths: Bool = false => Fwd Bwd FwdFast PrepareFast FwdKvcache FwdMla,
}

/// Returns the name that `fwd_mla` gives a scale of `fwd_kvcache`; None: latents have no such scale. The scale of latents serves keys
/// and values.
pub fn scale_of_latents(name: &str) -> Option<&'static str> {
    match name {
        "k_scale" => Some("latent_scale"),
        "k_descale" => Some("latent_descale"),
        _ => None,
    }
}

impl<T> Options<T> {
    /// Returns what a quantized cache has for each token and head, by name. An append writes it with the token.
    pub fn token_scales(&self) -> [(&'static str, &Option<T>); 4] {
        [("k_scale", &self.k_scale), ("v_scale", &self.v_scale), ("k_zero_point", &self.k_zero_point), ("v_zero_point", &self.v_zero_point)]
    }

    /// Returns the options of scores and probabilities, without lengths and cache. `share` returns another handle of a tensor.
    pub fn of_scores(&self, share: impl Fn(&T) -> T) -> Self {
        let &Options { dropout_p, softmax_scale, is_causal, window_left, window_right, softcap, batch_invariant, .. } = self;
        let [attn_bias, alibi_slopes, sinks] = [&self.attn_bias, &self.alibi_slopes, &self.sinks].map(|t| t.as_ref().map(&share));
        Options {
            attn_bias,
            alibi_slopes,
            sinks,
            dropout_p,
            softmax_scale,
            is_causal,
            window_left,
            window_right,
            softcap,
            batch_invariant,
            ..Options::default()
        }
    }
}

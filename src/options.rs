//! The keyword options of the operators: one list each for `volta_fa::fwd` and `bwd`, `volta_fa::fwd_fast`, `volta_fa::prepare_fast`,
//! `volta_fa::fwd_kvcache` and `volta_fa::fwd_mla`, and one struct with the values of all.
//!
//! Each row of a list gives an option's name, kind and default. A list becomes the struct in which the shim passes the values
//! ([`OptionArgs`]) and, in C++, the schema, the parameters and arguments of every registration, and what autograd saves
//! (tools/build/options.rs writes `volta_fa_options.h`). The library works with [`Options`]. The package's docstring explains each option;
//! `problem` validates them.
//!
//! build.rs compiles this file too, so it depends on `std` alone.

use std::ffi::c_void;

/// A size or number that is not known yet: symbolic, as in `torch.compile`'s dynamic shapes. Checks leave it out.
pub const UNKNOWN: i64 = i64::MIN;

/// Type of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// an optional tensor without a gradient
    Tensor,
    /// an optional tensor that may need a gradient
    Differentiable,
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

/// One option, as build.rs sees it.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// the keyword in Python, and the field's here
    pub name: &'static str,
    /// its type in the schema
    pub kind: Kind,
    /// as a Rust expression
    pub default: &'static str,
}

/// An optional number in the C ABI.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Maybe<T> {
    /// false: None
    pub given: bool,
    /// meaningful where given
    pub value: T,
}

impl<T: Copy> Maybe<T> {
    fn get(&self) -> Option<T> {
        self.given.then_some(self.value)
    }
}

/// A [`Kind`] as a type: how a value of it travels in the C ABI and stands in [`Options`].
pub trait Typed {
    /// the kind that this type stands for
    const KIND: Kind;
    /// in [`OptionArgs`]; a tensor is a handle, null where it is None
    type C: Copy;
    /// in [`Options`], with `T` for a tensor
    type Value<T>;
    /// Reads a value of the C ABI; `tensor` makes a tensor of a handle, None of a null one.
    fn read<T>(c: Self::C, tensor: &impl Fn(*mut c_void) -> Option<T>) -> Self::Value<T>;
    /// Returns the value with `f` of the tensor in its place; numbers stay as they are.
    fn try_map<T, U, E>(value: &Self::Value<T>, f: &impl Fn(&T) -> Result<U, E>) -> Result<Self::Value<U>, E>;
    /// Returns the tensor, if it is one and is there.
    fn tensor<T>(value: &Self::Value<T>) -> Option<&T>;
}

macro_rules! tensor_kind {
    ($kind:ident) => {
        impl Typed for kinds::$kind {
            const KIND: Kind = Kind::$kind;
            type C = *mut c_void;
            type Value<T> = Option<T>;
            fn read<T>(c: *mut c_void, tensor: &impl Fn(*mut c_void) -> Option<T>) -> Option<T> {
                tensor(c)
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
    ($kind:ident, $c:ty, $value:ty, $read:expr) => {
        impl Typed for kinds::$kind {
            const KIND: Kind = Kind::$kind;
            type C = $c;
            type Value<T> = $value;
            fn read<T>(c: $c, _: &impl Fn(*mut c_void) -> Option<T>) -> $value {
                $read(&c)
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
    pub struct Differentiable;
    pub struct Written;
    pub struct OptionalInt;
    pub struct Int;
    pub struct OptionalFloat;
    pub struct Float;
    pub struct Bool;
}
tensor_kind!(Tensor);
tensor_kind!(Differentiable);
tensor_kind!(Written);
scalar_kind!(OptionalInt, Maybe<i64>, Option<i64>, Maybe::get);
scalar_kind!(Int, i64, i64, i64::clone);
scalar_kind!(OptionalFloat, Maybe<f64>, Option<f64>, Maybe::get);
scalar_kind!(Float, f64, f64, f64::clone);
scalar_kind!(Bool, bool, bool, bool::clone);

/// Defines the options of an operator: its rows, and the struct of the C ABI.
macro_rules! options {
    ($(#[$doc:meta])* $rows:ident, $args:ident { $($name:ident: $kind:ident = $default:expr,)* }) => {
        $(#[$doc])*
        ///
        /// The rows, in the order of the schema.
        pub const $rows: &[Row] = &[$(Row { name: stringify!($name), kind: <kinds::$kind as Typed>::KIND, default: stringify!($default) }),*];

        $(#[$doc])*
        ///
        /// Their values on the way from C++: tensors are `at::Tensor*`, null where they are not there.
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        #[allow(missing_docs)] // the package's docstring has them
        pub struct $args {
            $(pub $name: <kinds::$kind as Typed>::C,)*
        }

        impl $args {
            /// Reads the values; `tensor` converts a handle.
            pub fn read<T>(&self, tensor: impl Fn(*mut c_void) -> Option<T>) -> Options<T> {
                Options { $($name: kinds::$kind::read(self.$name, &tensor),)* ..Options::default() }
            }
        }
    };
}

/// The options of all operators: the struct that the library works with.
macro_rules! all_options {
    ($($name:ident: $kind:ident = $default:expr,)*) => {
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

all_options! {
    cu_seqlens_q: Tensor = None,
    cu_seqlens_k: Tensor = None,
    max_seqlen_q: OptionalInt = None,
    max_seqlen_k: OptionalInt = None,
    seqused_k: Tensor = None,
    cache_seqlens: Tensor = None,
    cu_seqlens_k_new: Tensor = None,
    block_table: Tensor = None,
    cache_batch_idx: Tensor = None,
    leftpad_k: Tensor = None,
    k_scale: Tensor = None,
    v_scale: Tensor = None,
    k_zero_point: Tensor = None,
    v_zero_point: Tensor = None,
    k_descale: Tensor = None,
    v_descale: Tensor = None,
    latent_scale: Tensor = None,
    latent_descale: Tensor = None,
    rotary_cos: Tensor = None,
    rotary_sin: Tensor = None,
    rotary_interleaved: Bool = false,
    attn_bias: Tensor = None,
    attn_mask: Tensor = None,
    alibi_slopes: Tensor = None,
    sinks: Tensor = None,
    block_lists: Tensor = None,
    block_bits: Tensor = None,
    block_lists_t: Tensor = None,
    block_bits_t: Tensor = None,
    tree_mask: Tensor = None,
    kv_indices: Tensor = None,
    kv_block: Int = 1,
    dropout_p: Float = 0.0,
    softmax_scale: OptionalFloat = None,
    is_causal: Bool = false,
    window_left: Int = -1,
    window_right: Int = -1,
    softcap: Float = 0.0,
    num_splits: Int = 0,
    deterministic: Bool = false,
    batch_invariant: Bool = false,
    smooth_k: Bool = true,
    rotate: Bool = false,
    prepared: Tensor = None,
    check_lengths: Bool = false,
}

options! {
    /// The options of `volta_fa::fwd` and `volta_fa::bwd`.
    OPTIONS, OptionArgs {
        cu_seqlens_q: Tensor = None,
        cu_seqlens_k: Tensor = None,
        max_seqlen_q: OptionalInt = None,
        max_seqlen_k: OptionalInt = None,
        seqused_k: Tensor = None,
        attn_bias: Differentiable = None,
        alibi_slopes: Tensor = None,
        sinks: Differentiable = None,
        block_lists: Tensor = None,
        block_bits: Tensor = None,
        block_lists_t: Tensor = None,
        block_bits_t: Tensor = None,
        dropout_p: Float = 0.0,
        softmax_scale: OptionalFloat = None,
        is_causal: Bool = false,
        window_left: Int = -1,
        window_right: Int = -1,
        softcap: Float = 0.0,
        deterministic: Bool = false,
        batch_invariant: Bool = false,
        check_lengths: Bool = false,
    }
}

options! {
    /// The options of `volta_fa::fwd_fast`.
    FAST_OPTIONS, FastOptionArgs {
        cu_seqlens_q: Tensor = None,
        cu_seqlens_k: Tensor = None,
        max_seqlen_q: OptionalInt = None,
        max_seqlen_k: OptionalInt = None,
        attn_mask: Tensor = None,
        softmax_scale: OptionalFloat = None,
        is_causal: Bool = false,
        window_left: Int = -1,
        window_right: Int = -1,
        smooth_k: Bool = true,
        rotate: Bool = false,
        prepared: Tensor = None,
        check_lengths: Bool = false,
    }
}

options! {
    /// The options of `volta_fa::prepare_fast`.
    PREPARE_OPTIONS, PrepareOptionArgs {
        cu_seqlens_k: Tensor = None,
        max_seqlen_k: OptionalInt = None,
        smooth_k: Bool = true,
        rotate: Bool = false,
        check_lengths: Bool = false,
    }
}

options! {
    /// The options of `volta_fa::fwd_kvcache`.
    KVCACHE_OPTIONS, KvCacheOptionArgs {
        cache_seqlens: Tensor = None,
        cu_seqlens_q: Tensor = None,
        max_seqlen_q: OptionalInt = None,
        cu_seqlens_k_new: Tensor = None,
        block_table: Tensor = None,
        cache_batch_idx: Tensor = None,
        leftpad_k: Tensor = None,
        k_scale: Written = None,
        v_scale: Written = None,
        k_zero_point: Written = None,
        v_zero_point: Written = None,
        k_descale: Tensor = None,
        v_descale: Tensor = None,
        rotary_cos: Tensor = None,
        rotary_sin: Tensor = None,
        rotary_interleaved: Bool = false,
        alibi_slopes: Tensor = None,
        sinks: Tensor = None,
        tree_mask: Tensor = None,
        kv_indices: Tensor = None,
        kv_block: Int = 1,
        softmax_scale: OptionalFloat = None,
        is_causal: Bool = false,
        window_left: Int = -1,
        window_right: Int = -1,
        softcap: Float = 0.0,
        num_splits: Int = 0,
        batch_invariant: Bool = false,
        check_lengths: Bool = false,
    }
}

options! {
    /// The options of `volta_fa::fwd_mla`.
    MLA_OPTIONS, MlaOptionArgs {
        cache_seqlens: Tensor = None,
        cu_seqlens_q: Tensor = None,
        max_seqlen_q: OptionalInt = None,
        block_table: Tensor = None,
        cache_batch_idx: Tensor = None,
        latent_scale: Tensor = None,
        latent_descale: Tensor = None,
        kv_indices: Tensor = None,
        kv_block: Int = 1,
        softmax_scale: OptionalFloat = None,
        is_causal: Bool = false,
        num_splits: Int = 0,
        batch_invariant: Bool = false,
        check_lengths: Bool = false,
    }
}

/// Returns the name that [`MLA_OPTIONS`] give a scale of [`KVCACHE_OPTIONS`]; None: latents have no such scale. The scale of latents
/// serves keys and values.
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

    /// Makes the scales of a cache of latents those of a cache of keys.
    pub fn with_latents_as_keys(mut self) -> Self {
        (self.k_scale, self.k_descale) = (self.latent_scale.take(), self.latent_descale.take());
        self
    }
}

//! The table of KV-cache formats: how the elements of a cache store keys and values. Elements of quantized caches are codes, integers or
//! fp8 numbers: number = (code - zero point) * scale. Validation, kernel tables and the CPU backend read the rows. `_info()` publishes them
//! as `cache_formats` for Python, and device code gets them as `CacheFormatInfo` (tools/build/nvrtc.rs). Also a module of build.rs.

use crate::params::CacheFormat;

/// Granularity of the scales of a quantized cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleGranularity {
    /// no scale
    None,
    /// the columns of one token and head; appending writes the scale
    Token,
    /// all tokens of a head: the caller gives the scale
    Head,
}

/// A row of the table of cache formats.
#[derive(Clone, Copy, Debug)]
pub struct FormatInfo {
    pub format: CacheFormat,
    /// its name, as `kv_dtype` has it in Python
    pub name: &'static str,
    /// its word in kernel names; empty: none
    pub kernel_word: &'static str,
    /// type of its elements in PyTorch; empty: the type of q
    pub dtype: &'static str,
    /// bits of a column (one number of a key or value)
    pub bits: u32,
    /// granularity of its scales
    pub scale: ScaleGranularity,
    /// true if each scale has a zero point too: the code that stands for 0
    pub has_zero_point: bool,
    /// the largest magnitude of a code, as a number before it is scaled; 0 where there are no codes
    pub max_code: f32,
    /// true if a cache of latents (`volta_fa::fwd_mla`: multi-head latent attention) can have this format
    pub of_latents: bool,
    /// formats of keys and values, if the two differ. The rest of the row is that of the keys
    pub pair: Option<[CacheFormat; 2]>,
}

/// Every format, in the order of the enum.
pub const FORMATS: [FormatInfo; 6] = {
    use {CacheFormat::*, ScaleGranularity as Scale};
    // name in Python, word in kernel names, and type of an element in PyTorch
    const fn plain(format: CacheFormat, name: &'static str, kernel_word: &'static str, dtype: &'static str) -> FormatInfo {
        let (scale, has_zero_point, max_code) = (ScaleGranularity::None, false, 0.0);
        FormatInfo { format, name, kernel_word, dtype, bits: 16, scale, has_zero_point, max_code, of_latents: true, pair: None }
    }
    const fn int8(format: CacheFormat, name: &'static str) -> FormatInfo {
        FormatInfo { bits: 8, scale: Scale::Token, max_code: 127.0, ..plain(format, name, name, "torch.int8") }
    }
    [
        plain(Unquantized, "float", "", ""), // in the type of q
        int8(Int8, "int8"),
        // like int8, a scale for each token and head
        FormatInfo { dtype: "torch.uint8", bits: 4, has_zero_point: true, max_code: 15.0, of_latents: false, ..int8(Int4, "int4") },
        // max_code: the largest finite numbers of the two fp8 types
        FormatInfo { bits: 8, scale: Scale::Head, max_code: 57344.0, ..plain(E5m2, "fp8_e5m2", "e5m2", "torch.float8_e5m2") },
        FormatInfo { bits: 8, scale: Scale::Head, max_code: 448.0, ..plain(E4m3, "fp8_e4m3", "e4m3", "torch.float8_e4m3fn") },
        FormatInfo { pair: Some([Int8, Int4]), of_latents: false, ..int8(Int8Int4, "int8k_int4v") },
    ]
};

// `info` finds a format's row by its number
const _: () = {
    let mut i = 0;
    while i < FORMATS.len() {
        assert!(FORMATS[i].format as usize == i);
        i += 1;
    }
};

impl FormatInfo {
    /// Returns the columns in one element of a quantized cache's tensor: a byte has two of 4 bits.
    pub const fn columns(&self) -> i64 {
        match self.bits {
            4 => 2,
            _ => 1,
        }
    }

    /// Returns the row as C++: a specialization of `CacheFormatInfo` for device code.
    pub fn cpp(&self) -> String {
        let FormatInfo { format, bits, has_zero_point, max_code, .. } = self;
        let (columns, has_token_scales) = (self.columns(), self.scale == ScaleGranularity::Token);
        format!(
            "template <> struct CacheFormatInfo<CacheFormat::{format:?}> {{ static constexpr int kBits = {bits}, kColumns = {columns}; \
             static constexpr bool kTokenScales = {has_token_scales}, kZeroPoints = {has_zero_point}; \
             static constexpr float kMaxCode = {max_code:?}f; }};\n"
        )
    }
}

impl CacheFormat {
    pub const fn info(self) -> &'static FormatInfo {
        &FORMATS[self as usize]
    }

    /// Returns its name, as `kv_dtype` has it in Python.
    pub const fn name(self) -> &'static str {
        self.info().name
    }

    /// Returns the formats of keys and of values.
    pub const fn parts(self) -> [CacheFormat; 2] {
        match self.info().pair {
            Some(pair) => pair,
            None => [self, self],
        }
    }

    pub const fn is_pair(self) -> bool {
        self.info().pair.is_some()
    }

    pub const fn is_quantized(self) -> bool {
        self.info().max_code > 0.0
    }

    pub fn quantized() -> impl Iterator<Item = CacheFormat> {
        FORMATS.iter().map(|row| row.format).filter(|format| format.is_quantized())
    }
}

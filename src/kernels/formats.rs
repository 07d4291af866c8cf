//! The table of KV-cache formats. `_info()` publishes it as `cache_formats`, where Python reads it. Kernels get it as `CacheFormatInfo`
//! (tools/build/nvrtc.rs).
//!
//! python/volta_fa/kv_cache/formats.py says what the bytes of the quantized formats mean.

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
    /// the format
    pub format: CacheFormat,
    /// its name, as `kv_dtype` has it in Python
    pub name: &'static str,
    /// its word in kernel names
    pub kernel_word: &'static str,
    /// its type in PyTorch; empty: the type of q
    pub dtype: &'static str,
    /// bits of a column
    pub bits: u32,
    /// granularity of its scales
    pub scale: ScaleGranularity,
    /// true if each scale has a zero point too
    pub has_zero_point: bool,
    /// the largest number that a code stands for before it is scaled; 0 where there are no codes
    pub max_code: f32,
    /// true if latents (`volta_fa::fwd_mla`) can have this format
    pub of_latents: bool,
}

/// Every format, in the order of the enum.
pub const FORMATS: [FormatInfo; 5] = {
    use {CacheFormat::*, ScaleGranularity as Scale};
    const fn plain(format: CacheFormat, name: &'static str, kernel_word: &'static str, dtype: &'static str) -> FormatInfo {
        let (scale, has_zero_point, max_code) = (ScaleGranularity::None, false, 0.0);
        FormatInfo { format, name, kernel_word, dtype, bits: 16, scale, has_zero_point, max_code, of_latents: true }
    }
    [
        plain(Unquantized, "float", "", ""),
        FormatInfo { bits: 8, scale: Scale::Token, max_code: 127.0, ..plain(Int8, "int8", "int8", "torch.int8") },
        FormatInfo {
            bits: 4,
            scale: Scale::Token,
            has_zero_point: true,
            max_code: 15.0,
            of_latents: false,
            ..plain(Int4, "int4", "int4", "torch.uint8")
        },
        FormatInfo { bits: 8, scale: Scale::Head, max_code: 57344.0, ..plain(E5m2, "fp8_e5m2", "e5m2", "torch.float8_e5m2") },
        FormatInfo { bits: 8, scale: Scale::Head, max_code: 448.0, ..plain(E4m3, "fp8_e4m3", "e4m3", "torch.float8_e4m3fn") },
    ]
};

const _: () = {
    let mut i = 0;
    while i < FORMATS.len() {
        assert!(FORMATS[i].format as usize == i);
        i += 1;
    }
};

impl FormatInfo {
    /// Returns the columns of one element of a quantized cache's tensor, which has whole bytes.
    pub const fn columns(&self) -> i64 {
        if self.bits < 8 {
            8 / self.bits as i64
        } else {
            1
        }
    }

    /// Defines the row in C++.
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
    /// Returns its row of the table.
    pub const fn info(self) -> &'static FormatInfo {
        &FORMATS[self as usize]
    }

    /// Returns its name, as `kv_dtype` has it in Python.
    pub const fn name(self) -> &'static str {
        self.info().name
    }

    /// Returns true if its elements are codes that a scale belongs to.
    pub const fn is_quantized(self) -> bool {
        self.info().max_code > 0.0
    }

    /// Returns the formats whose elements are codes.
    pub fn quantized() -> impl Iterator<Item = CacheFormat> {
        FORMATS.iter().map(|row| row.format).filter(|format| format.is_quantized())
    }
}

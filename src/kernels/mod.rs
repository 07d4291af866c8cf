//! The kernel registry: every compiled kernel with its embedded code, and which of them a device runs. The planner searches it, the
//! launchers load code from it, and `_info()` lists it.
//!
//! A variant is one kernel, a pass what it computes, a feature an option that needs code of its own, and a family the kernels for one kind
//! of tensor core. Each variant has machine code (a cubin) for its family's architecture, and PTX for newer ones.

mod tables;

pub(crate) use tables::features::named;
pub use tables::formats::{FormatInfo, ScaleGranularity, FORMATS};
pub use tables::variants::{
    CacheFormat, Code, Family, Feature, FeatureSet, ParamBlock, Pass, PassInfo, RowKind, Scratch, Size, Variant, BACKWARD,
    DETERMINISTIC_BACKWARD, LARGE_PASS_SETS, PASSES, PASS_SETS, SPLIT_BACKWARD, SPLIT_TOKENS, STORED_BACKWARD,
};
pub use tables::volta::VOLTA;

use crate::error::{Error, Result};
use crate::limits::{COMMON_HEADDIM, MAX_HEADDIM}; // 256 and 512
use crate::params;
use std::cmp::Reverse;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

/// The code of one variant, as build.rs compiled it. A build that left the kernel out (VOLTA_FA_COMPILE_ONLY) has no bytes of it.
pub struct Image {
    pub name: &'static str,
    // both compressed by zstd
    cubin: &'static [u8],
    ptx: &'static [u8],
    /// registers of a thread, in the cubin
    pub registers: u32,
    /// spill stores and loads in the cubin, bytes
    pub spill_bytes: u32,
}

// IMAGES, which tools/build/embed.rs writes: the image of each variant
include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// Tables of variants, each of one family (the kernels for one kind of tensor core). Tests make some of their own.
#[derive(Clone, Copy, Debug)]
pub struct Kernels(pub &'static [&'static [Variant]]);

/// The kernels that build.rs compiled.
pub static COMPILED: LazyLock<Kernels> = LazyLock::new(|| Kernels(tables::tables().leak()));

impl Kernels {
    /// Returns every variant, table after table.
    pub fn variants(self) -> impl Iterator<Item = &'static Variant> {
        self.0.iter().copied().flatten()
    }

    /// Returns each family once, in the order of the tables.
    pub fn families(self) -> impl Iterator<Item = &'static Family> {
        let of_table = |table: &'static [Variant]| table.first().map(|v| &v.family);
        self.0.iter().enumerate().filter_map(move |(i, table)| {
            let family = of_table(table)?;
            let is_new = !self.0[..i].iter().any(|earlier| of_table(earlier).is_some_and(|f| f.name == family.name));
            is_new.then_some(family)
        })
    }

    /// Returns the variants of one family and pass, in the order of the tables.
    pub fn of(self, family: &'static Family, pass: Pass) -> impl Iterator<Item = &'static Variant> {
        let tables = self.0.iter().filter(move |table| table.first().is_some_and(|v| v.family.name == family.name));
        tables.copied().flatten().filter(move |v| v.pass == pass)
    }

    /// Returns the families that devices of this architecture (70 for sm_70) run, and the code that they load, in the planner's order:
    /// machine code before PTX, and of either kind the newer family first, because it is nearer to the device.
    pub fn families_for(self, sm: u32) -> Vec<(&'static Family, Code)> {
        let mut found: Vec<_> = self.families().filter_map(|f| Some((f, f.code_for(sm)?))).collect();
        found.sort_by_key(|(family, code)| (*code, Reverse(family.sm)));
        found
    }

    /// Returns true if a family has kernels of these passes for this headdim, in this shared memory (bytes of a block), with every feature
    /// of the pass. Kernels of block masks and of batch-invariant calls do not count, because they run no other calls.
    fn covers_all_of(self, family: &'static Family, passes: &[Pass], headdim: i64, shared_bytes: u32) -> bool {
        passes.iter().all(|&pass| {
            self.of(family, pass).any(|v| {
                !v.is_batch_invariant
                    && v.features.contains(pass.info().features.without(FeatureSet::of(&[Feature::Blocks])))
                    && v.headdim.min(v.headdim_v) as i64 >= headdim
                    && v.shared_bytes <= shared_bytes
            })
        })
    }

    /// Returns true if volta_fa can take over PyTorch's SDPA on this architecture (70 for sm_70). Its machine code must run every problem
    /// up to headdim [`COMMON_HEADDIM`]. With `through_ptx_too`, one kernel suffices, also as PTX.
    pub fn serve(self, sm: u32, through_ptx_too: bool) -> bool {
        let families = self.families_for(sm);
        if through_ptx_too {
            return !families.is_empty();
        }
        let covers = |f: &'static Family, passes: &[Pass]| self.covers_all_of(f, passes, COMMON_HEADDIM, f.shared_bytes);
        let is_native = |passes: &[Pass]| families.iter().any(|(f, code)| *code == Code::Cubin && covers(f, passes));
        // fwd, bwd, and deterministic bwd
        PASS_SETS.into_iter().all(is_native)
    }

    /// Returns the largest headdim for which kernels run every `fwd` and `bwd` on devices of this architecture, through PTX too.
    pub fn max_headdim(self, sm: u32) -> i64 {
        let families = self.families_for(sm);
        // a device that gets PTX alone is newer than Turing, and has at least the shared memory of an SM of Volta
        let native = families.iter().find(|(_, code)| *code == Code::Cubin);
        let bytes = native.map_or(VOLTA.shared_bytes, |(family, _)| family.shared_bytes);
        let covered = |passes: &[Pass]| families.iter().any(|(f, _)| self.covers_all_of(f, passes, MAX_HEADDIM, bytes));
        // fwd, and the bwd for large headdims
        match LARGE_PASS_SETS.into_iter().all(covered) {
            true => MAX_HEADDIM,
            false => COMMON_HEADDIM,
        }
    }
}

pub fn variants() -> impl Iterator<Item = &'static Variant> {
    COMPILED.variants()
}

/// Returns the size of a kernel argument, bytes.
pub fn params_bytes(block: ParamBlock) -> usize {
    match block {
        ParamBlock::Forward => size_of::<params::FwdParams>(),
        ParamBlock::ForwardStreamK => size_of::<params::FwdStreamKParams>(),
        ParamBlock::Backward => size_of::<params::BwdParams>(),
        ParamBlock::BackwardStreamK => size_of::<params::BwdStreamKParams>(),
        ParamBlock::ForwardBlocks => size_of::<params::FwdBlockParams>(),
        ParamBlock::BackwardBlocks => size_of::<params::BwdBlockParams>(),
        ParamBlock::BackwardStored => size_of::<params::BwdStoredParams>(),
        ParamBlock::BackwardStoredBlocks => size_of::<params::BwdStoredBlockParams>(),
        ParamBlock::Merge => size_of::<params::MergeParams>(),
        ParamBlock::Decode => size_of::<params::DecodeParams>(),
        ParamBlock::Append => size_of::<params::AppendParams>(),
        ParamBlock::Dequantize => size_of::<params::DequantizeParams>(),
        ParamBlock::Cast => size_of::<params::CastParams>(),
        ParamBlock::Fast => size_of::<params::FastParams>(),
        ParamBlock::SparseMla => size_of::<params::SparseMlaParams>(),
        ParamBlock::Indexer => size_of::<params::IndexerParams>(),
    }
}

pub fn image(variant: &Variant) -> &'static Image {
    IMAGES.iter().find(|i| i.name == variant.name).expect("build.rs embeds every variant of the tables")
}

impl Image {
    /// Returns a hash of the (compressed) machine code, by which `--resume` of benchmarks/driver.py tells whether a kernel changed.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.cubin.hash(&mut hasher);
        hasher.finish()
    }

    /// Returns the family's machine code (an ELF cubin).
    pub fn cubin(&self) -> Result<Vec<u8>> {
        decompress(self.name, self.cubin)
    }

    /// Returns PTX for the family's virtual architecture, with the terminating NUL that the driver needs.
    pub fn ptx(&self) -> Result<Vec<u8>> {
        let mut text = decompress(self.name, self.ptx)?;
        if text.last() != Some(&0) {
            text.push(0);
        }
        Ok(text)
    }
}

fn decompress(name: &str, data: &[u8]) -> Result<Vec<u8>> {
    if data.is_empty() {
        return Err(Error::runtime(format!("this build of volta_fa is without the kernel {name}: `make build` compiles all")));
    }
    zstd::decode_all(data).map_err(|e| Error::runtime(format!("the embedded code of {name} is damaged: {e}")))
}

//! Types of the kernel tables: families and rows. `features.rs` and `passes.rs` have the others. The tables are in `volta/`, `turing/` and
//! `shared.rs`; build.rs compiles their rows, and the planner chooses from them.
//!
//! A row is one kernel: its source, sizes and features ([`Variant`]). Plain kernels have no features of scores, generic ones have all, and
//! others require one or two. A block is a thread block, and its rows are queries or keys ([`RowKind`]).
//!
//! This file and the tables are also modules of build.rs, as src/params/ is, so they depend on nothing but that and the standard library.

pub use super::features::{Feature, FeatureSet};
pub use super::passes::*;
pub use crate::params::CacheFormat;

/// A set of kernels written for one instruction set: `volta` (sm_70) or `turing` (sm_75).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// name in `VOLTA_FA_FAMILY` and `_info()`, by which families are compared
    pub name: &'static str,
    /// architecture of the embedded machine code, for NVRTC's `--gpu-architecture=sm_NN`
    pub sm: u32,
    /// architectures that run this machine code, its own first; later ones run its PTX
    pub native: &'static [u32],
    /// shared memory of an SM of its own architecture, bytes; a block may take all of it
    pub shared_bytes: u32,
    /// threads that an SM of its own architecture holds
    pub threads: u32,
    /// layout of its backward kernels' scratch memory; None for families without them
    pub scratch: Option<Scratch>,
    /// the passes whose kernels find out from the grid's size whether its first axis is row tiles or heads (csrc/forward/block.cuh)
    pub either_order: &'static [Pass],
    /// true if main backward kernels take a part of the blocks of keys (`BwdParams::first_key_block`), so that the deterministic mode
    /// can launch them one part after the other
    pub has_key_block_offset: bool,
    /// true if its kernels can store the gradient of a bias as fp16, if each element belongs to one score; else they add to fp32
    pub stores_dbias: bool,
    /// for headdims above this, the backward pass that keeps P and dS in memory (csrc/backward/stored_scores.cuh) is faster than the others
    pub stored_above: u32,
}

/// Layout of the statistics of query rows that the backward kernels of a family keep between launches: -lse/scale, where lse is
/// softmax_lse, and -delta, where delta is the row sum of out * dout. Rows lie in groups, so that a lane loads its rows' together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// rows of a batch entry are a multiple of this, which every step of queries divides
    pub row_rounding: u32,
    /// rows of a group, whose statistics lie together
    pub group_rows: u32,
    /// floats of a group, copies included
    pub group_floats: u32,
    /// offset of each row's -lse/scale in its group, floats
    pub neg_lse_offsets: &'static [u32],
    /// offset of each row's -delta in its group, floats
    pub neg_delta_offsets: &'static [u32],
    /// distances from these offsets to each copy of a value, floats; 0 for the first. With copies, wide loads fill accumulators
    pub copy_distances: &'static [u32],
}

/// Form of a family's code that a GPU loads, the preferred one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Code {
    /// the embedded machine code
    Cubin,
    /// compiled by the driver
    Ptx,
}

impl Family {
    /// Returns the code that GPUs of this architecture load; None if they cannot run the family.
    pub fn code_for(&self, sm: u32) -> Option<Code> {
        if self.native.contains(&sm) {
            Some(Code::Cubin)
        } else {
            (sm > self.sm).then_some(Code::Ptx)
        }
    }
}

/// Rows of a block relative to other kernels of its headdim. Smaller ones are for small grids (`plan::choose::sized`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// the most rows, or the only size
    Large,
    /// fewer rows
    Medium,
    /// the fewest rows, or as many with more warps
    Small,
}

/// The device code of a kernel. csrc/entry.cu, compiled after `headers`, is a kernel that calls `kernel::run(arguments)`. `kernel` and
/// `arguments` are C++. They may use `p`, the parameter block, and `-D` definitions of the row (tools/build/nvrtc.rs), which have the names
/// of its fields in capitals: HEADDIM, BLOCK_ROWS, STEP, THREADS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// headers below `csrc/`, the kernel's own first
    pub headers: &'static [&'static str],
    /// type that has the kernel as a static function `run`
    pub kernel: &'static str,
    /// arguments of `run`
    pub arguments: &'static str,
}

impl Source {
    /// Returns the source of a kernel that takes the parameter block as it is.
    pub const fn new(headers: &'static [&'static str], kernel: &'static str) -> Source {
        Source { headers, kernel, arguments: "p" }
    }

    /// Returns the source with other arguments, for kernels that take parts of the parameter block, or objects made from them.
    pub const fn with_arguments(self, arguments: &'static str) -> Source {
        Source { arguments, ..self }
    }
}

/// One kernel: device code compiled with the `-D` definitions of its row. A row is tile times features times cache format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// name of the `extern "C" __global__` function; [`table`] derives it from the rest
    pub name: &'static str,
    pub family: Family,
    pub pass: Pass,
    /// features that it has code for; a problem may use any of them
    pub features: FeatureSet,
    /// features that the problem must use: the kernel applies them without checking parameters
    pub required_features: FeatureSet,
    /// the one cache format that it reads or writes; Unquantized for kernels without a cache too
    pub cache: CacheFormat,
    /// true if its queries, unquantized cache and output are bf16; other kernels take fp16, or either type by a parameter
    pub is_bf16: bool,
    /// true if a row's bits depend on no other row (csrc/batch_invariant.cuh); such calls run these kernels alone
    pub is_batch_invariant: bool,
    pub source: Source,
    /// the largest headdim of q and k that it handles; smaller ones are padded with zeros on load. Preprocess,
    /// postprocess, merge, append, dequantize and cast kernels read the headdim from their parameters, and take any
    pub headdim: u32,
    /// the largest headdim of v and out
    pub headdim_v: u32,
    /// rows of a block; `PassInfo::rows` says which rows
    pub block_rows: u32,
    /// query heads of a KV head whose rows a block computes, `block_rows` of each
    pub heads: u32,
    /// rows of the other kind, queries or keys, that an iteration of the main loop takes; decode: rows of one warp
    pub step: u32,
    /// its rows relative to other kernels of its headdim
    pub size: Size,
    pub threads: u32, // of a block
    /// dynamic shared memory of a block, bytes
    pub shared_bytes: u32,
    /// blocks that an SM must be able to hold (`__launch_bounds__`)
    pub blocks_per_sm: u32,
}

impl Variant {
    /// Returns the row that others of a family and pass begin with: no feature and no tile, but headdims to 256 and 256 threads.
    pub const fn new(family: Family, pass: Pass, source: Source) -> Variant {
        Variant {
            name: "",
            family,
            pass,
            features: FeatureSet::NONE,
            required_features: FeatureSet::NONE,
            cache: CacheFormat::Unquantized,
            is_bf16: false,
            is_batch_invariant: false,
            source,
            headdim: 256,
            headdim_v: 256,
            block_rows: 0,
            heads: 1,
            step: 0,
            size: Size::Large,
            threads: 256,
            shared_bytes: 0,
            blocks_per_sm: 1,
        }
    }

    /// Returns the row with those of `features` that its pass can use.
    pub const fn with_features(self, features: FeatureSet) -> Variant {
        Variant { features: features.intersection(self.pass.info().features), ..self }
    }

    pub const fn batch_invariant(self) -> Variant {
        Variant { is_batch_invariant: true, ..self }
    }

    /// Returns the row with block masks and these features. `source` takes lists of blocks, so the problem must have a mask.
    pub const fn with_blocks(self, features: FeatureSet, source: Source) -> Variant {
        let required_features = FeatureSet::of(&[Feature::Blocks]);
        Variant { required_features, source, ..self.with_features(features.union(required_features)) }
    }

    /// Returns the kernel's argument: its pass's, or with `Feature::Blocks` the block that contains that and the lists.
    pub const fn params(&self) -> ParamBlock {
        match (self.pass.info().params, self.features.has(Feature::Blocks)) {
            (ParamBlock::Forward, true) => ParamBlock::ForwardBlocks,
            (ParamBlock::Backward, true) => ParamBlock::BackwardBlocks,
            (ParamBlock::BackwardStored, true) => ParamBlock::BackwardStoredBlocks,
            (usual, _) => usual,
        }
    }

    /// Returns the kernel's name, from its row: `family_pass[_format[_format]][_invariant][_features][_stage][_tile][_size]`. A tile is
    /// `HEADDIM`, `HEADDIMxHEADDIM_V`, `HEADDIMxROWS` or `ROWS`.
    fn derived_name(&self) -> String {
        use Pass::*;
        let (pass, stage) = self.pass.info().words;
        let features = self.feature_words();
        let Variant { headdim, headdim_v, block_rows, .. } = self;
        let tile = match self.pass {
            Forward | ForwardStreamK | Prefill | PrefillStreamK | FastForward => format!("{headdim}x{headdim_v}"),
            Decode | SparseMla => format!("{headdim}x{block_rows}"),
            DecodeMla | Indexer => block_rows.to_string(),
            // these read the headdim from their parameters
            BackwardPreprocess | BackwardPostprocess | Merge | Append | Dequantize | Cast | SparseSelect => String::new(),
            _ if headdim == headdim_v => headdim.to_string(),
            _ => format!("{headdim}x{headdim_v}"),
        };
        let size = match self.size {
            _ if self.heads > 1 => "heads",
            Size::Large => "",
            Size::Medium => "medium",
            Size::Small => "small",
        };
        let format = if self.is_bf16 { "bf16" } else { self.cache.info().kernel_word };
        // after "bf16": only sparse MLA has kernels of bf16 queries beside another format of the cache
        let own_format = if self.is_bf16 { self.cache.info().kernel_word } else { "" };
        let invariant = if self.is_batch_invariant { "invariant" } else { "" };
        let words = [self.family.name, pass, format, own_format, invariant, &features, stage, &tile, size];
        words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join("_")
    }

    /// Returns the words for features in its name: features that the problem must use, else the set's name.
    fn feature_words(&self) -> String {
        let mut required: Vec<_> = self.required_features.iter().map(Feature::name).collect();
        required.sort_unstable();
        // every kernel of the pass has these features, so they get no word
        let usual = match self.pass {
            Pass::Prefill | Pass::PrefillStreamK => FeatureSet::PAGED,
            Pass::ForwardStreamK | Pass::ForwardSplitStreamK => FeatureSet::of(&[Feature::Sinks]),
            _ => FeatureSet::NONE,
        };
        let of_scores = FeatureSet::GENERIC.without(FeatureSet::FP32_OUTPUT);
        match self.features.without(usual) {
            // parameters that contain the pass's: the kernel has a block mask
            of if self.params() != self.pass.info().params && of.intersection(of_scores) != FeatureSet::NONE => "block_mask_generic".into(),
            _ if !required.is_empty() => required.join("_"),
            FeatureSet::NONE => String::new(),
            beyond if beyond.intersection(of_scores) == FeatureSet::NONE => {
                let is_fp32 = beyond.contains(FeatureSet::of(&[Feature::Fp32Output]));
                if is_fp32 { "fp32_output" } else { "varlen" }.into()
            }
            // beside generic kernels without dropout
            beyond if self.pass == Pass::ForwardSplit && beyond.has(Feature::Dropout) => "generic_dropout".into(),
            _ => "generic".into(),
        }
    }
}

/// Names the rows of one family, and keeps them for the life of the process.
pub fn table(rows: impl IntoIterator<Item = Variant>) -> &'static [Variant] {
    let named = |row: Variant| Variant { name: row.derived_name().leak(), ..row };
    rows.into_iter().map(named).collect::<Vec<_>>().leak()
}

//! Types of the kernel tables: passes, features, families and rows.
//!
//! A row is one kernel: its source, sizes and features ([`Variant`]). Plain kernels have no features of scores, generic ones have all, and
//! others require one or two. A block is a thread block, and its rows are queries or keys ([`RowKind`]).
//!
//! This file and the tables are also modules of build.rs, as src/params.rs is, so they depend on nothing but that and the standard library.

pub use crate::params::CacheFormat;

/// A feature of a problem beyond softmax(scale * QK^T)V inside a window with one length for all sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// sequence lengths come from memory: `cu_seqlens_*`, `seqused_k`
    Lengths,
    /// one more logit in the sum of each row
    Sinks,
    /// gradients leave as fp32
    Fp32Gradients,
    /// scores x become softcap * tanh(x / softcap)
    Softcap,
    /// slope * distance is subtracted from scores
    Alibi,
    /// an additive bias or a mask; in fp16 without `Fp32Bias`
    Bias,
    /// probabilities are dropped by random numbers
    Dropout,
    /// keys and values in a KV cache: in pages, or in entries with indices from memory
    Pages,
    /// an additive bias in fp32: never without `Bias`
    Fp32Bias,
    /// lists of the blocks of scores that exist: never without kernels of their own
    Blocks,
    /// a bit for each query and draft token says whether the query sees the token
    Tree,
}

impl Feature {
    /// In the order of the bits in [`FeatureSet`].
    pub const ALL: [Feature; 11] = [
        Feature::Lengths,
        Feature::Sinks,
        Feature::Fp32Gradients,
        Feature::Softcap,
        Feature::Alibi,
        Feature::Bias,
        Feature::Dropout,
        Feature::Pages,
        Feature::Fp32Bias,
        Feature::Blocks,
        Feature::Tree,
    ];

    /// Features that change scores or probabilities. Each has kernels of its own, which problems with another of them do not run.
    pub const OF_SCORES: [Feature; 4] = [Feature::Softcap, Feature::Alibi, Feature::Bias, Feature::Dropout];

    /// Returns its name in `_info()`, `_plan()` and tuning files.
    pub const fn name(self) -> &'static str {
        match self {
            Feature::Lengths => "varlen",
            Feature::Sinks => "sinks",
            Feature::Fp32Gradients => "fp32_gradients",
            Feature::Softcap => "softcap",
            Feature::Alibi => "alibi",
            Feature::Bias => "bias",
            Feature::Dropout => "dropout",
            Feature::Pages => "paged_kv",
            Feature::Fp32Bias => "fp32_bias",
            Feature::Blocks => "block_mask",
            Feature::Tree => "tree",
        }
    }

    /// Returns the feature of this name.
    pub fn named(name: &str) -> Option<Feature> {
        Feature::ALL.into_iter().find(|f| f.name() == name)
    }
}

/// A set of features. A kernel with more features than a problem uses runs it too, at a cost (`plan::choose`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureSet(u32);

impl FeatureSet {
    /// Of plain kernels: one length for all sequences, no option.
    pub const NONE: FeatureSet = FeatureSet(0);
    /// Features of a block's bounds and its epilogue; `kVarlen` in csrc/features.cuh.
    pub const VARLEN: FeatureSet = FeatureSet::of(&[Feature::Lengths, Feature::Sinks, Feature::Fp32Gradients]);
    /// Those, and the features of scores and probabilities; `kGeneric` in csrc/features.cuh.
    pub const GENERIC: FeatureSet =
        FeatureSet::VARLEN.union(FeatureSet::of(&Feature::OF_SCORES)).union(FeatureSet::of(&[Feature::Fp32Bias]));

    /// Features of generic kernels with block masks: a bias has no lists.
    pub const GENERIC_BLOCKS: FeatureSet =
        FeatureSet::GENERIC.without(FeatureSet::of(&[Feature::Bias, Feature::Fp32Bias])).union(FeatureSet::of(&[Feature::Blocks]));

    /// Features of every prefill kernel.
    pub const PAGED: FeatureSet = FeatureSet::of(&[Feature::Pages, Feature::Lengths, Feature::Sinks]);

    /// Returns the set of these features.
    pub const fn of(list: &[Feature]) -> FeatureSet {
        let (mut bits, mut i) = (0, 0);
        while i < list.len() {
            bits |= 1 << list[i] as u32;
            i += 1;
        }
        FeatureSet(bits)
    }

    /// Returns the features that a condition holds for.
    pub fn all_where(holds: impl Fn(Feature) -> bool) -> FeatureSet {
        Feature::ALL.into_iter().filter(|&n| holds(n)).fold(FeatureSet::NONE, |set, n| set.union(FeatureSet::of(&[n])))
    }

    /// Returns the features of either set.
    pub const fn union(self, other: FeatureSet) -> FeatureSet {
        FeatureSet(self.0 | other.0)
    }

    /// Returns the features of both sets.
    pub const fn intersection(self, other: FeatureSet) -> FeatureSet {
        FeatureSet(self.0 & other.0)
    }

    /// Returns the features that `other` lacks.
    pub const fn without(self, other: FeatureSet) -> FeatureSet {
        FeatureSet(self.0 & !other.0)
    }

    /// Returns true if all features of `other` are in this set.
    pub const fn contains(self, other: FeatureSet) -> bool {
        other.without(self).0 == 0
    }

    /// Returns the set with `Fp32Bias` if it has `Bias`: kernels that read either type.
    pub const fn with_fp32_bias(self) -> FeatureSet {
        match self.contains(FeatureSet::of(&[Feature::Bias])) {
            true => self.union(FeatureSet::of(&[Feature::Fp32Bias])),
            false => self,
        }
    }

    /// Returns the number of features.
    pub const fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Returns the features in the order of [`Feature::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.into_iter().filter(move |&n| self.contains(FeatureSet::of(&[n])))
    }

    /// Returns the bits that device code sees: `-DFEATURES=<bits>`, and `kFeature...` in the generated header.
    pub const fn bits(self) -> u32 {
        self.0
    }
}

/// The computation of a kernel. An op runs one pass, or several one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// out and softmax_lse
    Forward,
    /// the same on a stream-K grid, if the last wave of the usual grid would leave much of the GPU idle
    ForwardStreamK,
    /// out and softmax_lse of fp32 tensors, whose numbers are sums of two fp16 numbers
    ForwardSplit,
    /// delta and the other row statistics, zeroing of dq's accumulator
    BackwardPreprocess,
    /// dk, dv, and dq added to its accumulator by atomics
    Backward,
    /// the same on a stream-K grid, if few blocks of many steps would leave much of the GPU idle
    BackwardStreamK,
    /// dk and dv alone, for the deterministic mode
    BackwardDkDv,
    /// dq alone, for the deterministic mode
    BackwardDq,
    /// dq's accumulator to fp16 or fp32
    BackwardPostprocess,
    /// all of a backward pass, if one block has all keys of its heads
    BackwardFused,
    /// P and dS to memory, for large headdims
    BackwardScores,
    /// dq, dk and dv from them
    BackwardGradients,
    /// P and dS to memory, of fp32 tensors, whose numbers are sums of two fp16 numbers
    BackwardSplitScores,
    /// dq, dk and dv from them
    BackwardSplitGradients,
    /// attention over two sets of keys from that over each
    Merge,
    /// out and softmax_lse of few queries a sequence, over a KV cache
    Decode,
    /// the same of many queries a sequence
    Prefill,
    /// the same on a stream-K grid, if the last wave of the usual grid would leave much of the GPU idle
    PrefillStreamK,
    /// the same as decode over a cache of latents, whose first columns are the values
    DecodeMla,
    /// keys and values into a KV cache, and rotary embeddings of keys and queries
    Append,
    /// a quantized KV cache as fp16 or bf16
    Dequantize,
    /// bf16 or fp32 q, k and v as fp16, scaled by powers of two
    Cast,
    /// int8 codes of K and the range of V, for the fast forward
    FastPrepare,
    /// out and softmax_lse from int8 scores and fp16 sums
    FastForward,
    /// lists of the latents that queries chose, and bf16 queries as fp16
    SparseSelect,
    /// out and softmax_lse over them
    SparseMla,
    /// logits by which queries choose latents
    Indexer,
}

/// The argument of a pass's kernels: a struct of src/params.rs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamBlock {
    /// `FwdParams`
    Forward,
    /// `FwdStreamKParams`
    ForwardStreamK,
    /// `BwdParams`, of every backward pass
    Backward,
    /// `BwdStreamKParams`
    BackwardStreamK,
    /// `FwdBlockParams`, of forward kernels with `Feature::Blocks`
    ForwardBlocks,
    /// `BwdBlockParams`, of backward kernels with `Feature::Blocks`
    BackwardBlocks,
    /// `BwdStoredParams`
    BackwardStored,
    /// `BwdStoredBlockParams`, of their kernels with `Feature::Blocks`
    BackwardStoredBlocks,
    /// `MergeParams`
    Merge,
    /// `DecodeParams`
    Decode,
    /// `AppendParams`
    Append,
    /// `DequantizeParams`
    Dequantize,
    /// `CastParams`
    Cast,
    /// `FastParams`
    Fast,
    /// `SparseMlaParams`
    SparseMla,
    /// `IndexerParams`
    Indexer,
}

impl ParamBlock {
    /// Every block: build.rs writes them into the kernels' header.
    pub const ALL: [ParamBlock; 16] = {
        use ParamBlock::*;
        [
            Forward,
            ForwardStreamK,
            Backward,
            BackwardStreamK,
            ForwardBlocks,
            BackwardBlocks,
            BackwardStored,
            BackwardStoredBlocks,
            Merge,
            Decode,
            Append,
            Dequantize,
            Cast,
            Fast,
            SparseMla,
            Indexer,
        ]
    };

    /// Returns the name of the struct.
    pub const fn name(self) -> &'static str {
        match self {
            ParamBlock::Forward => "FwdParams",
            ParamBlock::ForwardStreamK => "FwdStreamKParams",
            ParamBlock::Backward => "BwdParams",
            ParamBlock::BackwardStreamK => "BwdStreamKParams",
            ParamBlock::ForwardBlocks => "FwdBlockParams",
            ParamBlock::BackwardBlocks => "BwdBlockParams",
            ParamBlock::BackwardStored => "BwdStoredParams",
            ParamBlock::BackwardStoredBlocks => "BwdStoredBlockParams",
            ParamBlock::Merge => "MergeParams",
            ParamBlock::Decode => "DecodeParams",
            ParamBlock::Append => "AppendParams",
            ParamBlock::Dequantize => "DequantizeParams",
            ParamBlock::Cast => "CastParams",
            ParamBlock::Fast => "FastParams",
            ParamBlock::SparseMla => "SparseMlaParams",
            ParamBlock::Indexer => "IndexerParams",
        }
    }
}

/// Kind of the rows of a pass's blocks, which decides the first two axes of its grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// queries of a query head
    Queries,
    /// the same, rounded up as in scratch memory
    ScratchQueries,
    /// keys of a KV head
    Keys,
    /// queries of all heads of a KV head, or all heads of queries; the grid is as large as the GPU
    PackedQueries,
    /// tiles of stored scores or of gradients; a plan limits their number
    StoredTiles,
}

/// A row of the table of passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassInfo {
    /// the pass
    pub pass: Pass,
    /// argument of its kernels; those of kernels with `Feature::Blocks` contain it ([`Variant::params`])
    pub params: ParamBlock,
    /// kind of the `block_rows` of its kernels
    pub rows: RowKind,
    /// features that problems can ask of it
    pub features: FeatureSet,
}

/// Tokens of a split in batch-invariant kernels. Fewer splits than blocks leave SMs idle; many splits take time to begin and to join.
pub const SPLIT_TOKENS: u32 = 512;

/// The table of passes, in the order of the enum.
pub const PASSES: [PassInfo; 27] = {
    use {ParamBlock as P, RowKind::*};
    const fn row(pass: Pass, params: ParamBlock, rows: RowKind, features: FeatureSet) -> PassInfo {
        PassInfo { pass, params, rows, features }
    }
    let scores = FeatureSet::GENERIC.union(FeatureSet::of(&[Feature::Blocks]));
    let forward = scores.without(FeatureSet::of(&[Feature::Fp32Gradients]));
    // backward finds all that sinks did in softmax_lse
    let gradients = scores.without(FeatureSet::of(&[Feature::Sinks]));
    // these two see no scores
    let (prepare, finish) = (FeatureSet::of(&[Feature::Lengths]), FeatureSet::of(&[Feature::Lengths, Feature::Fp32Gradients]));
    [
        row(Pass::Forward, P::Forward, Queries, forward),
        row(Pass::ForwardStreamK, P::ForwardStreamK, Queries, forward),
        row(Pass::ForwardSplit, P::Forward, Queries, forward),
        row(Pass::BackwardPreprocess, P::Backward, ScratchQueries, prepare),
        row(Pass::Backward, P::Backward, Keys, gradients),
        row(Pass::BackwardStreamK, P::BackwardStreamK, Keys, gradients),
        row(Pass::BackwardDkDv, P::Backward, Keys, gradients),
        row(Pass::BackwardDq, P::Backward, Queries, gradients),
        row(Pass::BackwardPostprocess, P::Backward, Queries, finish),
        row(Pass::BackwardFused, P::Backward, Keys, gradients),
        row(Pass::BackwardScores, P::BackwardStored, StoredTiles, gradients),
        row(Pass::BackwardGradients, P::BackwardStored, StoredTiles, finish),
        row(Pass::BackwardSplitScores, P::BackwardStored, StoredTiles, gradients),
        row(Pass::BackwardSplitGradients, P::BackwardStored, StoredTiles, finish.union(FeatureSet::of(&[Feature::Blocks]))),
        row(Pass::Merge, P::Merge, Queries, FeatureSet::NONE),
        row(Pass::Decode, P::Decode, PackedQueries, FeatureSet::of(&[Feature::Tree])),
        row(Pass::Prefill, P::Forward, Queries, FeatureSet::PAGED.union(FeatureSet::of(&[Feature::Softcap, Feature::Alibi]))),
        row(Pass::PrefillStreamK, P::ForwardStreamK, Queries, FeatureSet::PAGED),
        row(Pass::DecodeMla, P::Decode, PackedQueries, FeatureSet::NONE),
        row(Pass::Append, P::Append, Keys, FeatureSet::NONE),
        row(Pass::Dequantize, P::Dequantize, Keys, FeatureSet::NONE),
        row(Pass::Cast, P::Cast, Queries, FeatureSet::NONE),
        row(Pass::FastPrepare, P::Fast, Keys, FeatureSet::of(&[Feature::Lengths])),
        row(Pass::FastForward, P::Fast, Queries, FeatureSet::of(&[Feature::Lengths, Feature::Bias])),
        row(Pass::SparseSelect, P::SparseMla, Queries, FeatureSet::NONE),
        row(Pass::SparseMla, P::SparseMla, PackedQueries, FeatureSet::NONE),
        row(Pass::Indexer, P::Indexer, PackedQueries, FeatureSet::NONE),
    ]
};

const _: () = {
    let mut i = 0;
    while i < PASSES.len() {
        assert!(PASSES[i].pass as usize == i);
        i += 1;
    }
};

impl Pass {
    /// Returns its row of the table.
    pub const fn info(self) -> PassInfo {
        PASSES[self as usize]
    }

    /// Returns what its kernels do with dq (`DqMode` in csrc/backward/dq_mode.cuh), if they are main kernels of the backward pass. It is
    /// an argument of their type, so such passes share a [`Source`].
    pub const fn dq_mode(self) -> Option<&'static str> {
        match self {
            Pass::Backward | Pass::BackwardStreamK => Some("kAtomicAdd"),
            Pass::BackwardDkDv => Some("kSeparate"),
            Pass::BackwardFused => Some("kStore"),
            _ => None,
        }
    }

    /// Returns its words in kernel names: the pass, and the word after the features.
    const fn words(self) -> (&'static str, &'static str) {
        match self {
            Pass::Forward => ("fwd", ""),
            Pass::ForwardStreamK => ("fwd_streamk", ""),
            Pass::ForwardSplit => ("fwd_split", ""),
            Pass::BackwardPreprocess => ("bwd", "preprocess"),
            Pass::Backward => ("bwd", ""),
            Pass::BackwardStreamK => ("bwd_streamk", ""),
            Pass::BackwardDkDv => ("bwd", "dkdv"),
            Pass::BackwardDq => ("bwd", "dq"),
            Pass::BackwardPostprocess => ("bwd", "postprocess"),
            Pass::BackwardFused => ("bwd", "fused"),
            Pass::BackwardScores => ("bwd", "scores"),
            Pass::BackwardGradients => ("bwd", "gradients"),
            Pass::BackwardSplitScores => ("bwd_split", "scores"),
            Pass::BackwardSplitGradients => ("bwd_split", "gradients"),
            Pass::Merge => ("merge", ""),
            Pass::Decode => ("decode", ""),
            Pass::Prefill => ("prefill", ""),
            Pass::PrefillStreamK => ("prefill_streamk", ""),
            Pass::DecodeMla => ("mla_decode", ""),
            Pass::Append => ("append", ""),
            Pass::Dequantize => ("dequantize", ""),
            Pass::Cast => ("cast", ""),
            Pass::FastPrepare => ("fast_fwd", "prepare"),
            Pass::FastForward => ("fast_fwd", ""),
            Pass::SparseSelect => ("sparse_select", ""),
            Pass::SparseMla => ("sparse_mla", ""),
            Pass::Indexer => ("indexer", ""),
        }
    }
}

// Sets of passes whose kernels run one after the other and share scratch memory: a plan takes all of a set from one family.

/// The set of `volta_fa::fwd`.
pub const FORWARD: [Pass; 1] = [Pass::Forward];
/// The set of `volta_fa::fwd` of fp32 tensors.
pub const FORWARD_SPLIT: [Pass; 1] = [Pass::ForwardSplit];
/// The set of `volta_fa::fwd` where a stream-K grid is faster.
pub const FORWARD_STREAM_K: [Pass; 1] = [Pass::ForwardStreamK];
/// The set for a KV cache where a stream-K grid is faster.
pub const PREFILL_STREAM_K: [Pass; 1] = [Pass::PrefillStreamK];
/// The set of `volta_fa::bwd` with an accumulator of dq, to which blocks add by atomics, in any order. In deterministic mode, a family with
/// `has_key_block_offset` may run it too: several launches of the main kernel then fix the order.
pub const BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::Backward, Pass::BackwardPostprocess];
/// The main kernel of the same set where a stream-K grid is faster.
pub const BACKWARD_STREAM_K: [Pass; 1] = [Pass::BackwardStreamK];
/// The set of `volta_fa::bwd` where there are few keys.
pub const FUSED_BACKWARD: [Pass; 1] = [Pass::BackwardFused];
/// The other set of a deterministic `volta_fa::bwd`: dq has a kernel of its own, and no accumulator.
pub const DETERMINISTIC_BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::BackwardDkDv, Pass::BackwardDq];
/// The set of `volta_fa::bwd` for large headdims: P and dS travel through memory. It is deterministic.
pub const STORED_BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::BackwardScores, Pass::BackwardGradients];
/// The set of `volta_fa::bwd` of fp32 tensors. It is deterministic.
pub const SPLIT_BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::BackwardSplitScores, Pass::BackwardSplitGradients];
/// The set of `volta_fa::fwd_fast` that decides: its prepare kernel has the same headdim.
pub const FAST_FORWARD: [Pass; 1] = [Pass::FastForward];
/// The sets that a device needs to run every problem of `fwd` and `bwd` to `COMMON_HEADDIM`, for `Kernels::serve`. Stream-K and fused
/// kernels only save time.
pub const PASS_SETS: [&[Pass]; 3] = [&FORWARD, &BACKWARD, &DETERMINISTIC_BACKWARD];
/// The sets for headdims above.
pub const LARGE_PASS_SETS: [&[Pass]; 2] = [&FORWARD, &STORED_BACKWARD];

/// A set of kernels written for one instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// name in `VOLTA_FA_FAMILY` and `_info()`, by which families are compared
    pub name: &'static str,
    /// architecture of the embedded machine code, for NVRTC's `--gpu-architecture=sm_NN`
    pub sm: u32,
    /// architectures that run this machine code, its own first; later ones run its PTX
    pub native: &'static [u32],
    /// shared memory of an SM of its own, bytes; a block may take all of it
    pub shared_bytes: u32,
    /// threads that an SM of its own holds
    pub threads: u32,
    /// layout of its backward kernels' scratch memory; None for families without them
    pub scratch: Option<Scratch>,
    /// the passes whose kernels run on grids whose first axis is heads too (csrc/forward/block.cuh)
    pub either_order: &'static [Pass],
    /// true if main backward kernels take a part of the blocks of keys (`BwdParams::first_key_block`), so that the deterministic mode
    /// can launch them one part after the other
    pub has_key_block_offset: bool,
    /// true if its kernels store the gradient of a bias as fp16 where no two scores share an element
    pub stores_dbias: bool,
    /// headdims above this are faster with P and dS in memory (csrc/backward/stored_scores.cuh)
    pub stored_above: u32,
}

/// Layout of the statistics of query rows that the backward kernels of a family keep between launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// rows of an entry are a multiple of this, which every step of queries divides
    pub row_rounding: u32,
    /// rows of a group, whose statistics lie together
    pub group_rows: u32,
    /// floats of a group
    pub group_floats: u32,
    /// offset of each row's -lse/scale in its group, floats
    pub neg_lse_offsets: &'static [u32],
    /// offset of each row's -delta in its group, floats
    pub neg_delta_offsets: &'static [u32],
    /// distances from these offsets to each copy of a value, floats; 0 for the first
    pub copy_distances: &'static [u32],
}

/// Code of a family that a GPU loads, the better first.
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
        match self.native.contains(&sm) {
            true => Some(Code::Cubin),
            false => (sm > self.sm).then_some(Code::Ptx),
        }
    }
}

/// Rows of a block relative to other kernels of its headdim. Smaller blocks are for grids that would leave SMs idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// the most rows, or the only size
    Large,
    /// fewer rows
    Medium,
    /// the fewest rows
    Small,
}

/// The device code of a kernel. csrc/entry.cu, after `headers`, is a kernel that calls `kernel::run(arguments)`. `kernel` and `arguments`
/// are C++; they may use `-D` definitions of the row (tools/build/nvrtc.rs) and `p`, the parameter block.
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

    /// Returns the source with other arguments, for grids that take a part of the parameter block.
    pub const fn with_arguments(self, arguments: &'static str) -> Source {
        Source { arguments, ..self }
    }
}

/// One kernel: device code compiled with the `-D` definitions of its row. A row is tile times features times cache format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// name of the `extern "C" __global__` function; [`table`] derives it from the rest
    pub name: &'static str,
    /// the instruction set it is written for
    pub family: Family,
    /// its computation
    pub pass: Pass,
    /// features that it has code for
    pub features: FeatureSet,
    /// features that the problem must use: the kernel applies them without checking parameters
    pub required_features: FeatureSet,
    /// the one cache format that it reads or writes; Unquantized for kernels without a cache too
    pub cache: CacheFormat,
    /// true if its queries, unquantized cache and output are bf16; other kernels take fp16, or either type by a parameter
    pub is_bf16: bool,
    /// true if a row's bits depend on no other row (csrc/batch_invariant.cuh); such calls run these kernels alone
    pub is_batch_invariant: bool,
    /// its device code
    pub source: Source,
    /// the largest headdim of q and k that it handles; smaller ones are padded with zeros on load. Preprocess,
    /// postprocess, merge, append, dequantize and cast kernels read the headdim from their parameters, and take any
    pub headdim: u32,
    /// the largest headdim of v and out
    pub headdim_v: u32,
    /// rows of a block; `PassInfo::rows` says which rows
    pub block_rows: u32,
    /// keys or queries, the other of the two, of one step of the main loop
    pub step: u32,
    /// its rows relative to other kernels of its headdim
    pub size: Size,
    /// threads of a block
    pub threads: u32,
    /// dynamic shared memory of a block, bytes
    pub shared_bytes: u32,
    /// blocks that an SM must be able to hold (`__launch_bounds__`)
    pub blocks_per_sm: u32,
}

impl Variant {
    /// Returns the row that others of a family and pass begin with: no feature, no tile.
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
            step: 0,
            size: Size::Large,
            threads: 256,
            shared_bytes: 0,
            blocks_per_sm: 1,
        }
    }

    /// Returns the same source and tile with those of the features that its pass can use.
    pub const fn with_features(self, features: FeatureSet) -> Variant {
        Variant { features: features.intersection(self.pass.info().features), ..self }
    }

    /// Returns the kernel for batch-invariant calls.
    pub const fn batch_invariant(self) -> Variant {
        Variant { is_batch_invariant: true, ..self }
    }

    /// Returns the kernel with block masks and these features: `source` takes lists, so the problem must have them.
    pub const fn with_blocks(self, features: FeatureSet, source: Source) -> Variant {
        let required_features = FeatureSet::of(&[Feature::Blocks]);
        Variant { required_features, source, ..self.with_features(features.union(required_features)) }
    }

    /// Returns the kernel's argument: its pass's, or with `Feature::Blocks` the one that begins with it.
    pub const fn params(&self) -> ParamBlock {
        match (self.pass.info().params, self.features.contains(FeatureSet::of(&[Feature::Blocks]))) {
            (ParamBlock::Forward, true) => ParamBlock::ForwardBlocks,
            (ParamBlock::Backward, true) => ParamBlock::BackwardBlocks,
            (ParamBlock::BackwardStored, true) => ParamBlock::BackwardStoredBlocks,
            (usual, _) => usual,
        }
    }

    /// Returns the kernel's name, from the data of its row: `family_pass[_format][_invariant][_features][_stage][_headdim][_size]`.
    fn derived_name(&self) -> String {
        let (pass, stage) = self.pass.words();
        let features = self.feature_words();
        let Variant { headdim, headdim_v, block_rows, .. } = self;
        let tile = match self.pass {
            Pass::Forward | Pass::ForwardStreamK | Pass::Prefill | Pass::PrefillStreamK | Pass::FastForward => {
                format!("{headdim}x{headdim_v}")
            }
            Pass::Decode | Pass::SparseMla => format!("{headdim}x{block_rows}"),
            Pass::DecodeMla | Pass::Indexer => block_rows.to_string(),
            // these read the headdim from their parameters
            Pass::BackwardPreprocess
            | Pass::BackwardPostprocess
            | Pass::Merge
            | Pass::Append
            | Pass::Dequantize
            | Pass::Cast
            | Pass::SparseSelect => String::new(),
            _ if headdim == headdim_v => headdim.to_string(),
            _ => format!("{headdim}x{headdim_v}"),
        };
        let size = match self.size {
            Size::Large => "",
            Size::Medium => "medium",
            Size::Small => "small",
        };
        let format = if self.is_bf16 { "bf16" } else { self.cache.info().kernel_word };
        // formats of sparse latents go with both types of queries
        let own_format = if self.is_bf16 { self.cache.info().kernel_word } else { "" };
        let invariant = if self.is_batch_invariant { "invariant" } else { "" };
        let words = [self.family.name, pass, format, own_format, invariant, &features, stage, &tile, size];
        words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join("_")
    }

    /// Returns the words for features in its name: those that the problem must use, or the set, or for block masks both.
    fn feature_words(&self) -> String {
        let mut required: Vec<_> = self.required_features.iter().map(Feature::name).collect();
        required.sort_unstable();
        // every kernel of the pass has these
        let usual = match self.pass {
            Pass::Prefill | Pass::PrefillStreamK => FeatureSet::PAGED,
            Pass::ForwardStreamK => FeatureSet::of(&[Feature::Sinks]),
            _ => FeatureSet::NONE,
        };
        let of_scores = FeatureSet::GENERIC.without(FeatureSet::VARLEN);
        match self.features.without(usual) {
            of if self.params() != self.pass.info().params && of.intersection(of_scores) != FeatureSet::NONE => "block_mask_generic".into(),
            _ if !required.is_empty() => required.join("_"),
            FeatureSet::NONE => String::new(),
            beyond if beyond.intersection(of_scores) == FeatureSet::NONE => "varlen".into(),
            // some have no dropout
            beyond if self.pass == Pass::ForwardSplit && beyond.contains(FeatureSet::of(&[Feature::Dropout])) => "generic_dropout".into(),
            _ => "generic".into(),
        }
    }
}

/// Names the rows of one family and keeps them for the life of the process. The planner prefers the earlier of two
/// rows that are equally good.
pub fn table(rows: impl IntoIterator<Item = Variant>) -> &'static [Variant] {
    let named = |row: Variant| Variant { name: row.derived_name().leak(), ..row };
    rows.into_iter().map(named).collect::<Vec<_>>().leak()
}

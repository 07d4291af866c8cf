//! Passes: what kernels compute, from which parameter block (the struct that is a kernel's argument), over which rows. The kernel tables
//! name the pass of each kernel, the planner asks for kernels by pass. Also a module of build.rs.
//!
//! Words: P are probabilities, dS gradients of scores, and delta is the row sum of out * dout. A stream-K grid divides the steps of some
//! row tiles (the rows of one block) evenly among all blocks. A split fp32 number is the sum of two fp16 numbers. Latents are the
//! compressed keys and values of multi-head latent attention (MLA).

use super::features::{named, Feature, FeatureSet};

/// The computation of a kernel. An op runs one pass, or several one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// out and softmax_lse
    Forward,
    /// the same on a stream-K grid, if the last wave of the usual grid would leave much of the GPU idle
    ForwardStreamK,
    /// out and softmax_lse of fp32 tensors, whose numbers are split
    ForwardSplit,
    /// the same on a stream-K grid, if the last wave of the usual grid would leave much of the GPU idle
    ForwardSplitStreamK,
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
    /// P and dS to memory, of fp32 tensors, whose numbers are split
    BackwardSplitScores,
    /// dq, dk and dv from them
    BackwardSplitGradients,
    /// attention over two sets of keys, from the results over each
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
    /// int8 codes of K and largest magnitudes of V, for the fast forward
    FastPrepare,
    /// out and softmax_lse from int8 scores and fp16 sums
    FastForward,
    /// lists of the latents that queries chose, and bf16 queries as fp16
    SparseSelect,
    /// out and softmax_lse over these latents
    SparseMla,
    /// logits by which queries choose latents
    Indexer,
}

named! {
    /// The argument of a pass's kernels: a struct of src/params/, by its name. build.rs writes all of them into the kernels' header.
    enum ParamBlock {
        Forward = "FwdParams",
        ForwardStreamK = "FwdStreamKParams",
        /// of every backward pass:
        Backward = "BwdParams",
        BackwardStreamK = "BwdStreamKParams",
        /// of forward kernels with `Feature::Blocks`:
        ForwardBlocks = "FwdBlockParams",
        /// of backward kernels with `Feature::Blocks`:
        BackwardBlocks = "BwdBlockParams",
        BackwardStored = "BwdStoredParams",
        /// of their kernels with `Feature::Blocks`:
        BackwardStoredBlocks = "BwdStoredBlockParams",
        Merge = "MergeParams",
        Decode = "DecodeParams",
        Append = "AppendParams",
        Dequantize = "DequantizeParams",
        Cast = "CastParams",
        Fast = "FastParams",
        SparseMla = "SparseMlaParams",
        Indexer = "IndexerParams",
    }
}

/// Kind of the rows of a pass's blocks, which decides the first two axes of its grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// queries of a query head
    Queries,
    /// the same, rounded up as in the scratch memory of a backward pass
    ScratchQueries,
    /// keys of a KV head
    Keys,
    /// queries of all heads of a KV head, or (indexer) all heads of queries; the grid is as large as the GPU
    PackedQueries,
    /// tiles of P and dS in memory, or of gradients; `plan::backward` chooses their number
    StoredTiles,
}

/// A row of the table of passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassInfo {
    pub pass: Pass,
    /// words in the names of its kernels: before and after those of the features, `volta_bwd_varlen_preprocess`
    pub words: (&'static str, &'static str),
    /// argument of its kernels; those of kernels with `Feature::Blocks` contain it (`Variant::params`)
    pub params: ParamBlock,
    /// kind of the `block_rows` of its kernels
    pub rows: RowKind,
    /// features that problems can ask of it
    pub features: FeatureSet,
}

/// Tokens of a split in batch-invariant decode kernels: blocks share a sequence's keys in parts of this length, whatever the batch. Longer
/// splits may leave SMs idle; shorter ones take time to begin and to join.
pub const SPLIT_TOKENS: u32 = 512;

/// The table of passes, in the order of the enum.
pub const PASSES: [PassInfo; 28] = {
    use {ParamBlock as P, RowKind::*};
    type Words = (&'static str, &'static str);
    const fn row(pass: Pass, words: Words, params: ParamBlock, rows: RowKind, features: FeatureSet) -> PassInfo {
        PassInfo { pass, words, params, rows, features }
    }
    let scores = FeatureSet::GENERIC.union(FeatureSet::of(&[Feature::Blocks]));
    let forward = scores.without(FeatureSet::of(&[Feature::Fp32Gradients]));
    // their output is fp32 in any case
    let split = forward.without(FeatureSet::of(&[Feature::Fp32Output]));
    // the backward pass finds all that sinks did in softmax_lse
    let gradients = scores.without(FeatureSet::of(&[Feature::Sinks, Feature::Fp32Output]));
    // preprocess and postprocess kernels see no scores
    let (prepare, finish) = (FeatureSet::of(&[Feature::Lengths]), FeatureSet::of(&[Feature::Lengths, Feature::Fp32Gradients]));
    let finish_blocks = finish.union(FeatureSet::of(&[Feature::Blocks]));
    let prefill = FeatureSet::PAGED.union(FeatureSet::of(&[Feature::Softcap, Feature::Alibi]));
    [
        row(Pass::Forward, ("fwd", ""), P::Forward, Queries, forward),
        row(Pass::ForwardStreamK, ("fwd_streamk", ""), P::ForwardStreamK, Queries, forward),
        row(Pass::ForwardSplit, ("fwd_split", ""), P::Forward, Queries, split),
        row(Pass::ForwardSplitStreamK, ("fwd_split_streamk", ""), P::ForwardStreamK, Queries, split),
        row(Pass::BackwardPreprocess, ("bwd", "preprocess"), P::Backward, ScratchQueries, prepare),
        row(Pass::Backward, ("bwd", ""), P::Backward, Keys, gradients),
        row(Pass::BackwardStreamK, ("bwd_streamk", ""), P::BackwardStreamK, Keys, gradients),
        row(Pass::BackwardDkDv, ("bwd", "dkdv"), P::Backward, Keys, gradients),
        row(Pass::BackwardDq, ("bwd", "dq"), P::Backward, Queries, gradients),
        row(Pass::BackwardPostprocess, ("bwd", "postprocess"), P::Backward, Queries, finish),
        row(Pass::BackwardFused, ("bwd", "fused"), P::Backward, Keys, gradients),
        row(Pass::BackwardScores, ("bwd", "scores"), P::BackwardStored, StoredTiles, gradients),
        row(Pass::BackwardGradients, ("bwd", "gradients"), P::BackwardStored, StoredTiles, finish),
        row(Pass::BackwardSplitScores, ("bwd_split", "scores"), P::BackwardStored, StoredTiles, gradients),
        row(Pass::BackwardSplitGradients, ("bwd_split", "gradients"), P::BackwardStored, StoredTiles, finish_blocks),
        row(Pass::Merge, ("merge", ""), P::Merge, Queries, FeatureSet::NONE),
        row(Pass::Decode, ("decode", ""), P::Decode, PackedQueries, FeatureSet::of(&[Feature::Tree])),
        row(Pass::Prefill, ("prefill", ""), P::Forward, Queries, prefill),
        row(Pass::PrefillStreamK, ("prefill_streamk", ""), P::ForwardStreamK, Queries, FeatureSet::PAGED),
        row(Pass::DecodeMla, ("mla_decode", ""), P::Decode, PackedQueries, FeatureSet::NONE),
        row(Pass::Append, ("append", ""), P::Append, Keys, FeatureSet::NONE),
        row(Pass::Dequantize, ("dequantize", ""), P::Dequantize, Keys, FeatureSet::NONE),
        row(Pass::Cast, ("cast", ""), P::Cast, Queries, FeatureSet::NONE),
        row(Pass::FastPrepare, ("fast_fwd", "prepare"), P::Fast, Keys, FeatureSet::of(&[Feature::Lengths])),
        row(Pass::FastForward, ("fast_fwd", ""), P::Fast, Queries, FeatureSet::of(&[Feature::Lengths, Feature::Bias])),
        row(Pass::SparseSelect, ("sparse_select", ""), P::SparseMla, Queries, FeatureSet::NONE),
        row(Pass::SparseMla, ("sparse_mla", ""), P::SparseMla, PackedQueries, FeatureSet::NONE),
        row(Pass::Indexer, ("indexer", ""), P::Indexer, PackedQueries, FeatureSet::NONE),
    ]
};

// `info` finds a pass's row by its number
const _: () = {
    let mut i = 0;
    while i < PASSES.len() {
        assert!(PASSES[i].pass as usize == i);
        i += 1;
    }
};

impl Pass {
    pub const fn info(self) -> PassInfo {
        PASSES[self as usize]
    }

    /// Returns what its kernels do with dq (`DqMode` in csrc/backward/dq_mode.cuh), if they are main kernels of the backward pass. build.rs
    /// defines it for the kernel's C++ type as `DQ_MODE`, so these passes share their sources.
    pub const fn dq_mode(self) -> Option<&'static str> {
        match self {
            Pass::Backward | Pass::BackwardStreamK => Some("kAtomicAdd"),
            Pass::BackwardDkDv => Some("kSeparate"),
            Pass::BackwardFused => Some("kStore"),
            _ => None,
        }
    }
}

// Sets of passes whose kernels run one after the other and share scratch memory: a plan takes all of a set from one family.

/// The set of `volta_fa::bwd` with an accumulator of dq, to which blocks add by atomics, in any order. In deterministic mode, a family with
/// `has_key_block_offset` may run it too: several launches of the main kernel then fix the order.
pub const BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::Backward, Pass::BackwardPostprocess];
/// The other set of a deterministic `volta_fa::bwd`: dq has a kernel of its own, and no accumulator.
pub const DETERMINISTIC_BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::BackwardDkDv, Pass::BackwardDq];
/// The set of `volta_fa::bwd` for large headdims: P and dS travel through memory. It is deterministic.
pub const STORED_BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::BackwardScores, Pass::BackwardGradients];
/// The set of `volta_fa::bwd` of fp32 tensors. It is deterministic.
pub const SPLIT_BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::BackwardSplitScores, Pass::BackwardSplitGradients];
/// The sets that run every fp16 problem of `fwd` and `bwd` up to headdim `COMMON_HEADDIM` (256), for `Kernels::serve`. For each set, some
/// family must have all passes. Stream-K and fused kernels only save time.
pub const PASS_SETS: [&[Pass]; 3] = [&[Pass::Forward], &BACKWARD, &DETERMINISTIC_BACKWARD];
/// The same for headdims above.
pub const LARGE_PASS_SETS: [&[Pass]; 2] = [&[Pass::Forward], &STORED_BACKWARD];

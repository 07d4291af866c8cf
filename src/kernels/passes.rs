//! Passes: what kernels compute, from which parameter block, over which rows. Also a module of build.rs.

use super::features::{Feature, FeatureSet};

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

/// The argument of a pass's kernels: a struct of src/params/.
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
    /// argument of its kernels; those of kernels with `Feature::Blocks` contain it (`Variant::params`)
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
    /// an argument of their type, so such passes share a `Source`.
    pub const fn dq_mode(self) -> Option<&'static str> {
        match self {
            Pass::Backward | Pass::BackwardStreamK => Some("kAtomicAdd"),
            Pass::BackwardDkDv => Some("kSeparate"),
            Pass::BackwardFused => Some("kStore"),
            _ => None,
        }
    }

    /// Returns its words in kernel names: the pass, and the word after the features.
    pub const fn words(self) -> (&'static str, &'static str) {
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

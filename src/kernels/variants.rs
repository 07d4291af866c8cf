//! Every compiled kernel variant, in one table: build.rs compiles it, the registry embeds it, the plan
//! chooses from it. A new family is a new `Family` and more rows; nothing else changes.
//!
//! This file is also a module of build.rs, so it depends on nothing but `core`.

/// A set of kernels written for one instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    pub name: &'static str,
    /// architecture of the embedded machine code, for NVRTC's `--gpu-architecture=sm_NN`
    pub sm: u32,
}

/// Volta: `mma.sync.m8n8k4`, fp16 in and out, fp32 accumulation.
pub const VOLTA: Family = Family { name: "volta", sm: 70 };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Forward,
    /// delta and the other row statistics, zeroing of dq's accumulator
    BackwardPrepare,
    /// dk, dv, and dq added to its accumulator by atomics
    Backward,
    /// dk and dv alone, for the deterministic mode
    BackwardKeys,
    /// dq alone, for the deterministic mode
    BackwardQueries,
    /// dq's accumulator to fp16 or bf16
    BackwardFinish,
}

/// What a kernel is prepared for; each does what those before it do, at a price.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Flavor {
    /// all sequences have one length, and softmax(scale * QK^T) with a window is all there is
    Plain,
    /// sequence lengths come from memory, sinks join the rows of the forward pass, and gradients may leave as bf16
    Ragged,
    /// and scores pass through softcap, ALiBi, bias and dropout, where the parameters ask for them
    General,
}

/// One kernel: a source file compiled with its `-D` definitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// name of the `extern "C" __global__` function
    pub name: &'static str,
    pub family: Family,
    pub pass: Pass,
    pub flavor: Flavor,
    /// source below `csrc/`
    pub source: &'static str,
    /// the largest headdim of q and k that it handles; smaller ones are padded with zeros on load
    pub headdim: u32,
    /// the same for v and out
    pub headdim_v: u32,
    /// rows of a block: keys (backward, dk and dv) or queries (all others)
    pub block_rows: u32,
    /// keys or queries, the other of the two, of one step of the main loop
    pub step: u32,
    pub threads: u32,
    /// dynamic shared memory, bytes
    pub shared_bytes: u32,
    /// blocks that an SM must be able to hold (`__launch_bounds__`)
    pub blocks_per_sm: u32,
}

impl Variant {
    /// The same source and tiles, prepared for more.
    pub const fn flavored(self, flavor: Flavor, name: &'static str) -> Variant {
        Variant { name, flavor, ..self }
    }
}

//! The words of the kernel tables: what a kernel is for (its pass), what it is prepared for (needs), what it runs on
//! (its family), and its tiles.
//!
//! This file and the tables are also modules of build.rs, so they depend on nothing but `core`.

/// Something that a problem may ask of a kernel beside softmax(scale * QK^T)V inside a window, with one length for all sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// sequence lengths come from memory: `cu_seqlens_*`, `seqused_k`
    Lengths,
    /// a logit more in the sum of each row
    Sinks,
    /// gradients leave as bf16
    Bf16Gradients,
    Softcap,
    Alibi,
    /// an additive bias or a mask
    Bias,
    Dropout,
}

impl Need {
    pub const ALL: [Need; 7] = [Need::Lengths, Need::Sinks, Need::Bf16Gradients, Need::Softcap, Need::Alibi, Need::Bias, Need::Dropout];

    /// As `_info()` and `_plan()` have it.
    pub const fn name(self) -> &'static str {
        match self {
            Need::Lengths => "lengths",
            Need::Sinks => "sinks",
            Need::Bf16Gradients => "bf16_gradients",
            Need::Softcap => "softcap",
            Need::Alibi => "alibi",
            Need::Bias => "bias",
            Need::Dropout => "dropout",
        }
    }
}

/// A set of needs. A kernel with more of them than a problem asks for runs it too, at a price (`plan::cost`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs(u32);

impl Needs {
    pub const NONE: Needs = Needs(0);
    /// What touches a block's bounds and its epilogue; `kRagged` in csrc/sequence.cuh.
    pub const RAGGED: Needs = Needs::of(&[Need::Lengths, Need::Sinks, Need::Bf16Gradients]);
    /// That, and what happens to scores and probabilities; `kGeneral` in csrc/sequence.cuh.
    pub const GENERAL: Needs = Needs::RAGGED.union(Needs::of(&[Need::Softcap, Need::Alibi, Need::Bias, Need::Dropout]));

    pub const fn of(list: &[Need]) -> Needs {
        let (mut bits, mut i) = (0, 0);
        while i < list.len() {
            bits |= 1 << list[i] as u32;
            i += 1;
        }
        Needs(bits)
    }

    /// Those that a condition holds for.
    pub fn all_where(holds: impl Fn(Need) -> bool) -> Needs {
        Need::ALL.into_iter().filter(|&n| holds(n)).fold(Needs::NONE, |set, n| set.union(Needs::of(&[n])))
    }

    pub const fn union(self, other: Needs) -> Needs {
        Needs(self.0 | other.0)
    }

    pub const fn intersection(self, other: Needs) -> Needs {
        Needs(self.0 & other.0)
    }

    pub const fn without(self, other: Needs) -> Needs {
        Needs(self.0 & !other.0)
    }

    pub const fn covers(self, other: Needs) -> bool {
        other.without(self).0 == 0
    }

    pub const fn count(self) -> u32 {
        self.0.count_ones()
    }

    pub fn iter(self) -> impl Iterator<Item = Need> {
        Need::ALL.into_iter().filter(move |&n| self.covers(Needs::of(&[n])))
    }

    /// As the device code has it: `-DNEEDS=<bits>`, and `kNeed...` in the generated header.
    pub const fn bits(self) -> u32 {
        self.0
    }
}

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
    /// attention over two sets of keys from that over each
    Merge,
}

/// What a pass' kernels take as their one argument: a struct of src/params.rs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamBlock {
    Forward,
    Backward,
    Merge,
}

impl ParamBlock {
    pub const ALL: [ParamBlock; 3] = [ParamBlock::Forward, ParamBlock::Backward, ParamBlock::Merge];

    /// The struct's.
    pub const fn name(self) -> &'static str {
        match self {
            ParamBlock::Forward => "FwdParams",
            ParamBlock::Backward => "BwdParams",
            ParamBlock::Merge => "MergeParams",
        }
    }
}

/// What the rows of a pass' blocks are, and so its grid's first two axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// queries of a query head
    Queries,
    /// the same, and those that round them up in the scratch memory
    ScratchQueries,
    /// keys of a key head
    Keys,
}

/// A row of the table of passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassFacts {
    pub pass: Pass,
    pub params: ParamBlock,
    pub rows: Rows,
    /// what a problem may need of it at all
    pub needs: Needs,
}

/// The table of passes, in the order of the enum.
pub const PASSES: [PassFacts; 7] = {
    use {ParamBlock as P, Rows::*};
    const fn row(pass: Pass, params: ParamBlock, rows: Rows, needs: Needs) -> PassFacts {
        PassFacts { pass, params, rows, needs }
    }
    // backward finds all that sinks did in softmax_lse
    let gradients = Needs::GENERAL.without(Needs::of(&[Need::Sinks]));
    // these two see no scores
    let (prepare, finish) = (Needs::of(&[Need::Lengths]), Needs::of(&[Need::Lengths, Need::Bf16Gradients]));
    [
        row(Pass::Forward, P::Forward, Queries, Needs::GENERAL.without(Needs::of(&[Need::Bf16Gradients]))),
        row(Pass::BackwardPrepare, P::Backward, ScratchQueries, prepare),
        row(Pass::Backward, P::Backward, Keys, gradients),
        row(Pass::BackwardKeys, P::Backward, Keys, gradients),
        row(Pass::BackwardQueries, P::Backward, Queries, gradients),
        row(Pass::BackwardFinish, P::Backward, Queries, finish),
        row(Pass::Merge, P::Merge, Queries, Needs::NONE),
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
    pub const fn facts(self) -> PassFacts {
        PASSES[self as usize]
    }
}

/// Passes whose kernels run one after the other and share scratch memory: a plan takes them as a set, from one family.
pub const FORWARD: [Pass; 1] = [Pass::Forward];
pub const BACKWARD: [Pass; 3] = [Pass::BackwardPrepare, Pass::Backward, Pass::BackwardFinish];
pub const DETERMINISTIC_BACKWARD: [Pass; 3] = [Pass::BackwardPrepare, Pass::BackwardKeys, Pass::BackwardQueries];
pub const PASS_SETS: [&[Pass]; 3] = [&FORWARD, &BACKWARD, &DETERMINISTIC_BACKWARD];

/// A set of kernels written for one instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    pub name: &'static str,
    /// architecture of the embedded machine code, for NVRTC's `--gpu-architecture=sm_NN`
    pub sm: u32,
    /// architectures that run this machine code, its own first; later ones run its PTX
    pub native: &'static [u32],
    /// shared memory of an SM of its own, all of which a block may take, bytes
    pub shared_bytes: u32,
    /// threads that such an SM holds
    pub threads: u32,
    /// how its backward kernels lay out their scratch memory; None: it has none of them
    pub scratch: Option<Scratch>,
}

/// What the backward kernels of a family keep of query rows between their launches, as far as others need to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// rows of an entry are a multiple of this, which every step of queries divides
    pub row_rounding: u32,
    /// so many rows have their statistics together ...
    pub group_rows: u32,
    /// ... in so many floats,
    pub group_floats: u32,
    /// of which these are the rows' -lse/scale, one each,
    pub minus_lse_at: &'static [u32],
    /// and these the rows' -delta
    pub minus_delta_at: &'static [u32],
}

/// What a GPU gets of a family: the better first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Code {
    /// the embedded machine code
    Cubin,
    /// compiled by the driver
    Ptx,
}

impl Family {
    /// What GPUs of this architecture get; None: they cannot run it.
    pub fn code_for(&self, sm: u32) -> Option<Code> {
        match self.native.contains(&sm) {
            true => Some(Code::Cubin),
            false => (sm > self.sm).then_some(Code::Ptx),
        }
    }
}

/// One kernel: a source file compiled with its `-D` definitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// name of the `extern "C" __global__` function
    pub name: &'static str,
    pub family: Family,
    pub pass: Pass,
    /// what it is prepared for
    pub needs: Needs,
    /// source below `csrc/`
    pub source: &'static str,
    /// the largest headdim of q and k that it handles; smaller ones are padded with zeros on load
    pub headdim: u32,
    /// the same for v and out
    pub headdim_v: u32,
    /// rows of a block: what they are, the pass says
    pub block_rows: u32,
    /// keys or queries, the other of the two, of one step of the main loop
    pub step: u32,
    pub threads: u32,
    /// dynamic shared memory, bytes
    pub shared_bytes: u32,
    /// blocks that an SM must be able to hold (`__launch_bounds__`)
    pub blocks_per_sm: u32,
    /// per thread, of the family's machine code: a record, which a test compares with what was compiled
    pub registers: u32,
}

impl Variant {
    /// The same source and tiles, prepared for those of the needs that its pass can have.
    pub const fn covering(self, needs: Needs, name: &'static str, registers: u32) -> Variant {
        Variant { name, needs: needs.intersection(self.pass.facts().needs), registers, ..self }
    }
}

//! Features of problems, and the sets of them that kernels have code for. A feature is an option of a call that needs code of its own in a
//! kernel. A row of the kernel tables names its kernel's set; the planner compares it with the problem's (src/plan/choose.rs), and device
//! code gets its bits (csrc/features.cuh). Also a module of build.rs.

/// Defines an enum of rows `Value = "name"`: `ALL` has the values in this order, and `name()` returns the text.
macro_rules! named {
    ($(#[$of_enum:meta])* enum $Enum:ident { $($(#[$of_value:meta])* $Value:ident = $name:literal,)* }) => {
        $(#[$of_enum])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $Enum { $($(#[$of_value])* #[doc = concat!("`", $name, "`")] $Value,)* }

        impl $Enum {
            /// Every value, in the order of the enum.
            pub const ALL: [$Enum; [$($Enum::$Value),*].len()] = [$($Enum::$Value),*];

            pub const fn name(self) -> &'static str {
                match self { $($Enum::$Value => $name,)* }
            }
        }
    };
}
pub(crate) use named;

named! {
    /// A feature of a problem beyond softmax(scale * QK^T)V inside a window with one length for all sequences. `_info()`, `_plan()` and
    /// tuning files have its name. The order is that of the bits in [`FeatureSet`].
    enum Feature {
        /// sequence lengths come from memory: `cu_seqlens_*`, `seqused_k`
        Lengths = "varlen",
        /// one more logit in the sum of each row
        Sinks = "sinks",
        /// gradients leave as fp32
        Fp32Gradients = "fp32_gradients",
        /// scores x become softcap * tanh(x / softcap)
        Softcap = "softcap",
        /// slope * distance is subtracted from scores
        Alibi = "alibi",
        /// an additive bias or a mask: fp16, or beside `Fp32Bias` fp32
        Bias = "bias",
        /// probabilities are dropped by random numbers
        Dropout = "dropout",
        /// keys and values in a KV cache: in pages, or in entries with indices from memory
        Pages = "paged_kv",
        /// an additive bias in fp32: never without `Bias`
        Fp32Bias = "fp32_bias",
        /// a block mask: lists of the blocks of scores that exist. Its kernels run no other problems
        Blocks = "block_mask",
        /// speculative decoding: a bit for each query and draft token says whether the query sees the token
        Tree = "tree",
        /// out leaves as fp32
        Fp32Output = "fp32_output",
    }
}

impl Feature {
    /// Features that change scores or probabilities, in the main loop. A kernel has code for none of them, for one or two that its problems
    /// must use, or for several that parameters turn on (generic kernels).
    pub const OF_SCORES: [Feature; 4] = [Feature::Softcap, Feature::Alibi, Feature::Bias, Feature::Dropout];

    pub fn named(name: &str) -> Option<Feature> {
        Feature::ALL.into_iter().find(|f| f.name() == name)
    }
}

/// A set of features. A kernel also runs problems that use fewer, at a cost (`plan::choose`), unless it requires the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureSet(u32);

impl FeatureSet {
    /// Of plain kernels: one length for all sequences, no option.
    pub const NONE: FeatureSet = FeatureSet(0);
    /// Features of varlen kernels: `Lengths` (named "varlen"), and two more that cost the main loop nothing either. They concern only the
    /// bounds and the epilogue of a block.
    pub const VARLEN: FeatureSet = FeatureSet::of(&[Feature::Lengths, Feature::Sinks, Feature::Fp32Gradients]);
    /// `VARLEN`, of kernels that can write out as fp32.
    pub const FP32_OUTPUT: FeatureSet = FeatureSet::VARLEN.union(FeatureSet::of(&[Feature::Fp32Output]));
    /// `FP32_OUTPUT`, and all features of scores and probabilities: parameters say at run time which the problem uses.
    pub const GENERIC: FeatureSet =
        FeatureSet::FP32_OUTPUT.union(FeatureSet::of(&Feature::OF_SCORES)).union(FeatureSet::of(&[Feature::Fp32Bias]));
    /// Features of generic kernels with block masks, which no call combines with a bias.
    pub const GENERIC_BLOCKS: FeatureSet =
        FeatureSet::GENERIC.without(FeatureSet::of(&[Feature::Bias, Feature::Fp32Bias])).union(FeatureSet::of(&[Feature::Blocks]));
    /// Features of every prefill kernel (a forward kernel over a KV cache).
    pub const PAGED: FeatureSet = FeatureSet::of(&[Feature::Pages, Feature::Lengths, Feature::Sinks]);

    pub const fn of(list: &[Feature]) -> FeatureSet {
        let (mut bits, mut i) = (0, 0);
        while i < list.len() {
            bits |= 1 << list[i] as u32;
            i += 1;
        }
        FeatureSet(bits)
    }

    /// Returns the set of the features for which `holds` returns true.
    pub fn all_where(holds: impl Fn(Feature) -> bool) -> FeatureSet {
        Feature::ALL.into_iter().filter(|&n| holds(n)).fold(FeatureSet::NONE, |set, n| set.union(FeatureSet::of(&[n])))
    }

    pub const fn union(self, other: FeatureSet) -> FeatureSet {
        FeatureSet(self.0 | other.0)
    }

    pub const fn intersection(self, other: FeatureSet) -> FeatureSet {
        FeatureSet(self.0 & other.0)
    }

    /// Returns the features of this set that `other` lacks.
    pub const fn without(self, other: FeatureSet) -> FeatureSet {
        FeatureSet(self.0 & !other.0)
    }

    pub const fn has(self, feature: Feature) -> bool {
        self.contains(FeatureSet::of(&[feature]))
    }

    /// Returns true if all features of `other` are in this set.
    pub const fn contains(self, other: FeatureSet) -> bool {
        other.without(self).0 == 0
    }

    pub const fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Returns the features in the order of [`Feature::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.into_iter().filter(move |&n| self.has(n))
    }

    /// Returns the bits that device code sees: `-DFEATURES=<bits>`, and the constants `kFeature...` of one bit that build.rs generates.
    pub const fn bits(self) -> u32 {
        self.0
    }
}

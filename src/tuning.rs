//! Tunings: kernels that are faster on one GPU than the planner's choice, and kernels that failed there. `python -m volta_fa check --tune`
//! measures both and writes a file, which docs/reference/tuning-file.md describes.
//!
//! This module parses a file's text into a checked [`Tuning`], which the planner asks about shapes (plan/choose.rs). `launch::tuning` reads
//! the file. A tuning is a list of choices, each a [`Class`] of shapes of one pass and the kernel to take for it; and failed kernels. A
//! pass is what a kernel computes, a variant one kernel, and a feature an option that kernels need code for. Tests: tests/plan/tunings.rs.

use crate::error::{Error, Result};
use crate::kernels::{CacheFormat, Feature, FeatureSet, Kernels, Pass, Variant, PASSES};
use crate::problem::{Attention, MergedStates, Window};
use serde::Deserialize;

/// Version of the file format, which this library reads and `check` writes.
pub const FORMAT: u32 = 1;
/// Maximum number of choices in a tuning. `check` measures 272 classes of shapes on a V100 and can choose a kernel for each. A call
/// compares its shape with each choice in a few nanoseconds, so in at most two microseconds in total.
pub const MAX_CHOICES: usize = 512;

/// A GPU with its software. A tuning applies to the GPU and software of its measurements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Name of the GPU, from the driver.
    pub device: String,
    pub driver: String,
    /// Version of this library, because each version has its own kernels.
    pub volta_fa: String,
}

impl Card {
    pub fn file_name(&self) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() || ".+".contains(c) { c } else { '_' };
        [&self.device, &self.driver, &self.volta_fa].map(|text| text.chars().map(plain).collect::<String>()).join("-") + ".json"
    }
}

/// Properties of a problem that decide on its kernels. A [`Class`] may bound those of [`BOUNDED`], and name `is_causal` and features. The
/// planner's test whether a kernel is applicable also uses the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Padded headdim of q and k, a multiple of 8; 0: the pass takes any.
    pub headdim: i64,
    /// The same of v.
    pub headdim_v: i64,
    /// Queries of the longest entry.
    pub seqlen_q: i64,
    /// Keys of the longest entry.
    pub seqlen_k: i64,
    /// Query heads of a KV head, which a block's heads must divide.
    pub group: i64,
    /// Queries times heads of all batch entries, because they decide the number of blocks.
    pub rows: i64,
    /// True: the mask is causal; false: there is none; None: another window.
    pub is_causal: Option<bool>,
    /// Format of the KV cache; Unquantized without a cache.
    pub cache: CacheFormat,
    /// True: the call needs kernels that are compiled for bf16; others take fp16, or either by a parameter.
    pub is_bf16: bool,
    /// True: the call needs kernels whose rows' bits depend on no other row.
    pub is_batch_invariant: bool,
    /// Most positions that a row which sees keys may lie before the first key. Kernels that require ALiBi lose precision there.
    pub rows_before_keys: i64,
}

impl Shape {
    /// Of a pass that takes any headdim, and has no rows, mask or cache.
    pub const ANY: Shape = Shape {
        headdim: 0,
        headdim_v: 0,
        seqlen_q: 0,
        seqlen_k: 0,
        group: 1,
        rows: 0,
        is_causal: None,
        cache: CacheFormat::Unquantized,
        is_bf16: false,
        is_batch_invariant: false,
        rows_before_keys: 0,
    };

    /// Returns the shape of an attention problem. Decode plans set its cache and `is_bf16`.
    pub fn of(a: &Attention) -> Shape {
        Shape {
            headdim: a.headdim,
            headdim_v: a.headdim_v,
            seqlen_q: a.seqlen_q,
            seqlen_k: a.seqlen_k,
            group: a.group(),
            rows: a.total_q().unwrap_or(a.batch.saturating_mul(a.seqlen_q)).saturating_mul(a.nheads),
            is_causal: match a.window {
                Window::CAUSAL => Some(true),
                Window::FULL => Some(false),
                _ => None,
            },
            is_batch_invariant: a.features.batch_invariant,
            rows_before_keys: {
                // the host does not know the used keys, so it assumes none
                let seqlen_k = if a.features.seqused_k || a.cache().is_some() { 0 } else { a.seqlen_k };
                (a.seqlen_q - seqlen_k).clamp(0, a.window.right.unwrap_or(i64::MAX))
            },
            ..Shape::ANY
        }
    }

    /// Returns the shape of states to merge: their kernel takes any headdim.
    pub fn of_states(m: &MergedStates) -> Shape {
        Shape { seqlen_q: m.seqlen_q, rows: m.batch.saturating_mul(m.seqlen_q).saturating_mul(m.nheads), ..Shape::ANY }
    }
}

/// The properties of a shape that a class may bound, in the order of [`Class::bounds`].
const BOUNDED: [&str; 5] = ["headdim", "headdim_v", "seqlen_q", "seqlen_k", "rows"];

/// A class of shapes. None matches any value; bounds are [minimum, maximum], inclusive, in the order of [`BOUNDED`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Class {
    bounds: [Option<[i64; 2]>; 5],
    is_causal: Option<bool>,
    features: Option<FeatureSet>,
}

impl Class {
    /// Returns true if the class has the shape, in a call with these features.
    fn has(&self, s: &Shape, features: FeatureSet) -> bool {
        let numbers = [s.headdim, s.headdim_v, s.seqlen_q, s.seqlen_k, s.rows];
        self.bounds.iter().zip(numbers).all(|(bound, n)| bound.is_none_or(|[low, high]| low <= n && n <= high))
            && (self.is_causal.is_none() || self.is_causal == s.is_causal)
            && self.features.is_none_or(|own| own == features)
    }
}

/// What a choice selects for its class of shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Take {
    Kernel(&'static Variant),
    /// The kernels of the deterministic mode, for calls that do not require it.
    WithoutAtomics,
}

/// What to take for a class of shapes of one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Choice {
    pass: Pass,
    class: Class,
    take: Take,
}

/// Measurements on a GPU. The planner takes the first applicable choice for a shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Fields of the [`Card`], by name; None: the file leaves it out, which [`Tuning::check_made_on`] rejects.
    made_on: [(&'static str, Option<String>); 3],
    /// Names of kernels that failed on the GPU, sorted.
    failed: Vec<&'static str>,
    choices: Vec<Choice>,
}

/// Unchecked contents of a tuning file: FORMAT, the fields of a [`Card`], names of kernels that failed, choices. `note` is free text.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    format: u32,
    volta_fa: Option<String>,
    device: Option<String>,
    driver: Option<String>,
    #[serde(default)]
    failed: Vec<String>,
    #[serde(default)]
    choices: Vec<ChoiceText>,
    #[serde(rename = "note")]
    _note: Option<serde::de::IgnoredAny>,
}

/// Unchecked contents of a choice: a pass by name, the bounds and properties of a [`Class`], and either `variant`, a kernel's name, or
/// `deterministic`: true.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChoiceText {
    pass: String,
    headdim: Option<[i64; 2]>,
    headdim_v: Option<[i64; 2]>,
    seqlen_q: Option<[i64; 2]>,
    seqlen_k: Option<[i64; 2]>,
    rows: Option<[i64; 2]>,
    is_causal: Option<bool>,
    features: Option<Vec<String>>,
    variant: Option<String>,
    deterministic: Option<bool>,
    #[serde(rename = "note")]
    _note: Option<serde::de::IgnoredAny>,
}

/// Returns the kernel of this name. `at`: the place in the file, for the error.
fn variant(kernels: Kernels, name: &str, at: &str) -> Result<&'static Variant> {
    kernels
        .variants()
        .find(|v| v.name == name)
        .ok_or_else(|| Error::value(at, format!("`{name}`"), "a kernel of this build (`python -m volta_fa info` lists them)"))
}

impl ChoiceText {
    /// Checks a choice. `at`: its place in the file, `tuning: choices[3]`.
    fn checked(self, kernels: Kernels, at: &str) -> Result<Choice> {
        let field = |name: &str| format!("{at}.{name}");
        let pass = PASSES.iter().map(|p| p.pass).find(|p| format!("{p:?}") == self.pass).ok_or_else(|| {
            let known: Vec<_> = PASSES.iter().map(|p| format!("{:?}", p.pass)).collect();
            Error::value(&field("pass"), format!("`{}`", self.pass), known.join(", "))
        })?;
        let bounds = [self.headdim, self.headdim_v, self.seqlen_q, self.seqlen_k, self.rows];
        for (name, bound) in BOUNDED.iter().zip(bounds) {
            if let Some([low, high]) = bound.filter(|[low, high]| *low < 0 || low > high) {
                return Err(Error::value(&field(name), format!("[{low}, {high}]"), "the minimum and the maximum, 0 or larger"));
            }
        }
        let known = |name: &String| {
            let of_pass = pass.info().features;
            of_pass.iter().find(|&feature| Feature::named(name) == Some(feature)).ok_or_else(|| {
                let names: Vec<_> = of_pass.iter().map(Feature::name).collect();
                Error::value(&field("features"), format!("`{name}`"), format!("features of {pass:?}: {}", names.join(", ")))
            })
        };
        let features = self.features.map(|names| names.iter().map(known).collect::<Result<Vec<_>>>()).transpose()?;
        let class = Class { bounds, is_causal: self.is_causal, features: features.map(|list| FeatureSet::of(&list)) };
        let take = match (self.variant, self.deterministic) {
            (Some(name), None) => Take::Kernel(variant(kernels, &name, &field("variant"))?),
            (None, Some(true)) if pass == Pass::Backward => Take::WithoutAtomics,
            (None, Some(given)) => {
                let expected = "true, for pass Backward: a choice may take atomics away, not add them";
                return Err(Error::value(&field("deterministic"), format!("{given} for pass {pass:?}"), expected));
            }
            (given, _) => {
                let found = if given.is_some() { "both" } else { "neither" };
                return Err(Error::value(at, found, "either `variant` or `deterministic`"));
            }
        };
        if let Take::Kernel(v) = take {
            let [headdim, headdim_v, ..] = bounds.map(|bound| bound.map_or(0, |[low, _]| low));
            let is_applicable = v.pass == pass
                && v.headdim as i64 >= headdim
                && v.headdim_v as i64 >= headdim_v
                && v.features.contains(class.features.unwrap_or(FeatureSet::NONE));
            if !is_applicable {
                let expected = format!("a kernel of pass {pass:?} with the headdims and features of the class");
                return Err(Error::value(&field("variant"), format!("`{}`", v.name), expected));
            }
        }
        Ok(Choice { pass, class, take })
    }
}

impl Tuning {
    /// Parses and checks a tuning for these kernels. An error names its place in the text.
    pub fn parse(text: &str, kernels: Kernels) -> Result<Tuning> {
        let text: Text =
            serde_json::from_str(text).map_err(|e| Error::value("tuning", e, "JSON as docs/reference/tuning-file.md describes it"))?;
        if text.format != FORMAT {
            return Err(Error::value("tuning: format", text.format, FORMAT));
        }
        if text.choices.len() > MAX_CHOICES {
            return Err(Error::value("tuning: choices", format!("{} of them", text.choices.len()), format!("{MAX_CHOICES} at most")));
        }
        let name = |name: &String| variant(kernels, name, "tuning: failed").map(|v| v.name);
        let mut failed = text.failed.iter().map(name).collect::<Result<Vec<_>>>()?;
        failed.sort_unstable();
        failed.dedup();
        let choices = text.choices.into_iter().enumerate().map(|(i, c)| c.checked(kernels, &format!("tuning: choices[{i}]")));
        Ok(Tuning {
            made_on: [("device", text.device), ("driver", text.driver), ("volta_fa", text.volta_fa)],
            failed,
            choices: choices.collect::<Result<Vec<_>>>()?,
        })
    }

    /// Rejects a tuning of another GPU or software, or without these fields.
    pub fn check_made_on(&self, card: &Card) -> Result<()> {
        for ((name, found), expected) in self.made_on.iter().zip([&card.device, &card.driver, &card.volta_fa]) {
            if found.as_ref() != Some(expected) {
                let found = found.as_ref().map_or("nothing".into(), |text| format!("`{text}`"));
                return Err(Error::value(&format!("tuning: {name}"), found, format!("`{expected}`")));
            }
        }
        Ok(())
    }

    /// Removes the choices of a file that a device with this architecture and shared memory (bytes per block) can never take. Returns the
    /// reasons. Removes those of batch-invariant kernels too: they are for a class of shapes, and a row must have the same bits in any.
    pub fn usable_on(mut self, kernels: Kernels, sm: u32, shared_bytes_per_block: u32) -> (Tuning, Vec<String>) {
        let families = kernels.families_for(sm);
        let mut rejected = Vec::new();
        self.choices.retain(|c| {
            let Take::Kernel(v) = c.take else { return true };
            let why = if !families.iter().any(|(f, _)| f.name == v.family.name) {
                format!("this GPU does not run the family {}", v.family.name)
            } else if v.shared_bytes > shared_bytes_per_block {
                format!("it takes {} bytes of shared memory, of {shared_bytes_per_block}", v.shared_bytes)
            } else if v.is_batch_invariant {
                "a batch-invariant call takes no choice, so that its bits depend on no other row".into()
            } else {
                return true;
            };
            rejected.push(format!("{}: {why}", v.name));
            false
        });
        (self, rejected)
    }

    /// Returns true if the kernel failed `check` on the GPU: plans avoid it.
    pub fn has_failed(&self, v: &Variant) -> bool {
        self.failed.contains(&v.name)
    }

    /// Returns the kernels that failed, in the order of their names.
    pub fn failed(&self) -> &[&'static str] {
        &self.failed
    }

    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// Returns what the choices select whose class has the shape and exactly the features that the pass can have of these.
    fn of<'a>(&'a self, pass: Pass, shape: &'a Shape, features: FeatureSet) -> impl Iterator<Item = Take> + 'a {
        let features = features.intersection(pass.info().features);
        self.choices.iter().filter(move |c| c.pass == pass && c.class.has(shape, features)).map(|c| c.take)
    }

    /// Returns the kernels chosen for a shape in one pass, the preferred first. The planner checks that they are applicable.
    pub fn kernels<'a>(&'a self, pass: Pass, shape: &'a Shape, features: FeatureSet) -> impl Iterator<Item = &'static Variant> + 'a {
        self.of(pass, shape, features).filter_map(|take| match take {
            Take::Kernel(v) => Some(v),
            Take::WithoutAtomics => None,
        })
    }

    /// Returns true if a backward pass without `deterministic` must not use atomics.
    pub fn without_atomics(&self, shape: &Shape, features: FeatureSet) -> bool {
        self.of(Pass::Backward, shape, features).any(|take| take == Take::WithoutAtomics)
    }
}

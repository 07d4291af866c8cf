//! The kernel registry: every variant with its embedded machine code.

mod backward_table;
mod forward_table;
mod variants;

pub use variants::{Family, Flavor, Pass, Variant, VOLTA};

use crate::error::{Error, Result};

/// The machine code of one variant, as build.rs compiled and compressed it.
pub struct Image {
    pub name: &'static str,
    cubin: &'static [u8],
    ptx: &'static [u8],
    /// per thread, in the family's cubin
    pub registers: u32,
    /// spill stores and loads in the family's cubin, bytes
    pub spill_bytes: u32,
}

include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// Every compiled variant, forward first.
pub fn variants() -> impl Iterator<Item = &'static Variant> {
    forward_table::FORWARD.iter().chain(backward_table::BACKWARD)
}

/// The variants of one family and pass.
pub fn of(family: Family, pass: Pass) -> impl Iterator<Item = &'static Variant> {
    variants().filter(move |v| v.family == family && v.pass == pass)
}

/// The family that runs on a device of this compute capability, if any does.
pub fn family_for(capability: (i32, i32)) -> Option<Family> {
    (capability >= (7, 0)).then_some(VOLTA)
}

/// Is a family made for devices of this kind? sm_72 runs sm_70's machine code as it is and just as well; sm_75 has other
/// tensor cores. `newer_too`: is there one that runs there at all?
pub fn serves(sm: u32, newer_too: bool) -> bool {
    let own = if sm == 72 { 70 } else { sm };
    variants().any(|v| v.family.sm == own || (newer_too && v.family.sm <= sm))
}

/// The embedded code of a variant.
pub fn image(variant: &Variant) -> &'static Image {
    IMAGES.iter().find(|i| i.name == variant.name).expect("build.rs embeds every variant of the tables")
}

impl Image {
    /// The family's machine code (an ELF cubin).
    pub fn cubin(&self) -> Result<Vec<u8>> {
        decompress(self.name, self.cubin)
    }

    /// PTX for the family's virtual architecture, NUL-terminated as the driver wants it.
    pub fn ptx(&self) -> Result<Vec<u8>> {
        let mut text = decompress(self.name, self.ptx)?;
        if text.last() != Some(&0) {
            text.push(0);
        }
        Ok(text)
    }
}

fn decompress(name: &str, data: &[u8]) -> Result<Vec<u8>> {
    zstd::decode_all(data).map_err(|e| Error::runtime(format!("the embedded code of {name} is damaged: {e}")))
}

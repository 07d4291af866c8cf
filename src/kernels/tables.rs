//! Every compiled kernel variant: build.rs compiles these rows, the registry embeds them, the plan chooses from them.
//! A new family is a folder like `volta`, and here its `mod` and its tables.

// with their paths, since this file is a module of build.rs too
#[path = "shared/mod.rs"]
mod shared;
#[path = "turing/mod.rs"]
pub mod turing;
#[path = "variants.rs"]
pub mod variants;
#[path = "volta/mod.rs"]
pub mod volta;

/// Each table is of one family, its rows in the order in which the plan prefers one of two that are as good.
pub const TABLES: &[&[variants::Variant]] = &[
    volta::FORWARD,
    volta::FORWARD_STREAM_K,
    volta::BACKWARD,
    volta::SHARED,
    volta::PREFILL,
    volta::DECODE,
    volta::LATENTS,
    turing::FORWARD,
    turing::BACKWARD,
    turing::PREFILL,
    turing::SHARED,
    turing::DECODE,
];

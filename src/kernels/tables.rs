//! Every compiled kernel variant: build.rs compiles these rows, the registry embeds them, the planner chooses from them.
//! To add a family, add a folder like `volta`, and here its `mod` and its tables.

// with their paths, since this file is a module of build.rs too
#[path = "features.rs"]
mod features;
#[path = "formats.rs"]
pub mod formats;
#[path = "passes.rs"]
mod passes;
#[path = "shared.rs"]
mod shared;
#[path = "turing/mod.rs"]
pub mod turing;
#[path = "variants.rs"]
pub mod variants;
#[path = "volta/mod.rs"]
pub mod volta;

/// Builds the tables. Each is of one family, its rows in the planner's order of preference among equally good ones.
pub fn tables() -> Vec<&'static [variants::Variant]> {
    [volta::tables(), turing::tables()].concat()
}

//! All kernels, as rows of tables: build.rs compiles the rows, `kernels::COMPILED` holds them, and the planner chooses from them. A row (a
//! variant) is a kernel's source with its tile sizes and features. A family is the kernels for one kind of tensor core: volta or turing.
//! A new family is a folder like `volta`, listed here.

// with their paths, because this file is a module of build.rs too
#[path = "features.rs"]
pub mod features;
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

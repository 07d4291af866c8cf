//! Parameter blocks: each is the one argument of some kernels. src/ops/ fills them, and each has its only definition here.
//!
//! build.rs generates `volta_fa_params.h` from these files with cbindgen. tests/kernels.rs compares `size_of` with the parameter size in
//! each embedded cubin. The files may only contain `#[repr(C)]` structs of pointers and numbers, enums with a `#[repr]`, and their
//! functions. They import no other module. Strides count elements. Every pointer is a device address (under the simulator, a host address).
//! An entry is an element of the batch.

mod backward;
mod cache;
mod decode;
mod forward;
mod merge_cast;
mod shared;

pub use backward::*;
pub use cache::*;
pub use decode::*;
pub use forward::*;
pub use merge_cast::*;
pub use shared::*;

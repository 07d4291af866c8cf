//! The error of the public interface.

use std::fmt;

/// What went wrong, as text. Faults of a kernel name the kernel, pc, instruction, CTA, warp, lane,
/// address and the nearest buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(String);

/// Result of the public interface.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl From<String> for Error {
    fn from(text: String) -> Self {
        Error(text)
    }
}

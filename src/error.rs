//! The error type: a message for the user, and the Python exception that it becomes.

use std::fmt;

/// Result with an error for the user.
pub type Result<T> = std::result::Result<T, Error>;

/// Kind of an error: which Python exception it becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// An argument is wrong: ValueError.
    Value,
    /// This version, device or build cannot compute the call: NotImplementedError.
    Unsupported,
    /// The machine, the driver or a library failed: RuntimeError.
    Runtime,
}

/// An error that becomes a Python exception.
#[derive(Clone, Debug)]
pub struct Error {
    /// Which exception it becomes.
    pub kind: ErrorKind,
    /// Text of the exception; [`Error::in_op`] prepends the op.
    pub message: String,
}

impl Error {
    /// Formats `argument: got found, expected allowed`.
    pub fn value(argument: &str, found: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        Error { kind: ErrorKind::Value, message: format!("{argument}: got {found}, expected {allowed}") }
    }

    /// Returns an error for what this version, device or build cannot compute.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Error { kind: ErrorKind::Unsupported, message: message.into() }
    }

    /// Returns an error for a failure of the machine, the driver or a library.
    pub fn runtime(message: impl Into<String>) -> Self {
        Error { kind: ErrorKind::Runtime, message: message.into() }
    }

    /// Adds the name of the op.
    pub fn in_op(mut self, op: &str) -> Self {
        self.message = format!("volta_fa::{op}: {}", self.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<tch::TchError> for Error {
    fn from(e: tch::TchError) -> Self {
        // the lines after the first are a C++ backtrace
        let text = e.to_string();
        Error::runtime(format!("torch: {}", text.lines().next().unwrap_or("unknown error")))
    }
}

//! The error type of the library: a message for the user, and the Python exception that it becomes. The C ABI returns kind and message as a
//! `Status` (ffi.rs), from which the C++ shim throws.

use std::fmt;

/// Result of whatever can fail because of the caller or the machine.
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
    pub kind: ErrorKind,
    /// Text of the exception; [`Error::in_op`] prepends the operator.
    pub message: String,
}

impl Error {
    /// Returns an error about an argument (or an environment variable): `argument: got {found}, expected {allowed}`.
    pub fn value(argument: &str, found: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        Error { kind: ErrorKind::Value, message: format!("{argument}: got {found}, expected {allowed}") }
    }

    /// Returns an error about a call that this version, device or build cannot compute.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Error { kind: ErrorKind::Unsupported, message: message.into() }
    }

    /// Returns an error of the machine, the driver or a library.
    pub fn runtime(message: impl Into<String>) -> Self {
        Error { kind: ErrorKind::Runtime, message: message.into() }
    }

    /// Returns the error with the operator's name before its message. `ffi::status` calls it, for every operator.
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
        // after the first line comes a C++ backtrace
        let text = e.to_string();
        Error::runtime(format!("torch: {}", text.lines().next().unwrap_or("unknown error")))
    }
}

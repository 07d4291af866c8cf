//! The error type of the library: a message for the user, and the Python exception that it becomes.

use std::fmt;

/// Result of what can fail with a message for the user.
pub type Result<T> = std::result::Result<T, Error>;

/// Kind of an error: the Python exception that it becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// an argument is wrong: ValueError
    Value,
    /// the arguments are fine, but this version, device or build cannot do it: NotImplementedError
    Unsupported,
    /// the machine, driver or a library failed: RuntimeError
    Runtime,
}

/// An error, on its way to a Python exception.
#[derive(Clone, Debug)]
pub struct Error {
    /// which exception it becomes
    pub kind: ErrorKind,
    /// the exception's text; [`Error::in_op`] puts the op in front
    pub message: String,
}

impl Error {
    /// Returns the error of a wrong argument: its name in the schema, what the call gave, and what it may give.
    pub fn value(argument: &str, found: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        Error { kind: ErrorKind::Value, message: format!("{argument}: got {found}, expected {allowed}") }
    }

    /// Returns the error of what this version, device or build cannot do.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Error { kind: ErrorKind::Unsupported, message: message.into() }
    }

    /// Returns the error of a failure of the machine, the driver or a library.
    pub fn runtime(message: impl Into<String>) -> Self {
        Error { kind: ErrorKind::Runtime, message: message.into() }
    }

    /// Returns the error with the name of its op in front.
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
        // c10 errors carry a C++ backtrace after the first line; the user needs the first line
        let text = e.to_string();
        Error::runtime(format!("torch: {}", text.lines().next().unwrap_or("unknown error")))
    }
}

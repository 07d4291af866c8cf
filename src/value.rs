//! A value of a call in the C ABI: what PyTorch's stack holds for one argument.

use crate::error::{Error, Result};
use std::ffi::c_void;

/// Type of a [`Value`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueTag {
    /// None; an undefined tensor
    None,
    /// a tensor
    Tensor,
    /// an int; a symbolic one is [`crate::options::UNKNOWN`]
    Int,
    /// a float
    Float,
    /// a bool
    Bool,
}

impl ValueTag {
    fn name(self) -> &'static str {
        match self {
            ValueTag::None => "None",
            ValueTag::Tensor => "a tensor",
            ValueTag::Int => "an int",
            ValueTag::Float => "a float",
            ValueTag::Bool => "a bool",
        }
    }
}

/// Content of a [`Value`]; the tag says which member is written.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union ValuePayload {
    /// a borrowed `at::Tensor*`
    pub tensor: *mut c_void,
    pub integer: i64,
    pub number: f64,
    pub boolean: bool,
}

/// An argument of a call.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct Value {
    pub tag: ValueTag,
    pub payload: ValuePayload,
}

impl Value {
    fn is_none(&self) -> bool {
        self.tag == ValueTag::None
    }

    /// Rejects a value of another type than these. From Python and TorchScript values have the schema's types, from a C++ stack any.
    ///
    /// # Errors
    /// [`Error::value`] with the argument's name.
    pub fn check<'a>(&self, tags: &[ValueTag], name: impl FnOnce() -> &'a str) -> Result<()> {
        match tags.contains(&self.tag) {
            true => Ok(()),
            false => Err(Error::value(name(), self.tag.name(), tags[0].name())),
        }
    }

    fn expect(&self, tag: ValueTag) {
        assert_eq!(self.tag, tag, "the schema has another type");
    }

    /// Returns the handle of a tensor; None for None.
    pub fn tensor(&self) -> Option<*mut c_void> {
        (!self.is_none()).then(|| {
            self.expect(ValueTag::Tensor);
            // SAFETY: the tag names the member.
            unsafe { self.payload.tensor }
        })
    }

    /// Returns an int; None for None.
    pub fn optional_int(&self) -> Option<i64> {
        (!self.is_none()).then(|| self.int())
    }

    /// Returns an int.
    pub fn int(&self) -> i64 {
        self.expect(ValueTag::Int);
        // SAFETY: the tag names the member.
        unsafe { self.payload.integer }
    }

    /// Returns a float; None for None.
    pub fn optional_float(&self) -> Option<f64> {
        (!self.is_none()).then(|| self.float())
    }

    /// Returns a float.
    pub fn float(&self) -> f64 {
        self.expect(ValueTag::Float);
        // SAFETY: the tag names the member.
        unsafe { self.payload.number }
    }

    /// Returns a bool.
    pub fn bool(&self) -> bool {
        self.expect(ValueTag::Bool);
        // SAFETY: the tag names the member.
        unsafe { self.payload.boolean }
    }
}

//! An argument of an operator's call in the C ABI. PyTorch's dispatcher passes a call's arguments on a stack; the C++ shim turns each into
//! a [`Value`], in the order of the operator's schema, and src/operators.rs and src/options.rs read them. A value borrows a tensor.

use crate::error::{Error, Result};
use std::ffi::c_void;

/// Type of a [`Value`]. An undefined tensor is None, and a symbolic int [`crate::options::UNKNOWN`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueTag {
    None,
    Tensor,
    Int,
    Float,
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
pub struct Value {
    pub tag: ValueTag,
    pub payload: ValuePayload,
}

impl Value {
    fn is_none(&self) -> bool {
        self.tag == ValueTag::None
    }

    /// Rejects a value of another type than these, by the argument's name. From Python and TorchScript values have the schema's types, from
    /// a C++ caller's stack any. The functions below panic on another type, so calls check first.
    pub fn check<'a>(&self, tags: &[ValueTag], name: impl FnOnce() -> &'a str) -> Result<()> {
        match tags.contains(&self.tag) {
            true => Ok(()),
            false => Err(Error::value(name(), self.tag.name(), tags[0].name())),
        }
    }

    fn expect(&self, tag: ValueTag) {
        assert_eq!(self.tag, tag, "the schema has another type");
    }

    /// Returns the handle of a tensor, an `at::Tensor*`; None for None.
    pub fn tensor(&self) -> Option<*mut c_void> {
        (!self.is_none()).then(|| {
            self.expect(ValueTag::Tensor);
            // SAFETY: the tag names the member.
            unsafe { self.payload.tensor }
        })
    }

    pub fn optional_int(&self) -> Option<i64> {
        (!self.is_none()).then(|| self.int())
    }

    pub fn int(&self) -> i64 {
        self.expect(ValueTag::Int);
        // SAFETY: the tag names the member.
        unsafe { self.payload.integer }
    }

    pub fn optional_float(&self) -> Option<f64> {
        (!self.is_none()).then(|| self.float())
    }

    pub fn float(&self) -> f64 {
        self.expect(ValueTag::Float);
        // SAFETY: the tag names the member.
        unsafe { self.payload.number }
    }

    pub fn bool(&self) -> bool {
        self.expect(ValueTag::Bool);
        // SAFETY: the tag names the member.
        unsafe { self.payload.boolean }
    }
}

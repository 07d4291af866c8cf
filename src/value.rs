//! An argument of an operator's call in the C ABI. PyTorch's dispatcher passes a call's arguments on a stack; the C++ shim turns each into
//! a [`Value`], in the order of the operator's schema, and src/operators.rs, src/options.rs and src/internal.rs read them.

use std::borrow::Cow;
use std::ffi::{c_char, c_void, CStr};

/// An argument of a call. An undefined tensor is None, and a symbolic int [`crate::options::UNKNOWN`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum Value {
    None,
    /// a borrowed `at::Tensor*`
    Tensor(*mut c_void),
    Int(i64),
    Float(f64),
    Bool(bool),
    /// a NUL-terminated string that the caller owns; of internal operators only
    Text(*const c_char),
}

/// Returns a call's arguments as an array, to take apart by name.
pub fn arguments<const N: usize>(values: &[Value]) -> &[Value; N] {
    values.try_into().expect("the schema has as many arguments")
}

/// The functions that return a payload panic on a value of another type, so calls check types first ([`crate::options::Kind::check`]).
impl Value {
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Tensor(_) => "a tensor",
            Value::Int(_) => "an int",
            Value::Float(_) => "a float",
            Value::Bool(_) => "a bool",
            Value::Text(_) => "a str",
        }
    }

    fn is_none(&self) -> bool {
        matches!(self, Value::None)
    }

    /// Returns the handle of a tensor, an `at::Tensor*`; None for None.
    pub fn tensor(&self) -> Option<*mut c_void> {
        match *self {
            Value::None => None,
            Value::Tensor(handle) => Some(handle),
            _ => panic!("the schema has a tensor, the call {}", self.type_name()),
        }
    }

    pub fn optional_int(&self) -> Option<i64> {
        (!self.is_none()).then(|| self.int())
    }

    pub fn int(&self) -> i64 {
        let Value::Int(n) = *self else { panic!("the schema has an int, the call {}", self.type_name()) };
        n
    }

    pub fn optional_float(&self) -> Option<f64> {
        (!self.is_none()).then(|| self.float())
    }

    pub fn float(&self) -> f64 {
        let Value::Float(x) = *self else { panic!("the schema has a float, the call {}", self.type_name()) };
        x
    }

    pub fn bool(&self) -> bool {
        let Value::Bool(b) = *self else { panic!("the schema has a bool, the call {}", self.type_name()) };
        b
    }

    pub fn text(&self) -> Cow<'_, str> {
        let Value::Text(text) = *self else { panic!("the schema has a str, the call {}", self.type_name()) };
        // SAFETY: the caller's string lives through the call.
        unsafe { CStr::from_ptr(text) }.to_string_lossy()
    }
}

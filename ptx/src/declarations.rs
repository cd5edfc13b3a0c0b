//! The declarations of a module, which the bodies of its kernels refer to.

use std::collections::HashMap;

use crate::{text::Token, variable::Variable};

/// Where the variables of a module begin; no device memory is there.
pub(crate) const VARIABLES: u64 = 1 << 60;

/// The declarations outside of functions that their bodies refer to.
#[derive(Default)]
pub(crate) struct Declarations<'a, 't> {
    /// Offsets of variables among the bytes of all.
    pub variables: HashMap<&'a str, usize>,
    pub shared: HashMap<&'a str, Variable>,
    /// The array whose size a launch states, with its alignment.
    pub dynamic: Option<(&'a str, usize)>,
    pub functions: HashMap<&'a str, DeviceFunction<'a, 't>>,
}

/// A function that kernels call.
#[derive(Clone)]
pub(crate) struct DeviceFunction<'a, 't> {
    /// The names of its results and then of its parameters, which a call binds to memory of a thread.
    pub results: Vec<&'a str>,
    pub parameters: Vec<&'a str>,
    pub body: &'t [Token<'a>],
}

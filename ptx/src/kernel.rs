//! Kernels: their declarations and their code.

use std::{fmt, sync::Arc};

use crate::instruction::Code;

/// A parameter of a kernel: its place among the bytes of all parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The offset in bytes.
    pub offset: usize,
    /// The size in bytes.
    pub bytes: usize,
}

/// A kernel that can be launched.
pub struct PtxKernel {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
    /// The most threads of a block, if the kernel says so.
    pub(crate) most_threads: Option<u32>,
    pub(crate) code: Code,
    /// The module's variables.
    pub(crate) variables: Arc<[u8]>,
}

impl PtxKernel {
    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The parameters, in order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The number of instructions.
    pub fn instructions(&self) -> usize {
        self.code.instructions.len()
    }

    /// The bytes of shared memory that the kernel declares, besides that of a launch.
    pub fn shared(&self) -> usize {
        self.code.shared
    }
}

impl fmt::Debug for PtxKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PtxKernel({}, {} instructions)", self.name, self.instructions())
    }
}

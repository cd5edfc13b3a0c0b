//! The form of a launch: how a program's operands are stored. Together with the program, all that a kernel depends on.

use numcore::{Accumulate, DType};
use smallvec::SmallVec;

/// How a program meets its operands.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Form {
    /// Stored types of the inputs.
    pub inputs: SmallVec<[DType; 8]>,
    /// Inputs that are old values of outputs, by the index of the output.
    pub own: SmallVec<[Option<u16>; 8]>,
    /// How each output is stored.
    pub outputs: SmallVec<[Output; 4]>,
    /// Whether values may be stored as another type than they have.
    pub converts: bool,
}

/// What becomes of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Output {
    /// Stored as this dtype.
    Overwrite(DType),
    /// Accumulated into elements stored as this dtype.
    Add(DType),
    /// Kept where it was computed, in the compute form of this dtype.
    Keep(DType),
}

impl Output {
    /// The dtype of the operand.
    pub(in crate::pointwise) fn dtype(&self) -> DType {
        match *self {
            Output::Overwrite(t) | Output::Add(t) | Output::Keep(t) => t,
        }
    }

    /// A code that distinguishes outputs in a cache key.
    pub(in crate::pointwise) fn code(&self) -> u64 {
        match *self {
            Output::Overwrite(t) => t as u64,
            Output::Add(t) => 16 + t as u64,
            Output::Keep(t) => 32 + t as u64,
        }
    }
}

impl Form {
    pub(crate) fn input(&mut self, dtype: DType, own: Option<u16>) {
        self.inputs.push(dtype);
        self.own.push(own);
    }

    /// One output that is kept for the caller.
    pub(crate) fn keep(&mut self, dtype: DType) {
        self.outputs.push(Output::Keep(dtype));
    }

    pub(in crate::pointwise) fn output(&mut self, how: Accumulate, dtype: DType) {
        self.outputs.push(match how {
            Accumulate::Overwrite => Output::Overwrite(dtype),
            Accumulate::Add => Output::Add(dtype),
        });
    }
}

//! The form of a launch: the storage of a program's operands. Together with the program, it determines a kernel.

use numcore::{Accumulate, DType};
use smallvec::SmallVec;

/// The storage of a program's operands.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Form {
    /// The stored types of the inputs.
    pub inputs: SmallVec<[DType; 8]>,
    /// The index of the output whose old value an input is, for each input.
    pub own: SmallVec<[Option<u16>; 8]>,
    /// The treatment of each output.
    pub outputs: SmallVec<[Output; 4]>,
    /// True if values may be stored as another type than they have.
    pub converts: bool,
}

/// The treatment of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Output {
    /// The output is overwritten and stored as this dtype.
    Overwrite(DType),
    /// The value is accumulated into elements stored as this dtype.
    Add(DType),
    /// The value is kept where it was computed, in the compute form of this dtype.
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

    /// Adds an output that is kept for the caller.
    pub(crate) fn keep(&mut self, dtype: DType) {
        self.outputs.push(Output::Keep(dtype));
    }

    pub(crate) fn output(&mut self, how: Accumulate, dtype: DType) {
        self.outputs.push(match how {
            Accumulate::Overwrite => Output::Overwrite(dtype),
            Accumulate::Add => Output::Add(dtype),
        });
    }
}

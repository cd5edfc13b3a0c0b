//! The compiled form of a program: steps over blocks that are named by slots.

use std::sync::Arc;

use numcore::{
    DType, Scalar,
    pointwise::{Number, Program, Typed},
};
use smallvec::SmallVec;

use super::compiled::Body;
use crate::{
    Simd,
    pointwise::execute::{Common, FastestWay, StepFn},
};

/// A program lowered for certain types: the steps that run on each block.
pub(crate) struct Kernel {
    pub(in crate::pointwise) steps: Vec<Step>,
    /// The AOT-compiled body that runs instead of the steps, if there is one.
    pub(in crate::pointwise) compiled: Option<(Simd, Body)>,
    pub(in crate::pointwise) immediates: Vec<Immediate>,
    pub(in crate::pointwise) slots: Slots,
    /// The index of the output whose old value an input is, for each input.
    pub(in crate::pointwise) own: SmallVec<[Option<u16>; 8]>,
    /// The inputs that no step reads: bit `i` for input `i`.
    pub(in crate::pointwise) unread: u64,
    /// The outputs whose old values are read: bit `o` for output `o`.
    pub(in crate::pointwise) reads_outputs: u64,
    /// The bytes of the widest element of a register or immediate.
    pub(in crate::pointwise) width: usize,
    /// True if the result depends on the positions of elements.
    pub(crate) positional: bool,
    /// The approximate number of simple steps that one element costs.
    pub(crate) weight: usize,
    /// The slot of the value, for a kernel that stores nothing.
    pub(in crate::pointwise) value: u16,
    pub(in crate::pointwise) keeps: bool,
    /// The bytes of an element, for a kernel that only copies its one input to its one output.
    pub(in crate::pointwise) copies: Option<usize>,
    /// The measured ways of moving operands that are larger than the caches.
    pub(in crate::pointwise) ways: FastestWay,
    pub(in crate::pointwise) typed: Arc<Typed>,
}

/// An operation on a block; operands are indices of slots.
#[derive(Clone, Copy)]
pub(in crate::pointwise) struct Step {
    pub f: StepFn,
    pub to: u16,
    pub args: [u16; 3],
}

/// The location of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::pointwise) enum Slot {
    /// A register in scratch memory.
    Register(u16),
    /// A value that is the same for all elements.
    Immediate(u16),
    /// An input, as stored.
    Input(u16),
    /// An output, as stored.
    Output(u16),
    /// Positions in the whole shape (`i64`).
    Positions,
}

/// The number of slots of each kind. Slots are numbered in this order, positions last.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::pointwise) struct Slots {
    pub registers: u16,
    pub immediates: u16,
    pub inputs: u16,
    pub outputs: u16,
}

impl Slots {
    pub(in crate::pointwise) fn number(&self, slot: Slot) -> u16 {
        match slot {
            Slot::Register(i) => i,
            Slot::Immediate(i) => self.registers + i,
            Slot::Input(i) => self.registers + self.immediates + i,
            Slot::Output(i) => self.registers + self.immediates + self.inputs + i,
            Slot::Positions => self.registers + self.immediates + self.inputs + self.outputs,
        }
    }

    pub(in crate::pointwise) fn count(&self) -> usize {
        self.number(Slot::Positions) as usize + 1
    }
}

/// A value that is the same for all elements, known at launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::pointwise) enum Immediate {
    /// Value `of` of the program, in the compute form of `dtype`, repeated over a block.
    Value { of: u32, dtype: DType },
    /// A run-time scalar, as one `u64`.
    Seed(u16),
    /// A constant, as one `u64`.
    Stream(u32),
}

/// The bytes of an immediate, and the number of them that one element has.
#[derive(Clone, Copy)]
pub(crate) struct ImmediateBits {
    pub bytes: [u8; 8],
    pub size: usize,
}

impl Kernel {
    /// This kernel with a compiled body: no registers, and slots in the order in which the body is printed.
    pub(in crate::pointwise) fn compiled(self, program: &Program, simd: Simd, body: Body) -> Kernel {
        let number = |of| Immediate::Value { of, dtype: self.typed.dtypes[of as usize] };
        let immediates: Vec<Immediate> = program.launch_values().into_iter().map(number).collect();
        let slots = Slots { registers: 0, immediates: immediates.len() as u16, ..self.slots };
        let value = slots.number(Slot::Positions);
        Kernel { compiled: Some((simd, body)), immediates, slots, value, ..self }
    }

    /// This kernel with the immediates of a launch.
    #[inline]
    pub(crate) fn with(&self, program: &Program, scalars: &[Scalar], simd: Simd) -> Common<'_> {
        Common { kernel: self, values: self.values(program, scalars), simd }
    }

    #[inline]
    fn values(&self, program: &Program, scalars: &[Scalar]) -> SmallVec<[ImmediateBits; 8]> {
        if self.immediates.is_empty() {
            return SmallVec::new();
        }
        let numbers = program.eval_uniform(&self.typed, scalars);
        let bits = |i: &Immediate| match *i {
            Immediate::Value { of, dtype } => encode(numbers[of as usize].unwrap_or(Number::Int(0)), dtype),
            Immediate::Seed(i) => word(scalars[i as usize].to_i64() as u64),
            Immediate::Stream(stream) => word(u64::from(stream)),
        };
        self.immediates.iter().map(bits).collect()
    }
}

fn word(x: u64) -> ImmediateBits {
    ImmediateBits { bytes: x.to_ne_bytes(), size: 8 }
}

/// A scalar in the compute form of a dtype: reals to integers saturate, integers wrap, as in the cast of an element.
fn encode(x: Number, dtype: DType) -> ImmediateBits {
    macro_rules! int {
        ($t:ty) => {
            pad(match x {
                Number::Float(x) => x as $t,
                x => x.to_i64() as $t,
            }
            .to_ne_bytes())
        };
    }
    match dtype {
        DType::F64 => pad(x.to_f64().to_ne_bytes()),
        DType::I32 => int!(i32),
        DType::I64 => int!(i64),
        DType::U32 => int!(u32),
        DType::U8 => int!(u8),
        DType::Bool => pad([u8::from(x.to_f64() != 0.0)]),
        _ => pad((x.to_f64() as f32).to_ne_bytes()),
    }
}

fn pad<const N: usize>(from: [u8; N]) -> ImmediateBits {
    let mut bytes = [0; 8];
    bytes[..N].copy_from_slice(&from);
    ImmediateBits { bytes, size: N }
}

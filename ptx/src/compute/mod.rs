//! Opcodes that compute one register from others, lane by lane: a table of texts and functions.
//!
//! A row gives an opcode without its last type, the types that it stands for, its operands, and the value of one lane.
//! The text of an instruction must be equal to that of a row: a modifier that no row has is unknown.

mod carry;
mod compare;
mod convert;
mod float;
mod integer;
mod rounding;

use std::{collections::HashMap, sync::LazyLock};

use crate::registers::{Class, WarpRegisters};

/// A function that computes the lanes of a mask; the first row is the result's, the others are the operands'.
pub(crate) type ComputeFn = fn(&mut WarpRegisters, &[u32; 5], u32);

/// An opcode that computes.
pub(crate) struct ComputeOp {
    pub result: Class,
    pub operands: &'static [Class],
    pub run: ComputeFn,
}

/// The type of values that a type of PTX stands for.
#[allow(non_camel_case_types)]
mod kinds {
    pub(super) type u8 = core::primitive::u8;
    pub(super) type s8 = i8;
    pub(super) type b16 = core::primitive::u16;
    pub(super) type u16 = core::primitive::u16;
    pub(super) type s16 = i16;
    pub(super) type b32 = core::primitive::u32;
    pub(super) type u32 = core::primitive::u32;
    pub(super) type s32 = i32;
    pub(super) type b64 = core::primitive::u64;
    pub(super) type u64 = core::primitive::u64;
    pub(super) type s64 = i64;
    pub(super) type f32 = core::primitive::f32;
    pub(super) type f64 = core::primitive::f64;
    pub(super) type pred = bool;
    /// Halves are carried as bits.
    pub(super) type f16 = core::primitive::u16;
    pub(super) type bf16 = core::primitive::u16;
}

/// A row's function: the loop over lanes around the value of one lane.
macro_rules! compute {
    (($($x:ident: $from:ty),*) -> $to:ty, $value:expr) => {
        $crate::compute::ComputeOp {
            result: <$to as $crate::registers::LaneValue>::CLASS,
            operands: &[$(<$from as $crate::registers::LaneValue>::CLASS),*],
            run: |registers, slots, mask| {
                use $crate::registers::LaneValue;
                let mut values = <$to as LaneValue>::EMPTY;
                {
                    let mut operands = slots[1..].iter().copied();
                    $(let $x = <$from as LaneValue>::row(registers, operands.next().unwrap_or_default());)*
                    for lane in 0..$crate::registers::LANES {
                        $(let $x = <$from as LaneValue>::get($x, lane);)*
                        <$to as LaneValue>::set(&mut values, lane, $value);
                    }
                }
                <$to as LaneValue>::store(registers, slots[0], mask, &values);
            },
        }
    };
}
use compute;

/// RegisterRows of the table: `"opcode" [types] (operands) -> result => value;`, in which `T` is the type.
macro_rules! rows {
    ($($name:literal [$($kind:ident)+] $operands:tt -> $to:ty => $value:expr;)*) => {
        pub(super) fn rows() -> Vec<(&'static str, $crate::compute::ComputeOp)> {
            vec![$($({
                #[allow(dead_code)]
                type T = $crate::compute::kinds::$kind;
                (concat!($name, ".", stringify!($kind)), $crate::compute::compute!($operands -> $to, $value))
            },)+)*]
        }
    };
}
use rows;

static TABLE: LazyLock<HashMap<&'static str, ComputeOp>> = LazyLock::new(|| all_rows().into_iter().flatten().collect());

fn all_rows() -> [Vec<(&'static str, ComputeOp)>; 5] {
    [integer::rows(), carry::rows(), float::rows(), convert::rows(), compare::rows()]
}

/// The opcode of this text.
pub(crate) fn find(text: &str) -> Option<&'static ComputeOp> {
    TABLE.get(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_opcode_has_two_rows() {
        assert_eq!(all_rows().iter().map(Vec::len).sum::<usize>(), TABLE.len());
    }
}

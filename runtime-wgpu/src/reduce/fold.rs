//! Generated WGSL of reduction operators.

use numcore::{ArgOp, ReduceKind};
use smallvec::{SmallVec, smallvec};

use crate::access::StorageForm;

/// A reduction operator as WGSL. A state is one or two values, `a0`, `a1`; it is merged with the state `b0`, `b1`.
pub(super) struct FoldOp {
    pub(super) kind: &'static str,
    /// The types and the initial values of a state.
    pub(super) states: SmallVec<[(&'static str, String); 2]>,
    pub(super) merge: String,
    pub(super) result: &'static str,
}

impl FoldOp {
    pub(super) fn of(op: ReduceKind, form: StorageForm) -> FoldOp {
        let ty = form.ty();
        let (first, merge) = match (op, form) {
            (ReduceKind::Sum | ReduceKind::Max, StorageForm::Bool) => ("false", "a0 || b0"),
            (ReduceKind::Prod | ReduceKind::Min, StorageForm::Bool) => ("true", "a0 && b0"),
            (ReduceKind::Sum, StorageForm::I64) => ("vec2<u32>(0u, 0u)", "wg_add_i64(a0, b0)"),
            (ReduceKind::Prod, StorageForm::I64) => ("vec2<u32>(1u, 0u)", "wg_mul_i64(a0, b0)"),
            (ReduceKind::Max, StorageForm::I64) => ("vec2<u32>(0u, 0x80000000u)", "wg_max_i64(a0, b0)"),
            (ReduceKind::Min, StorageForm::I64) => ("vec2<u32>(0xffffffffu, 0x7fffffffu)", "wg_min_i64(a0, b0)"),
            (ReduceKind::Sum, _) => ("0", "a0 + b0"),
            (ReduceKind::Prod, _) => ("1", "a0 * b0"),
            (ReduceKind::Max, StorageForm::I32) => ("-2147483648", "max(a0, b0)"),
            (ReduceKind::Min, StorageForm::I32) => ("2147483647", "min(a0, b0)"),
            (ReduceKind::Max, StorageForm::U32 | StorageForm::U8) => ("0", "max(a0, b0)"),
            (ReduceKind::Min, StorageForm::U32 | StorageForm::U8) => ("4294967295", "min(a0, b0)"),
            (ReduceKind::Max, _) => ("wg_bits(0xff800000u)", "wg_max(a0, b0)"),
            (ReduceKind::Min, _) => ("wg_bits(0x7f800000u)", "wg_min(a0, b0)"),
        };
        let first = format!("{ty}({first})");
        FoldOp { kind: "reduce", states: smallvec![(ty, first)], merge: format!("a0 = {merge};\n"), result: "a0" }
    }

    pub(super) fn arg(op: ArgOp, form: StorageForm) -> FoldOp {
        let better = match (op, form) {
            (ArgOp::Max, StorageForm::I64) => "wg_lt_i64(a0, b0)",
            (ArgOp::Min, StorageForm::I64) => "wg_lt_i64(b0, a0)",
            (_, StorageForm::Bool) => {
                if op == ArgOp::Max {
                    "(b0 && !a0)"
                } else {
                    "(a0 && !b0)"
                }
            }
            (ArgOp::Max, StorageForm::F32 | StorageForm::F16 | StorageForm::BF16) => {
                "(!wg_nan(a0) && (b0 > a0 || wg_nan(b0)))"
            }
            (ArgOp::Min, StorageForm::F32 | StorageForm::F16 | StorageForm::BF16) => {
                "(!wg_nan(a0) && (b0 < a0 || wg_nan(b0)))"
            }
            (ArgOp::Max, _) => "(b0 > a0)",
            (ArgOp::Min, _) => "(b0 < a0)",
        };
        let same = match form {
            StorageForm::I64 => "wg_eq_i64(a0, b0)",
            StorageForm::F32 | StorageForm::F16 | StorageForm::BF16 => "(a0 == b0 || (wg_nan(a0) && wg_nan(b0)))",
            _ => "(a0 == b0)",
        };
        // A state whose position is the largest integer has seen no element.
        let merge = format!(
            "if (b1 != 0xffffffffu && (a1 == 0xffffffffu || {better} || ({same} && b1 < a1))) {{ a0 = b0; a1 = b1; }}\n"
        );
        let first = if form == StorageForm::I64 { "vec2<u32>(0u, 0u)".into() } else { format!("{}(0)", form.ty()) };
        let states = smallvec![(form.ty(), first), ("u32", "0xffffffffu".into())];
        FoldOp { kind: "arg_reduce", states, merge, result: "vec2<u32>(a1, 0u)" }
    }

    /// Declarations of a state, `var a0: T = …;`, with `name` in place of `a`.
    pub(super) fn declare(&self, name: &str) -> String {
        let states = self.states.iter().enumerate();
        states.map(|(i, (ty, first))| format!("var {name}{i}: {ty} = {first};\n")).collect()
    }

    /// The concatenation of `line(i)` for each value of a state.
    pub(super) fn each(&self, line: impl Fn(usize) -> String) -> String {
        (0..self.states.len()).map(line).collect()
    }
}

/// Statements that merge the running state into the far one.
pub(super) fn far_merge(fold: &FoldOp) -> String {
    let swap = fold.each(|i| format!("let near{i} = a{i};\na{i} = far{i};\nb{i} = near{i};\n"));
    format!("{{\n{}{swap}{}{}}}\n", fold.declare("b"), fold.merge, fold.each(|i| format!("far{i} = a{i};\n")))
}

//! How values become one, as text.

use numcore::{ArgOp, ReduceOp};
use smallvec::{SmallVec, smallvec};

use crate::access::Form;

/// How states become one. A state is one or two values, `a0`, `a1`; `b0`, `b1` is what is combined with it.
pub(super) struct Fold {
    pub(super) kind: &'static str,
    /// Types and what a state begins with.
    pub(super) states: SmallVec<[(&'static str, String); 2]>,
    pub(super) merge: String,
    pub(super) result: &'static str,
}

impl Fold {
    pub(super) fn of(op: ReduceOp, form: Form) -> Fold {
        let ty = form.ty();
        let (first, merge) = match (op, form) {
            (ReduceOp::Sum | ReduceOp::Max, Form::Bool) => ("false", "a0 || b0"),
            (ReduceOp::Prod | ReduceOp::Min, Form::Bool) => ("true", "a0 && b0"),
            (ReduceOp::Sum, Form::I64) => ("vec2<u32>(0u, 0u)", "wg_add_i64(a0, b0)"),
            (ReduceOp::Prod, Form::I64) => ("vec2<u32>(1u, 0u)", "wg_mul_i64(a0, b0)"),
            (ReduceOp::Max, Form::I64) => ("vec2<u32>(0u, 0x80000000u)", "wg_max_i64(a0, b0)"),
            (ReduceOp::Min, Form::I64) => ("vec2<u32>(0xffffffffu, 0x7fffffffu)", "wg_min_i64(a0, b0)"),
            (ReduceOp::Sum, _) => ("0", "a0 + b0"),
            (ReduceOp::Prod, _) => ("1", "a0 * b0"),
            (ReduceOp::Max, Form::I32) => ("-2147483648", "max(a0, b0)"),
            (ReduceOp::Min, Form::I32) => ("2147483647", "min(a0, b0)"),
            (ReduceOp::Max, Form::U32 | Form::U8) => ("0", "max(a0, b0)"),
            (ReduceOp::Min, Form::U32 | Form::U8) => ("4294967295", "min(a0, b0)"),
            (ReduceOp::Max, _) => ("wg_bits(0xff800000u)", "wg_max(a0, b0)"),
            (ReduceOp::Min, _) => ("wg_bits(0x7f800000u)", "wg_min(a0, b0)"),
        };
        let first = format!("{ty}({first})");
        Fold { kind: "reduce", states: smallvec![(ty, first)], merge: format!("a0 = {merge};\n"), result: "a0" }
    }

    pub(super) fn arg(op: ArgOp, form: Form) -> Fold {
        let better = match (op, form) {
            (ArgOp::Max, Form::I64) => "wg_lt_i64(a0, b0)",
            (ArgOp::Min, Form::I64) => "wg_lt_i64(b0, a0)",
            (_, Form::Bool) => {
                if op == ArgOp::Max {
                    "(b0 && !a0)"
                } else {
                    "(a0 && !b0)"
                }
            }
            (ArgOp::Max, Form::F32 | Form::F16 | Form::BF16) => "(!wg_nan(a0) && (b0 > a0 || wg_nan(b0)))",
            (ArgOp::Min, Form::F32 | Form::F16 | Form::BF16) => "(!wg_nan(a0) && (b0 < a0 || wg_nan(b0)))",
            (ArgOp::Max, _) => "(b0 > a0)",
            (ArgOp::Min, _) => "(b0 < a0)",
        };
        let same = match form {
            Form::I64 => "wg_eq_i64(a0, b0)",
            Form::F32 | Form::F16 | Form::BF16 => "(a0 == b0 || (wg_nan(a0) && wg_nan(b0)))",
            _ => "(a0 == b0)",
        };
        // Nothing has been seen while the position is the largest number.
        let merge = format!(
            "if (b1 != 0xffffffffu && (a1 == 0xffffffffu || {better} || ({same} && b1 < a1))) {{ a0 = b0; a1 = b1; }}\n"
        );
        let first = if form == Form::I64 { "vec2<u32>(0u, 0u)".into() } else { format!("{}(0)", form.ty()) };
        let states = smallvec![(form.ty(), first), ("u32", "0xffffffffu".into())];
        Fold { kind: "arg_reduce", states, merge, result: "vec2<u32>(a1, 0u)" }
    }

    /// `var a0: T = …;` for a name in place of `a`.
    pub(super) fn declare(&self, name: &str) -> String {
        let states = self.states.iter().enumerate();
        states.map(|(i, (ty, first))| format!("var {name}{i}: {ty} = {first};\n")).collect()
    }

    /// One line for each state.
    pub(super) fn each(&self, line: impl Fn(usize) -> String) -> String {
        (0..self.states.len()).map(line).collect()
    }
}

/// Merges the running state into the far one.
pub(super) fn far_merge(fold: &Fold) -> String {
    let swap = fold.each(|i| format!("let near{i} = a{i};\na{i} = far{i};\nb{i} = near{i};\n"));
    format!("{{\n{}{swap}{}{}}}\n", fold.declare("b"), fold.merge, fold.each(|i| format!("far{i} = a{i};\n")))
}

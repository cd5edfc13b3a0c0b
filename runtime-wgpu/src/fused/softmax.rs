//! Softmax over rows, and its gradient.

use numcore::{Result, Support};

use super::{
    FusedCall,
    rows::{Along, RowFrame, RowKernel},
};

pub(super) fn forward(call: &FusedCall<'_, '_>, log: bool) -> Result<Support> {
    let (rows, width) = call.rows(0);
    let operands = [(call.ins[0], Along::Both), (call.outs[0], Along::Both)];
    let details = [u32::from(log)];
    let launch = RowKernel {
        op: "softmax",
        kind: "softmax",
        operands: &operands,
        outputs: 1,
        rows,
        width,
        numbers: &[],
        details: &details,
        indexed: false,
    };
    launch.run(call.wgpu, |f| {
        let x = f.load(0);
        let y = if log {
            format!("{x} - top - shift")
        } else {
            format!("select(wg_exp({x} - top) / total, 0f, total == 0f)")
        };
        let store = f.store(1, "y");
        format!("{}let shift = wg_log(total);\n{}", total(f, 0), f.columns(&[0, 1], &format!("let y = {y};\n{store}")))
    })?;
    Ok(Support::Done)
}

/// Statements for `top`, the largest element of a row or 0 where that is infinite, and `total`, the sum of `exp(x −
/// top)`.
pub(super) fn total(f: &RowFrame<'_>, x: usize) -> String {
    let value = f.load(x);
    format!(
        "var most = wg_bits(0xff800000u);\n{}let largest = all_max(local, most);\n\
         let top = select(largest, 0f, wg_infinite(largest));\n\
         var part = 0f;\n{}let total = all_sum(local, part);\n",
        f.columns(&[x], &format!("most = wg_max(most, {value});\n")),
        f.columns(&[x], &format!("part += wg_exp({value} - top);\n")),
    )
}

pub(super) fn backward(call: &FusedCall<'_, '_>, log: bool) -> Result<Support> {
    let (rows, width) = call.rows(0);
    let operands = [(call.ins[0], Along::Both), (call.ins[1], Along::Both), (call.outs[0], Along::Both)];
    let details = [u32::from(log)];
    let launch = RowKernel {
        op: "softmax_grad",
        kind: "softmax_grad",
        operands: &operands,
        outputs: 2,
        rows,
        width,
        numbers: &[],
        details: &details,
        indexed: false,
    };
    launch.run(call.wgpu, |f| {
        let (y, g) = (f.load(0), f.load(1));
        let (term, d) = if log {
            (g.clone(), format!("{g} - wg_exp({y}) * total"))
        } else {
            (format!("{y} * {g}"), format!("{y} * ({g} - total)"))
        };
        let store = f.store(2, "d");
        format!(
            "var part = 0f;\n{}let total = all_sum(local, part);\n{}",
            f.columns(&[0, 1], &format!("part += {term};\n")),
            f.columns(&[0, 1, 2], &format!("let d = {d};\n{store}"))
        )
    })?;
    Ok(Support::Done)
}

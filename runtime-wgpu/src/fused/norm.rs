//! Layer norm and RMS norm over rows; the parameters' gradients are reductions over them.

use std::sync::LazyLock;

use numcore::{
    Accumulate, DType, Layout, ReduceKind, Result, Shape, Support,
    fused::{Norm, NormGrad, NormKind},
    pointwise::Program,
};
use smallvec::{SmallVec, smallvec};

use super::{
    FusedCall,
    rows::{Along, RowKernel, number, read},
};
use crate::{bindings::OperandView, reduce};

pub(super) fn forward(call: &FusedCall<'_, '_>, op: &Norm) -> Result<Support> {
    let (rows, width) = call.rows(0);
    let layer = op.kind == NormKind::Layer;
    let mut operands: SmallVec<[(OperandView<'_>, Along); 8]> = smallvec![(call.ins[Norm::X], Along::Both)];
    operands.extend(call.ins[1..].iter().map(|p| (*p, Along::Columns)));
    let y = operands.len();
    operands.push((call.outs[0], Along::Both));
    operands.extend(call.outs[1..].iter().map(|p| (*p, Along::Rows)));
    let launch = RowKernel {
        op: "norm",
        kind: "norm",
        operands: &operands,
        outputs: y,
        rows,
        width,
        numbers: &[number(op.eps)],
        details: &[u32::from(layer) | u32::from(op.weight) << 1 | u32::from(op.bias) << 2],
        indexed: false,
    };
    launch.run(call.wgpu, |f| {
        let (x, eps) = (f.load(0), read(&mut f.params));
        let mean = if layer {
            let sum = f.columns(&[0], &format!("part += {x};\n"));
            format!("var part = 0f;\n{sum}let first = all_sum(local, part) / f32(width);\nvar rest = 0f;\n")
        } else {
            "let mean = 0f;\n".into()
        };
        let squares = if layer {
            f.columns(&[0], &format!("let v = {x} - first;\nrest += v;\nsquares += v * v;\n"))
        } else {
            f.columns(&[0], &format!("let v = {x};\nsquares += v * v;\n"))
        };
        // The residual of the rounded mean corrects the mean and the variance: a row of equal elements gives exactly
        // zeros.
        let variance = if layer {
            "let left = all_sum(local, rest) / f32(width);\nlet mean = first + left;\n\
             let spread = all_sum(local, squares) / f32(width) - left * left;\nlet variance = select(spread, 0f, spread < 0f);\n"
        } else {
            "let variance = all_sum(local, squares) / f32(width);\n"
        };
        let weight = if op.weight { format!(" * {}", f.load(1)) } else { String::new() };
        let bias = if op.bias { format!(" + {}", f.load(2)) } else { String::new() };
        let all: SmallVec<[usize; 4]> = (0..=y).collect();
        let each = f.columns(&all, &format!("let y = ({x} - mean) * rstd{weight}{bias};\n{}", f.store(y, "y")));
        let store_mean = if layer { f.store(y + 2, "mean") } else { String::new() };
        format!(
            "{mean}var squares = 0f;\n{squares}{variance}\
             let rstd = 1f / wg_sqrt(variance + {eps});\n{each}\
             if (local == 0u) {{\n{}{store_mean}}}\n",
            f.store(y + 1, "rstd"),
        )
    })?;
    Ok(Support::Done)
}

/// Computes the gradients of a norm; f16 and bf16 accumulate in `f32`. With `x̂` normalized and `h = g·w`: `dx = rstd ·
/// (h − mean(h) − x̂ · mean(h·x̂))`, `dw = Σ g·x̂`, `db = Σ g`.
pub(super) fn backward(call: &FusedCall<'_, '_>, op: &NormGrad) -> Result<Support> {
    let (rows, width) = call.rows(0);
    let layer = op.0.kind == NormKind::Layer;
    let (mean, weight) = (layer.then_some(3), op.weight_at());
    let mut operands: SmallVec<[(OperandView<'_>, Along); 8]> = smallvec![
        (call.ins[NormGrad::X], Along::Both),
        (call.ins[NormGrad::GRAD], Along::Both),
        (call.ins[NormGrad::RSTD], Along::Rows)
    ];
    operands.extend(mean.map(|k| (call.ins[k], Along::Rows)));
    operands.extend(weight.map(|k| (call.ins[k], Along::Columns)));
    let d = operands.len();
    operands.push((call.outs[0], Along::Both));
    let launch = RowKernel {
        op: "norm_grad",
        kind: "norm_grad",
        operands: &operands,
        outputs: d,
        rows,
        width,
        numbers: &[],
        details: &[u32::from(layer) | u32::from(weight.is_some()) << 1],
        indexed: false,
    };
    launch.run(call.wgpu, |f| {
        let (x, g, rstd) = (f.load(0), f.load(1), f.load(2));
        let mean = mean.map_or("0f".into(), |k| f.load(k));
        let h = weight.map_or(g.clone(), |k| format!("{g} * {}", f.load(k)));
        let mut all: SmallVec<[usize; 4]> = smallvec![0, 1];
        all.extend(weight);
        let sums = f.columns(&all, &format!("let h = {h};\nlevel += h;\nalong += h * (({x} - mean) * rstd);\n"));
        all.push(d);
        let store = f.store(d, "d");
        let level = if layer { "all_sum(local, level) / f32(width)" } else { "0f" };
        let each = f.columns(&all, &format!("let d = ({h} - mean_h - ({x} - mean) * rstd * slope) * rstd;\n{store}"));
        format!(
            "let rstd = {rstd};\nlet mean = {mean};\nvar level = 0f;\nvar along = 0f;\n{sums}\
             let mean_h = {level};\nlet slope = all_sum(local, along) / f32(width);\n{each}"
        )
    })?;
    parameters(call, op, rows, width)?;
    Ok(Support::Done)
}

fn parameters(call: &FusedCall<'_, '_>, op: &NormGrad, rows: usize, width: usize) -> Result<()> {
    static SLOPE: LazyLock<Program> =
        LazyLock::new(|| Program::new("norm_grad", |[x, g, r, m], []| [g * ((x - m) * r)]));
    static SLOPE_RMS: LazyLock<Program> = LazyLock::new(|| Program::new("norm_grad", |[x, g, r], []| [g * (x * r)]));
    static SUM: LazyLock<Program> = LazyLock::new(|| Program::new("norm_grad", |[g], []| [g]));
    let full = Shape::from([rows, width]);
    let seen = |p: OperandView<'_>, axes: [usize; 2]| -> Result<Layout> {
        Layout::contiguous(Shape::from(axes)).at(p.layout.offset()).broadcast_to(full)
    };
    let (x, g) = (call.ins[NormGrad::X], call.ins[NormGrad::GRAD]);
    let (x, g) = (x.seen(seen(x, [rows, width])?), g.seen(seen(g, [rows, width])?));
    let to = |k: usize| call.outs[k].seen(Layout::contiguous(Shape::from([1, width])).at(call.outs[k].layout.offset()));
    let sum = |program: &Program, ins: &[OperandView<'_>], k: usize| {
        reduce::places(
            call.wgpu,
            (program, &[DType::F32; 4][..ins.len()], DType::F32),
            ins,
            &[],
            &full,
            ReduceKind::Sum,
            (to(k), Accumulate::Overwrite),
        )
    };
    if op.0.weight {
        let rstd = call.ins[NormGrad::RSTD];
        let r = rstd.seen(seen(rstd, [rows, 1])?);
        match op.0.kind {
            NormKind::Layer => {
                let mean = call.ins[NormGrad::MEAN];
                let m = mean.seen(seen(mean, [rows, 1])?);
                sum(&SLOPE, &[x, g, r, m], 1)?;
            }
            NormKind::Rms => sum(&SLOPE_RMS, &[x, g, r], 1)?,
        }
    }
    if op.0.bias {
        sum(&SUM, &[g], 2)?;
    }
    Ok(())
}

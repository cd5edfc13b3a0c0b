//! Linear layers: a product with its bias and its residual in one call of cuBLASLt, which rounds once; and the
//! gradients of weight and bias, of which the second is summed while the first is computed. Operands that it cannot
//! read are copied; calls that it does not compute (a bias in `f64`, say) are decomposed.

use numcore::{
    Layout, Result, Shape, Support,
    fused::{Linear, LinearGrad},
};

use super::FusedCall;
use crate::{
    matmul::{affine, is_addend, is_bias, with_sum_of_rows},
    operand::Operand,
    pointwise::{Target, to_dense},
};

pub(super) fn run(call: &mut FusedCall<'_>, op: &Linear) -> Result<Support> {
    let out = call.outs[0];
    let w = call.ins[Linear::WEIGHT];
    let [inner, columns]: [usize; 2] = std::array::from_fn(|i| w.dims()[i]);
    let rows = out.numel() / columns.max(1);
    let Some(to) = seen(&out, [rows, columns]) else { return Ok(Support::Decompose) };
    let x = matrix(call, call.ins[Linear::X], [rows, inner], |_| true)?;
    let bias = op.bias.then(|| call.ins[Linear::BIAS]);
    let bias = bias.map(|b| matrix(call, b, [1, columns], is_bias)).transpose()?;
    let residual = op.residual.then(|| call.ins[call.ins.len() - 1]);
    let residual = residual.map(|r| matrix(call, r, [rows, columns], is_addend)).transpose()?;
    affine(call.cuda, x, w, to, bias.as_ref(), residual.as_ref())
}

/// The library overwrites the sum. A sum that is accumulated is added by the reduction, which rounds once.
pub(super) fn backward(call: &mut FusedCall<'_>) -> Result<Support> {
    let (weight, bias) = (call.outs[0], call.outs[1]);
    if call.added[1] || !is_bias(&bias) {
        return Ok(Support::Decompose);
    }
    let out = Target { to: weight, add: call.added[0] };
    with_sum_of_rows(call.cuda, call.ins[LinearGrad::X], call.ins[LinearGrad::GRAD], out, bias)
}

/// The operand as a matrix of these sizes that `fits`, or a copy of it.
fn matrix(call: &mut FusedCall<'_>, x: Operand, shape: [usize; 2], fits: fn(&Operand) -> bool) -> Result<Operand> {
    if let Some(x) = seen(&x, shape).filter(fits) {
        return Ok(x);
    }
    let (memory, copy) = to_dense(call.cuda, &x, x.dtype)?;
    call.kept.push(memory);
    Ok(Operand { layout: Layout::contiguous(Shape::from(shape)), ..copy })
}

/// A view of the operand as a matrix, if its strides allow one.
fn seen(x: &Operand, shape: [usize; 2]) -> Option<Operand> {
    x.layout.reshape(Shape::from(shape)).map(|layout| Operand { layout, ..*x })
}

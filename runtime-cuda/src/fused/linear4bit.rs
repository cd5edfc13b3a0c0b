//! Products with a matrix of four bits per element: one kernel dequantises it, and a GEMM multiplies.

use numcore::{Layout, Result, Support, fused::Linear4bit};

use super::FusedCall;
use crate::{
    handwritten::{DefineValue, HandwrittenKernel, KernelLaunch, blocks, element},
    matmul::product,
    operand::Operand,
    pointwise::Target,
};

/// The number of elements of a thread, as in the kernel's text.
const RUN: usize = 8;

pub(super) fn run(call: &mut FusedCall<'_>, op: &Linear4bit) -> Result<Support> {
    let dtype = call.dtype();
    let x = Operand { address: call.dense(Linear4bit::X)?, ..call.ins[Linear4bit::X] };
    let count = op.shape[0] * op.shape[1];
    let address = call.scratch(count * dtype.size())?;
    if count > 0 {
        dequantise(call, op, address, count)?;
    }
    let layout = Layout::contiguous(op.shape.into());
    let layout = if op.transposed { layout } else { layout.permute(&[1, 0])? };
    let matrix = Operand { address, layout, dtype };
    product(call.cuda, rows(&x)?, matrix, Target { to: rows(&call.outs[0])?, add: false })?;
    Ok(Support::Done)
}

/// Writes the matrix to this address, row-major, in the type of the product.
fn dequantise(call: &mut FusedCall<'_>, op: &Linear4bit, to: u64, count: usize) -> Result<()> {
    let [packed, code, outer] =
        [call.dense(Linear4bit::PACKED)?, call.dense(Linear4bit::CODE)?, call.dense(Linear4bit::SCALES)?];
    // Outer values are scales of blocks, or indices into nested scales; an operand that a kernel does not read has
    // address 0.
    let (scales, index, second) = match op.nested {
        None => (outer, 0, 0),
        Some(_) => (call.dense(Linear4bit::NESTED_SCALES)?, outer, call.dense(Linear4bit::NESTED_CODE)?),
    };
    let (nested_block, offset) = op.nested.map_or((1, 0.0), |nested| (nested.block, nested.offset));
    let defines = [("T", DefineValue::from(element(call.dtype()))), ("NESTED", op.nested.is_some().into())];
    let kernel = HandwrittenKernel::new("linear4bit.cu", "dequantise4bit", &defines);
    let mut launch = KernelLaunch::new(call.cuda, "linear4bit", &kernel)?;
    for address in [to, packed, code, scales, index, second] {
        launch = launch.arg(address);
    }
    for size in [count, op.block, nested_block] {
        launch = launch.arg(size as i64);
    }
    // SAFETY: the contract of `numcore::Runtime`: operands have the sizes that shape inference has checked and are
    // row-major; `to` is fresh memory of `count` elements.
    unsafe { launch.arg(offset).run(blocks(call.cuda, count.div_ceil(RUN)), [256, 1]) }
}

/// A row-major operand as one matrix whose columns are its last axis.
fn rows(x: &Operand) -> Result<Operand> {
    let width = x.dims()[x.dims().len() - 1];
    let rows = x.dims()[..x.dims().len() - 1].iter().product();
    Ok(Operand { layout: Layout::contiguous([rows, width].into()), ..*x })
}

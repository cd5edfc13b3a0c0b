//! Two-dimensional convolution as GEMM over an explicit im2col; with one channel per group, as a direct convolution.

use bytemuck::NoUninit;
use numcore::{
    Layout, Result, Shape, Support,
    fused::{Conv, ConvKind},
};

use super::FusedCall;
use crate::{
    axes::LoopAxes,
    handwritten::{DefineValue, HandwrittenKernel, KernelLaunch, Strided, blocks, element},
    matmul::product,
    operand::Operand,
    pointwise::Target,
};

/// The approximate bytes of im2col columns at a time: images are done in groups.
const COLUMNS: usize = 256 << 20;

/// The kernels' `struct Conv`.
#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct ConvSizes {
    batch: i32,
    channels: i32,
    input: [i32; 2],
    kernel: [i32; 2],
    output: [i32; 2],
    stride: [i32; 2],
    padding: [i32; 2],
    dilation: [i32; 2],
}

// The size that `window.cuh` asserts too.
const _: () = assert!(size_of::<ConvSizes>() == 56);

/// The relation `y = conv(x, w)`: shapes and addresses of the three operands, one of which is the output.
struct ConvPlan<'a> {
    op: &'a Conv,
    x: Operand,
    w: Operand,
    y: Operand,
}

pub(super) fn run(call: &mut FusedCall<'_>, op: &Conv) -> Result<Support> {
    let (a, b, out) = (call.ins[0], call.ins[1], call.outs[0]);
    // Empty operands are rare, and the decomposition handles them; a bias is a separate pass.
    if op.bias || [&a, &b, &out].iter().any(|o| o.numel() == 0 || o.numel() > i32::MAX as usize) {
        return Ok(Support::Decompose);
    }
    let dense = [call.dense(0)?, call.dense(1)?];
    debug_assert_eq!(dense.len(), 2);
    let (a, b) = (call.ins[0], call.ins[1]);
    let plan = match op.kind {
        ConvKind::Forward => ConvPlan { op, x: a, w: b, y: out },
        ConvKind::Input(_) => ConvPlan { op, x: out, w: b, y: a },
        ConvKind::Weight(_) => ConvPlan { op, x: a, w: out, y: b },
    };
    if plan.w.dims()[1] == 1 {
        return plan.depthwise(call);
    }
    let images = plan.images();
    let columns = call.scratch(images * plan.rows() * plan.pixels() * out.dtype.size())?;
    for first in (0..plan.x.dims()[0]).step_by(images) {
        let some = plan.narrowed(first, images.min(plan.x.dims()[0] - first))?;
        match op.kind {
            ConvKind::Forward => some.forward(call, columns)?,
            ConvKind::Input(_) => some.input_adjoint(call, columns)?,
            ConvKind::Weight(_) => some.weight_adjoint(call, columns, first > 0)?,
        }
    }
    Ok(Support::Done)
}

impl ConvPlan<'_> {
    /// The number of rows of an image's columns: `C · R · S`.
    fn rows(&self) -> usize {
        self.x.dims()[1] * self.w.dims()[2] * self.w.dims()[3]
    }

    /// The number of output positions, `P · Q`.
    fn pixels(&self) -> usize {
        self.y.dims()[2] * self.y.dims()[3]
    }

    /// The number of images done at a time.
    fn images(&self) -> usize {
        let each = self.rows() * self.pixels() * self.x.dtype.size();
        (COLUMNS / each).clamp(1, self.x.dims()[0])
    }

    /// The relation for `count` images from `first` on.
    fn narrowed(&self, first: usize, count: usize) -> Result<ConvPlan<'_>> {
        let part = |o: &Operand| -> Result<Operand> {
            let address = o.address + (first as isize * o.layout.strides()[0]) as u64 * o.dtype.size() as u64;
            Ok(Operand { address, layout: Layout::contiguous(o.layout.shape().with(0, count)), dtype: o.dtype })
        };
        Ok(ConvPlan { op: self.op, x: part(&self.x)?, w: self.w, y: part(&self.y)? })
    }

    fn sizes(&self) -> ConvSizes {
        let two = |n: [usize; 2]| n.map(|n| n as i32);
        let (x, w, y) = (self.x.dims(), self.w.dims(), self.y.dims());
        ConvSizes {
            batch: x[0] as i32,
            channels: x[1] as i32,
            input: two([x[2], x[3]]),
            kernel: two([w[2], w[3]]),
            output: two([y[2], y[3]]),
            stride: two(self.op.stride),
            padding: two(self.op.padding),
            dilation: two(self.op.dilation),
        }
    }

    fn kernel(&self, file: &'static str, entry: &'static str) -> HandwrittenKernel {
        HandwrittenKernel::new(file, entry, &[("T", DefineValue::from(element(self.x.dtype)))])
    }

    /// Writes windows as columns: element `(n, row, pixel)` at `n · batch_step + row · row_step + pixel`.
    fn unfold(&self, call: &FusedCall<'_>, columns: u64, batch_step: usize, row_step: usize) -> Result<()> {
        let dims = self.x.dims();
        // The kernel indexes the four axes: none may be merged.
        let axes = LoopAxes { sizes: dims.into(), steps: std::iter::once(self.x.steps()).collect() };
        let launch =
            KernelLaunch::new(call.cuda, "conv", &self.kernel("conv.cu", "unfold"))?.arg(columns).arg(self.x.address);
        let launch = launch.arg(Strided::of(&axes, 0)).arg(self.sizes()).arg(batch_step as i64).arg(row_step as i64);
        let count = dims[0] * self.rows() * self.pixels();
        // SAFETY: the contract of `numcore::Runtime`; the columns have space for these images.
        unsafe { launch.run(blocks(call.cuda, count), [256, 1]) }
    }

    /// An operand of sizes `dims` in dense memory.
    fn dense(&self, address: u64, dims: &[usize]) -> Result<Operand> {
        Ok(Operand { address, layout: Layout::contiguous(Shape::new(dims)?), dtype: self.x.dtype })
    }

    /// The operands of the product: the weight as `[N, G, O/G, C/G · R · S]` (broadcast over `N`), the columns as
    /// `[N, G, C/G · R · S, P · Q]`, the output as `[N, G, O/G, P · Q]`.
    fn matrices(&self, columns: u64) -> Result<[Operand; 3]> {
        let (n, groups, outputs) = (self.x.dims()[0], self.op.groups, self.w.dims()[0]);
        let inner = self.rows() / groups;
        let w = self.dense(self.w.address, &[groups, outputs / groups, inner])?;
        let w = Operand { layout: w.layout.broadcast_to(Shape::new(&[n, groups, outputs / groups, inner])?)?, ..w };
        let columns = self.dense(columns, &[n, groups, inner, self.pixels()])?;
        Ok([w, columns, self.dense(self.y.address, &[n, groups, outputs / groups, self.pixels()])?])
    }

    fn forward(&self, call: &FusedCall<'_>, columns: u64) -> Result<()> {
        self.unfold(call, columns, self.rows() * self.pixels(), self.pixels())?;
        let [w, columns, y] = self.matrices(columns)?;
        product(call.cuda, w, columns, Target { to: y, add: false })
    }

    fn input_adjoint(&self, call: &FusedCall<'_>, columns: u64) -> Result<()> {
        let [w, to, y] = self.matrices(columns)?;
        let w = Operand { layout: w.layout.permute(&[0, 1, 3, 2])?, ..w };
        product(call.cuda, w, y, Target { to, add: false })?;
        let launch =
            KernelLaunch::new(call.cuda, "conv", &self.kernel("conv.cu", "fold"))?.arg(self.x.address).arg(columns);
        let launch = launch.arg(self.sizes()).arg((self.rows() * self.pixels()) as i64).arg(self.pixels() as i64);
        // SAFETY: as in `unfold`.
        unsafe { launch.run(blocks(call.cuda, self.x.numel()), [256, 1]) }
    }

    /// Computes the weight's gradient by one GEMM over all images: `[G, O/G, N · P · Q]` times
    /// `[G, N · P · Q, C/G · R · S]`.
    fn weight_adjoint(&self, call: &mut FusedCall<'_>, columns: u64, add: bool) -> Result<()> {
        let (n, groups, outputs, pixels) = (self.x.dims()[0], self.op.groups, self.w.dims()[0], self.pixels());
        self.unfold(call, columns, pixels, n * pixels)?;
        let by_image = self.dense(self.y.address, &[n, outputs, pixels])?;
        let by_output = Operand { layout: by_image.layout.permute(&[1, 0, 2])?, ..by_image };
        let (memory, y) = crate::pointwise::to_dense(call.cuda, &by_output, by_output.dtype)?;
        call.kept.push(memory);
        let (inner, long) = (self.rows() / groups, n * pixels);
        let y = self.dense(y.address, &[groups, outputs / groups, long])?;
        let columns = self.dense(columns, &[groups, inner, long])?;
        let columns = Operand { layout: columns.layout.permute(&[0, 2, 1])?, ..columns };
        let to = self.dense(self.w.address, &[groups, outputs / groups, inner])?;
        product(call.cuda, y, columns, Target { to, add })
    }

    fn depthwise(&self, call: &FusedCall<'_>) -> Result<Support> {
        let (entry, operands, out) = match self.op.kind {
            ConvKind::Forward => ("depthwise", [&self.y, &self.x, &self.w], self.y.numel()),
            ConvKind::Input(_) => ("depthwise_input", [&self.x, &self.y, &self.w], self.x.numel()),
            ConvKind::Weight(_) => ("depthwise_weight", [&self.w, &self.x, &self.y], self.w.numel()),
        };
        let mut launch = KernelLaunch::new(call.cuda, "conv", &self.kernel("depthwise.cu", entry))?;
        for operand in operands {
            launch = launch.arg(operand.address);
        }
        let launch = launch.arg(self.sizes()).arg((self.w.dims()[0] / self.op.groups) as i32);
        let one_block_each = matches!(self.op.kind, ConvKind::Weight(_));
        let grid = if one_block_each { [out, 1, 1] } else { blocks(call.cuda, out) };
        // SAFETY: as in `unfold`; all three are dense.
        unsafe { launch.run(grid, [256, 1])? };
        Ok(Support::Done)
    }
}

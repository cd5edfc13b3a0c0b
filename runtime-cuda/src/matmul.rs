//! Matrix products as problems of a column-major library. A row-major product `a · b` is the column-major product
//! `bᵀ · aᵀ` of the same memory, so nothing is moved: transposed views become operation flags, strides leading
//! dimensions, axes along which an operand repeats batches of stride 0. Only operands without such a form are copied to
//! contiguous memory first.

use numcore::{DType, ErrorKind, Layout, MAX_RANK, Out, Result, Scalar, View};

use crate::{
    Cuda,
    axes::{LoopAxes, Steps},
    driver::{CublasGemm, GemmOperand},
    memory::CudaBuffer,
    operand::Operand,
    pointwise::{Target, convert, fill, to_dense},
};

/// `a: [B.., M, K]` times `b: [B.., K, N]` into `out: [B.., M, N]`.
pub(crate) fn matmul(cuda: &Cuda, a: View<'_, Cuda>, b: View<'_, Cuda>, out: Out<'_, Cuda>) -> Result<()> {
    product(cuda, a.into(), b.into(), Target::from(&out))
}

/// Computes a matrix product of operands by address.
pub(crate) fn product(cuda: &Cuda, a: Operand, b: Operand, out: Target) -> Result<()> {
    if out.to.numel() == 0 {
        return Ok(());
    }
    if !out.to.dtype.is_float() {
        let why = format!("there is no matrix product of {}", out.to.dtype);
        return Err(ErrorKind::Unsupported { op: "matmul", device: cuda.queue.engine.device, why }.into());
    }
    if a.dims()[a.dims().len() - 1] == 0 {
        return if out.add { Ok(()) } else { fill(cuda, out.to, Scalar::I64(0), false) };
    }
    let mut kept: Vec<CudaBuffer> = Vec::new();
    let a = fitting(cuda, a, &mut kept)?;
    let b = fitting(cuda, b, &mut kept)?;
    match BatchedGemm::new(&a, &b, &out) {
        Some(problem) => problem.run(cuda, out),
        None => {
            // The output's layout is not one that cuBLASLt writes.
            let layout = Layout::contiguous(*out.to.layout.shape());
            let memory = cuda.scratch(layout.numel() * out.to.dtype.size())?;
            let dense = Operand::of(&memory, layout, out.to.dtype);
            product(cuda, a, b, Target { to: dense, add: false })?;
            convert(cuda, &dense, out.to, out.add)
        }
    }
}

/// The operand, or a copy of it that a library can read. Axes along which it repeats still do.
fn fitting(cuda: &Cuda, x: Operand, kept: &mut Vec<CudaBuffer>) -> Result<Operand> {
    if MatrixLayout::of(&x.layout).form().is_some() {
        return Ok(x);
    }
    let (shape, rank) = (*x.layout.shape(), x.layout.rank());
    let mut once = x.layout;
    for axis in (0..rank - 2).filter(|&i| x.layout.strides()[i] == 0) {
        once = once.slice(axis, 0, 1, 1)?;
    }
    let (memory, copy) = to_dense(cuda, &Operand { layout: once, ..x }, x.dtype)?;
    kept.push(memory);
    Ok(Operand { layout: copy.layout.broadcast_to(shape)?, ..copy })
}

/// The last two axes of an operand.
#[derive(Clone, Copy, Debug, PartialEq)]
struct MatrixLayout {
    rows: usize,
    columns: usize,
    /// Elements between rows, and between columns.
    steps: [isize; 2],
}

impl MatrixLayout {
    fn of(layout: &Layout) -> MatrixLayout {
        let rank = layout.rank();
        let (dims, strides) = (layout.dims(), layout.strides());
        MatrixLayout { rows: dims[rank - 2], columns: dims[rank - 1], steps: [strides[rank - 2], strides[rank - 1]] }
    }

    fn transposed(self) -> MatrixLayout {
        MatrixLayout { rows: self.columns, columns: self.rows, steps: [self.steps[1], self.steps[0]] }
    }

    /// Elements between rows, if rows are contiguous.
    fn row_major(self) -> Option<usize> {
        let neighbours = self.steps[1] == 1 || self.columns == 1;
        let leading = if self.rows == 1 { self.columns as isize } else { self.steps[0] };
        (neighbours && leading >= self.columns as isize).then_some(leading as usize)
    }

    /// Elements between rows or columns, and whether the columns are the contiguous ones.
    fn form(self) -> Option<(usize, bool)> {
        let rows = self.row_major().map(|leading| (leading, false));
        rows.or_else(|| self.transposed().row_major().map(|leading| (leading, true)))
    }
}

/// A GEMM as the library takes it, for every position of the batch axes that it cannot take.
#[derive(Debug)]
struct BatchedGemm {
    gemm: CublasGemm,
    /// Addresses of the left, right and result matrix, as the library counts them.
    at: [u64; 3],
    /// Axes to loop over: strides in bytes of the three matrices.
    loops: LoopAxes,
}

impl BatchedGemm {
    /// `None` where the output has no form; the operands have one.
    fn new(a: &Operand, b: &Operand, out: &Target) -> Option<BatchedGemm> {
        let to = MatrixLayout::of(&out.to.layout);
        if to.row_major().is_none() {
            // Columns are contiguous: the transposed GEMM writes rows.
            to.transposed().row_major()?;
            let [a, b, to] = [a, b, &out.to].map(transposed);
            return BatchedGemm::new(&b, &a, &Target { to, ..*out });
        }
        let (ma, mb) = (MatrixLayout::of(&a.layout), MatrixLayout::of(&b.layout));
        let mut rows = ma.rows;
        let rank = out.to.layout.rank();
        let batch: Vec<usize> = (0..rank - 2).collect();
        let mut axes = LoopAxes::of(&out.to.dims()[..rank - 2], &[a.steps(), b.steps(), out.to.steps()], batch);
        // Where the right operand repeats and the left is contiguous from batch to batch, all batches are rows of one
        // GEMM.
        let mut last = axes.rank() - 1;
        while rows_go_on(&axes, last, ma, to, rows) {
            rows *= axes.sizes[last];
            axes.sizes[last] = 1;
            axes.steps.iter_mut().for_each(|s| s[last] = 0);
            if last == 0 {
                break;
            }
            last -= 1;
        }
        // The longest axis is the library's batch.
        let longest = (0..axes.rank()).max_by_key(|&i| axes.sizes[i])?;
        let (count, steps) = (axes.sizes[longest], axes.steps.clone());
        axes.sizes[longest] = 1;
        let side = |operand: &Operand, index: usize, (leading, other): (usize, bool)| GemmOperand {
            leading,
            batch: steps[index][longest],
            transposed: other,
            aligned: aligned(operand, &axes, &steps[index]),
        };
        let mut ma = ma;
        if rows != ma.rows {
            ma.rows = rows;
        }
        let gemm = CublasGemm {
            dtype: out.to.dtype,
            m: mb.columns,
            n: rows,
            k: ma.columns,
            a: side(b, 1, mb.form()?),
            b: side(a, 0, ma.form()?),
            d: side(&out.to, 2, (MatrixLayout { rows, ..to }.row_major()?, false)),
            batch: count,
            add: out.add,
            tf32: false,
        };
        let size = out.to.dtype.size() as isize;
        let order = [1, 0, 2].map(|i| steps[i].map(|s| s * size));
        let loops = LoopAxes { sizes: axes.sizes, steps: order.into_iter().collect() };
        Some(BatchedGemm { gemm, at: [b.address, a.address, out.to.address], loops })
    }

    fn run(mut self, cuda: &Cuda, out: Target) -> Result<()> {
        self.gemm.tf32 = cuda.tf32 && out.to.dtype == DType::F32;
        for position in 0..self.loops.count() {
            let at: [u64; 3] = std::array::from_fn(|i| self.at[i].wrapping_add_signed(self.offset(i, position)));
            // SAFETY: the contract of `numcore::Runtime`: views are inside their buffers, and the output overlaps
            // nothing.
            unsafe { cuda.queue.gemm(&self.gemm, at)? };
        }
        Ok(())
    }

    /// Bytes to a position of the loops.
    fn offset(&self, operand: usize, mut position: usize) -> i64 {
        let mut offset = 0;
        for (axis, &size) in self.loops.sizes.iter().enumerate().rev() {
            offset += (position % size) as i64 * self.loops.steps[operand][axis] as i64;
            position /= size;
        }
        offset
    }
}

/// Whether batch axis `axis` of the left operand and the output continues their rows, and the right one repeats along
/// it.
fn rows_go_on(axes: &LoopAxes, axis: usize, a: MatrixLayout, out: MatrixLayout, rows: usize) -> bool {
    let [left, right, to] = [0, 1, 2].map(|i| axes.steps[i][axis]);
    let lies = |m: MatrixLayout, step: isize| m.steps[1] == 1 && (m.steps[0] * rows as isize == step);
    axes.sizes[axis] > 1 && right == 0 && a.rows > 1 && lies(a, left) && lies(out, to)
}

fn transposed(x: &Operand) -> Operand {
    let rank = x.layout.rank();
    let mut order: Vec<usize> = (0..rank).collect();
    order.swap(rank - 2, rank - 1);
    Operand { layout: x.layout.permute(&order).unwrap_or(x.layout), ..*x }
}

/// The largest power of two up to 16 that divides the address of every matrix of an operand.
fn aligned(x: &Operand, loops: &LoopAxes, steps: &Steps) -> u32 {
    let looped = loops.sizes.iter().zip(&steps[..MAX_RANK]).filter(|(d, _)| **d > 1).map(|(_, s)| *s);
    let bytes = looped.fold(x.address | 16, |all, s| all | (s.unsigned_abs() * x.dtype.size()) as u64);
    1 << bytes.trailing_zeros()
}

//! Matrix products as problems of a column-major library. A row-major product `a · b` is the column-major product
//! `bᵀ · aᵀ` of the same memory, so nothing is moved: transposed views become operation flags, strides leading
//! dimensions, axes along which an operand repeats batches of stride 0. Only operands without such a form are copied to
//! contiguous memory first, and those of products that the library refuses.

use numcore::{DType, ErrorKind, Layout, MAX_RANK, Out, Result, Scalar, Shape, View};
use smallvec::SmallVec;

use crate::{
    Cuda,
    axes::{LoopAxes, Steps},
    driver::{CublasGemm, DriverFailure, GemmOperand},
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
        Some(problem) => match problem.run(cuda, out)? {
            None => Ok(()),
            Some(_) => by_copies(cuda, &a, &b, &out),
        },
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
    let (memory, copy) = to_dense(cuda, &without_repeats(&x)?, x.dtype)?;
    kept.push(memory);
    Ok(Operand { layout: copy.layout.broadcast_to(*x.layout.shape())?, ..copy })
}

/// One of the matrices that an operand repeats.
fn without_repeats(x: &Operand) -> Result<Operand> {
    let mut once = x.layout;
    for axis in (0..x.layout.rank() - 2).filter(|&i| x.layout.strides()[i] == 0) {
        once = once.slice(axis, 0, 1, 1)?;
    }
    Ok(Operand { layout: once, ..*x })
}

/// A product that the library refused, on copies it has every algorithm for. Sums are still rounded once: what the
/// result is added to is copied too.
fn by_copies(cuda: &Cuda, a: &Operand, b: &Operand, out: &Target) -> Result<()> {
    let mut kept: Vec<CudaBuffer> = Vec::new();
    let mut copy = |x: &Operand, filled: bool| -> Result<Operand> {
        let once = without_repeats(x)?;
        let (memory, copy) = aligned_space(cuda, &once)?;
        kept.push(memory);
        if filled {
            convert(cuda, &once, copy, false)?;
        }
        Ok(Operand { layout: copy.layout.broadcast_to(*x.layout.shape())?, ..copy })
    };
    let (left, right, to) = (copy(a, true)?, copy(b, true)?, copy(&out.to, out.add)?);
    let dense = Target { to, add: out.add };
    let refused = match BatchedGemm::new(&left, &right, &dense) {
        Some(problem) => problem.run(cuda, dense)?,
        None => Some(DriverFailure::new("the copies have no form")),
    };
    match refused {
        None => convert(cuda, &to, out.to, false),
        Some(failure) => {
            let (a, b, dtype) = (a.dims(), b.dims(), out.to.dtype);
            let why = format!(
                "the library computes no product {a:?} x {b:?} of {dtype}, also without a workspace and on aligned copies ({failure}); \
                 use other shapes or another type"
            );
            Err(ErrorKind::Unsupported { op: "matmul", device: cuda.queue.engine.device, why }.into())
        }
    }
}

/// Memory for the elements of `x`, of which every row starts at a multiple of 16 bytes.
fn aligned_space(cuda: &Cuda, x: &Operand) -> Result<(CudaBuffer, Operand)> {
    let last = x.layout.rank() - 1;
    let columns = x.dims()[last];
    let mut dims: SmallVec<[usize; MAX_RANK]> = x.dims().into();
    dims[last] = columns.next_multiple_of(16 / x.dtype.size());
    let padded = Layout::contiguous(Shape::new(&dims)?);
    let memory = cuda.scratch(padded.numel() * x.dtype.size())?;
    let space = Operand::of(&memory, padded.slice(last, 0, columns, 1)?, x.dtype);
    Ok((memory, space))
}

/// The most matrices of one call, above which the library has no algorithm (a dimension of a grid ends at 65,535). A
/// power of two, so that every call's first matrix is as aligned as the first of all.
const MOST_BATCHES: usize = 1 << 15;

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
        // From a single row nothing leads to another: whatever makes rows start at multiples of 16 bytes.
        let leading = if self.rows == 1 { self.columns.next_multiple_of(8) as isize } else { self.steps[0] };
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
        // The longest axis is the library's batch, which goes forwards.
        let forwards = |axis: &usize| axes.steps.iter().all(|steps| steps[*axis] >= 0);
        let longest = (0..axes.rank()).filter(forwards).max_by_key(|&i| axes.sizes[i]);
        let steps = axes.steps.clone();
        let count = longest.map_or(1, |axis| std::mem::replace(&mut axes.sizes[axis], 1));
        let side = |operand: &Operand, index: usize, (leading, other): (usize, bool)| GemmOperand {
            leading,
            batch: longest.map_or(0, |axis| steps[index][axis]),
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

    /// What the library says if it refuses the problem; nothing was queued then.
    fn run(mut self, cuda: &Cuda, out: Target) -> Result<Option<DriverFailure>> {
        self.gemm.tf32 = cuda.tf32 && out.to.dtype == DType::F32;
        let CublasGemm { a, b, d, batch, dtype, .. } = self.gemm;
        let first = |start: usize, side: &GemmOperand| start as i64 * side.batch as i64 * dtype.size() as i64;
        let starts: Vec<usize> = (0..batch).step_by(MOST_BATCHES).collect();
        for (position, &start) in (0..self.loops.count()).flat_map(|p| starts.iter().map(move |s| (p, s))) {
            let before = [a, b, d].map(|side| first(start, &side));
            let at: [u64; 3] =
                std::array::from_fn(|i| self.at[i].wrapping_add_signed(self.offset(i, position) + before[i]));
            let gemm = CublasGemm { batch: MOST_BATCHES.min(batch - start), ..self.gemm };
            // SAFETY: the contract of `numcore::Runtime`: views are inside their buffers, and the output overlaps
            // nothing.
            let refused = unsafe { cuda.queue.gemm(&gemm, at)? };
            match refused {
                None => {}
                Some(failure) if position == 0 && start == 0 => return Ok(Some(failure)),
                // Parts of the result are there, and may have been added to.
                Some(failure) => return cuda.queue.kept("matmul", Err(failure)),
            }
        }
        Ok(None)
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

//! Matrix products as problems of a column-major library. A row-major product `a · b` is the column-major product
//! `bᵀ · aᵀ` of the same memory, so nothing is moved: transposed views become operation flags, strides leading
//! dimensions, axes along which an operand repeats batches of stride 0. Only operands without such a form are copied to
//! contiguous memory first, and those of products that the library refuses.

use numcore::{DType, Error, Layout, MAX_RANK, Out, Result, Scalar, Shape, Support, View};
use smallvec::SmallVec;

use crate::{
    Cuda,
    axes::{LoopAxes, Steps},
    driver::{CublasGemm, DriverFailure, Epilogue, GemmOperand, GemmPlaces},
    matrix_layout::MatrixLayout,
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
        return Err(Error::unsupported_on(cuda.queue.engine.device, "matmul", why));
    }
    if a.dims()[a.dims().len() - 1] == 0 {
        return if out.add { Ok(()) } else { fill(cuda, out.to, Scalar::I64(0), false) };
    }
    if let Some((extent, parts)) = uneven(&a, &b, &out.to) {
        return in_two(cuda, [a, b], out, extent, parts);
    }
    let mut kept: Vec<CudaBuffer> = Vec::new();
    let a = fitting(cuda, a, &mut kept)?;
    let b = fitting(cuda, b, &mut kept)?;
    match BatchedGemm::new(&a, &b, &out) {
        Some(problem) => match problem.run(cuda)? {
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

/// An extent that a product is split along.
#[derive(Clone, Copy)]
enum Extent {
    Rows,
    Inner,
    Columns,
}

/// Extents from which a product is worth two calls of the library.
const LARGE: usize = 1024;
/// Halves in 16 bytes: the library has its fast algorithms for multiples of it alone, also where rows are padded to that.
const GROUP: usize = 8;

/// The start and length of two parts of an extent.
type Parts = [(usize, usize); 2];

/// The large extent of a product of halves that is no multiple of 16 bytes: the largest multiple in it, and what is left.
/// None where rows of it are not padded to a multiple: most would be unaligned still.
fn uneven(a: &Operand, b: &Operand, out: &Operand) -> Option<(Extent, Parts)> {
    let [left, right, to] = [a, b, out].map(|x| MatrixLayout::of(&x.layout));
    // Along an axis whose elements are adjacent, lines begin at multiples of the group.
    let is_padded = |m: MatrixLayout, axis: usize| m.steps[axis] != 1 || m.steps[1 - axis] % GROUP as isize == 0;
    let extents = [
        (Extent::Columns, right.columns, is_padded(right, 1) && is_padded(to, 1)),
        (Extent::Inner, left.columns, is_padded(left, 1) && is_padded(right, 0)),
        (Extent::Rows, left.rows, left.steps[0] == 1 && is_padded(left, 0) && is_padded(to, 0)),
    ];
    let is_uneven =
        |(_, size, padded): &(Extent, usize, bool)| *padded && *size >= LARGE && !size.is_multiple_of(GROUP);
    let (extent, size, _) = extents.into_iter().find(is_uneven).filter(|_| a.dtype.is_half())?;
    let at = size / GROUP * GROUP;
    Some((extent, [(0, at), (at, size - at)]))
}

/// A product by the parts of an extent. It is rounded once: halves that are sums of both are summed in `f32`.
fn in_two(cuda: &Cuda, [a, b]: [Operand; 2], out: Target, extent: Extent, parts: Parts) -> Result<()> {
    let slice = |x: &Operand, from_end: usize, start: usize, length: usize| -> Result<Operand> {
        let layout = x.layout.slice(x.layout.rank() - from_end, start, length, 1)?;
        let moved = layout.offset() as i64 - x.layout.offset() as i64;
        Ok(Operand { address: x.address.wrapping_add_signed(moved * x.dtype.size() as i64), layout, ..*x })
    };
    match extent {
        Extent::Columns => parts.into_iter().try_for_each(|(start, length)| {
            let to = slice(&out.to, 1, start, length)?;
            product(cuda, a, slice(&b, 1, start, length)?, Target { to, ..out })
        }),
        Extent::Rows => parts.into_iter().try_for_each(|(start, length)| {
            let to = slice(&out.to, 2, start, length)?;
            product(cuda, slice(&a, 2, start, length)?, b, Target { to, ..out })
        }),
        Extent::Inner if out.to.dtype.is_half() => {
            let (layout, dtype) = (Layout::contiguous(*out.to.layout.shape()), out.to.dtype.compute());
            let memory = cuda.scratch(layout.numel() * dtype.size())?;
            let sum = Operand::of(&memory, layout, dtype);
            in_two(cuda, [a, b], Target { to: sum, add: false }, extent, parts)?;
            convert(cuda, &sum, out.to, out.add)
        }
        Extent::Inner => parts.into_iter().try_for_each(|(start, length)| {
            let add = out.add || start > 0;
            product(cuda, slice(&a, 1, start, length)?, slice(&b, 2, start, length)?, Target { add, ..out })
        }),
    }
}

/// Whether an epilogue takes these elements, one for each column: vectors are read 16 bytes at a time.
pub(crate) fn is_bias(x: &Operand) -> bool {
    x.layout.is_contiguous() && x.address.is_multiple_of(16)
}

/// Whether a product can be added to this matrix.
pub(crate) fn is_addend(x: &Operand) -> bool {
    MatrixLayout::of(&x.layout).row_major().is_some()
}

/// Computes `x · w + bias + residual` for rows `x: [N, I]`, `w: [I, O]`, a bias `[1, O]` that [`is_bias`] and a residual
/// `[N, O]` that [`is_addend`] in one call of the library, which rounds once; or nothing, where that refuses.
pub(crate) fn affine(
    cuda: &Cuda,
    x: Operand,
    w: Operand,
    out: Operand,
    bias: Option<&Operand>,
    residual: Option<&Operand>,
) -> Result<Support> {
    if out.numel() == 0 {
        return Ok(Support::Done);
    }
    if x.dims()[1] == 0 || !is_addend(&out) || uneven(&x, &w, &out).is_some() {
        return Ok(Support::Decompose);
    }
    let mut kept: Vec<CudaBuffer> = Vec::new();
    let (x, w) = (fitting(cuda, x, &mut kept)?, fitting(cuda, w, &mut kept)?);
    let Some(mut problem) = BatchedGemm::new(&x, &w, &Target { to: out, add: false }) else {
        return Ok(Support::Decompose);
    };
    if let Some(r) = residual {
        let Some(leading) = MatrixLayout::of(&r.layout).row_major() else { return Ok(Support::Decompose) };
        let aligned = aligned(r, &problem.loops, &[0; MAX_RANK]);
        problem.gemm.c = Some(GemmOperand { leading, batch: 0, transposed: false, aligned });
        problem.at.c = r.address;
    }
    if let Some(bias) = bias {
        problem.gemm.epilogue = Epilogue::Bias;
        problem.at.vector = bias.address;
    }
    Ok(if problem.run(cuda)?.is_none() { Support::Done } else { Support::Decompose })
}

/// Computes `xᵀ · g` and the sum of the rows of `g` in one call of the library, for `x: [N, I]`, `g: [N, O]` and a sum
/// `[O]` that [`is_bias`]; or nothing, where that refuses. The library sums whichever operand `g` is to it.
pub(crate) fn with_sum_of_rows(cuda: &Cuda, x: Operand, g: Operand, out: Target, sum: Operand) -> Result<Support> {
    let xt = transposed(&x);
    if out.to.numel() == 0 || g.dims()[0] == 0 || uneven(&xt, &g, &out.to).is_some() {
        return Ok(Support::Decompose);
    }
    let mut kept: Vec<CudaBuffer> = Vec::new();
    let (xt, g) = (fitting(cuda, xt, &mut kept)?, fitting(cuda, g, &mut kept)?);
    let Some(mut problem) = BatchedGemm::new(&xt, &g, &out) else { return Ok(Support::Decompose) };
    // The output's rows are `g`'s columns where its columns are contiguous: `BatchedGemm::new` exchanged the operands.
    let is_exchanged = MatrixLayout::of(&out.to.layout).row_major().is_none();
    problem.gemm.epilogue = if is_exchanged { Epilogue::SumOfB } else { Epilogue::SumOfA };
    problem.at.vector = sum.address;
    Ok(if problem.run(cuda)?.is_none() { Support::Done } else { Support::Decompose })
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
        Some(problem) => problem.run(cuda)?,
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
            Err(Error::unsupported_on(cuda.queue.engine.device, "matmul", why))
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

/// A GEMM as the library takes it, for every position of the batch axes that it cannot take.
#[derive(Debug)]
struct BatchedGemm {
    gemm: CublasGemm,
    /// The addresses of the first matrices, as the library counts them.
    at: GemmPlaces,
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
            dtype: a.dtype,
            into: out.to.dtype,
            m: mb.columns,
            n: rows,
            k: ma.columns,
            a: side(b, 1, mb.form()?),
            b: side(a, 0, ma.form()?),
            d: side(&out.to, 2, (MatrixLayout { rows, ..to }.row_major()?, false)),
            c: None,
            epilogue: Epilogue::Nothing,
            batch: count,
            add: out.add,
            tf32: false,
        };
        let sizes = [a, b, &out.to].map(|x| x.dtype.size() as isize);
        let order = [1, 0, 2].map(|i| steps[i].map(|s| s * sizes[i]));
        let loops = LoopAxes { sizes: axes.sizes, steps: order.into_iter().collect() };
        let at = GemmPlaces { a: b.address, b: a.address, d: out.to.address, ..GemmPlaces::default() };
        Some(BatchedGemm { gemm, at, loops })
    }

    /// What the library says if it refuses the problem; nothing was queued then.
    fn run(mut self, cuda: &Cuda) -> Result<Option<DriverFailure>> {
        self.gemm.tf32 = cuda.products.tf32 && self.gemm.dtype == DType::F32;
        let CublasGemm { a, b, d, batch, dtype, into, .. } = self.gemm;
        let first =
            |start: usize, side: &GemmOperand, dtype: DType| start as i64 * side.batch as i64 * dtype.size() as i64;
        let starts: Vec<usize> = (0..batch).step_by(MOST_BATCHES).collect();
        for (position, &start) in (0..self.loops.count()).flat_map(|p| starts.iter().map(move |s| (p, s))) {
            let before = [first(start, &a, dtype), first(start, &b, dtype), first(start, &d, into)];
            let moved = |at: u64, i: usize| at.wrapping_add_signed(self.offset(i, position) + before[i]);
            let GemmPlaces { a, b, d, .. } = self.at;
            let at = GemmPlaces { a: moved(a, 0), b: moved(b, 1), d: moved(d, 2), ..self.at };
            let gemm = CublasGemm { batch: MOST_BATCHES.min(batch - start), ..self.gemm };
            // SAFETY: the contract of `numcore::Runtime`: views are inside their buffers, and the output overlaps
            // nothing.
            let refused = unsafe { cuda.queue.gemm(&gemm, at, cuda.products.tuned)? };
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

//! Matrix products: tiles of the output, spread over threads, each one call of a packed kernel that takes any strides.
//!
//! The tiles are cut by the sizes alone, and no sum is split, so a product has the same bits at any number of threads.
//! Halves are widened to `f32`, multiplied there, and rounded once.

use std::cell::RefCell;

use gemm::Parallelism;
use numcore::{Accumulate, DType, Layout, Out, Result, View};

use crate::{
    Buffer, Cpu, Engine,
    element::{Lane, Stored},
    operand::{Base, Operand},
    pointwise::{convert, turn},
    walk::Walk,
};

/// Multiplications of one tile or group of small products, about; what is less is not worth a hand-over.
const GRAIN: usize = 1 << 21;
/// Most tasks of one product.
const TASKS: usize = 16;
/// Tiles begin at multiples of this, which the kernels' own blocks divide, and are not narrower.
const EDGE: usize = 96;
/// Bytes of a panel at most: a longer one is left as it lies.
const PANEL: usize = 32 << 20;

thread_local! {
    /// A panel of the right operand, turned; kept, so that a product allocates nothing.
    static TURNED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// `a: [B.., M, K]` times `b: [B.., K, N]` into `out: [B.., M, N]`.
pub(crate) fn matmul(cpu: &Cpu, a: View<'_, Cpu>, b: View<'_, Cpu>, out: Out<'_, Cpu>) -> Result<()> {
    let (a, b, to) = (Operand::from(a), Operand::from(b), Operand::from(&out.view));
    if to.layout.numel() == 0 {
        return Ok(());
    }
    if to.dtype.is_half() {
        return halves(cpu, &a, &b, to, out.how);
    }
    let rows = if worth_dense_rows(&a, &b) { Some(dense(cpu, &a, a.dtype)?) } else { None };
    let a = rows.as_ref().map_or(a, |(memory, layout)| Operand::of(memory, *layout, a.dtype));
    let product = Product::new(&a.layout, &b.layout, &to.layout);
    let engine = &*cpu.queue.engine;
    match to.dtype {
        DType::F64 => product.run::<f64>(engine, to.base(), a.base(), b.base(), out.how),
        _ => product.run::<f32>(engine, to.base(), a.base(), b.base(), out.how),
    }
    Ok(())
}

/// Whether rows of the left operand should be laid out anew: every tile of columns would pack them again, element by element.
fn worth_dense_rows(a: &Operand, b: &Operand) -> bool {
    let rank = a.layout.rank();
    let (k, n) = (a.layout.dims()[rank - 1], b.layout.dims()[rank - 1]);
    a.layout.strides()[rank - 1] != 1 && k >= EDGE / 2 && n >= EDGE
}

/// Where the kernel finds one matrix: strides along its rows and columns.
type Strides = [isize; 2];

struct Product {
    batch: Walk<3>,
    m: usize,
    k: usize,
    n: usize,
    a: Strides,
    b: Strides,
    out: Strides,
}

impl Product {
    fn new(a: &Layout, b: &Layout, out: &Layout) -> Product {
        let rank = out.rank();
        let last_two = |l: &Layout| [l.strides()[rank - 2], l.strides()[rank - 1]];
        Product {
            batch: Walk::new([out, a, b], |i| i + 2 >= rank),
            m: out.dims()[rank - 2],
            k: a.dims()[rank - 1],
            n: out.dims()[rank - 1],
            a: last_two(a),
            b: last_two(b),
            out: last_two(out),
        }
    }

    fn run<T: Stored + Lane>(&self, engine: &Engine, out: Base<T>, a: Base<T>, b: Base<T>, how: Accumulate) {
        if self.k == 0 && how == Accumulate::Add {
            return;
        }
        let work = (self.m * self.n * self.k).max(1);
        let (tm, tn) = tile(self.m, self.n, (work / GRAIN).clamp(1, TASKS.div_ceil(self.batch.len())));
        let (down, across) = (self.m.div_ceil(tm), self.n.div_ceil(tn));
        let grain = if down * across > 1 { 1 } else { (GRAIN / work).max(1) };
        engine.ranges(self.batch.len() * down * across, grain, |part| {
            for task in part {
                let [o, i, j] = self.batch.at(task / (down * across));
                let (row, column) = (task / across % down * tm, task % across * tn);
                let size = (tm.min(self.m - row), tn.min(self.n - column));
                let (row, column) = (row as isize, column as isize);
                let out = out.at(o + row * self.out[0] + column * self.out[1]);
                let (a, b) = (a.at(i + row * self.a[0]), b.at(j + column * self.b[1]));
                // SAFETY: a tile of the output, which is this task's alone, and the rows and columns it needs.
                unsafe { self.tile(engine, size, out, a, b, how) };
            }
        });
    }

    /// One tile of `m × n`. Columns of `b` that lie along `k` are turned first: the kernel would read them element by element.
    ///
    /// # Safety
    /// The tile and its rows of `a` and columns of `b` lie in their operands; nothing else sees the tile meanwhile.
    unsafe fn tile<T: Stored + Lane>(
        &self,
        engine: &Engine,
        (m, n): (usize, usize),
        out: *mut T,
        a: *const T,
        b: *const T,
        how: Accumulate,
    ) {
        let bytes = n * self.k * size_of::<T>();
        let along = self.b[0] == 1 && self.b[1] != 1 && self.out[1] == 1;
        if !along || m < EDGE / 2 || n < 16 || bytes > PANEL {
            // SAFETY: the caller's promise.
            return unsafe { self.kernel((m, n), out, a, (b, self.b), how) };
        }
        TURNED.with_borrow_mut(|words| {
            words.resize(words.len().max(bytes.div_ceil(8)), 0);
            let panel = words.as_mut_ptr().cast::<T>();
            let line = (n * size_of::<T>()) as isize;
            let from = (b.cast_mut().cast(), self.b[1] * size_of::<T>() as isize);
            // SAFETY: the caller's promise; the panel is this thread's.
            unsafe {
                turn::<T>(engine.simd, (panel.cast(), line), from, (self.k, n));
                self.kernel((m, n), out, a, (panel, [n as isize, 1]), how);
            }
        });
    }

    /// # Safety
    /// As for [`tile`](Product::tile).
    unsafe fn kernel<T: Lane>(
        &self,
        (m, n): (usize, usize),
        out: *mut T,
        a: *const T,
        (b, [b_row, b_column]): (*const T, Strides),
        how: Accumulate,
    ) {
        let add = how == Accumulate::Add;
        let ([a_row, a_column], [out_row, out_column]) = (self.a, self.out);
        let alpha = if add { T::ONE } else { T::ZERO };
        // SAFETY: the caller's promise.
        unsafe {
            gemm::gemm(
                m,
                n,
                self.k,
                out,
                out_column,
                out_row,
                add,
                a,
                a_column,
                a_row,
                b,
                b_column,
                b_row,
                alpha,
                T::ONE,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}

/// The size of a tile, for about `tiles` of them. Columns are cut first: a piece of the right operand is packed once then,
/// while every cut of the rows packs it again.
fn tile(m: usize, n: usize, tiles: usize) -> (usize, usize) {
    let across = tiles.min(n / EDGE).max(1);
    let down = (tiles / across).min(m / EDGE).max(1);
    (m.div_ceil(down).next_multiple_of(EDGE), n.div_ceil(across).next_multiple_of(EDGE))
}

fn halves(cpu: &Cpu, a: &Operand, b: &Operand, to: Operand, how: Accumulate) -> Result<()> {
    let engine = &*cpu.queue.engine;
    let (wide_a, la) = dense(cpu, a, DType::F32)?;
    let (wide_b, lb) = dense(cpu, b, DType::F32)?;
    let lo = Layout::contiguous(*to.layout.shape());
    let memory = cpu.scratch(lo.numel() * size_of::<f32>())?;
    let product = Operand::of(&memory, lo, DType::F32);
    let [a, b] = [(&wide_a, la), (&wide_b, lb)].map(|(memory, l)| Operand::of(memory, l, DType::F32).base());
    Product::new(&la, &lb, &lo).run::<f32>(engine, product.base(), a, b, Accumulate::Overwrite);
    convert(engine, product, to, how)
}

/// The operand as `dtype` in row-major memory; axes along which it repeats still do.
fn dense(cpu: &Cpu, x: &Operand, dtype: DType) -> Result<(Buffer, Layout)> {
    let shape = *x.layout.shape();
    let mut once = x.layout;
    for (i, _) in x.layout.strides().iter().enumerate().filter(|(_, s)| **s == 0) {
        once = once.slice(i, 0, shape[i].min(1), 1)?;
    }
    let dense = Layout::contiguous(*once.shape());
    let memory = cpu.scratch(dense.numel() * dtype.size())?;
    let from = Operand { layout: once, ..*x };
    convert(&cpu.queue.engine, from, Operand::of(&memory, dense, dtype), Accumulate::Overwrite)?;
    Ok((memory, dense.broadcast_to(shape)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_and_are_few() {
        for (m, n) in [(1, 1), (1024, 1024), (512, 50257), (50257, 512), (7, 9), (1, 4096), (4096, 1), (100, 200)] {
            for tiles in [1, 2, 5, 16] {
                let (tm, tn) = tile(m, n, tiles);
                assert!(tm > 0 && tn > 0 && m.div_ceil(tm) * n.div_ceil(tn) <= tiles, "{m} {n} {tiles}: {tm} {tn}");
            }
        }
        assert_eq!(tile(1024, 1024, 2), (1056, 576));
        assert_eq!(tile(4096, 64, 4), (1056, 96));
    }
}

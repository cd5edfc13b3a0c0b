//! Matrix products: tiles of the output, spread over threads, each one call of a packed kernel that takes any strides.
//!
//! The tiles are cut by the sizes alone, and no sum is split, so a product has the same bits at any number of threads.
//! Halves are widened to `f32`, multiplied there, and rounded once.

use gemm::Parallelism;
use numcore::{Accumulate, DType, Layout, Out, Result, View};

use crate::{
    Buffer, Cpu, Engine,
    element::{Lane, Stored},
    operand::{Base, Operand},
    walk::{Axis, Walk},
};

/// Multiplications of one tile or group of small products, about; what is less is not worth a hand-over.
const GRAIN: usize = 1 << 21;
/// Most tiles along both axes of one product: each packs its operands anew.
const TILES: usize = 16;
/// Tiles begin at multiples of this, which the kernels' own blocks divide.
const EDGE: usize = 48;
/// Elements of one task of a conversion.
const CONVERT: usize = 1 << 15;

/// `a: [B.., M, K]` times `b: [B.., K, N]` into `out: [B.., M, N]`.
pub(crate) fn matmul(cpu: &Cpu, a: View<'_, Cpu>, b: View<'_, Cpu>, out: Out<'_, Cpu>) -> Result<()> {
    let (a, b, to) = (Operand::from(a), Operand::from(b), Operand::from(&out.view));
    let engine = &*cpu.queue.engine;
    match to.dtype {
        DType::F16 => halves::<half::f16>(cpu, &a, &b, &to, out.how),
        DType::BF16 => halves::<half::bf16>(cpu, &a, &b, &to, out.how),
        DType::F64 => {
            Product::new(a.layout, b.layout, to.layout).run::<f64>(engine, to.base(), a.base(), b.base(), out.how);
            Ok(())
        }
        _ => {
            Product::new(a.layout, b.layout, to.layout).run::<f32>(engine, to.base(), a.base(), b.base(), out.how);
            Ok(())
        }
    }
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
    fn new(a: Layout, b: Layout, out: Layout) -> Product {
        let rank = out.rank();
        let last_two = |l: &Layout| [l.strides()[rank - 2], l.strides()[rank - 1]];
        Product {
            batch: Walk::new([&out, &a, &b], |i| i + 2 >= rank),
            m: out.dims()[rank - 2],
            k: a.dims()[rank - 1],
            n: out.dims()[rank - 1],
            a: last_two(&a),
            b: last_two(&b),
            out: last_two(&out),
        }
    }

    fn run<T: Stored + Lane>(&self, engine: &Engine, out: Base<T>, a: Base<T>, b: Base<T>, how: Accumulate) {
        let work = self.m * self.n * self.k;
        if self.batch.len() * self.m * self.n == 0 || (self.k == 0 && how == Accumulate::Add) {
            return;
        }
        let (tm, tn) = tile(self.m, self.n, self.k);
        let (down, across) = (self.m.div_ceil(tm), self.n.div_ceil(tn));
        let tasks = self.batch.len() * down * across;
        engine.ranges(tasks, if down * across > 1 { 1 } else { (GRAIN / work.max(1)).max(1) }, |part| {
            for task in part {
                let [o, i, j] = self.batch.at(task / (down * across));
                let (row, column) = (task / across % down * tm, task % across * tn);
                let size = (tm.min(self.m - row), tn.min(self.n - column));
                let (row, column) = (row as isize, column as isize);
                let out = out.at(o + row * self.out[0] + column * self.out[1]);
                let (a, b) = (a.at(i + row * self.a[0]), b.at(j + column * self.b[1]));
                // SAFETY: a tile of the output, which is this task's alone, and the rows and columns it needs.
                unsafe { self.kernel(size, out, a, b, how) };
            }
        });
    }

    /// One tile of `m × n`.
    ///
    /// # Safety
    /// The tile and its rows of `a` and columns of `b` lie in their operands; nothing else sees the tile meanwhile.
    unsafe fn kernel<T: Lane>(&self, (m, n): (usize, usize), out: *mut T, a: *const T, b: *const T, how: Accumulate) {
        let add = how == Accumulate::Add;
        // SAFETY: the caller's promise.
        unsafe {
            gemm::gemm(
                m,
                n,
                self.k,
                out,
                self.out[1],
                self.out[0],
                add,
                a,
                self.a[1],
                self.a[0],
                b,
                self.b[1],
                self.b[0],
                if add { T::ONE } else { T::ZERO },
                T::ONE,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}

/// The size of a tile: as few as give every thread some work, close to square.
fn tile(m: usize, n: usize, k: usize) -> (usize, usize) {
    let tiles = (m * n / GRAIN.div_ceil(k.max(1)).max(1)).clamp(1, TILES);
    let (mut down, mut across) = (1, 1);
    while 2 * down * across <= tiles {
        if m / down > n / across { down *= 2 } else { across *= 2 }
    }
    (m.div_ceil(down).next_multiple_of(EDGE), n.div_ceil(across).next_multiple_of(EDGE))
}

fn halves<T: Stored<Lane = f32>>(
    cpu: &Cpu,
    a: &Operand,
    b: &Operand,
    to: &Operand,
    how: Accumulate,
) -> Result<()> {
    let engine = &*cpu.queue.engine;
    let (wide_a, la) = widened::<T>(cpu, a)?;
    let (wide_b, lb) = widened::<T>(cpu, b)?;
    let dense = Layout::contiguous(*to.layout.shape());
    let product = cpu.scratch(dense.numel() * size_of::<f32>())?;
    let from = Base::new(product.ptr().cast::<f32>());
    let [pa, pb] = [&wide_a, &wide_b].map(|w| Base::new(w.ptr().cast::<f32>()));
    Product::new(la, lb, dense).run::<f32>(engine, from, pa, pb, Accumulate::Overwrite);
    let (cells, out) = (Walk::new([&to.layout, &dense], |_| false), to.base::<T>());
    engine.ranges(cells.len(), CONVERT, |part| {
        cells.each(part.start, part.end, |_, [o, i]| {
            // SAFETY: positions of the output and of the product; no two tasks share one.
            unsafe {
                let x = from.get(i);
                out.set(o, T::store(if how == Accumulate::Add { out.get(o).load() + x } else { x }));
            }
        });
    });
    Ok(())
}

/// The operand in `f32`, dense; axes along which it repeats still do.
fn widened<T: Stored<Lane = f32>>(cpu: &Cpu, x: &Operand) -> Result<(Buffer, Layout)> {
    let (mut thin, shape) = (*x.layout.shape(), *x.layout.shape());
    for (i, _) in x.layout.strides().iter().enumerate().filter(|(_, s)| **s == 0) {
        thin = thin.with(i, 1);
    }
    let dense = Layout::contiguous(thin);
    let buffer = cpu.scratch(thin.numel() * size_of::<f32>())?;
    let (to, from) = (Base::new(buffer.ptr().cast::<f32>()), x.base::<T>());
    let axes = (0..shape.rank()).map(|i| Axis { size: thin[i], strides: [dense.strides()[i], x.layout.strides()[i]] });
    let cells = Walk::of(axes);
    if shape.numel() != 0 {
        cpu.queue.engine.ranges(cells.len(), CONVERT, |part| {
            // SAFETY: positions of the operand and of fresh memory; no two tasks share one.
            cells.each(part.start, part.end, |_, [o, i]| unsafe { to.set(o, from.get(i).load()) });
        });
    }
    Ok((buffer, dense.broadcast_to(shape)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_and_are_few() {
        for (m, n, k) in
            [(1, 1, 1), (1024, 1024, 1024), (512, 50257, 512), (50257, 512, 512), (7, 9, 100_000), (1, 4096, 4096)]
        {
            let (tm, tn) = tile(m, n, k);
            assert!(tm > 0 && tn > 0 && m.div_ceil(tm) * n.div_ceil(tn) <= TILES, "{m} {n} {k}: {tm} {tn}");
        }
        assert_eq!(tile(64, 64, 64), (96, 96));
    }
}

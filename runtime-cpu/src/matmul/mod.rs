//! Matrix products: tiles of the output, spread over threads, each a product on one thread ([`product`]) of operands with any strides.
//!
//! The order of every sum is fixed by its length alone, so a product has the same bits however it is cut into tiles.
//! Halves are multiplied in `f32` and rounded once: bf16 by the processor's instructions for it (`tiles`), otherwise widened first.

mod cut;
mod epilogue;
mod factor;
mod filters;
mod kernel;
mod linear;
mod pack;
mod packed;
mod product;
mod register;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod unfolded;

use numcore::{Accumulate, DType, Layout, Out, Result, View};
use smallvec::SmallVec;

use crate::{
    Buffer, Cpu, Engine,
    element::Stored,
    operand::{Base, Operand},
    pointwise::convert,
    walk::Walk,
};

use cut::Cut;
pub(crate) use epilogue::Epilogue;
pub(crate) use factor::{Left, Matrix};
pub(crate) use filters::{Filters, windows_times};
pub(crate) use linear::linear;
pub(crate) use packed::Packed;
pub(crate) use product::{Line, product, product_of, room};
pub(crate) use register::Registers;
#[cfg(target_arch = "x86_64")]
pub(crate) use tiles::{Beside, Pieces, Tile, Tiles, Work, is_available as has_tiles, not_finite, pairs, row, rows_of};
pub(crate) use unfolded::{BEHIND, Unfolded};

/// Multiplications of one tile or group of small products, about; what is less is not worth a hand-over.
const GRAIN: usize = 1 << 21;

/// `a: [B.., M, K]` times `b: [B.., K, N]` into `out: [B.., M, N]`.
pub(crate) fn matmul(cpu: &Cpu, a: View<'_, Cpu>, b: View<'_, Cpu>, out: Out<'_, Cpu>) -> Result<()> {
    multiply(cpu, &a.into(), &b.into(), Operand::from(&out.view), out.how, [None; 2])
}

/// The same with matrices (of the output's shape) that are added to a product which is no batch.
fn multiply(
    cpu: &Cpu,
    a: &Operand,
    b: &Operand,
    to: Operand,
    how: Accumulate,
    plus: [Option<Operand>; 2],
) -> Result<()> {
    if to.layout.numel() == 0 {
        return Ok(());
    }
    let product = Product::new(&a.layout, &b.layout, &to.layout);
    let engine = &*cpu.queue.engine;
    #[cfg(target_arch = "x86_64")]
    match (to.dtype, tiles::Level::best(engine.simd)) {
        (DType::BF16, Some(level)) => {
            tiles::run_bf16(&product, engine, level, [to.base(), a.base(), b.base()], epilogue(how, plus));
            return Ok(());
        }
        (DType::F32, _) if tiles::takes(&product, engine.simd) => {
            tiles::run_f32(&product, engine, [to.base(), a.base(), b.base()], epilogue(how, plus));
            return Ok(());
        }
        _ => {}
    }
    if to.dtype.is_half() {
        return halves(cpu, a, b, to, how, plus);
    }
    match to.dtype {
        DType::F64 => product.run::<f64>(engine, to.base(), a.base(), b.base(), epilogue(how, plus)),
        _ => product.run::<f32>(engine, to.base(), a.base(), b.base(), epilogue(how, plus)),
    }
    Ok(())
}

fn epilogue<T: Stored>(how: Accumulate, plus: [Option<Operand>; 2]) -> Epilogue<T> {
    let plus = plus.map(|x| x.map(|x| matrix(x.base::<T>().at(0).cast_const(), last_two(&x.layout))));
    Epilogue { plus, ..Epilogue::adding(how == Accumulate::Add) }
}

/// Distances along rows and columns of one matrix.
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

    fn run<T: Stored + Registers>(&self, engine: &Engine, out: Base<T>, a: Base<T>, b: Base<T>, epilogue: Epilogue<T>) {
        if self.k == 0 && epilogue.only_adds() {
            return;
        }
        self.tiles(engine, Cut::of(self, engine.threads.count()), GRAIN, |[o, i, j], sizes, [row, column]| {
            let out = matrix(out.at(o), self.out).part(row, column);
            let a = matrix(a.at(i).cast_const(), self.a).part(row, 0);
            let b = matrix(b.at(j).cast_const(), self.b).part(0, column);
            let epilogue = epilogue.part(row, column);
            // SAFETY: a tile of the output, which is this task's alone, and the rows and columns it needs.
            unsafe { product(engine.simd, sizes, out, a, b, T::ONE, epilogue) };
        });
    }

    /// Calls `tile` with the offsets of output and operands in the batch, the sizes `[m, k, n]` of a tile, and the row and the column it
    /// begins at, for every tile of every product, on any thread.
    fn tiles(&self, engine: &Engine, cut: Cut, grain: usize, tile: impl Fn([isize; 3], [usize; 3], [usize; 2]) + Sync) {
        let grain = if cut.tiles() > 1 { 1 } else { (grain / (self.m * self.n * self.k).max(1)).max(1) };
        engine.ranges(self.batch.len() * cut.tiles(), grain, |part| {
            for task in part {
                let (rows, columns) = cut.tile(task % cut.tiles(), self.m, self.n);
                let sizes = [rows.len(), self.k, columns.len()];
                tile(self.batch.at(task / cut.tiles()), sizes, [rows.start, columns.start]);
            }
        });
    }
}

fn matrix<P>(at: P, [row, column]: Strides) -> Matrix<P> {
    Matrix { at, row, column }
}

fn last_two(l: &Layout) -> Strides {
    [l.strides()[l.rank() - 2], l.strides()[l.rank() - 1]]
}

fn halves(cpu: &Cpu, a: &Operand, b: &Operand, to: Operand, how: Accumulate, plus: [Option<Operand>; 2]) -> Result<()> {
    let engine = &*cpu.queue.engine;
    let mut copies: SmallVec<[Buffer; 4]> = SmallVec::new();
    let mut wide = |x: &Operand| -> Result<Operand> {
        let (memory, layout) = dense(cpu, x, DType::F32)?;
        let wide = Operand::of(&memory, layout, DType::F32);
        copies.push(memory);
        Ok(wide)
    };
    let (a, b) = (wide(a)?, wide(b)?);
    let [first, second] = plus.map(|x| x.map(|x| wide(&x)).transpose());
    let plus = [first?, second?];
    let lo = Layout::contiguous(*to.layout.shape());
    let memory = cpu.scratch(lo.numel() * size_of::<f32>())?;
    let product = Operand::of(&memory, lo, DType::F32);
    multiply(cpu, &a, &b, product, Accumulate::Overwrite, plus)?;
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

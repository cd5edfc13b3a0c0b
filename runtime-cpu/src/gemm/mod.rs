//! GEMM: matrix products, partitioned into tiles of the output that threads compute independently.
//!
//! `README.md` in this folder draws the loop nest, with the cache in which each panel lives.
//!
//! The order of every sum depends on `k` alone, so the output has the same bits for every partition. Half-precision
//! operands are accumulated in `f32` and rounded once, or stored in `f32`: bf16 by AMX or AVX-512 BF16 ([`amx`]), all
//! others upcast to `f32` while they are packed (f16 before a product by AMX).

#[cfg(target_arch = "x86_64")]
mod amx;
mod conv_weights;
mod epilogue;
mod gemv;
mod im2col;
mod linear;
mod loops;
mod macro_kernel;
mod matrix;
mod pack_a;
mod pack_b;
mod packed_b;
mod partition;
mod vector;
mod widen;

use half::{bf16, f16};
use numcore::{Accumulate, DType, Layout, Out, Result, View};

use crate::{
    Cpu, CpuBuffer, Engine,
    element::{Lane, Stored},
    operand::{Base, Operand},
    pointwise::convert,
    walk::Walk,
};

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::{
    BackgroundTask, Interleaved, SplitBf16, Tile, TileUnit, not_finite, split_pairs, split_row, unpair_rows,
};
pub(crate) use conv_weights::{ConvSize, ConvWeights, gemm_im2col_lhs};
pub(crate) use epilogue::{Epilogue, Old};
pub(crate) use im2col::{Im2col, OVERREAD};
pub(crate) use linear::linear;
pub(crate) use loops::{CacheLine, KC as K_BLOCK, gemm, gemm_operand, workspace};
pub(crate) use matrix::{GemmSize, Matrix};
pub(crate) use pack_a::AOperand;
pub(crate) use packed_b::PackedB;
use partition::Partition;
pub(crate) use vector::Vectors;

/// The approximate number of multiply-adds of one task. A smaller task costs more to hand to another thread than it
/// takes.
const GRAIN: usize = 1 << 21;

/// Multiplies `a: [B.., M, K]` by `b: [B.., K, N]` into `out: [B.., M, N]`.
pub(crate) fn matmul(cpu: &Cpu, a: View<'_, Cpu>, b: View<'_, Cpu>, out: Out<'_, Cpu>) -> Result<()> {
    gemm_into(cpu, &a.into(), &b.into(), Operand::from(&out.view), out.how, [None; 2])
}

/// Computes `out = a · b` plus the matrices in `addends`, which have the shape and type of `out` and require a batch of
/// one.
fn gemm_into(
    cpu: &Cpu,
    a: &Operand,
    b: &Operand,
    out: Operand,
    how: Accumulate,
    addends: [Option<Operand>; 2],
) -> Result<()> {
    if out.layout.numel() == 0 {
        return Ok(());
    }
    let problem = Gemm::new(&a.layout, &b.layout, &out.layout);
    let engine = &*cpu.queue.engine;
    #[cfg(target_arch = "x86_64")]
    match (a.dtype, out.dtype, amx::Bf16Isa::best(engine.simd)) {
        (DType::BF16, DType::BF16, Some(isa)) => {
            let operands = (out.base(), [a.base(), b.base()]);
            amx::run_bf16::<bf16>(&problem, engine, isa, operands, epilogue(how, addends));
            return Ok(());
        }
        (DType::BF16, DType::F32, Some(isa)) => {
            let operands = (out.base(), [a.base(), b.base()]);
            amx::run_bf16::<f32>(&problem, engine, isa, operands, epilogue(how, addends));
            return Ok(());
        }
        (DType::F32, DType::F32, _) if amx::takes(&problem, engine.simd) => {
            amx::run_f32(&problem, engine, (out.base(), [a.base(), b.base()]), epilogue(how, addends));
            return Ok(());
        }
        (DType::F16, DType::F32, _) if amx::takes(&problem, engine.simd) => {
            let (a, b) = (upcast(cpu, a)?, upcast(cpu, b)?);
            return gemm_into(cpu, &a.0, &b.0, out, how, addends);
        }
        _ => {}
    }
    if out.dtype.is_half() {
        return rounded_gemm(cpu, a, b, out, how, addends);
    }
    match a.dtype {
        DType::F64 => problem.run::<f64>(engine, out.base(), [a.base(), b.base()], epilogue(how, addends)),
        DType::BF16 => problem.run::<bf16>(engine, out.base(), [a.base(), b.base()], epilogue(how, addends)),
        DType::F16 => problem.run::<f16>(engine, out.base(), [a.base(), b.base()], epilogue(how, addends)),
        _ => problem.run::<f32>(engine, out.base(), [a.base(), b.base()], epilogue(how, addends)),
    }
    Ok(())
}

fn epilogue<T: Stored>(how: Accumulate, addends: [Option<Operand>; 2]) -> Epilogue<T> {
    let addends = addends.map(|x| x.map(|x| matrix(x.base::<T>().at(0).cast_const(), last_two(&x.layout))));
    Epilogue { addends, ..Epilogue::accumulate(how == Accumulate::Add) }
}

/// Row stride and column stride of one matrix.
type Strides = [isize; 2];

/// A batched GEMM: sizes and strides of `out = a · b`.
struct Gemm {
    batch: Walk<3>,
    m: usize,
    k: usize,
    n: usize,
    a: Strides,
    b: Strides,
    out: Strides,
}

/// A tile of one output matrix.
struct Task {
    /// Offsets of `out`, `a` and `b` in the batch.
    batch: [isize; 3],
    size: GemmSize,
    /// The tile's first row and column.
    row: usize,
    column: usize,
}

impl Gemm {
    fn new(a: &Layout, b: &Layout, out: &Layout) -> Gemm {
        let rank = out.rank();
        Gemm {
            batch: Walk::new([out, a, b], |i| i + 2 >= rank),
            m: out.dims()[rank - 2],
            k: a.dims()[rank - 1],
            n: out.dims()[rank - 1],
            a: last_two(a),
            b: last_two(b),
            out: last_two(out),
        }
    }

    fn run<S: Stored<Lane: Vectors>>(
        &self,
        engine: &Engine,
        out: Base<S::Lane>,
        [a, b]: [Base<S>; 2],
        epilogue: Epilogue<S::Lane>,
    ) {
        if self.k == 0 && epilogue.only_accumulates() {
            return;
        }
        self.for_each_task(engine, Partition::new(self, engine.threads.count()), GRAIN, |task| {
            let Task { batch: [o, i, j], size, row, column } = task;
            let out = matrix(out.at(o), self.out).offset(row, column);
            let a = matrix(a.at(i).cast_const(), self.a).offset(row, 0);
            let b = matrix(b.at(j).cast_const(), self.b).offset(0, column);
            let epilogue = epilogue.offset(row, column);
            // SAFETY: each tile of the output belongs to one task; the rows of `a` and columns of `b` that it needs are
            // in their operands, because shape inference has checked the shapes.
            unsafe { gemm(engine.simd, size, out, a, b, S::Lane::ONE, epilogue) };
        });
    }

    /// Calls `body` for every tile of every matrix of the batch, on any thread.
    fn for_each_task(&self, engine: &Engine, partition: Partition, grain: usize, body: impl Fn(Task) + Sync) {
        let tiles = partition.tiles();
        let grain = if tiles > 1 { 1 } else { (grain / (self.m * self.n * self.k).max(1)).max(1) };
        engine.ranges(self.batch.len() * tiles, grain, |part| {
            for task in part {
                let (rows, columns) = partition.tile(task % tiles, self.m, self.n);
                let size = GemmSize { m: rows.len(), k: self.k, n: columns.len() };
                body(Task { batch: self.batch.at(task / tiles), size, row: rows.start, column: columns.start });
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

/// A GEMM of a half-precision output without instructions for it: sums are `f32`, and rounded once.
fn rounded_gemm(
    cpu: &Cpu,
    a: &Operand,
    b: &Operand,
    out: Operand,
    how: Accumulate,
    addends: [Option<Operand>; 2],
) -> Result<()> {
    let [first, second] = addends.map(|x| x.map(|x| upcast(cpu, &x)).transpose());
    let copies = [first?, second?];
    let addends = copies.each_ref().map(|x| x.as_ref().map(|(x, _)| *x));
    let contiguous = Layout::contiguous(*out.layout.shape());
    let memory = cpu.scratch(contiguous.numel() * size_of::<f32>())?;
    let unrounded = Operand::of(&memory, contiguous, DType::F32);
    gemm_into(cpu, a, b, unrounded, Accumulate::Overwrite, addends)?;
    convert(&cpu.queue.engine, unrounded, out, how)
}

/// A row-major copy of `x` in `f32`, and its memory. Axes that `x` broadcasts (stride 0) stay broadcast and take none.
fn upcast(cpu: &Cpu, x: &Operand) -> Result<(Operand, CpuBuffer)> {
    let shape = *x.layout.shape();
    let mut once = x.layout;
    for (i, _) in x.layout.strides().iter().enumerate().filter(|(_, s)| **s == 0) {
        once = once.slice(i, 0, shape[i].min(1), 1)?;
    }
    let dense = Layout::contiguous(*once.shape());
    let memory = cpu.scratch(dense.numel() * size_of::<f32>())?;
    let from = Operand { layout: once, ..*x };
    convert(&cpu.queue.engine, from, Operand::of(&memory, dense, DType::F32), Accumulate::Overwrite)?;
    Ok((Operand::of(&memory, dense.broadcast_to(shape)?, DType::F32), memory))
}

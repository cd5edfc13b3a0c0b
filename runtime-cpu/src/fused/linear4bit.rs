//! Products with a matrix of four bits per element. A tile of the matrix at a time is dequantised into memory of the
//! thread, and multiplied from there. So the whole matrix is never in memory. Tiles are cut at the blocks of a GEMM's
//! sums, so the output has the bits of a GEMM with the dequantised matrix.

use std::{cell::RefCell, ops::Range};

use numcore::{
    Accumulate, DType, Layout, Result, Support, View,
    fused::{Linear4bit, NestedScales},
};

use crate::{
    Cpu,
    gemm::{CacheLine, Epilogue, GemmSize, K_BLOCK, Matrix, gemm, workspace},
    operand::Operand,
    pointwise::convert,
};

/// The number of columns of the output that a task computes.
const COLUMNS: usize = 128;
/// The number of elements of the sum in a tile: whole blocks of a GEMM's sum.
const DEPTH: usize = 2 * K_BLOCK;

thread_local! {
    /// A tile of the matrix. It stays allocated, so that a product allocates nothing.
    static TILE: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
}

/// Computes `out = x · wᵀ` or `x · w`; `out` is contiguous.
pub(super) fn run(cpu: &Cpu, op: &Linear4bit, ins: &[View<'_, Cpu>], out: Operand) -> Result<Support> {
    let stored = &ins[Linear4bit::PACKED..];
    if out.dtype == DType::F64 || stored.iter().any(|x| !x.layout().is_contiguous()) {
        return Ok(Support::Decompose);
    }
    let x = Operand::from(ins[Linear4bit::X]);
    // Other types are upcast, and the output is rounded once.
    let (mut copy, mut unrounded) = (None, None);
    let x = match x.dtype == DType::F32 && x.layout.is_contiguous() {
        true => x,
        false => {
            let memory = copy.insert(cpu.scratch(x.layout.numel() * size_of::<f32>())?);
            let wide = Operand::of(memory, Layout::contiguous(*x.layout.shape()), DType::F32);
            convert(&cpu.queue.engine, x, wide, Accumulate::Overwrite)?;
            wide
        }
    };
    let wide = match out.dtype {
        DType::F32 => out,
        _ => {
            let memory = unrounded.insert(cpu.scratch(out.layout.numel() * size_of::<f32>())?);
            Operand::of(memory, Layout::contiguous(*out.layout.shape()), DType::F32)
        }
    };
    multiply(cpu, op, &Packed::new(op, stored), x, wide);
    if out.dtype != DType::F32 {
        convert(&cpu.queue.engine, wide, out, Accumulate::Overwrite)?;
    }
    Ok(Support::Done)
}

/// The product in `f32`: each task has some columns of the output.
fn multiply(cpu: &Cpu, op: &Linear4bit, packed: &Packed<'_>, x: Operand, out: Operand) {
    let engine = &*cpu.queue.engine;
    let [rows, columns] = op.shape;
    let (k, n) = if op.transposed { (rows, columns) } else { (columns, rows) };
    if out.layout.numel() == 0 {
        return;
    }
    let m = out.layout.numel() / n;
    let (x, out) = (x.base::<f32>(), out.base::<f32>());
    engine.ranges(n, COLUMNS, |part| {
        TILE.with_borrow_mut(|memory| {
            // With k = 0 the output is still written.
            for from in (0..k.max(1)).step_by(DEPTH) {
                let deep = from..k.min(from + DEPTH);
                let (of_rows, of_columns) = if op.transposed { (&deep, &part) } else { (&part, &deep) };
                let tile = workspace::<f32>(memory, of_rows.len() * of_columns.len());
                packed.tile(columns, of_rows.clone(), of_columns.clone(), tile);
                let b = Matrix { at: tile.as_ptr(), row: of_columns.len() as isize, column: 1 };
                let b = if op.transposed { b } else { b.transposed() };
                let a = Matrix { at: x.at(from as isize).cast_const(), row: k as isize, column: 1 };
                let to = Matrix { at: out.at(part.start as isize), row: n as isize, column: 1 };
                let size = GemmSize { m, k: deep.len(), n: part.len() };
                // SAFETY: `x` is `[m, k]` and `out` is `[m, n]`, both contiguous, and these columns of the output
                // belong to this task. `b` is the tile of this thread, of `deep` by `part`, and overlaps neither.
                unsafe { gemm(engine.simd, size, to, a, b, 1.0, Epilogue::accumulate(from > 0)) };
            }
        });
    });
}

/// The stored form of a matrix.
struct Packed<'a> {
    bytes: &'a [u8],
    /// The code words of both halves of a byte.
    pairs: [[f32; 2]; 256],
    block: usize,
    scales: Scales<'a>,
}

/// The scales of blocks.
enum Scales<'a> {
    Plain(&'a [f32]),
    Nested { index: &'a [u8], scales: &'a [f32], code: &'a [f32], how: NestedScales },
}

impl<'a> Packed<'a> {
    /// The operands after `x`, whose sizes and types shape inference has checked.
    fn new(op: &Linear4bit, ins: &[View<'a, Cpu>]) -> Self {
        let at = |i: usize| &ins[i - Linear4bit::PACKED];
        let code = floats(at(Linear4bit::CODE));
        let scales = match op.nested {
            None => Scales::Plain(floats(at(Linear4bit::SCALES))),
            Some(how) => Scales::Nested {
                index: bytes(at(Linear4bit::SCALES)),
                scales: floats(at(Linear4bit::NESTED_SCALES)),
                code: floats(at(Linear4bit::NESTED_CODE)),
                how,
            },
        };
        Packed {
            bytes: bytes(at(Linear4bit::PACKED)),
            pairs: std::array::from_fn(|byte| [code[byte >> 4], code[byte & 15]]),
            block: op.block,
            scales,
        }
    }

    /// Dequantises rows and columns of the matrix, whose rows have `width` elements, into `to`, row-major.
    fn tile(&self, width: usize, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        if columns.is_empty() {
            return;
        }
        for (row, to) in rows.zip(to.chunks_exact_mut(columns.len())) {
            self.run(row * width + columns.start, to);
        }
    }

    /// Dequantises elements from `at` on, a block after another.
    fn run(&self, mut at: usize, mut to: &mut [f32]) {
        while !to.is_empty() {
            let block = at / self.block;
            let len = to.len().min((block + 1) * self.block - at);
            let (part, rest) = to.split_at_mut(len);
            self.within(at, self.scale(block), part);
            (at, to) = (at + len, rest);
        }
    }

    /// Dequantises elements of one block.
    fn within(&self, at: usize, scale: f32, to: &mut [f32]) {
        let (first, to) = to.split_at_mut(at % 2);
        if let [x] = first {
            *x = self.pairs[usize::from(self.bytes[at / 2])][1] * scale;
        }
        let bytes = &self.bytes[at.div_ceil(2)..];
        let last = bytes.get(to.len() / 2);
        let mut pairs = to.chunks_exact_mut(2);
        for (pair, byte) in pairs.by_ref().zip(bytes) {
            let words = self.pairs[usize::from(*byte)];
            pair.copy_from_slice(&[words[0] * scale, words[1] * scale]);
        }
        if let ([x], Some(byte)) = (pairs.into_remainder(), last) {
            *x = self.pairs[usize::from(*byte)][0] * scale;
        }
    }

    fn scale(&self, block: usize) -> f32 {
        match &self.scales {
            Scales::Plain(scales) => scales[block],
            Scales::Nested { index, scales, code, how } => {
                code[usize::from(index[block])] * scales[block / how.block] + how.offset
            }
        }
    }
}

fn bytes<'a>(x: &View<'a, Cpu>) -> &'a [u8] {
    let x = Operand::from(*x);
    // SAFETY: a contiguous operand of bytes, which nothing writes while its view lives.
    unsafe { x.base().slice(0, x.layout.numel()) }
}

fn floats<'a>(x: &View<'a, Cpu>) -> &'a [f32] {
    let x = Operand::from(*x);
    // SAFETY: a contiguous operand of `f32`, which nothing writes while its view lives.
    unsafe { x.base().slice(0, x.layout.numel()) }
}

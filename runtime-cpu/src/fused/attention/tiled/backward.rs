//! Gradients, in the same blocks. Those of keys and values are made in columns, `dkᵀ = qᵀ·dS` and `dvᵀ = gᵀ·P`: so weights go into a right
//! operand's tiles, where two queries lie side by side, and not into turned ones.

use std::{arch::x86_64::*, ops::Range};

use numcore::Result;

use super::{
    super::{
        backward::{Head, QUERIES, dots_of},
        *,
    },
    Row, SIDE, exp2_all, line, room, rows_out, tiles, visible_row,
};
use crate::{
    matmul::{Pieces, Tile, Tiles, split},
    pointwise::turn_square,
};

/// Strips of queries in a block.
const STRIPS: usize = QUERIES / SIDE;
/// Panels of keys in a block.
const PANELS: usize = KEYS / SIDE;

/// Tiles of a block of queries: upstream gradients and queries as columns, weights and gradients of scores.
struct Block {
    turned: [*mut Tile; 2],
    right: [*mut Tile; 2],
}

/// One task: these keys, and all heads that share them.
pub(in super::super) fn keys<T: Pieces<P>, const P: usize>(
    call: &Call<'_>,
    p: &Problem,
    heads: &[Head<'_, T>],
    mine: Range<usize>,
) -> Result<()> {
    let Some(amx) = Tiles::<P>::of(call.engine().simd) else { return Ok(()) };
    let [deep, wide] = [p.depth, p.value_depth].map(|n| n.div_ceil(SIDE));
    let strips = p.queries.div_ceil(SIDE);
    let operands = [
        PANELS * deep,
        PANELS * wide,
        deep * PANELS,
        deep.max(wide),
        PANELS,
        deep * STRIPS,
        wide * STRIPS,
        PANELS * STRIPS,
        PANELS * STRIPS,
    ];
    let blocks = [PANELS, PANELS, deep * PANELS, wide * PANELS, p.group * strips * deep];
    let others = [p.group * p.queries, aside::<T>(QUERIES * p.value_depth), aside::<T>(QUERIES * p.value_depth)];
    let operands = operands.into_iter().map(|steps| room(steps * Tiles::<P>::STEP));
    let mut sizes = operands.chain(blocks.map(|n| room(n * 4))).chain(others);
    let mut scratch = Scratch::<f32, 17>::new(call.cpu, std::array::from_fn(|_| sizes.next().unwrap_or(0)))?;
    let [kt, vt, k, left, ds_left, qt, gt, weights, ds_right, s, ds, dk, dv, dq, dots, wide_g, wide_o] =
        scratch.parts();
    dq.fill(0.0);
    for (h, dots) in heads.iter().zip(dots.chunks_mut(p.queries.max(1))) {
        // SAFETY: these queries of the operands.
        unsafe { dots_of(call.engine().simd, p, h, [wide_g, wide_o], dots) };
    }
    let dq = tiles(dq);
    for keys in parts(mine, KEYS) {
        let Some(any) = heads.first() else { break };
        let n = keys.len();
        dk.fill(0.0);
        dv.fill(0.0);
        let [kt, vt, k] = [&mut *kt, &mut *vt, &mut *k].map(tiles);
        // SAFETY: these keys of the operands; there is room for a block.
        unsafe {
            let [key, value] = [any.k, any.v].map(|m| m.part(keys.start, 0));
            amx.right(key.turned(), (p.depth, n), kt);
            amx.right(value.turned(), (p.value_depth, n), vt);
            amx.right(key, (n, p.depth), k);
        }
        for (i, (h, dots)) in heads.iter().zip(dots.chunks(p.queries.max(1))).enumerate() {
            for rows in pieces(p.queries, QUERIES).filter(|rows| p.seen(rows.end - 1, &keys) > 0) {
                let block = Block {
                    turned: [&mut *gt, &mut *qt].map(tiles),
                    right: [&mut *weights, &mut *ds_right].map(tiles),
                };
                // SAFETY: these queries of the operands, and tiles of this task's.
                unsafe {
                    let sources = [(h.g, p.value_depth), (h.q, p.depth)];
                    for ((x, width), to) in sources.into_iter().zip(block.turned) {
                        for (strip, part) in pieces(width, SIDE).enumerate() {
                            let x = x.part(rows.start, part.start).turned();
                            amx.left(x, (part.len(), rows.len()), to.add(strip * STRIPS * Tiles::<P>::STEP));
                        }
                    }
                    for (t, step) in parts(rows.clone(), SIDE).enumerate() {
                        let seen = Seen { first: p.seen(step.start, &keys), last: p.seen(step.end - 1, &keys) };
                        let panels = seen.last.div_ceil(SIDE);
                        let [s, ds, ds_left, left] = [&mut *s, &mut *ds, &mut *ds_left, &mut *left].map(tiles);
                        for (x, width, right, sums) in [(h.q, p.depth, kt, s), (h.g, p.value_depth, vt, ds)] {
                            let steps = width.div_ceil(SIDE);
                            amx.left(x.part(step.start, 0), (step.len(), width), left);
                            for panel in 0..panels {
                                amx.multiply(
                                    left,
                                    right.add(panel * steps * Tiles::<P>::STEP),
                                    sums.add(panel * 4),
                                    steps,
                                    false,
                                );
                            }
                        }
                        if panels == 0 {
                            continue;
                        }
                        let scale = (p.scale * std::f64::consts::LOG2_E) as f32;
                        let known = (&h.lse[step.clone()], &dots[step.clone()]);
                        let right = block.right.map(|x| x.add(t * Tiles::<P>::STEP));
                        score_grads::<P>([s, ds], (right, ds_left), scale, known, seen);
                        let dq = dq.add((i * strips + step.start / SIDE) * deep * 4);
                        for panel in 0..deep {
                            let k = k.add(panel * n.div_ceil(SIDE) * Tiles::<P>::STEP);
                            amx.multiply(ds_left, k, dq.add(panel * 4), panels, true);
                        }
                    }
                    let sums = [(tiles(dv), wide), (tiles(dk), deep)];
                    add_keys(&amx, p, (&rows, &keys), &block, sums);
                }
            }
        }
        for (sums, out, width, scale) in
            [(&mut *dk, any.dk, p.depth, p.scale as f32), (&mut *dv, any.dv, p.value_depth, 1.0)]
        {
            // SAFETY: these keys' gradients, which are this task's alone; the processor has the instructions.
            unsafe { columns_out(tiles(sums), out.part(keys.start, 0), (n, width), scale) };
        }
    }
    for (i, h) in heads.iter().enumerate() {
        for (strip, step) in pieces(p.queries, SIDE).enumerate() {
            let (sums, scale) = (dq.wrapping_add((i * strips + strip) * deep * 4), p.scale as f32);
            // SAFETY: these queries' gradients, which are this task's alone; the processor has the instructions.
            unsafe {
                match h.rounded {
                    Some(out) => rows_out(sums, out.part(step.start, 0), p.depth, &[scale; SIDE][..step.len()]),
                    None => rows_out(sums, h.dq.part(step.start, 0), p.depth, &[scale; SIDE][..step.len()]),
                }
            }
        }
    }
    Ok(())
}

/// What a block of queries adds to gradients of values and keys.
///
/// # Safety
/// The tiles are this task's, those of strips that see any of a panel's keys are filled.
unsafe fn add_keys<const P: usize>(
    amx: &Tiles<P>,
    p: &Problem,
    (rows, keys): (&Range<usize>, &Range<usize>),
    block: &Block,
    sums: [(*mut Tile, usize); 2],
) {
    for panel in 0..p.seen(rows.end - 1, keys).div_ceil(SIDE) {
        let sees = |step: Range<usize>| p.seen(step.end - 1, keys) > panel * SIDE;
        let Some(first) = parts(rows.clone(), SIDE).position(sees) else { continue };
        let steps = rows.len().div_ceil(SIDE) - first;
        for ((sums, strips), (left, right)) in sums.into_iter().zip(block.turned.into_iter().zip(block.right)) {
            for strip in 0..strips {
                // SAFETY: the caller's promise.
                unsafe {
                    let left = left.add((strip * STRIPS + first) * Tiles::<P>::STEP);
                    let right = right.add((panel * STRIPS + first) * Tiles::<P>::STEP);
                    amx.multiply(left, right, sums.add((strip * PANELS + panel) * 4), steps, true);
                }
            }
        }
    }
}

/// Scores and gradients of weights become weights and gradients of scores before they are scaled: both in the right operand's tiles, of two
/// queries side by side, the gradients in the left one's too. They are 0 where a query sees no key, and where there is no query.
///
/// # Safety
/// There are tiles for all keys that are seen; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn score_grads<const P: usize>(
    [s, ds]: [*mut Tile; 2],
    ([weights, ds_right], ds_left): ([*mut Tile; 2], *mut Tile),
    scale: f32,
    (lse, dots): (&[f32], &[f32]),
    seen: Seen,
) {
    const PAIRS: [u16; 32] = {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 32 {
            order[i] = (i / 2 + i % 2 * 16) as u16;
            i += 1;
        }
        order
    };
    let panels = seen.last.div_ceil(SIDE);
    let mut rows: [[Row; 2]; 2] = [[[0.0; KEYS]; 2]; 2];
    for pair in 0..SIDE / 2 {
        let [p_rows, ds_rows] = &mut rows;
        for (side, (p, d)) in p_rows.iter_mut().zip(ds_rows).enumerate() {
            let i = 2 * pair + side;
            let (p, d) = (&mut p[..panels * SIDE], &mut d[..panels * SIDE]);
            // A query that saw nothing has no finite logsumexp, and no weight.
            let Some((&lse, &dot)) = lse.get(i).zip(dots.get(i)).filter(|(lse, _)| **lse != f32::NEG_INFINITY) else {
                p.fill(0.0);
                d.fill(0.0);
                continue;
            };
            // SAFETY: the caller's promise.
            unsafe {
                visible_row(s, i, p, scale, seen.of(i));
                exp2_all(p, lse * std::f32::consts::LOG2_E);
                for (j, (p, d)) in p.as_chunks::<16>().0.iter().zip(d.as_chunks_mut::<16>().0).enumerate() {
                    let g = _mm512_sub_ps(_mm512_load_ps(line(ds.add(j / 2 * 4), i, j % 2)), _mm512_set1_ps(dot));
                    // What is hidden is 0, whatever its gradient.
                    let p = _mm512_loadu_ps(p.as_ptr());
                    let there = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(p, _mm512_setzero_ps());
                    _mm512_storeu_ps(d.as_mut_ptr(), _mm512_maskz_mul_ps(there, p, g));
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe {
            let order = _mm512_loadu_si512(PAIRS.as_ptr().cast());
            let pieces = |halves: [*const f32; 2]| split::<P>(halves.map(|x| _mm512_loadu_ps(x)));
            for j in 0..2 * panels {
                for (x, to) in rows.iter().zip([weights, ds_right]) {
                    let to = to.add(j / 2 * STRIPS * Tiles::<P>::STEP + j % 2).cast::<__m512i>().add(pair);
                    for (piece, x) in
                        pieces([0, 1].map(|side: usize| x[side].as_ptr().add(16 * j))).into_iter().enumerate()
                    {
                        *to.add(piece * SIDE) = _mm512_permutexvar_epi16(order, x);
                    }
                }
            }
            for panel in 0..panels {
                for (side, x) in rows[1].iter().enumerate() {
                    let (i, at) = (2 * pair + side, x.as_ptr().add(panel * SIDE));
                    let to = ds_left.add(panel * Tiles::<P>::STEP + i / 16).cast::<__m512i>().add(i % 16);
                    for (piece, x) in pieces([at, at.add(16)]).into_iter().enumerate() {
                        *to.add(piece * SIDE) = x;
                    }
                }
            }
        }
    }
}

/// Sums in columns, scaled and rounded into rows of the output.
///
/// # Safety
/// These are rows of the output, which nothing else sees; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn columns_out<T: Pieces<P>, const P: usize>(
    sums: *const Tile,
    out: Matrix<*mut T>,
    (rows, columns): (usize, usize),
    scale: f32,
) {
    for (i, j) in pieces(rows, 16).flat_map(|i| pieces(columns, 16).map(move |j| (i.clone(), j))) {
        let panel = (j.start / SIDE * PANELS + i.start / SIDE) * 4;
        let tile = panel + j.start / 16 % 2 * 2 + i.start / 16 % 2;
        let mask = u32::from(u16::MAX >> (16 - j.len()));
        // SAFETY: the caller's promise.
        unsafe {
            let lines = turn_square(sums.add(tile).cast::<[__m512i; 16]>().read());
            for (at, line) in i.zip(lines) {
                let x = _mm512_mul_ps(_mm512_castsi512_ps(line), _mm512_set1_ps(scale));
                T::write(out.part(at, j.start).at, mask, [x, _mm512_setzero_ps()]);
            }
        }
    }
}

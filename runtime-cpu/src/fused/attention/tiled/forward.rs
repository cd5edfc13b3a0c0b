//! Outputs and logsumexps.

use std::{arch::x86_64::*, ops::Range};

use numcore::Result;

use super::{
    super::{forward::Head, *},
    Row, SIDE, exp2_all, line, room, rows_out, tiles, visible_row,
};
use crate::{
    fused::softmax::finite,
    math::Math,
    matmul::{Pieces, Tile, Tiles, split},
};

/// These queries against all keys they see, a strip of queries and a block of keys at a time.
pub(in super::super) fn queries<T: Pieces<P>, const P: usize>(
    call: &Call<'_>,
    p: &Problem,
    h: &Head<T>,
    rows: Range<usize>,
    lse: &mut [f32],
) -> Result<()> {
    let Some(amx) = Tiles::<P>::of(call.engine().simd) else { return Ok(()) };
    let (panels, strips) = (KEYS / SIDE, rows.len().div_ceil(SIDE));
    let [deep, wide] = [p.depth, p.value_depth].map(|n| n.div_ceil(SIDE));
    let operands = [panels * deep, wide * panels, deep, panels].map(|steps| room(steps * Tiles::<P>::STEP));
    let ([a, b, c, d], [e, f]) = (operands, [panels * 4, strips * wide * 4].map(room));
    let mut scratch = Scratch::<f32, _>::new(call.cpu, [a, b, c, d, e, f, rows.len(), rows.len()])?;
    let [k, v, q, weighted, s, o, top, sum] = scratch.parts();
    o.fill(0.0);
    let [k, v, q, s, weighted, o] = [k, v, q, s, weighted, o].map(tiles);
    let [top, sum] = [top, sum].map(|x| &mut x[..rows.len()]);
    top.fill(f32::NEG_INFINITY);
    sum.fill(0.0);
    let scale = (p.scale * std::f64::consts::LOG2_E) as f32;
    for keys in pieces(p.visible(&rows), KEYS) {
        let steps = keys.len().div_ceil(SIDE);
        // SAFETY: these keys of the operands; there is room for a block.
        unsafe {
            amx.right(h.k.part(keys.start, 0).turned(), (p.depth, keys.len()), k);
            amx.right(h.v.part(keys.start, 0), (keys.len(), p.value_depth), v);
        }
        for (strip, step) in parts(rows.clone(), SIDE).enumerate().filter(|(_, step)| p.seen(step.end - 1, &keys) > 0) {
            let seen = Seen { first: p.seen(step.start, &keys), last: p.seen(step.end - 1, &keys) };
            let (seen_panels, o) = (seen.last.div_ceil(SIDE), o.wrapping_add(strip * wide * 4));
            let at = step.start - rows.start..step.end - rows.start;
            // SAFETY: these queries of the operand; the tiles are this task's, and the processor has the instructions.
            unsafe {
                amx.left(h.q.part(step.start, 0), (step.len(), p.depth), q);
                for panel in 0..seen_panels {
                    amx.multiply(q, k.add(panel * deep * Tiles::<P>::STEP), s.add(panel * 4), deep, false);
                }
                weights::<P>((s, weighted), (o, wide), scale, (&mut top[at.clone()], &mut sum[at]), seen);
                for panel in 0..wide {
                    amx.multiply(
                        weighted,
                        v.add(panel * steps * Tiles::<P>::STEP),
                        o.add(panel * 4),
                        seen_panels,
                        true,
                    );
                }
            }
        }
    }
    for ((&top, sum), lse) in top.iter().zip(&mut *sum).zip(lse) {
        *lse = finite(top) * std::f32::consts::LN_2 + Math::log(*sum);
        *sum = if *sum == 0.0 { 0.0 } else { 1.0 / *sum };
    }
    for (strip, step) in parts(0..rows.len(), SIDE).enumerate() {
        let out = h.o.part(rows.start + step.start, 0);
        // SAFETY: these queries' rows of the output, which are this task's alone; the processor has the instructions.
        unsafe { rows_out(o.add(strip * wide * 4), out, p.value_depth, &sum[step]) };
    }
    Ok(())
}

/// Turns scores into weights relative to the largest score so far, in the left operand's tiles, and rescales what was gathered before.
///
/// # Safety
/// There are tiles of scores for all keys that are seen, as many steps of weights, and `wide` panels of the output; the processor has the
/// instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn weights<const P: usize>(
    (s, weighted): (*const Tile, *mut Tile),
    (o, wide): (*mut Tile, usize),
    scale: f32,
    (top, sum): (&mut [f32], &mut [f32]),
    seen: Seen,
) {
    let panels = seen.last.div_ceil(SIDE);
    let mut row: Row = [0.0; KEYS];
    for (i, (top, sum)) in top.iter_mut().zip(sum).enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let before = *top;
            *top = before.max(visible_row(s, i, &mut row[..panels * SIDE], scale, seen.of(i)));
            let base = finite(*top);
            exp2_all(&mut row[..panels * SIDE], base);
            let mut gathered = [_mm512_setzero_ps(); 2];
            for (panel, x) in row[..panels * SIDE].as_chunks::<SIDE>().0.iter().enumerate() {
                let x = [0, 16].map(|at| _mm512_loadu_ps(x.as_ptr().add(at)));
                gathered = [_mm512_add_ps(gathered[0], x[0]), _mm512_add_ps(gathered[1], x[1])];
                let to = weighted.add(panel * Tiles::<P>::STEP + i / 16).cast::<__m512i>().add(i % 16);
                for (piece, x) in split::<P>(x).into_iter().enumerate() {
                    *to.add(piece * SIDE) = x;
                }
            }
            let gathered = _mm512_reduce_add_ps(_mm512_add_ps(gathered[0], gathered[1]));
            if before != *top {
                let factor = Math::exp2_flushed(before - base);
                for panel in 0..wide {
                    for half in 0..2 {
                        let at = line(o.add(panel * 4), i, half);
                        _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(factor)));
                    }
                }
                *sum *= factor;
            }
            *sum += gathered;
        }
    }
}

//! Recurrent layers, step by step.

use numcore::{
    Tensor,
    ops::{MatmulOps, PointwiseOps, ViewOps, stack},
};

use crate::{call::Call, file::Answer, graph::T};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "RNN" | "GRU" | "LSTM" => layer(c).map(Some),
        _ => Ok(None),
    }
}

/// `x: [T, B, I]`, or `[B, T, I]` where `layout` is 1; outputs of each step `[T, D, B, H]`, and the last ones.
fn layer(c: &Call<'_>) -> Answer<Vec<T>> {
    if c.has("activations") || c.has("clip") || c.opt(4).is_some_and(|_| c.op() != "LSTM") {
        return Err("activations, clips and lengths other than the usual ones".into());
    }
    let batch_first = c.int("layout", 0) == 1;
    let x = if batch_first { c.x(0)?.transpose(0, 1)? } else { c.x(0)?.clone() };
    let (steps, batch, hidden) = (x.dims()[0], x.dims()[1], c.int("hidden_size", 1) as usize);
    let direction = c.text("direction", "forward").to_string();
    let count = c.x(1)?.dims()[0];
    let (mut outputs, mut last, mut cells) = (Vec::new(), Vec::new(), Vec::new());
    for d in 0..count {
        let backward = direction == "reverse" || d == 1;
        let start = |i: usize| -> Answer<T> {
            let Some(x) = c.opt(i) else { return Ok(Tensor::zeros(c.cpu(), [batch, hidden], x.dtype())?) };
            Ok(if batch_first { x.select(1, d)? } else { x.select(0, d)? })
        };
        let (mut h, mut cell) = (start(5)?, start(6)?);
        let mut made = vec![h.clone(); steps];
        for i in 0..steps {
            let t = if backward { steps - 1 - i } else { i };
            (h, cell) = step(c, d, &x.select(0, t)?, &h, &cell)?;
            made[t] = h.clone();
        }
        outputs.push(stack(&made.iter().collect::<Vec<_>>(), 0)?);
        last.push(h);
        cells.push(cell);
    }
    let together = |xs: &[T], axis: isize| stack(&xs.iter().collect::<Vec<_>>(), axis);
    let at = if batch_first { 1 } else { 0 };
    let y = together(&outputs, 1)?;
    let y = if batch_first { y.permute(&[2, 0, 1, 3])? } else { y };
    Ok(vec![y, together(&last, at)?, together(&cells, at)?])
}

fn step(c: &Call<'_>, d: usize, x: &T, h: &T, cell: &T) -> Answer<(T, T)> {
    let (w, r) = (c.x(1)?.select(0, d)?, c.x(2)?.select(0, d)?);
    let hidden = r.dims()[1];
    let rows = w.dims()[0];
    let bias = match c.opt(3) {
        Some(b) => b.select(0, d)?,
        None => Tensor::zeros(c.cpu(), [2 * rows], x.dtype())?,
    };
    let of_x = x.matmul(&w.t()?)?.add(&bias.narrow(0, 0, rows)?)?;
    let recurrent = |h: &T| h.matmul(&r.t()?)?.add(&bias.narrow(0, rows, rows)?);
    let gate = |x: &T, i: usize| x.narrow(-1, i * hidden, hidden);
    match c.op() {
        "RNN" => Ok((of_x.add(&recurrent(h)?)?.tanh()?, cell.clone())),
        "GRU" => {
            let of_h = recurrent(h)?;
            let z = gate(&of_x, 0)?.add(&gate(&of_h, 0)?)?.sigmoid()?;
            let reset = gate(&of_x, 1)?.add(&gate(&of_h, 1)?)?.sigmoid()?;
            let inner = if c.int("linear_before_reset", 0) == 1 {
                reset.mul(&gate(&of_h, 2)?)?
            } else {
                gate(&recurrent(&reset.mul(h)?)?, 2)?
            };
            let new = gate(&of_x, 2)?.add(&inner)?.tanh()?;
            Ok((new.lerp(h, &z)?, cell.clone()))
        }
        _ => {
            let all = of_x.add(&recurrent(h)?)?;
            // Peepholes are of the input's, the output's and the forget gate.
            let peep = |i: usize, cell: &T| -> numcore::Result<T> {
                match c.opt(7) {
                    Some(p) => gate(&p.select(0, d)?, i)?.mul(cell),
                    None => cell.mul(0.0),
                }
            };
            let input = gate(&all, 0)?.add(&peep(0, cell)?)?.sigmoid()?;
            let forget = gate(&all, 2)?.add(&peep(2, cell)?)?.sigmoid()?;
            let new = forget.mul(cell)?.add(&input.mul(&gate(&all, 3)?.tanh()?)?)?;
            let output = gate(&all, 1)?.add(&peep(1, &new)?)?.sigmoid()?;
            Ok((output.mul(&new.tanh()?)?, new))
        }
    }
}

//! Random chains of views: their values, and the gradients written through them.

use autograd::{Gradients, Var};
use numcore::{
    Result, Runtime, Tensor,
    ops::{PointwiseOps, ViewOps},
};
use proptest::prelude::*;

use super::{
    positions::{flat, unflat},
    programs::random,
    report::{Section, Verdict},
};

/// Integers from which a view is generated; their meaning depends on the shape to which it is applied.
type Draw = (u8, [usize; 3]);

fn draws() -> impl Strategy<Value = (Vec<usize>, Vec<Draw>)> {
    let shape = prop::collection::vec(1..5usize, 1..4);
    (shape, prop::collection::vec((0..9u8, [0..64usize, 0..64usize, 0..64usize]), 1..7))
}

pub(crate) fn chains<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("chains of views");
    section.check("of a leaf", || Ok(random(400, draws(), |(shape, chain)| check(rt, shape, chain, false))));
    section.check("of an intermediate", || Ok(random(400, draws(), |(shape, chain)| check(rt, shape, chain, true))));
    section
}

/// Positions of the first tensor's elements, seen through a view.
#[derive(Clone)]
struct Positions {
    dims: Vec<usize>,
    at: Vec<usize>,
}

impl Positions {
    /// Selects element `f(position)` of these at every position of `dims`.
    fn pick(&self, dims: Vec<usize>, f: impl Fn(&[usize]) -> Vec<usize>) -> Positions {
        let n: usize = dims.iter().product();
        let at = (0..n).map(|k| self.at[flat(&f(&unflat(k, &dims)), &self.dims)]).collect();
        Positions { dims, at }
    }
}

/// Applies one view to the variable and to the positions.
fn step<R: Runtime>(x: &Var<R>, p: &Positions, (kind, n): Draw) -> Result<(Var<R>, Positions)> {
    let (dims, rank) = (p.dims.clone(), p.dims.len());
    let axis = n[0] % rank.max(1);
    let a = axis as isize;
    let changed = |size: usize| {
        let mut dims = dims.clone();
        dims[axis] = size;
        dims
    };
    let along = |position: &[usize], at: usize| {
        let mut position = position.to_vec();
        position[axis] = at;
        position
    };
    Ok(match kind {
        0 if rank > 0 => {
            let other = n[1] % rank;
            let swap = |v: &[usize]| {
                let mut v = v.to_vec();
                v.swap(axis, other);
                v
            };
            (x.transpose(a, other as isize)?, p.pick(swap(&dims), swap))
        }
        1 if rank > 0 => {
            let start = n[1] % dims[axis];
            let len = 1 + n[2] % (dims[axis] - start);
            (x.narrow(a, start, len)?, p.pick(changed(len), |q| along(q, q[axis] + start)))
        }
        2 if rank > 0 => {
            let (start, by) = (n[1] % dims[axis], 1 + n[2] % 3);
            let len = (dims[axis] - start).div_ceil(by);
            (x.slice(a, start, len, by)?, p.pick(changed(len), |q| along(q, start + q[axis] * by)))
        }
        3 if rank > 0 => (x.flip(&[a])?, p.pick(dims.clone(), |q| along(q, dims[axis] - 1 - q[axis]))),
        4 if rank > 0 && rank < 6 => {
            let (size, by) = (1 + n[1] % dims[axis], 1 + n[2] % 2);
            let windows = (dims[axis] - size) / by + 1;
            let mut shape = changed(windows);
            shape.push(size);
            (x.unfold(a, size, by, 1)?, p.pick(shape, |q| along(&q[..rank], q[axis] * by + q[rank])))
        }
        5 => {
            let whole: usize = dims.iter().product();
            let first = (1..=whole).filter(|d| whole.is_multiple_of(*d)).nth(n[1] % 4).unwrap_or(1);
            (x.reshape([first, whole / first])?, Positions { dims: vec![first, whole / first], at: p.at.clone() })
        }
        6 if rank < 6 => (
            x.unsqueeze(a)?,
            p.pick([&dims[..axis], &[1], &dims[axis..]].concat(), |q| [&q[..axis], &q[axis + 1..]].concat()),
        ),
        7 if rank > 0 && dims[axis] == 1 && p.at.len() < 200 => {
            let size = 1 + n[1] % 3;
            (x.broadcast_to(changed(size))?, p.pick(changed(size), |q| along(q, 0)))
        }
        8 if rank > 1 => {
            let at = n[1] % dims[axis];
            let shape = [&dims[..axis], &dims[axis + 1..]].concat();
            (x.select(a, at)?, p.pick(shape, |q| [&q[..axis], &[at], &q[axis..]].concat()))
        }
        _ => (x.clone(), p.clone()),
    })
}

fn check<R: Runtime>(rt: &R, shape: &[usize], chain: &[Draw], intermediate: bool) -> Result<Verdict> {
    let n: usize = shape.iter().product();
    let numbers: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let leaf = Var::leaf("x", Tensor::from_slice(rt, shape, &numbers)?)?;
    let start = if intermediate { leaf.mul(2.0)? } else { leaf.clone() };
    let mut seen = (start, Positions { dims: shape.to_vec(), at: (0..n).collect() });
    for draw in chain {
        seen = step(&seen.0, &seen.1, *draw)?;
    }
    let ((x, positions), factor) = (seen, if intermediate { 2.0 } else { 1.0 });
    let got = x.value()?.to_f64s()?;
    let want: Vec<f64> = positions.at.iter().map(|&k| factor * k as f64).collect();
    if x.dims() != positions.dims || got != want {
        return Ok(Verdict::failed(format!("{:?} {got:?}, expected {:?} {want:?}", x.dims(), positions.dims)));
    }
    // Each element has a different integer weight: sums are exact.
    let weights: Vec<f32> = (0..got.len()).map(|i| 1.0 + (i % 13) as f32).collect();
    let mut gradients = Gradients::new();
    let seed = Var::new(Tensor::from_slice(rt, &positions.dims[..], &weights)?);
    autograd::Backward::from(&x, &seed)?.run(&mut gradients)?;
    let mut sums = vec![0.0; n];
    positions.at.iter().zip(&weights).for_each(|(&k, &w)| sums[k] += factor * f64::from(w));
    let gradient = gradients.of(&leaf).map(|g| g.to_f64s()).transpose()?;
    Ok(Verdict::when(gradient.as_ref() == Some(&sums), || format!("gradient {gradient:?}, expected {sums:?}")))
}

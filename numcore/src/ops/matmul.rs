//! Matrix products: batched and broadcast, with transposed operands expressed as strides.

use std::ops::RangeInclusive;

use smallvec::{SmallVec, smallvec};

use super::{
    Apply, Backprop, Bits, Op, Rule, Saves, Spec, Specs, ViewOps,
    rule::{float, same_dtype},
};
use crate::{Error, Out, Result, Runtime, Shape, Tensor, fused::Linear};

/// The matrix product of `a: [B.., M, K]` and `b: [B.., K, N]`; batch axes broadcast.
#[derive(Clone, Debug)]
pub struct Matmul;

impl Matmul {
    fn batch(a: Shape, b: Shape) -> Option<Shape> {
        let lead = |s: Shape| Shape::new(&s[..s.rank() - 2]).ok();
        lead(a)?.broadcast(&lead(b)?)
    }

    fn operand(batch: Shape, x: Shape) -> Result<Shape> {
        Shape::new(&[&batch[..], &x[x.rank() - 2..]].concat())
    }
}

impl Rule for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let dtype = same_dtype("matmul", ins)?;
        float("matmul", ins[0])?;
        let (a, b) = (ins[0].shape, ins[1].shape);
        if a.rank() < 2 || b.rank() < 2 {
            return Err(Error::shape("matmul", &[a, b], "needs at least two axes on each side"));
        }
        let (m, k, k2, n) = (a[a.rank() - 2], a[a.rank() - 1], b[b.rank() - 2], b[b.rank() - 1]);
        if k != k2 {
            return Err(Error::shape("matmul", &[a, b], format!("inner sizes {k} and {k2} differ")));
        }
        let Some(batch) = Self::batch(a, b) else {
            return Err(Error::shape("matmul", &[a, b], "batch axes cannot be broadcast together"));
        };
        Ok(smallvec![Spec { shape: Shape::new(&[&batch[..], &[m, n]].concat())?, dtype }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let (a, b) = (*ins[0].shape(), *ins[1].shape());
        let rt = ins[0].runtime();
        if let Some(rows) = rows(a, b)
            && let Some(layout) = outs[0].view.layout.reshape(Shape::from([rows, b[1]]))
        {
            let a = ins[0].reshape([rows, b[0]])?;
            let mut out = outs[0].reborrow();
            out.view.layout = &layout;
            return rt.matmul(a.view(), ins[1].view(), out);
        }
        let batch = Self::batch(a, b).unwrap_or(Shape::SCALAR);
        let (mut room_a, mut room_b) = (None, None);
        let a = ins[0].view_at(&Self::operand(batch, a)?, &mut room_a)?;
        let b = ins[1].view_at(&Self::operand(batch, b)?, &mut room_b)?;
        rt.matmul(a, b, outs[0].reborrow())
    }

    fn saves(&self, wants: Bits) -> Result<Saves> {
        Ok(saves(wants))
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        gradient(cx, &g)
    }
}

/// The inputs that [`gradient`] reads.
pub(crate) fn saves(wants: Bits) -> Saves {
    let inputs = Bits(u64::from(wants.has(1)) | u64::from(wants.has(0)) << 1);
    Saves { inputs, outputs: Bits::NONE }
}

/// Computes the gradients of inputs 0 and 1 of a matmul, given the gradient `g` of its result.
#[track_caller]
pub(crate) fn gradient<T: Apply>(cx: &mut dyn Backprop<T>, g: &T) -> Result<()> {
    gradient_of_left(cx, g)?;
    if cx.wants(1) {
        let (a, g) = rows_of_both(cx, g)?;
        product_to(cx, 1, &a.t()?, &g)?;
    }
    Ok(())
}

/// Computes the gradient of input 0 of a matmul, if it is wanted.
#[track_caller]
pub(crate) fn gradient_of_left<T: Apply>(cx: &mut dyn Backprop<T>, g: &T) -> Result<()> {
    if cx.wants(0) {
        let bt = cx.input(1)?.t()?;
        product_to(cx, 0, g, &bt)?;
    }
    Ok(())
}

/// The left operand of a matmul and the gradient of its result, as matrices of all rows if it ran as one product.
#[track_caller]
pub(crate) fn rows_of_both<T: Apply>(cx: &mut dyn Backprop<T>, g: &T) -> Result<(T, T)> {
    let a = cx.input(0)?;
    match rows(a.spec().shape, cx.input_spec(1)?.shape) {
        Some(rows) => Ok((flat(&a, rows)?, flat(g, rows)?)),
        None => Ok((a, g.clone())),
    }
}

/// The number of rows, if `[.., M, K] · [K, N]` can run as one matmul of all rows.
fn rows(a: Shape, b: Shape) -> Option<usize> {
    (b.rank() == 2 && a.rank() > 2).then(|| a[..a.rank() - 1].iter().product())
}

#[track_caller]
fn flat<T: Apply>(x: &T, rows: usize) -> Result<T> {
    x.reshape([rows, x.spec().shape.last().copied().unwrap_or(1)])
}

/// The gradient `a · b` of input `i`, summed over the batch axes along which that input was broadcast.
#[track_caller]
fn product_to<T: Apply>(cx: &mut dyn Backprop<T>, i: usize, a: &T, b: &T) -> Result<()> {
    let product = Matmul.infer(&[a.spec(), b.spec()])?[0].shape;
    if product == cx.input_spec(i)?.shape {
        return cx.give(i, Op::Matmul(Matmul), &[a, b]);
    }
    let product = T::apply1(Matmul, &[a, b])?;
    cx.give_sum_to(i, &product)
}

/// Matrix multiplication of matrices, vectors and batches.
pub trait MatmulOps: Apply {
    /// The matrix product over the last two axes; leading axes are batches and broadcast. A one-dimensional operand is
    /// a vector, whose axis disappears. `[.., M, K] · [K, N]` runs as one matmul of `[.. · M, K]`, copied first if
    /// strides cannot express it.
    #[track_caller]
    fn matmul(&self, other: &Self) -> Result<Self> {
        let (a, b) = (self.spec().shape, other.spec().shape);
        match (a.rank(), b.rank()) {
            (0, _) | (_, 0) => Err(Error::shape("matmul", &[a, b], "a scalar has no matrix product; use `mul`")),
            (1, _) => self.unsqueeze(0)?.matmul(other)?.squeeze(if b.rank() == 1 { -1 } else { -2 }),
            (_, 1) => self.matmul(&other.unsqueeze(1)?)?.squeeze(-1),
            _ => Self::apply1(Matmul, &[self, other]),
        }
    }
    /// The affine map `x · wᵀ + b` with `x: [.., I]`, `w: [O, I]`, `b: [O]`.
    #[track_caller]
    fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self> {
        linear(self, weight, bias, None)
    }
    /// The affine map with a residual, `x · wᵀ + b + r` for `r: [.., O]`; see [`linear`](MatmulOps::linear).
    #[track_caller]
    fn linear_onto(&self, weight: &Self, bias: Option<&Self>, residual: &Self) -> Result<Self> {
        linear(self, weight, bias, Some(residual))
    }
    /// Inner product of two vectors.
    #[track_caller]
    fn dot(&self, other: &Self) -> Result<Self> {
        self.matmul(other)
    }
}

impl<T: Apply> MatmulOps for T {}

#[track_caller]
fn linear<T: Apply>(x: &T, weight: &T, bias: Option<&T>, residual: Option<&T>) -> Result<T> {
    let (xs, ws) = (x.spec().shape, weight.spec().shape);
    if ws.rank() != 2 || xs.last() != ws.last() {
        let ins: SmallVec<[&T; 4]> = [x, weight].into_iter().chain(bias).collect();
        let shapes: SmallVec<[Shape; 4]> = ins.iter().map(|x| x.spec().shape).collect();
        let why = match (xs.last(), &ws[..]) {
            (Some(n), [_, inputs]) => format!("x has {n} features, the weight takes {inputs}"),
            _ => "needs x [.., I] and a weight [O, I]".into(),
        };
        return Err(T::explained(Error::shape("linear", &shapes, why), &ins));
    }
    let weight = weight.t()?;
    if bias.is_none() && residual.is_none() {
        return x.matmul(&weight);
    }
    if x.spec().shape.rank() == 1 {
        let residual = residual.map(|r| r.unsqueeze(0)).transpose()?;
        return linear_rows(&x.unsqueeze(0)?, &weight, bias, residual.as_ref())?.squeeze(0);
    }
    linear_rows(x, &weight, bias, residual)
}

#[track_caller]
fn linear_rows<T: Apply>(x: &T, weight: &T, bias: Option<&T>, residual: Option<&T>) -> Result<T> {
    let op = Linear { bias: bias.is_some(), residual: residual.is_some() };
    let ins: SmallVec<[&T; 4]> = [x, weight].into_iter().chain(bias).chain(residual).collect();
    T::apply1(op, &ins)
}

//! Matrix products: batched, broadcast, with transposed operands as strides, and Einstein sums reduced to them.

use smallvec::{SmallVec, smallvec};

use super::{
    Apply, Backprop, Bits, Op, ReduceOps, Rule, Saves, Spec, Specs, ViewOps,
    rule::{float, same_dtype},
};
use crate::{Error, MAX_RANK, Out, Result, Runtime, Shape, Tensor, fused::Linear};

/// `a: [B.., M, K]` times `b: [B.., K, N]`; batch axes broadcast.
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

/// What [`gradient`] reads.
pub(crate) fn saves(wants: Bits) -> Saves {
    let inputs = Bits(u64::from(wants.has(1)) | u64::from(wants.has(0)) << 1);
    Saves { inputs, outputs: Bits::NONE }
}

/// Gives the gradients of inputs 0 and 1 where that of their product is `g`.
pub(crate) fn gradient<T: Apply>(cx: &mut dyn Backprop<T>, g: &T) -> Result<()> {
    if cx.wants(0) {
        let bt = cx.input(1)?.t()?;
        product_to(cx, 0, g, &bt)?;
    }
    if cx.wants(1) {
        let a = cx.input(0)?;
        let (a, g) = match rows(a.spec().shape, cx.input_spec(1).shape) {
            Some(rows) => (flat(&a, rows)?, flat(g, rows)?),
            None => (a, g.clone()),
        };
        product_to(cx, 1, &a.t()?, &g)?;
    }
    Ok(())
}

/// `[.., M, K] · [K, N]` is one product of so many rows.
fn rows(a: Shape, b: Shape) -> Option<usize> {
    (b.rank() == 2 && a.rank() > 2).then(|| a[..a.rank() - 1].iter().product())
}

fn flat<T: Apply>(x: &T, rows: usize) -> Result<T> {
    x.reshape([rows, x.spec().shape.last().copied().unwrap_or(1)])
}

/// The gradient of input `i` is `a · b`, summed over the batch axes along which that input was broadcast.
fn product_to<T: Apply>(cx: &mut dyn Backprop<T>, i: usize, a: &T, b: &T) -> Result<()> {
    let product = Matmul.infer(&[a.spec(), b.spec()])?[0].shape;
    if product == cx.input_spec(i).shape {
        return cx.give(i, Op::Matmul(Matmul), &[a, b]);
    }
    let product = T::apply1(Matmul, &[a, b])?;
    cx.give_sum_to(i, &product)
}

/// Products of matrices, vectors and batches.
pub trait MatmulOps: Apply {
    /// Matrix product over the last two axes; leading axes are batches and broadcast. A one-dimensional side is a vector,
    /// whose axis disappears. `[.., M, K] · [K, N]` runs as one product of `[.. · M, K]`, copied first if strides cannot say that.
    fn matmul(&self, other: &Self) -> Result<Self> {
        let (a, b) = (self.spec().shape, other.spec().shape);
        match (a.rank(), b.rank()) {
            (0, _) | (_, 0) => Err(Error::shape("matmul", &[a, b], "a scalar has no matrix product; use `mul`")),
            (1, _) => self.unsqueeze(0)?.matmul(other)?.squeeze(if b.rank() == 1 { -1 } else { -2 }),
            (_, 1) => self.matmul(&other.unsqueeze(1)?)?.squeeze(-1),
            _ => Self::apply1(Matmul, &[self, other]),
        }
    }
    /// `x · wᵀ + b` with `x: [.., I]`, `w: [O, I]`, `b: [O]`.
    fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self> {
        linear(self, weight, bias, None)
    }
    /// `x · wᵀ + b + r`: as [`linear`](MatmulOps::linear), onto a residual `r: [.., O]`.
    fn linear_onto(&self, weight: &Self, bias: Option<&Self>, residual: &Self) -> Result<Self> {
        linear(self, weight, bias, Some(residual))
    }
    /// Inner product of two vectors.
    fn dot(&self, other: &Self) -> Result<Self> {
        self.matmul(other)
    }
}

impl<T: Apply> MatmulOps for T {}

fn linear<T: Apply>(x: &T, weight: &T, bias: Option<&T>, residual: Option<&T>) -> Result<T> {
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

fn linear_rows<T: Apply>(x: &T, weight: &T, bias: Option<&T>, residual: Option<&T>) -> Result<T> {
    let op = Linear { bias: bias.is_some(), residual: residual.is_some() };
    let ins: SmallVec<[&T; 4]> = [x, weight].into_iter().chain(bias).chain(residual).collect();
    T::apply1(op, &ins)
}

type Labels = SmallVec<[u8; MAX_RANK]>;

/// Einstein's sum convention: `einsum("bhqd,bhkd->bhqk", &[&q, &k])`. Letters name axes; those absent on the right are summed.
/// Operands are contracted from left to right, each pair as one batched product. A letter may occur once per operand.
pub fn einsum<T: Apply>(equation: &str, ins: &[&T]) -> Result<T> {
    let (operands, output) = parse(equation, ins)?;
    let mut at = Labelled { labels: operands[0].clone(), value: ins[0].clone() };
    for (i, x) in ins.iter().enumerate().skip(1) {
        let later: Labels = operands[i + 1..].iter().flatten().chain(&output).copied().collect();
        at = contract(at, Labelled { labels: operands[i].clone(), value: (*x).clone() }, &later)?;
    }
    at.keep(&output)?.arranged(&output)
}

struct Labelled<T> {
    labels: Labels,
    value: T,
}

impl<T: Apply> Labelled<T> {
    fn sizes(&self, labels: &[u8]) -> Vec<usize> {
        let shape = self.value.spec().shape;
        labels.iter().filter_map(|l| self.labels.iter().position(|m| m == l)).map(|i| shape[i]).collect()
    }

    /// Sums away the labels that are not in `wanted`.
    fn keep(self, wanted: &[u8]) -> Result<Self> {
        let gone: Vec<isize> =
            (0..self.labels.len()).filter(|&i| !wanted.contains(&self.labels[i])).map(|i| i as isize).collect();
        if gone.is_empty() {
            return Ok(self);
        }
        let labels = self.labels.iter().copied().filter(|l| wanted.contains(l)).collect();
        Ok(Labelled { labels, value: self.value.sum(&gone, false)? })
    }

    fn arranged(self, order: &[u8]) -> Result<T> {
        let axes: Vec<usize> = order.iter().filter_map(|l| self.labels.iter().position(|m| m == l)).collect();
        if axes.iter().enumerate().all(|(i, &a)| i == a) { Ok(self.value) } else { self.value.permute_axes(&axes) }
    }
}

fn contract<T: Apply>(a: Labelled<T>, b: Labelled<T>, later: &[u8]) -> Result<Labelled<T>> {
    let wanted_a: Labels = later.iter().chain(&b.labels).copied().collect();
    let wanted_b: Labels = later.iter().chain(&a.labels).copied().collect();
    let (a, b) = (a.keep(&wanted_a)?, b.keep(&wanted_b)?);
    let pick = |from: &Labels, f: &dyn Fn(&u8) -> bool| -> Labels { from.iter().copied().filter(|l| f(l)).collect() };
    let batch = pick(&a.labels, &|l| b.labels.contains(l) && later.contains(l));
    let inner = pick(&a.labels, &|l| b.labels.contains(l) && !later.contains(l));
    let rows = pick(&a.labels, &|l| !b.labels.contains(l));
    let columns = pick(&b.labels, &|l| !a.labels.contains(l));
    let (nb, nm, nk, nn) = (a.sizes(&batch), a.sizes(&rows), a.sizes(&inner), b.sizes(&columns));
    let flat = |v: &[usize]| v.iter().product::<usize>();
    let left = a.arranged(&[&batch[..], &rows, &inner].concat())?.reshape([flat(&nb), flat(&nm), flat(&nk)])?;
    let right = b.arranged(&[&batch[..], &inner, &columns].concat())?.reshape([flat(&nb), flat(&nk), flat(&nn)])?;
    let value = T::apply1(Matmul, &[&left, &right])?.reshape([nb, nm, nn].concat())?;
    Ok(Labelled { labels: [&batch[..], &rows, &columns].concat().into(), value })
}

fn parse<T: Apply>(equation: &str, ins: &[&T]) -> Result<(Vec<Labels>, Labels)> {
    let bad = |why: String| Error::argument("einsum", format!("`{equation}`: {why}"));
    let text: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = text.split_once("->").ok_or_else(|| bad("write the result after `->`".into()))?;
    let labels = |s: &str| -> Result<Labels> {
        let l: Labels = s.bytes().collect();
        if !l.iter().all(u8::is_ascii_alphabetic) {
            return Err(bad("axes are named by letters".into()));
        }
        if (1..l.len()).any(|i| l[..i].contains(&l[i])) {
            return Err(bad(format!("a letter occurs twice in `{s}`")));
        }
        Ok(l)
    };
    let operands = left.split(',').map(labels).collect::<Result<Vec<_>>>()?;
    let output = labels(right)?;
    if operands.len() != ins.len() || ins.is_empty() {
        return Err(bad(format!("names {} operands, {} were given", operands.len(), ins.len())));
    }
    let mut sizes = [None; 256];
    for (l, x) in operands.iter().zip(ins) {
        let shape = x.spec().shape;
        if l.len() != shape.rank() {
            return Err(Error::shape("einsum", &[shape], format!("`{equation}` names {} axes for it", l.len())));
        }
        for (&letter, &n) in l.iter().zip(shape.iter()) {
            if *sizes[letter as usize].get_or_insert(n) != n {
                return Err(bad(format!("axis `{}` has two sizes", letter as char)));
            }
        }
    }
    match output.iter().find(|&&l| sizes[l as usize].is_none()) {
        Some(&l) => Err(bad(format!("`{}` occurs in no operand", l as char))),
        None => Ok((operands, output)),
    }
}

//! Reductions: an elementwise program whose result is combined over axes.

use std::{ops::RangeInclusive, sync::LazyLock};

use smallvec::{SmallVec, smallvec};

use super::{
    Apply, Backprop, Bits, Pointwise, PointwiseOps, Rule, Saves, ScalarList, Scan, Spec, Specs, ViewOps,
    by_example::rows_of_each,
    launch,
    pointwise::{chain, given_bits, rooms, with_tangents},
};
use crate::{
    DType, Error, Out, ProgramOperand, ReduceKind, Result, Runtime, Shape, Tensor, TensorMut,
    pointwise::{Program, Widened},
};

/// The values of `program` at every position of its broadcast inputs, combined by `op` into shape `to`. The reduced
/// axes are those along which `to` broadcasts to the inputs.
///
/// One launch does the map and the reduction. This op is also the gradient of a broadcast input.
#[derive(Clone, Debug)]
pub struct Reduce {
    program: Program,
    scalars: ScalarList,
    op: ReduceKind,
    to: Shape,
    mean: Option<Mean>,
}

/// The divisor of a sum, and the form of its program whose values are summed.
#[derive(Clone, Debug)]
struct Mean {
    summed: Program,
    divisor: f64,
}

impl Reduce {
    /// A reduction of the input itself. `to` must broadcast to the input's shape.
    pub fn new(op: ReduceKind, to: Shape) -> Self {
        Reduce { program: Pointwise::identity().program, scalars: ScalarList::new(), op, to, mean: None }
    }

    /// The sum down to a shape that broadcasts to the input's: the adjoint of broadcasting.
    pub fn sum_to(to: Shape) -> Self {
        Self::new(ReduceKind::Sum, to)
    }

    /// The sum of the single output of a program.
    pub fn sum_of(program: Program, scalars: ScalarList, to: Shape) -> Self {
        Reduce { program, scalars, op: ReduceKind::Sum, to, mean: None }
    }

    /// The mean of a program's values: their sum divided by `count`, NaN if there are none. Half-precision operands
    /// (`dtype`) are widened, summed, and rounded once.
    ///
    /// The sum is divided, and its terms are not multiplied by a rounded `1/count`. The mean of equal numbers whose sum
    /// is exact is therefore that number.
    pub fn mean_of(program: &Widened, dtype: DType, scalars: ScalarList, to: Shape, count: usize) -> Self {
        let mean = Some(Mean { summed: program.of(dtype).clone(), divisor: count as f64 });
        Reduce { mean, ..Self::sum_of(program.of(DType::F32).clone(), scalars, to) }
    }

    /// The values that are combined: a program with its scalars.
    pub fn mapped(&self) -> Pointwise {
        self.values(&self.program)
    }

    /// The way in which values are combined.
    pub fn kind(&self) -> ReduceKind {
        self.op
    }

    /// The number that divides a sum, if the op is a mean.
    pub fn divisor(&self) -> Option<f64> {
        self.mean.as_ref().map(|mean| mean.divisor)
    }

    /// This reduction with `op` in place of its own.
    pub(super) fn by(self, op: ReduceKind) -> Self {
        Reduce { op, ..self }
    }

    /// Combines the values of a program into `out`.
    fn combine<R: Runtime>(&self, program: &Program, ins: &[&Tensor<R>], mut out: Out<'_, R>) -> Result<()> {
        let full = self.full(ins.iter().map(|t| *t.shape()))?;
        let mut rooms = rooms(ins.len());
        let views = ins.iter().zip(&mut rooms).map(|(t, room)| t.view_at(&full, room));
        let views = views.collect::<Result<SmallVec<[_; 4]>>>()?;
        let layout = out.view.layout.broadcast_to(self.to.padded(full.rank()))?;
        let mut out = out.reborrow();
        out.view.layout = &layout;
        ins[0].runtime().reduce(program, &views, &self.scalars, &full, self.op, out)
    }

    /// The widened form of a mean, if its derivatives read operands, which are then rounded once. Otherwise `None`: the
    /// widened form would read operands only for their dtype.
    fn widened_derivatives(&self, wants: Bits) -> Result<Option<&Mean>> {
        let reads = self.values(&self.program).saves(wants)?.inputs != Bits::NONE;
        Ok(self.mean.as_ref().filter(|_| reads))
    }

    /// The tangent of the result; see [`tangents`](super::tangents).
    #[track_caller]
    pub(super) fn tangent<T: Apply>(&self, ins: &[&T], out: &T, given: &[Option<&T>]) -> Result<Option<T>> {
        if self.op == ReduceKind::Sum {
            let wrt = given_bits(given);
            let Some(program) = self.program.tangent(wrt) else { return Ok(None) };
            let summed = |mean: &Mean| Some(Mean { summed: mean.summed.tangent(wrt)?, divisor: mean.divisor });
            let (mean, scalars) = (self.mean.as_ref().and_then(summed), self.scalars.clone());
            let sum = Reduce { mean, scalars, ..Self::sum_of(program, ScalarList::new(), self.to) };
            return T::apply1(sum, &with_tangents(ins, given)).map(Some);
        }
        let (x, Some(t)) = (ins[0], given[0]) else { return Ok(None) };
        let weight = match self.op {
            ReduceKind::Prod => products_of_others(x, self.to)?,
            _ => self.shares(x, out)?,
        };
        T::apply1(Reduce::sum_to(self.to), &[&weight.mul(t)?]).map(Some)
    }

    /// The sum over the rows of each example, `[B, ..]`; `None` if the rows are not summed. See
    /// [`by_example`](super::by_example).
    #[track_caller]
    pub(super) fn by_example<T: Apply>(&self, ins: &[&T], examples: usize) -> Result<Option<T>> {
        let full = self.full(ins.iter().map(|x| x.spec().shape))?;
        let to = self.to.padded(full.rank());
        let is_summed = self.op == ReduceKind::Sum && self.mean.is_none() && full.rank() > 0;
        if !is_summed || (to[0] == full[0] && self.to.rank() == full.rank()) {
            return Ok(None);
        }
        let each = rows_of_each(&self.clone().into(), full[0], examples)?;
        let lengthened = |x: &&T| {
            let shape = x.spec().shape.padded(full.rank());
            let first = if shape[0] == full[0] { [examples, each] } else { [1, 1] };
            x.reshape([&first, &shape[1..]].concat())
        };
        let ins = ins.iter().map(lengthened).collect::<Result<SmallVec<[T; 4]>>>()?;
        let sum = Reduce { to: Shape::new(&[&[examples, 1], &to[1..]].concat())?, ..self.clone() };
        let sum = T::apply1(sum, &ins.iter().collect::<SmallVec<[&T; 4]>>())?;
        sum.reshape([&[examples], &self.to[..]].concat()).map(Some)
    }

    /// The share of each element in an extreme: 1, divided among equal elements.
    #[track_caller]
    fn shares<T: Apply>(&self, x: &T, extreme: &T) -> Result<T> {
        let full = x.spec().shape;
        let hit = x.eq(&extreme.broadcast_to(full)?)?.to_dtype(x.spec().dtype)?.detach();
        hit.div(&T::apply1(Reduce::sum_to(self.to), &[&hit])?.broadcast_to(full)?)
    }

    /// The values of a form of the program, before they are combined.
    fn values(&self, program: &Program) -> Pointwise {
        Pointwise { program: program.clone(), scalars: self.scalars.clone() }
    }

    fn full(&self, ins: impl Iterator<Item = Shape>) -> Result<Shape> {
        let shapes: SmallVec<[Shape; 4]> = ins.collect();
        Shape::broadcast_all(self.name(), &shapes)
    }
}

impl Rule for Reduce {
    fn name(&self) -> &'static str {
        match self.op {
            ReduceKind::Sum => "sum",
            ReduceKind::Prod => "prod",
            ReduceKind::Max => "amax",
            ReduceKind::Min => "amin",
        }
    }

    fn arity(&self) -> RangeInclusive<usize> {
        self.program.inputs()..=self.program.inputs()
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let full = self.full(ins.iter().map(|s| s.shape))?;
        if self.to.broadcast(&full) != Some(full) {
            return Err(Error::shape(self.name(), &[full, self.to], "the second does not broadcast to the first"));
        }
        let empty = full.numel() == 0 && self.to.numel() != 0;
        if empty && matches!(self.op, ReduceKind::Max | ReduceKind::Min) {
            return Err(Error::shape(self.name(), &[full], "an extreme of no elements does not exist"));
        }
        let dtypes: SmallVec<[DType; 4]> = ins.iter().map(|s| s.dtype).collect();
        let typed = self.program.typed(&dtypes, &[])?;
        self.program.check_scalars(typed, &self.scalars)?;
        let dtype = typed.dtypes[self.program.outputs()[0] as usize];
        if dtype == DType::Bool && matches!(self.op, ReduceKind::Sum | ReduceKind::Prod) {
            return Err(Error::dtype(self.name(), &[dtype], "truth values have no arithmetic; cast to i64 to count"));
        }
        Ok(smallvec![Spec { shape: self.to, dtype }])
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        let Some(mean) = &self.mean else { return self.combine(&self.program, ins, outs[0].reborrow()) };
        let (rt, dtype) = (ins[0].runtime(), outs[0].view.dtype());
        let mut sums = TensorMut::alloc(rt, self.to, dtype.compute())?;
        self.combine(&mean.summed, ins, sums.out())?;
        launch(rt, divided(dtype), &[ProgramOperand::View(sums.freeze()?.view())], &[mean.divisor.into()], outs)
    }

    fn saves(&self, wants: Bits) -> Result<Saves> {
        match self.op {
            ReduceKind::Sum => {
                let program = self.widened_derivatives(wants)?.map_or(&self.program, |mean| &mean.summed);
                self.values(program).saves(wants)
            }
            ReduceKind::Prod => Ok(Saves::inputs(&[0])),
            ReduceKind::Max | ReduceKind::Min => Ok(Saves { inputs: Bits(1), outputs: Bits(1) }),
        }
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        let shapes = (0..cx.inputs()).map(|i| Ok(cx.input_spec(i)?.shape)).collect::<Result<Vec<_>>>()?;
        let full = self.full(shapes.into_iter())?;
        match self.op {
            ReduceKind::Sum => {
                let wants = Bits((0..cx.inputs()).filter(|&i| cx.wants(i)).fold(0, |bits, i| bits | 1 << i));
                let (program, g) = match (self.widened_derivatives(wants)?, &self.mean) {
                    (Some(mean), _) => (&mean.summed, g.to_dtype(g.spec().dtype.compute())?.div(mean.divisor)?),
                    (None, Some(mean)) => (&self.program, g.div(mean.divisor)?),
                    (None, None) => (&self.program, g),
                };
                chain(program, &self.scalars, &[g.broadcast_to(full)?], cx)
            }
            ReduceKind::Prod => {
                let others = products_of_others(&cx.input(0)?, self.to)?;
                cx.give_value(0, &others.mul(&g.broadcast_to(full)?)?)
            }
            ReduceKind::Max | ReduceKind::Min => {
                let (x, y) = (cx.input(0)?, cx.output(0)?);
                let hit = x.eq(&y.broadcast_to(full)?)?.to_dtype(x.spec().dtype)?.detach();
                let share = T::apply1(Reduce::sum_to(self.to), &[&hit])?;
                cx.give_value(0, &hit.mul(&g.div(&share)?.broadcast_to(full)?)?)
            }
        }
    }
}

/// The program that divides a sum by a number and rounds it to a floating dtype.
fn divided(to: DType) -> &'static Program {
    static PROGRAMS: LazyLock<[Program; 3]> = LazyLock::new(|| {
        let rounded = |to| Program::new("mean", |[sum], [n]| [(sum / n).cast(to)]);
        [Program::new("mean", |[sum], [n]| [sum / n]), rounded(DType::F16), rounded(DType::BF16)]
    });
    match to {
        DType::F16 => &PROGRAMS[1],
        DType::BF16 => &PROGRAMS[2],
        _ => &PROGRAMS[0],
    }
}

/// The product of all other elements that are reduced together with each element: exact where some are 0.
#[track_caller]
fn products_of_others<T: Apply>(x: &T, to: Shape) -> Result<T> {
    let shape = x.spec().shape;
    let lead = shape.rank() - to.rank();
    let (kept, gone): (Vec<usize>, Vec<usize>) =
        (0..shape.rank()).partition(|&i| i >= lead && to[i - lead] == shape[i]);
    let order: Vec<usize> = kept.iter().chain(&gone).copied().collect();
    let outer: usize = kept.iter().map(|&i| shape[i]).product();
    let inner: usize = gone.iter().map(|&i| shape[i]).product();
    let moved = x.permute_axes(&order)?;
    let flat = moved.reshape([outer, inner])?;
    let before = Scan::exclusive_prod(&flat, 1, false)?;
    let after = Scan::exclusive_prod(&flat, 1, true)?;
    let mut back = vec![0; order.len()];
    order.iter().enumerate().for_each(|(i, &a)| back[a] = i);
    before.mul(&after)?.reshape(moved.spec().shape)?.permute_axes(&back)
}

/// The maximum along the axes that `to` drops (0 where it is infinite), without a gradient. It is subtracted before
/// `exp`.
#[track_caller]
pub(crate) fn finite_top<T: Apply>(x: &T, to: Shape) -> Result<T> {
    static FINITE: LazyLock<Program> =
        LazyLock::new(|| Program::new("finite", |[m], []| [m.abs().eq(f64::INFINITY).select(m.sign() * 0.0, m)]));
    // An empty reduction has no maximum, and any finite value serves.
    let op = if x.spec().shape.numel() == 0 { ReduceKind::Sum } else { ReduceKind::Max };
    T::apply1(Reduce::new(op, to), &[&x.detach()])?.apply_program(&FINITE, &[], &[])
}

/// The sum of a program's values, down to `to`.
pub(super) fn sum_of<T: Apply>(program: &Widened, x: &T, scalars: ScalarList, to: Shape) -> Reduce {
    Reduce::sum_of(program.of(x.spec().dtype).clone(), scalars, to)
}

/// The mean of a program's values down to `to`; `f32` for half-precision inputs.
#[track_caller]
pub(crate) fn mean_of<T: Apply>(program: &Widened, ins: &[&T], to: Shape, count: usize) -> Result<T> {
    mean_by(program, ins, ScalarList::new(), to, count as f64)
}

/// The sum of a program's values down to `to`, over `divisor`; `f32` for half-precision inputs.
#[track_caller]
pub(super) fn mean_by<T: Apply>(
    program: &Widened,
    ins: &[&T],
    scalars: ScalarList,
    to: Shape,
    divisor: f64,
) -> Result<T> {
    let sum = sum_of(program, ins[0], scalars, to);
    T::apply1(Reduce { mean: Some(Mean { summed: sum.program.clone(), divisor }), ..sum }, ins)
}

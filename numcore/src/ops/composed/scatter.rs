//! Scatters: values written to the positions that an index names. They replace the old value, or are combined with it
//! and with one another.
//!
//! An index may name a position several times. After a stable sort by position, the values for one position are
//! adjacent. A segmented scan of doubling distances combines them, and the last value of each segment is the result.
//! Results therefore depend on the order of the values alone, never on threads, and need no kernel beyond sort, gather
//! and scatter-add.

use std::sync::LazyLock;

use super::zeros;
use crate::{
    DType, Error, Result, Scalar, Shape, Tensor,
    fused::ScatterExtreme,
    ops::{Apply, IndexOps, PointwiseOps, SortOps, ViewOps, cat, rule},
    pointwise::Program,
};

/// The reduction of values that are scattered to one position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScatterReduction {
    /// The sum of the values.
    Sum,
    /// The product of the values.
    Prod,
    /// The mean of the values; floating dtypes only.
    Mean,
    /// The largest value. NaN wins, and values that tie share the gradient evenly.
    Amax,
    /// The smallest value. NaN wins, and values that tie share the gradient evenly.
    Amin,
}

/// Scatter operations. Indices are `i64`, with as many axes as `self`, and no larger than `self` on the axes other than
/// `axis`. `src` has at least the index's sizes. An index out of range is an error.
pub trait ScatterOps: Apply {
    /// `self` with `src[.., i, ..]` in place of `self[.., index[.., i, ..], ..]` along `axis`. The last of several
    /// values for one position is kept, on every runtime (PyTorch leaves it undefined). Both operands have one dtype,
    /// any.
    #[doc(alias = "scatter_")]
    #[doc(alias = "put_along_axis")]
    #[track_caller]
    fn scatter(&self, axis: isize, index: &Self, src: &Self) -> Result<Self> {
        let at = ScatterRegion::new("scatter", self, axis, index, src)?;
        let Some(winner) = at.winners().map_err(|e| at.found("scatter", e))? else { return Ok(self.clone()) };
        at.merged(&winner.pick(at.axis, &at.src)?, &winner.hit()?)
    }
    /// `self` with `value` at `index` along `axis`; an integer value for integer dtypes.
    #[track_caller]
    fn scatter_value(&self, axis: isize, index: &Self, value: f64) -> Result<Self> {
        let dtype = self.spec().dtype;
        let whole = !dtype.is_float() && value.fract() == 0.0;
        let number = if whole { Scalar::I64(value as i64) } else { Scalar::F64(value) };
        let one = Self::constant(Tensor::full(self.runtime(), Shape::SCALAR, dtype, number)?);
        self.scatter(axis, index, &one.broadcast_to(index.spec().shape)?).map_err(|e| e.of_op("scatter_value"))
    }
    /// `self` with `src[.., i, ..]` combined into `self[.., index[.., i, ..], ..]` along `axis`. The value of `self` at
    /// a named position takes part with `include_self` only. Positions that are not named keep their value. Sums
    /// accumulate in ascending order of `i`. Any dtype but `bool`.
    #[doc(alias = "scatter_reduce_")]
    #[doc(alias = "index_reduce")]
    #[track_caller]
    fn scatter_reduce(
        &self,
        axis: isize,
        index: &Self,
        src: &Self,
        reduction: ScatterReduction,
        include_self: bool,
    ) -> Result<Self> {
        let at = ScatterRegion::new("scatter_reduce", self, axis, index, src)?;
        if self.spec().dtype == DType::Bool {
            return Err(Error::dtype(
                "scatter_reduce",
                &[DType::Bool],
                "truth values have no arithmetic; cast to `u8`",
            ));
        }
        if at.index.spec().shape.numel() == 0 {
            return Ok(self.clone());
        }
        at.reduced(reduction, include_self).map_err(|e| at.found("scatter_reduce", e))
    }
    /// `self: [D1 .. DK, R..]` with the slices of `src: [J.., R..]` at coordinates `index: [J.., K]` of the first `K`
    /// axes. The last of equal coordinates is kept. Negative coordinates count from the end. ONNX's `ScatterND`.
    #[doc(alias = "index_put")]
    #[track_caller]
    fn scatter_nd(&self, index: &Self, src: &Self) -> Result<Self> {
        let [rows, at, values] = rows_named("scatter_nd", self, index, src)?;
        let named = rows.scatter(0, &at, &values);
        named
            .map_err(|e| super::select::coordinate("scatter_nd", index, &self.spec().shape, e))?
            .reshape(self.spec().shape)
    }
    /// Writes slices to the positions that `index` names, as [`scatter_nd`](ScatterOps::scatter_nd) does, with values
    /// combined as by [`scatter_reduce`](ScatterOps::scatter_reduce).
    #[track_caller]
    fn scatter_nd_reduce(
        &self,
        index: &Self,
        src: &Self,
        reduction: ScatterReduction,
        include_self: bool,
    ) -> Result<Self> {
        let [rows, at, values] = rows_named("scatter_nd", self, index, src)?;
        let named = rows.scatter_reduce(0, &at, &values, reduction, include_self);
        named
            .map_err(|e| super::select::coordinate("scatter_nd", index, &self.spec().shape, e))?
            .reshape(self.spec().shape)
    }
    /// `self` with slice `i` of `src` in place of the slice along `axis` named by `index[i]`; `index: [N]`, and the
    /// last of equal indices is kept.
    #[doc(alias = "index_copy_")]
    #[track_caller]
    fn index_copy(&self, axis: isize, index: &Self, src: &Self) -> Result<Self> {
        let (shape, ids) = (self.spec().shape, index.spec().shape);
        let at = shape.axis("index_copy", axis)?;
        if ids.rank() != 1 || src.spec().shape != shape.with(at, ids.numel()) {
            let why = format!("needs an index [N] and a source of the first's shape with N along axis {axis}");
            return Err(Error::shape("index_copy", &[shape, ids, src.spec().shape], why));
        }
        let thin = super::along(shape.rank(), at, ids.numel());
        let whole = index.reshape(thin)?.broadcast_to(shape.with(at, ids.numel()))?;
        self.scatter(axis, &whole, src).map_err(|e| e.of_axis("index_copy", at))
    }
    /// `self` with `value` in the slices along `axis` named by `index: [N]`.
    #[doc(alias = "index_fill_")]
    #[track_caller]
    fn index_fill(&self, axis: isize, index: &Self, value: f64) -> Result<Self> {
        let (shape, ids) = (self.spec().shape, index.spec().shape);
        let at = shape.axis("index_fill", axis)?;
        if ids.rank() != 1 {
            return Err(Error::shape("index_fill", &[shape, ids], "the index must have one axis"));
        }
        let thin = super::along(shape.rank(), at, ids.numel());
        let whole = index.reshape(thin)?.broadcast_to(shape.with(at, ids.numel()))?;
        self.scatter_value(axis, &whole, value).map_err(|e| e.of_axis("index_fill", at))
    }
}

impl<T: Apply> ScatterOps for T {}

/// The operands of a scatter by coordinates as rows: the tensor as `[D1 · .. · DK, R..]`, and flat indices and values
/// of one shape.
#[track_caller]
fn rows_named<T: Apply>(op: &'static str, x: &T, index: &T, src: &T) -> Result<[T; 3]> {
    let (shape, ids, from) = (x.spec().shape, index.spec().shape, src.spec().shape);
    rule::index(op, index.spec())?;
    let depth = ids.last().copied().unwrap_or(usize::MAX);
    if depth > shape.rank() || from[..] != [&ids[..ids.rank() - 1], &shape[depth..]].concat()[..] {
        let why = "the index must be [J.., K], naming the first K axes of the first, and the source [J.., R..], R.. the other axes";
        return Err(Error::shape(op, &[shape, ids, from], why));
    }
    let count = |sizes: &[usize]| sizes.iter().product::<usize>();
    let (named, rest) = (count(&ids[..ids.rank() - 1]), count(&shape[depth..]));
    let flat = super::select::flat_positions(index, &shape[..depth])?.reshape([named, 1])?;
    Ok([x.reshape([count(&shape[..depth]), rest])?, flat.broadcast_to([named, rest])?, src.reshape([named, rest])?])
}

/// The region of a tensor that an index can name.
struct ScatterRegion<'a, T> {
    whole: &'a T,
    /// `whole` narrowed to the index's sizes on every axis but `axis`.
    part: T,
    index: T,
    src: T,
    axis: usize,
}

impl<'a, T: Apply> ScatterRegion<'a, T> {
    fn new(op: &'static str, whole: &'a T, axis: isize, index: &T, src: &T) -> Result<Self> {
        let (shape, ids, from) = (whole.spec().shape, index.spec().shape, src.spec().shape);
        let axis = shape.axis(op, axis)?;
        rule::same_dtype(op, &[whole.spec(), src.spec()])?;
        rule::index(op, index.spec())?;
        let ranks = ids.rank() == shape.rank() && from.rank() == shape.rank();
        if !ranks || (0..ids.rank()).any(|i| ids[i] > from[i] || i != axis && ids[i] > shape[i]) {
            let why = format!(
                "the index must have as many axes, no larger than the source, nor (but along {axis}) than the first"
            );
            return Err(Error::shape(op, &[shape, ids, from], why));
        }
        let cut = |x: &T, free: Option<usize>| {
            (0..ids.rank()).filter(|&i| Some(i) != free).try_fold(x.clone(), |x, i| match x.spec().shape[i] == ids[i] {
                true => Ok(x),
                false => x.narrow(i as isize, 0, ids[i]),
            })
        };
        Ok(ScatterRegion { whole, part: cut(whole, Some(axis))?, index: index.clone(), src: cut(src, None)?, axis })
    }

    fn winners(&self) -> Result<Option<Winners<T>>> {
        match self.index.spec().shape.numel() {
            0 => Ok(None),
            _ => Sorted::new(&self.index, self.axis)?.winners(self.part.spec().shape[self.axis]).map(Some),
        }
    }

    /// Renames an error to `op`. An index out of range was found in sorted order, so its position is looked up in the
    /// caller's index.
    fn found(&self, op: &'static str, e: Error) -> Error {
        let again = || {
            zeros(self.whole, self.part.spec().shape, DType::I64)?.scatter_add(
                self.axis as isize,
                &self.index,
                &self.index,
            )
        };
        let e = if e.is_index() { again().err().filter(Error::is_index).unwrap_or(e) } else { e };
        if e.is_index() { e.of_op(op) } else { e }
    }

    /// The whole tensor with `values` where `hit` holds; both have the part's shape.
    fn merged(&self, values: &T, hit: &T) -> Result<T> {
        let shape = self.whole.spec().shape;
        let grow = |x: &T| {
            (0..shape.rank()).try_fold(x.clone(), |x, i| match x.spec().shape[i] == shape[i] {
                true => Ok(x),
                false => x.embed(i as isize, shape[i], 0, 1),
            })
        };
        grow(values)?.where_cond(&grow(hit)?, self.whole)
    }

    fn reduced(&self, reduction: ScatterReduction, include_self: bool) -> Result<T> {
        let dtype = self.whole.spec().dtype;
        let (axis, shape) = (self.axis as isize, self.part.spec().shape);
        let counts = || {
            let one = Tensor::ones(self.whole.runtime(), Shape::SCALAR, DType::I64)?;
            let ones = T::constant(one.broadcast_to(self.index.spec().shape)?);
            zeros(self.whole, shape, DType::I64)?.scatter_add(axis, &self.index, &ones)
        };
        match reduction {
            ScatterReduction::Sum if include_self => self.whole.scatter_add(axis, &self.index, &self.src),
            ScatterReduction::Sum => {
                let sum = zeros(self.whole, shape, dtype)?.scatter_add(axis, &self.index, &self.src)?;
                self.merged(&sum, &counts()?.gt(0.0)?)
            }
            ScatterReduction::Mean => {
                rule::float("scatter_reduce", self.whole.spec())?;
                let (counts, wide) = (counts()?, |x: &T| x.to_dtype(dtype.compute()));
                let own = if include_self { wide(&self.part)? } else { zeros(self.whole, shape, dtype.compute())? };
                let sum = own.scatter_add(axis, &self.index, &wide(&self.src)?)?;
                let number = counts.add(f64::from(u8::from(include_self)))?.maximum(1.0)?;
                let mean = sum.div(&wide(&number)?)?.to_dtype(dtype)?;
                self.merged(&mean, &counts.gt(0.0)?)
            }
            ScatterReduction::Prod => {
                let sorted = Sorted::new(&self.index, self.axis)?;
                let winner = sorted.winners(shape[self.axis])?;
                let runs = sorted.combined(&self.src, |a, b| a.mul(b))?;
                let product = winner.pick(self.axis, &sorted.back(&runs)?)?;
                let hit = winner.hit()?;
                self.merged(&if include_self { product.mul(&self.part)? } else { product }, &hit)
            }
            ScatterReduction::Amax | ScatterReduction::Amin => {
                let largest = reduction == ScatterReduction::Amax;
                let op = ScatterExtreme { axis: self.axis, largest, include_self };
                let part = T::apply1(op, &[&self.part, &self.index, &self.src])?;
                let all = T::constant(Tensor::full(self.whole.runtime(), Shape::SCALAR, DType::Bool, true)?);
                self.merged(&part, &all.broadcast_to(shape)?)
            }
        }
    }
}

/// An index in ascending order along an axis.
pub(crate) struct Sorted<T> {
    axis: isize,
    places: T,
    /// The original position of each index.
    order: T,
}

impl<T: Apply> Sorted<T> {
    pub(crate) fn new(index: &T, axis: usize) -> Result<Self> {
        let axis = axis as isize;
        let (places, order) = index.detach().sort(axis, false)?;
        Ok(Sorted { axis, places, order })
    }

    fn len(&self) -> usize {
        self.places.spec().shape[self.axis as usize]
    }

    /// A mask of the elements that have the same destination as the element `by` positions before. The first `by`
    /// elements have none and are left out.
    fn same(&self, by: usize) -> Result<T> {
        let n = self.len() - by;
        self.places.narrow(self.axis, by, n)?.eq(&self.places.narrow(self.axis, 0, n)?)
    }

    /// Values in sorted order, each combined with all earlier ones of the same destination (Hillis & Steele 1986).
    pub(crate) fn combined(&self, src: &T, combine: impl Fn(&T, &T) -> Result<T>) -> Result<T> {
        let n = self.len();
        let mut x = src.gather(self.axis, &self.order)?;
        let mut by = 1;
        while by < n {
            let (before, own) = (x.narrow(self.axis, 0, n - by)?, x.narrow(self.axis, by, n - by)?);
            let both = combine(&before, &own)?.where_cond(&self.same(by)?, &own)?;
            x = cat(&[&x.narrow(self.axis, 0, by)?, &both], self.axis)?;
            by *= 2;
        }
        Ok(x)
    }

    /// Restores the order of the index from sorted values.
    pub(crate) fn back(&self, sorted: &T) -> Result<T> {
        sorted.gather(self.axis, &self.order.argsort(self.axis, false)?)
    }

    /// For each of `size` destinations, the last element of the index that names it.
    pub(crate) fn winners(&self, size: usize) -> Result<Winners<T>> {
        static COUNTED: LazyLock<Program> = LazyLock::new(|| {
            Program::build("scatter", 2, 0, |b, x, _| vec![x[0].select(b.int(0).cast_like(x[1]), x[1] + b.int(1))])
        });
        let followed = self.same(1)?;
        let shape = self.places.spec().shape;
        let end = zeros(&self.places, shape.with(self.axis as usize, 1), DType::Bool)?;
        let followed = cat(&[&followed, &end], self.axis)?;
        let last = followed.apply_program(&COUNTED, &[&self.order], &[])?;
        let none = zeros(&self.places, shape.with(self.axis as usize, size), DType::I64)?;
        Ok(Winners(none.scatter_add(self.axis, &self.places, &last)?))
    }
}

/// For each destination, 1 more than the position of the last element that names it, or 0.
pub(crate) struct Winners<T>(T);

impl<T: Apply> Winners<T> {
    /// A mask of the destinations that an element names.
    pub(crate) fn hit(&self) -> Result<T> {
        self.0.gt(0.0)
    }

    /// The element of `src` for each destination; the first element of `src` for a destination that none names.
    pub(crate) fn pick(&self, axis: usize, src: &T) -> Result<T> {
        src.gather(axis as isize, &self.0.sub(1.0)?.maximum(0.0)?)
    }
}

//! Max pooling by position: the value is gathered from the input, so its gradient needs no windows.

use std::sync::LazyLock;

use super::{
    positions, room,
    windows::{PoolOptions, WindowAxis, regions, spatial},
};
use crate::{
    DType, Error, Result, Shape, Tensor,
    fused::MaxPool,
    ops::{Apply, IndexOps, JoinOps, PointwiseOps, ReduceOps, ScatterOps, ViewOps},
    pointwise::Program,
};

/// The windows of a pool over the last `N` axes.
pub(super) enum PoolWindows<const N: usize> {
    /// Windows of one size, at equal distances.
    Sliding([WindowAxis; N]),
    /// Regions, each from a first element to one past its last.
    Regions([Vec<(usize, usize)>; N]),
}

impl<const N: usize> PoolWindows<N> {
    fn output(&self) -> [usize; N] {
        match self {
            PoolWindows::Sliding(axes) => axes.map(|a| a.count),
            PoolWindows::Regions(regions) => std::array::from_fn(|i| regions[i].len()),
        }
    }

    /// The windows of `x: [B, L1 .. LN]` as `[B, P1 · .. · PN, K]`, `outside` where they reach over the edges.
    fn windows<T: Apply>(&self, x: &T, outside: f64) -> Result<T> {
        let mut x = match self {
            PoolWindows::Sliding(axes) => {
                let pads: Vec<_> = std::iter::once((0, 0)).chain(axes.iter().map(|a| (a.before, a.after))).collect();
                if pads.iter().all(|p| *p == (0, 0)) { x.clone() } else { x.pad(&pads, outside)? }
            }
            PoolWindows::Regions(_) => x.clone(),
        };
        for i in 0..N {
            let axis = i as isize + 1;
            x = match self {
                PoolWindows::Sliding(axes) => x.unfold(axis, axes[i].kernel, axes[i].step, axes[i].dilation)?,
                PoolWindows::Regions(regions) => apart(&x, axis, &regions[i])?,
            };
        }
        let shape = x.spec().shape;
        x.reshape([shape[0], shape[1..=N].iter().product(), shape[N + 1..].iter().product()])
    }

    /// The position of the first largest element of each window of `x: [B, L1 .. LN]`, `[B, P1 · .. · PN, 1]`. It is
    /// always a position within the input, even where all elements are as low as the padding.
    fn first_of_largest<T: Apply>(&self, x: &T, outside: f64) -> Result<T> {
        static TOP: LazyLock<Program> = LazyLock::new(|| {
            Program::build("max_pool", 3, 0, |b, x, _| {
                let hit = x[2] & (x[0].eq(x[1]) | x[0].ne(x[0]));
                vec![hit.select(b.int(1), b.int(0)).cast(DType::U8)]
            })
        });
        let windows = self.windows(x, outside)?;
        if !matches!(self, PoolWindows::Sliding(axes) if axes.iter().any(|a| (a.before, a.after) != (0, 0))) {
            return windows.argmax_keepdim(-1);
        }
        let inside = Tensor::full(x.runtime(), x.spec().shape.with(0, 1), DType::Bool, true)?;
        let inside = T::constant(self.windows(&inside, 0.0)?);
        windows.apply_program(&TOP, &[&windows.amax_keepdim(&[-1])?, &inside], &[])?.argmax_keepdim(-1)
    }
}

/// The regions of `axis` as rows, `[.., regions, .., K]`. Shorter regions repeat their last element, which changes no
/// maximum.
#[track_caller]
fn apart<T: Apply>(x: &T, axis: isize, regions: &[(usize, usize)]) -> Result<T> {
    let most = regions.iter().map(|r| r.1 - r.0).max().unwrap_or(1);
    let mut at: Vec<i64> = room("adaptive_max_pool", regions.len().saturating_mul(most))?;
    at.extend(regions.iter().flat_map(|&(from, to)| (0..most).map(move |k| (from + k).min(to - 1) as i64)));
    x.index_select(axis, &positions(x, [at.len()], &at)?)?.unfold(axis, most, most, 1)
}

/// The lowest value of a dtype.
fn lowest(dtype: DType) -> f64 {
    match dtype {
        DType::I32 => f64::from(i32::MIN),
        DType::I64 => i64::MIN as f64,
        DType::U32 | DType::U8 | DType::Bool => 0.0,
        _ => f64::NEG_INFINITY,
    }
}

/// Max pooling, by the kernel for two axes where it applies.
pub(super) fn largest<const N: usize, T: Apply>(x: &T, options: &PoolOptions<N>) -> Result<T> {
    let shape = x.spec().shape;
    let axes = options.axes("max_pool", shape)?;
    if N > 2 || options.ceil_mode || options.dilation != [1; N] || !x.spec().dtype.is_float() {
        return Ok(with_positions("max_pool", x, &PoolWindows::Sliding(axes))?.0);
    }
    let flat = |values: [usize; N], one: usize| if N == 2 { [values[0], values[1]] } else { [one, values[0]] };
    let lead = shape.rank() - N;
    let [h, w] = flat(axes.map(|a| a.size), 1);
    let pool =
        MaxPool { kernel: flat(options.kernel, 1), stride: flat(options.stride, 1), padding: flat(options.padding, 0) };
    if N == 2 && lead == 2 {
        return T::apply1(pool, &[x]);
    }
    let image = x.reshape([shape[..lead].iter().product(), 1, h, w])?;
    T::apply1(pool, &[&image])?.reshape([&shape[..lead], &axes.map(|a| a.count)[..]].concat())
}

/// The largest element of each window of the last `N` axes, and its position.
pub(super) fn with_positions<const N: usize, T: Apply>(
    op: &'static str,
    x: &T,
    cut: &PoolWindows<N>,
) -> Result<(T, T)> {
    let (shape, dtype) = (x.spec().shape, x.spec().dtype);
    if dtype == DType::Bool {
        return Err(Error::dtype(op, &[dtype], "truth values have no order; cast them to `u8` first"));
    }
    let spatial = spatial::<N>(op, shape)?;
    let lead = shape.rank() - N;
    let (batch, plane) = (shape[..lead].iter().product::<usize>(), spatial.iter().product::<usize>());
    let image = x.reshape([&[batch][..], &spatial].concat())?;
    let top = cut.first_of_largest(&image.detach(), lowest(dtype))?;
    // Windows of the elements' own positions map an index within a window to a position in the input.
    let own = Tensor::arange(x.runtime(), 0i64, 1i64, plane, DType::I64)?.reshape([&[1][..], &spatial].concat())?;
    let own = cut.windows(&own, 0.0)?;
    let own = T::constant(own.broadcast_to(Shape::from([batch, own.dims()[1], own.dims()[2]]))?);
    let at = own.gather(-1, &top)?.squeeze(-1)?;
    let output = [&shape[..lead], &cut.output()[..]].concat();
    let values = image.reshape([batch, plane])?.gather(-1, &at)?;
    Ok((values.reshape(&output)?, at.reshape(&output)?))
}

/// The largest element of each of `size` regions of the last `N` axes, and its position.
pub(crate) fn adaptive<const N: usize, T: Apply>(op: &'static str, x: &T, size: [usize; N]) -> Result<(T, T)> {
    with_positions(op, x, &PoolWindows::Regions(regions(op, x.spec().shape, size)?))
}

/// Zeros of `size` along the last `N` axes, with the values of `x` written at the positions `at`.
pub(super) fn put_back<const N: usize, T: Apply>(x: &T, at: &T, size: [usize; N]) -> Result<T> {
    let (shape, ids) = (x.spec().shape, at.spec().shape);
    spatial::<N>("max_unpool", shape)?;
    if shape != ids {
        return Err(Error::shape("max_unpool", &[shape, ids], "values and positions must have one shape"));
    }
    let lead = shape.rank() - N;
    let rows = [shape[..lead].iter().product(), shape[lead..].iter().product::<usize>()];
    let plane = Shape::new(&size)?.numel();
    let zeros = super::zeros(x, Shape::new(&[rows[0], plane])?, x.spec().dtype)?;
    let full = zeros.scatter(1, &at.reshape(rows)?, &x.reshape(rows)?)?;
    full.reshape([&shape[..lead], &size[..]].concat())
}

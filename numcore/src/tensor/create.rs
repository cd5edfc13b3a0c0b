//! Creation of tensors: constants, ranges, random values. Constants, ranges, uniform and Bernoulli values are pointwise
//! programs of the element's index, so every runtime computes the same ones. The last bit may differ where a device
//! does not contract a multiply and an add to an FMA. Normal values and permutations are drawn on the host.

use std::sync::LazyLock;

use half::{bf16, f16};

use super::{Tensor, TensorMut};
use crate::{
    DType, DeviceKind, Error, Result, Runtime, Scalar, Shape, Within,
    pointwise::{Number, Program},
    rng::Philox,
};

static FILL: LazyLock<Program> = LazyLock::new(|| Program::new("full", |[], [s]| [s]));
static RANGE: LazyLock<Program> =
    LazyLock::new(|| Program::build("arange", 0, 2, |b, _, s| vec![b.index() * s[1] + s[0]]));
static UNIFORM: LazyLock<Program> = LazyLock::new(|| {
    Program::build("uniform", 0, 4, |b, _, s| {
        let bits = b.random(0, 0) >> b.int(8);
        vec![(bits.cast(DType::F32) * 2f64.powi(-24) * (s[2] - s[1]) + s[1]).min(s[3])]
    })
});
static UNIFORM64: LazyLock<Program> = LazyLock::new(|| {
    Program::build("uniform64", 0, 4, |b, _, s| {
        let high = (b.random(0, 0) >> b.int(5)).cast(DType::F64);
        let low = (b.random(0, 1) >> b.int(6)).cast(DType::F64);
        vec![((high * 67_108_864.0 + low) * 2f64.powi(-53) * (s[2] - s[1]) + s[1]).min(s[3])]
    })
});
static BERNOULLI: LazyLock<Program> = LazyLock::new(|| {
    Program::build("bernoulli", 0, 2, |b, _, s| {
        let u = (b.random(0, 0) >> b.int(8)).cast(DType::F32) * 2f64.powi(-24);
        vec![u.lt(s[1].cast(DType::F32))]
    })
});

impl<R: Runtime> Tensor<R> {
    /// The output of `program`, which takes no inputs, at every position of `shape`.
    #[track_caller]
    pub fn generate(
        rt: &R,
        shape: impl AsRef<[usize]>,
        dtype: DType,
        program: &Program,
        scalars: &[Scalar],
    ) -> Result<Self> {
        let mut out = TensorMut::alloc(rt, Shape::new(shape.as_ref())?, dtype)?;
        crate::ops::launch(rt, program, &[], scalars, &mut [out.out()])?;
        out.freeze()
    }

    /// A tensor whose elements are all `value`, which an integer dtype must be able to hold exactly.
    #[track_caller]
    pub fn full(rt: &R, shape: impl AsRef<[usize]>, dtype: DType, value: impl Into<Scalar>) -> Result<Self> {
        let value = value.into();
        require_whole("full", dtype, &[value])?;
        Self::generate(rt, shape, dtype, &FILL, &[value])
    }

    /// A tensor whose elements are all 0.
    #[track_caller]
    pub fn zeros(rt: &R, shape: impl AsRef<[usize]>, dtype: DType) -> Result<Self> {
        Self::full(rt, shape, dtype, 0i64)
    }

    /// A tensor whose elements are all 1.
    #[track_caller]
    pub fn ones(rt: &R, shape: impl AsRef<[usize]>, dtype: DType) -> Result<Self> {
        Self::full(rt, shape, dtype, 1i64)
    }

    /// The sequence `start, start + step, …` of `len` elements; an integer dtype must be able to hold each exactly.
    #[track_caller]
    pub fn arange(rt: &R, start: impl Into<Scalar>, step: impl Into<Scalar>, len: usize, dtype: DType) -> Result<Self> {
        let (start, step) = (start.into(), step.into());
        require_whole("arange", dtype, &[start])?;
        if len > 1 && dtype.is_int() {
            let exact = |x| whole(x).ok_or_else(|| not_exact("arange", dtype, x));
            let last = exact(start)? + exact(step)?.saturating_mul(len as i128 - 1);
            require_within("arange", dtype, last)?;
        }
        Self::generate(rt, [len], dtype, &RANGE, &[start, step])
    }

    /// The identity matrix, `[n, n]`.
    #[track_caller]
    pub fn eye(rt: &R, n: usize, dtype: DType) -> Result<Self> {
        static EYE: LazyLock<Program> = LazyLock::new(|| {
            Program::build("eye", 0, 1, |b, _, s| {
                let i = b.index().cast(DType::I64);
                vec![(i % (s[0] + b.int(1))).eq(b.int(0)).select(b.int(1), b.int(0))]
            })
        });
        Self::generate(rt, [n, n], dtype, &EYE, &[n.into()])
    }

    /// Uniform values in `[low, high)` from Philox with this seed, of a floating dtype. They are bit-equal on every
    /// runtime for `[0, 1)`. Other ranges may differ in the last bit where a device does not contract a multiply and an
    /// add to an FMA.
    #[track_caller]
    pub fn uniform(rt: &R, shape: impl AsRef<[usize]>, dtype: DType, low: f64, high: f64, seed: u64) -> Result<Self> {
        if low.is_nan() || high.is_nan() || low > high {
            return Err(Error::range("uniform", "low", low, format!("at most high, which is {high}"))).at_caller();
        }
        let program = if dtype == DType::F64 { &UNIFORM64 } else { &UNIFORM };
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        require_float("uniform", dtype)?;
        let scalars = [seed.into(), low.into(), high.into(), last_below(dtype, high, low).into()];
        let t = Self::generate(rt, shape, wide, program, &scalars)?;
        crate::ops::cast(&t, dtype)
    }

    /// A `bool` tensor, each element `true` with probability `p`, from Philox with this seed: bit-equal on every
    /// runtime.
    #[track_caller]
    pub fn bernoulli(rt: &R, shape: impl AsRef<[usize]>, p: f64, seed: u64) -> Result<Self> {
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::range("bernoulli", "probability", p, "in [0, 1]")).at_caller();
        }
        Self::generate(rt, shape, DType::Bool, &BERNOULLI, &[seed.into(), p.into()])
    }

    /// Normal values with this mean and standard deviation, drawn on the host with fixed arithmetic: bit-equal on every
    /// runtime.
    #[track_caller]
    pub fn normal(rt: &R, shape: impl AsRef<[usize]>, dtype: DType, mean: f64, std: f64, seed: u64) -> Result<Self> {
        require_float("normal", dtype)?;
        if std.is_nan() || std < 0.0 {
            return Err(Error::range("normal", "standard deviation", std, "at least 0")).at_caller();
        }
        let mut rng = Philox::new(seed, 0);
        Self::from_f64_fn(rt, shape, dtype, || mean + std * rng.normal())
    }

    /// A tensor of values that a host closure returns, called once per element in row-major order.
    #[track_caller]
    pub fn from_f64_fn(
        rt: &R,
        shape: impl AsRef<[usize]>,
        dtype: DType,
        mut next: impl FnMut() -> f64,
    ) -> Result<Self> {
        let shape = Shape::new(shape.as_ref())?;
        let n = shape.numel();
        // Sizes alone are of interest there, and a large model's values take minutes to draw.
        if rt.device().kind == DeviceKind::Null {
            return TensorMut::alloc(rt, shape, dtype)?.freeze();
        }
        if dtype == DType::F64 {
            let mut values = room("from_f64_fn", n)?;
            values.extend((0..n).map(|_| next()));
            return Self::from_slice(rt, shape, &values);
        }
        let mut narrow = room("from_f64_fn", n)?;
        narrow.extend((0..n).map(|_| next() as f32));
        crate::ops::cast(&Self::from_slice(rt, shape, &narrow)?, dtype)
    }

    /// A random permutation of `0..n` as `i64`, drawn on the host: equal on every runtime.
    #[track_caller]
    pub fn permutation(rt: &R, n: usize, seed: u64) -> Result<Self> {
        Shape::new(&[n])?;
        let mut order: Vec<i64> = room("permutation", n)?;
        order.extend(0..n as i64);
        Philox::new(seed, 0).shuffle(&mut order);
        Self::from_vec(rt, order)
    }
}

/// An empty host list with capacity `n`, or an error: a caller's sizes may exceed the memory there is.
#[track_caller]
pub(crate) fn room<X>(op: &'static str, n: usize) -> Result<Vec<X>> {
    let mut list = Vec::new();
    let had = list.try_reserve_exact(n);
    had.map_err(|_| Error::range(op, "number of elements", n, "no more than the host's memory can hold"))
        .at_caller()?;
    Ok(list)
}

/// The largest number of a floating dtype below `high`, but at least `low`: the bound that a rounded uniform value is
/// clamped to.
fn last_below(dtype: DType, high: f64, low: f64) -> f64 {
    let rounded = |x: f64| Number::Float(x).cast(dtype).to_f64();
    // Maps the bits of a half-precision number to those of the next smaller number.
    let before = |bits: u16| match bits {
        0 | 0x8000 => 0x8001,
        _ if bits & 0x8000 != 0 => bits + 1,
        _ => bits - 1,
    };
    let at = rounded(high);
    let below = match dtype {
        _ if at < high => at,
        DType::F16 => f16::from_bits(before(f16::from_f64(at).to_bits())).to_f64(),
        DType::BF16 => bf16::from_bits(before(bf16::from_f64(at).to_bits())).to_f64(),
        DType::F32 => f64::from((at as f32).next_down()),
        _ => at.next_down(),
    };
    below.max(rounded(low))
}

/// The scalar itself, if it is an integer.
fn whole(x: Scalar) -> Option<i128> {
    match x {
        Scalar::F64(x) => (x.fract() == 0.0 && x.abs() < 2f64.powi(100)).then_some(x as i128),
        Scalar::I64(x) => Some(x.into()),
        Scalar::U64(x) => Some(x.into()),
    }
}

/// Checks that an integer dtype holds each value exactly; nothing is rounded or wraps silently.
#[track_caller]
fn require_whole(op: &'static str, dtype: DType, values: &[Scalar]) -> Result<()> {
    for &x in values.iter().filter(|_| dtype.is_int()) {
        match whole(x) {
            Some(x) => require_within(op, dtype, x)?,
            None => return Err(not_exact(op, dtype, x)).at_caller(),
        }
    }
    Ok(())
}

#[track_caller]
fn require_within(op: &'static str, dtype: DType, x: i128) -> Result<()> {
    let range: std::ops::RangeInclusive<i128> = match dtype {
        DType::U8 => 0..=u8::MAX.into(),
        DType::I32 => i32::MIN.into()..=i32::MAX.into(),
        DType::U32 => 0..=u32::MAX.into(),
        _ => i64::MIN.into()..=i64::MAX.into(),
    };
    let wide = || u64::try_from(x).map_or(Scalar::F64(x as f64), Scalar::U64);
    let value = || i64::try_from(x).map_or_else(|_| wide(), Scalar::I64);
    if range.contains(&x) { Ok(()) } else { Err(not_exact(op, dtype, value())).at_caller() }
}

fn not_exact(op: &'static str, dtype: DType, x: Scalar) -> Error {
    Error::range(op, "value", x, format!("an exact {dtype}"))
}

#[track_caller]
fn require_float(op: &'static str, dtype: DType) -> Result<()> {
    if dtype.is_float() {
        Ok(())
    } else {
        Err(Error::dtype(op, &[dtype], "only floating types can be drawn from it")).at_caller()
    }
}

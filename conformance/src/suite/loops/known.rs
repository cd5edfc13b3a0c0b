//! Operands in every memory layout, whose values are known without any kernel.

use half::{bf16, f16};
use numcore::{
    DType, Element, Layout, Result, Runtime, Shape, Tensor,
    float8::{E4M3, E5M2},
    ops::ViewOps,
    pointwise::Number,
    rng::Philox,
};

use crate::suite::{close::near_each, report::Verdict};

pub(super) const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
pub(super) const INTS: [DType; 4] = [DType::I32, DType::I64, DType::U32, DType::U8];
/// All types that have sums.
pub(super) const NUMBERS: [DType; 8] =
    [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64, DType::U32, DType::U8];
/// Shapes: empty, tiny, odd, longer than a block, short rows, tall and wide, many axes.
pub(super) const SHAPES: [&[usize]; 12] = [
    &[],
    &[1],
    &[0, 3],
    &[5],
    &[4099],
    &[2, 5000],
    &[300, 7],
    &[70, 66],
    &[3, 1, 17],
    &[2, 3, 4, 5],
    &[9, 33, 40],
    &[2, 2, 2, 2, 2, 2, 2, 3],
];

/// A layout of an operand in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum InMemory {
    Dense,
    Transposed,
    EverySecond,
    Part,
    RepeatedRows,
    RepeatedColumns,
    OneValue,
    Flipped,
    LastFlipped,
}

impl InMemory {
    pub(super) const ALL: [InMemory; 9] = [
        InMemory::Dense,
        InMemory::Transposed,
        InMemory::EverySecond,
        InMemory::Part,
        InMemory::RepeatedRows,
        InMemory::RepeatedColumns,
        InMemory::OneValue,
        InMemory::Flipped,
        InMemory::LastFlipped,
    ];

    /// The shape of the memory from which a view of `shape` is taken.
    fn storage(self, shape: &[usize]) -> Vec<usize> {
        let thin = |odd: usize| shape.iter().enumerate().map(|(i, &d)| if i % 2 == odd { d } else { 1 }).collect();
        match self {
            InMemory::Dense | InMemory::Flipped | InMemory::LastFlipped => shape.to_vec(),
            InMemory::Transposed => shape.iter().rev().copied().collect(),
            InMemory::EverySecond | InMemory::Part => shape.iter().map(|d| 2 * d + 1).collect(),
            InMemory::RepeatedRows => thin(0),
            InMemory::RepeatedColumns => thin(1),
            InMemory::OneValue => Vec::new(),
        }
    }

    /// The view of `shape` of such memory.
    fn view<R: Runtime>(self, memory: &Tensor<R>, shape: &[usize]) -> Result<Tensor<R>> {
        let rank = shape.len() as isize;
        let sliced = |step| {
            let along = |t: Tensor<R>, axis: isize| t.slice(axis, 1, shape[axis as usize], step);
            (0..rank).try_fold(memory.clone(), along)
        };
        match self {
            InMemory::Dense => Ok(memory.clone()),
            InMemory::Transposed => memory.permute(&(0..rank).rev().collect::<Vec<_>>()),
            InMemory::EverySecond => sliced(2),
            InMemory::Part => sliced(1),
            InMemory::RepeatedRows | InMemory::RepeatedColumns | InMemory::OneValue => memory.broadcast_to(shape),
            InMemory::Flipped | InMemory::LastFlipped if rank == 0 => Ok(memory.clone()),
            InMemory::Flipped => memory.flip(&(0..rank).collect::<Vec<_>>()),
            InMemory::LastFlipped => memory.flip(&[-1]),
        }
    }
}

/// A tensor, and its values in row-major order, found through its layout alone.
#[derive(Clone)]
pub(super) struct Known<R: Runtime> {
    pub(super) tensor: Tensor<R>,
    pub(super) values: Vec<f64>,
    /// The element type, the shape and the layout in memory, for messages.
    pub(super) what: String,
}

impl<R: Runtime> Known<R> {
    /// Uploads these values to row-major memory; `values` are then as the type rounds them.
    pub(super) fn dense(rt: &R, dtype: DType, shape: &[usize], values: &[f64]) -> Result<Self> {
        let (tensor, values) = upload(rt, dtype, shape, values)?;
        Ok(Known { tensor, values, what: format!("{dtype} {shape:?}") })
    }

    /// Random values of the type's kind, in memory in this layout.
    pub(super) fn drawn(rt: &R, dtype: DType, shape: &[usize], seed: u64, way: InMemory) -> Result<Self> {
        Self::of(rt, dtype, shape, way, |n| draw(dtype, n, seed))
    }

    /// A view of memory that `draw` fills.
    pub(super) fn of(
        rt: &R,
        dtype: DType,
        shape: &[usize],
        way: InMemory,
        draw: impl Fn(usize) -> Vec<f64>,
    ) -> Result<Self> {
        let storage = way.storage(shape);
        let (memory, values) = upload(rt, dtype, &storage, &draw(storage.iter().product()))?;
        let tensor = way.view(&memory, shape)?;
        let values = offsets(tensor.layout()).into_iter().map(|at| values[at]).collect();
        Ok(Known { tensor, values, what: format!("{dtype} {shape:?} {way:?}") })
    }

    /// Random operands of one shape, in memory in every layout.
    pub(super) fn all(rt: &R, dtype: DType, shape: &[usize], seed: u64) -> Result<Vec<Self>> {
        InMemory::ALL.into_iter().map(|way| Self::drawn(rt, dtype, shape, seed, way)).collect()
    }

    /// Checks that a result has the expected values within `tolerance`: relative, and absolute below 1.
    pub(super) fn expect(&self, what: &str, got: &Tensor<R>, want: &[f64], tolerance: f64) -> Result<Verdict> {
        close(&format!("{what} of {}", self.what), got, want, tolerance)
    }
}

/// Checks that a tensor has the expected values within `tolerance`: relative, and absolute below 1.
pub(super) fn close<R: Runtime>(what: &str, got: &Tensor<R>, want: &[f64], tolerance: f64) -> Result<Verdict> {
    Ok(near_each(what, &got.to_f64s()?, want, tolerance))
}

/// Uploads values to row-major memory, and returns them as the type rounds them.
pub(crate) fn upload<R: Runtime>(
    rt: &R,
    dtype: DType,
    shape: &[usize],
    values: &[f64],
) -> Result<(Tensor<R>, Vec<f64>)> {
    fn of<R: Runtime, E: Element>(rt: &R, shape: &[usize], values: &[f64]) -> Result<(Tensor<R>, Vec<f64>)> {
        let stored: Vec<E> = values.iter().map(|&x| E::from_f64(x)).collect();
        Ok((Tensor::from_slice(rt, shape, &stored)?, stored.iter().map(|x| x.to_f64()).collect()))
    }
    match dtype {
        DType::F32 => of::<R, f32>(rt, shape, values),
        DType::F64 => of::<R, f64>(rt, shape, values),
        DType::F16 => of::<R, f16>(rt, shape, values),
        DType::BF16 => of::<R, bf16>(rt, shape, values),
        DType::I32 => of::<R, i32>(rt, shape, values),
        DType::I64 => of::<R, i64>(rt, shape, values),
        DType::U32 => of::<R, u32>(rt, shape, values),
        DType::U8 => of::<R, u8>(rt, shape, values),
        DType::Bool => of::<R, bool>(rt, shape, values),
        DType::F8E4M3 => coded(rt, dtype, shape, values, E4M3::encode),
        DType::F8E5M2 => coded(rt, dtype, shape, values, E5M2::encode),
    }
}

/// Uploads values as codes of an 8-bit float.
fn coded<R: Runtime>(
    rt: &R,
    dtype: DType,
    shape: &[usize],
    values: &[f64],
    encode: fn(f32) -> u8,
) -> Result<(Tensor<R>, Vec<f64>)> {
    let codes: Vec<u8> = values.iter().map(|&x| encode(x as f32)).collect();
    let stored = values.iter().map(|&x| Number::Float(x).cast(dtype).to_f64()).collect();
    Ok((Tensor::from_bytes(rt, Shape::new(shape)?, dtype, &codes)?, stored))
}

/// The offsets of the elements of a layout, in row-major order.
fn offsets(layout: &Layout) -> Vec<usize> {
    let offset = |mut k: usize| {
        let mut at = layout.offset() as isize;
        for (&d, &s) in layout.dims().iter().zip(layout.strides()).rev() {
            at += (k % d) as isize * s;
            k /= d;
        }
        at as usize
    };
    (0..layout.numel()).map(offset).collect()
}

/// Random values of a type's kind: reals around 0, small integers, truth values.
pub(super) fn draw(dtype: DType, n: usize, seed: u64) -> Vec<f64> {
    let mut rng = Philox::new(seed, 0);
    let mut next = || match dtype {
        DType::Bool => f64::from(rng.normal() > 0.0),
        DType::U8 | DType::U32 => (rng.normal().abs() * 20.0).floor(),
        d if d.is_int() => (rng.normal() * 20.0).round(),
        _ => rng.normal() * 2.0,
    };
    (0..n).map(|_| next()).collect()
}

/// A value rounded as a type stores it.
pub(super) fn round_to(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::BF16 => bf16::from_f64(x).to_f64(),
        d if d.is_storage() => Number::Float(x).cast(d).to_f64(),
        _ => x,
    }
}

/// The error that one rounding to a type may cause, with a few ULP of the computation.
pub(super) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 2e-6,
        d => d.epsilon(),
    }
}

#[cfg(test)]
mod tests {
    use numcore::NullRuntime;

    use super::*;

    #[test]
    fn every_way_is_another_layout_of_the_shape() {
        let layouts: Vec<Layout> = InMemory::ALL
            .into_iter()
            .map(|way| *Known::drawn(&NullRuntime::new(), DType::F32, &[4, 6], 1, way).unwrap().tensor.layout())
            .collect();
        assert!(layouts.iter().all(|layout| layout.dims() == [4, 6]));
        for (i, layout) in layouts.iter().enumerate() {
            assert!(!layouts[..i].contains(layout), "{:?}", InMemory::ALL[i]);
        }
    }

    #[test]
    fn values_are_found_through_the_layout() {
        let of = |way| Known::of(&NullRuntime::new(), DType::U8, &[2, 2], way, |n| (0..n).map(|i| i as f64).collect());
        let values = |way| of(way).unwrap().values;
        assert_eq!(values(InMemory::Dense), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(values(InMemory::Transposed), [0.0, 2.0, 1.0, 3.0]);
        assert_eq!(values(InMemory::EverySecond), [6.0, 8.0, 16.0, 18.0]);
        assert_eq!(values(InMemory::RepeatedColumns), [0.0, 1.0, 0.0, 1.0]);
        assert_eq!(values(InMemory::LastFlipped), [1.0, 0.0, 3.0, 2.0]);
    }
}

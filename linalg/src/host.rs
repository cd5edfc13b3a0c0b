//! Batches of matrices in host memory.

use faer::{MatMut, MatRef, traits::RealField};
use numcore::{DType, Element, Error, Result, Runtime, Shape, Tensor};

/// The elements of matrices that faer computes with.
pub(crate) trait Real: Element + RealField {
    /// The value, without rounding.
    fn wide(self) -> f64;
    /// The nearest value.
    fn nearest(value: f64) -> Self;
}

impl Real for f32 {
    fn wide(self) -> f64 {
        self.into()
    }
    fn nearest(value: f64) -> Self {
        value as f32
    }
}

impl Real for f64 {
    fn wide(self) -> f64 {
        self
    }
    fn nearest(value: f64) -> Self {
        value
    }
}

/// A computation on the matrices of one place in a batch.
pub(crate) trait Kernel {
    /// Fills `outs`, whose matrices have the sizes that the caller of [`on_host`] gave. Vectors are columns. The error
    /// says what is wrong with a matrix.
    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> std::result::Result<(), String>;
}

/// Runs a kernel for each place of a batch, and returns tensors whose last axes are `outs`, one or two each. All inputs
/// have the same axes before their last two.
pub(crate) fn on_host<R: Runtime>(
    op: &'static str,
    kernel: &impl Kernel,
    ins: &[Tensor<R>],
    outs: &[&[usize]],
) -> Result<Vec<Tensor<R>>> {
    match ins[0].dtype() {
        DType::F32 => run::<R, f32>(op, kernel, ins, outs),
        DType::F64 => run::<R, f64>(op, kernel, ins, outs),
        dtype => Err(Error::dtype(op, &[dtype], "matrices are factorized in f32 or f64: convert them (`to_dtype`)")),
    }
}

fn run<R: Runtime, T: Real>(
    op: &'static str,
    kernel: &impl Kernel,
    ins: &[Tensor<R>],
    outs: &[&[usize]],
) -> Result<Vec<Tensor<R>>> {
    let (batch, _) = axes(op, ins[0].shape())?;
    let count: usize = batch.iter().product();
    let values = ins.iter().map(|tensor| tensor.to_vec::<T>()).collect::<Result<Vec<_>>>()?;
    let sizes = ins.iter().map(|tensor| Ok(axes(op, tensor.shape())?.1)).collect::<Result<Vec<_>>>()?;
    let mut results: Vec<Vec<T>> =
        outs.iter().map(|own| vec![T::default(); count * own.iter().product::<usize>()]).collect();
    for place in 0..count {
        let part = |[m, n]: [usize; 2]| place * m * n..(place + 1) * m * n;
        let mut matrices = Vec::new();
        for (values, [m, n]) in values.iter().zip(&sizes) {
            matrices.push(MatRef::from_row_major_slice(&values[part([*m, *n])], *m, *n));
        }
        let mut own = Vec::new();
        for (result, of) in results.iter_mut().zip(outs) {
            let [m, n] = [0, 1].map(|axis| of.get(axis).copied().unwrap_or(1));
            own.push(MatMut::from_row_major_slice_mut(&mut result[part([m, n])], m, n));
        }
        let which = || if count == 1 { "the matrix".into() } else { format!("matrix {place} of the {count}") };
        kernel.run(&matrices, &mut own).map_err(|why| Error::argument(op, format!("{} {why}", which())))?;
    }
    let tensor = |(values, own): (Vec<T>, &&[usize])| {
        let shape = [&batch[..], own].concat();
        Tensor::from_slice(ins[0].runtime(), shape, &values)
    };
    results.into_iter().zip(outs).map(tensor).collect()
}

/// The axes of a batch of matrices: those before the last two, and the last two.
#[track_caller]
pub(crate) fn axes(op: &'static str, shape: &Shape) -> Result<(Vec<usize>, [usize; 2])> {
    match shape.split_last_chunk::<2>() {
        Some((batch, size)) => Ok((batch.to_vec(), *size)),
        None => Err(Error::shape(op, &[*shape], "a matrix has two axes: [.., M, N]")),
    }
}

/// The size of square matrices.
#[track_caller]
pub(crate) fn square(op: &'static str, shape: &Shape) -> Result<usize> {
    match axes(op, shape)?.1 {
        [m, n] if m == n => Ok(n),
        _ => Err(Error::shape(op, &[*shape], "the matrices are not square: [.., N, N]")),
    }
}

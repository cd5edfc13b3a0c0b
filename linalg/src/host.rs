//! Batches of matrices in host memory.

use std::sync::Arc;

use autograd::{Function, Var, apply_function};
use faer::{MatMut, MatRef, traits::RealField};
use numcore::{
    DType, Element, Error, Result, Runtime, Shape, Tensor,
    ops::{Backprop, Saves},
};

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

/// A function of matrices that is computed on the host, with its gradient.
pub(crate) trait Kernel: Send + Sync + 'static {
    /// The name of the function in error messages.
    const NAME: &'static str;

    /// The last axes of each output, one or two or none, of inputs whose matrices have these sizes.
    fn outs(&self, ins: &[[usize; 2]]) -> Vec<Vec<usize>>;

    /// Fills the outputs of one place in a batch. Vectors are columns. The error says what is wrong with a matrix.
    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> std::result::Result<(), String>;

    /// The inputs and outputs that the gradient reads.
    fn saves(&self) -> Saves;

    /// Gives the gradient of each wanted input, as [`Function::backward`] does.
    fn backward<R: Runtime>(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()>;
}

/// A kernel as a function of the tape. All inputs have the same axes before their last two.
struct OnHost<K>(K);

impl<R: Runtime, K: Kernel> Function<R> for OnHost<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        match ins[0].dtype() {
            DType::F32 => run::<R, K, f32>(&self.0, ins),
            DType::F64 => run::<R, K, f64>(&self.0, ins),
            dtype => {
                Err(Error::dtype(K::NAME, &[dtype], "matrices are factorized in f32 or f64: convert them (`to_dtype`)"))
            }
        }
    }

    fn saves(&self) -> Saves {
        self.0.saves()
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        self.0.backward(cx)
    }
}

/// Applies a kernel with `N` outputs, and records it on the tape.
#[track_caller]
pub(crate) fn apply<R: Runtime, K: Kernel, const N: usize>(kernel: K, ins: &[&Var<R>]) -> Result<[Var<R>; N]> {
    let outs: Vec<Var<R>> = apply_function(Arc::new(OnHost(kernel)), ins)?.into_iter().collect();
    outs.try_into().map_err(|_| Error::internal(K::NAME, "it has another number of outputs"))
}

fn run<R: Runtime, K: Kernel, T: Real>(kernel: &K, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
    let (batch, _) = axes(K::NAME, ins[0].shape())?;
    let sizes = ins.iter().map(|tensor| Ok(axes(K::NAME, tensor.shape())?.1)).collect::<Result<Vec<_>>>()?;
    let outs = kernel.outs(&sizes);
    let count: usize = batch.iter().product();
    let values = ins.iter().map(|tensor| tensor.to_vec::<T>()).collect::<Result<Vec<_>>>()?;
    let mut results: Vec<Vec<T>> =
        outs.iter().map(|own| vec![T::default(); count * own.iter().product::<usize>()]).collect();
    for place in 0..count {
        let part = |[m, n]: [usize; 2]| place * m * n..(place + 1) * m * n;
        let mut matrices = Vec::new();
        for (values, [m, n]) in values.iter().zip(&sizes) {
            matrices.push(MatRef::from_row_major_slice(&values[part([*m, *n])], *m, *n));
        }
        let mut own = Vec::new();
        for (result, of) in results.iter_mut().zip(&outs) {
            let [m, n] = [0, 1].map(|axis| of.get(axis).copied().unwrap_or(1));
            own.push(MatMut::from_row_major_slice_mut(&mut result[part([m, n])], m, n));
        }
        let which = || if count == 1 { "the matrix".into() } else { format!("matrix {place} of the {count}") };
        kernel.run(&matrices, &mut own).map_err(|why| Error::argument(K::NAME, format!("{} {why}", which())))?;
    }
    let tensor = |(values, own): (Vec<T>, &Vec<usize>)| {
        let shape = [&batch[..], own].concat();
        Tensor::from_slice(ins[0].runtime(), shape, &values)
    };
    results.into_iter().zip(&outs).map(tensor).collect()
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

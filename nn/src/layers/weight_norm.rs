//! Layers whose weight is normalized before each use.

use autograd::{Var, no_grad};
use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};

use crate::{
    Buffer, Forward, Init, Initializer, Mode, Module, ModuleExt, Param, parallel::Cuts, replaced::with_replaced,
};

/// A layer with the weight `g v / ‖v‖` (Salimans & Kingma 2016), where `v` is the weight of the layer within. Norms are
/// over all axes but the first, as of PyTorch's `weight_norm` with `dim=0`. A row of zeros has no direction, and gives
/// NaN.
///
/// Parameters have the layer's names, and `weight_g` is the magnitude of each row. In PyTorch these two are
/// `parametrizations.weight.original1` and `original0`.
///
/// ```
/// use nn::{Forward, Init, Linear, ModuleExt, WeightNorm};
/// use runtime_cpu::Cpu;
///
/// let cpu = Cpu::new();
/// let layer = WeightNorm::new(Linear::new(&Init::new(&cpu, 0), 4, 3)?)?;
/// let names: Vec<String> = layer.named_parameters().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["weight", "bias", "weight_g"]);
/// # Ok::<(), numcore::Error>(())
/// ```
#[derive(Debug, Module)]
pub struct WeightNorm<R: Runtime, L: Module<R>> {
    /// The layer whose weight is `v`.
    #[module(flatten)]
    layer: L,
    /// The magnitude of each row of the weight, of size 1 along all axes but the first.
    pub weight_g: Param<R>,
    #[module(skip)]
    weight: Param<R>,
}

impl<R: Runtime, L: Module<R>> WeightNorm<R, L> {
    /// Normalizes the parameter `weight` of a layer. The layer computes what it did before.
    ///
    /// # Errors
    /// An error if the layer has no parameter of this name, or it has one axis.
    #[track_caller]
    pub fn new(layer: L) -> Result<Self> {
        let weight = weight_of("weight_norm", &layer).at_caller()?;
        let weight_g = Param::new(row_norms(&Var::new(weight.value()?))?.value()?)?;
        Ok(WeightNorm { layer, weight_g, weight })
    }
}

impl<R: Runtime, L: Forward<R>> Forward<R> for WeightNorm<R, L> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let v = self.weight.var();
        let normed = v.mul(&self.weight_g.var().div(&row_norms(&v)?)?)?;
        with_replaced(vec![(self.weight.id(), Box::new(normed))], || self.layer.forward(x))
    }
}

/// A layer with the weight `W / σ(W)` (Miyato et al. 2018), as of PyTorch's `spectral_norm`. `σ` is the largest
/// singular value of the layer's own weight as a matrix, with the outputs as rows.
///
/// In training each call improves the estimate of `σ` by power iteration, from the vectors of the call before. No
/// gradient flows through these vectors. In PyTorch `weight` is `parametrizations.weight.original`, and the buffers are
/// `parametrizations.weight.0._u` and `_v`.
#[derive(Debug, Module)]
pub struct SpectralNorm<R: Runtime, L: Module<R>> {
    /// The layer with the weight that is divided.
    #[module(flatten)]
    layer: L,
    /// The left singular vector, of the axis of rows.
    pub weight_u: Buffer<R>,
    /// The right singular vector, of all other axes.
    pub weight_v: Buffer<R>,
    /// The power iterations of a call; 1 unless set.
    pub iterations: usize,
    /// The smallest norm by which a vector is divided; 1e-12 unless set.
    pub eps: f64,
    /// The mode of the layer, training or evaluation.
    pub mode: Mode,
    #[module(skip)]
    weight: Param<R>,
    rows: usize,
}

impl<R: Runtime, L: Module<R>> SpectralNorm<R, L> {
    /// Normalizes the parameter `weight` of a layer, with rows along its first axis. The vectors are random, and
    /// improved by 15 iterations.
    ///
    /// # Errors
    /// An error if the layer has no parameter of this name, or it has one axis.
    #[track_caller]
    pub fn new(init: &Init<R>, layer: L) -> Result<Self> {
        Self::along(init, layer, 0)
    }

    /// Normalizes the parameter `weight` of a layer, with rows along `axis`: 1 for a
    /// [`ConvTranspose`](crate::ConvTranspose), whose weight has its inputs first.
    ///
    /// # Errors
    /// Fails as [`new`](SpectralNorm::new), and if the weight has no such axis.
    #[track_caller]
    pub fn along(init: &Init<R>, layer: L, axis: usize) -> Result<Self> {
        let weight = weight_of("spectral_norm", &layer).at_caller()?;
        if axis >= weight.shape().rank() {
            let why = format!("has no axis {axis} for rows");
            return Err(Error::shape("spectral_norm", &[weight.shape()], why)).at_caller();
        }
        let (rows, columns) = (weight.shape()[axis], weight.shape().numel() / weight.shape()[axis].max(1));
        let [weight_u, weight_v] = [rows, columns].map(|len| {
            init.tensor([len], Initializer::Normal { mean: 0.0, std: 1.0 })?.to_dtype(weight.dtype()).map(Buffer::new)
        });
        let (iterations, eps, mode) = (1, 1e-12, Mode::default());
        let norm =
            SpectralNorm { layer, weight_u: weight_u?, weight_v: weight_v?, iterations, eps, mode, weight, rows: axis };
        norm.iterate(&norm.matrix(&norm.weight.value()?)?, 15).at_caller()?;
        Ok(norm)
    }

    fn matrix<T: ViewOps>(&self, weight: &T) -> Result<T> {
        let others = (0..self.weight.shape().rank()).filter(|&axis| axis != self.rows);
        let order: Vec<usize> = [self.rows].into_iter().chain(others).collect();
        weight.permute_axes(&order)?.reshape([self.weight_u.spec().shape[0], self.weight_v.spec().shape[0]])
    }

    /// Improves the singular vectors of `matrix: [O, I]`.
    fn iterate(&self, matrix: &Tensor<R>, iterations: usize) -> Result<()> {
        let unit = |x: Tensor<R>| x.div(&x.norm_all()?.maximum(self.eps)?);
        for _ in 0..iterations {
            let u = unit(matrix.matmul(&self.weight_v.value().unsqueeze(1)?)?.squeeze(1)?)?;
            let v = unit(matrix.t()?.matmul(&u.unsqueeze(1)?)?.squeeze(1)?)?;
            self.weight_u.set(u)?;
            self.weight_v.set(v)?;
        }
        Ok(())
    }
}

impl<R: Runtime, L: Forward<R>> Forward<R> for SpectralNorm<R, L> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let weight = self.weight.var();
        let matrix = self.matrix(&weight)?;
        if self.mode.is_training() {
            no_grad(|| self.iterate(&matrix.value()?, self.iterations))?;
        }
        let (u, v) = (self.weight_u.var(), self.weight_v.var());
        let sigma = u.mul(&matrix.matmul(&v.unsqueeze(1)?)?.squeeze(1)?)?.sum_all()?;
        let normed = weight.div(&sigma)?;
        with_replaced(vec![(self.weight.id(), Box::new(normed))], || self.layer.forward(x))
    }
}

/// The norm of each row of a weight, `[O, 1, ..]`.
fn row_norms<R: Runtime>(weight: &Var<R>) -> Result<Var<R>> {
    weight.norm_keepdim(&(1..weight.spec().shape.rank() as isize).collect::<Vec<_>>())
}

/// The parameter `weight` of a layer, whose parameters no plan may cut from now on: a norm is of the whole.
fn weight_of<R: Runtime>(op: &'static str, layer: &impl Module<R>) -> Result<Param<R>> {
    layer.parameters().into_iter().for_each(|parameter| drop(parameter.with_cuts(Cuts::None)));
    let weight = layer.named_parameters().into_iter().find(|(name, _)| name == "weight");
    match weight {
        Some((_, weight)) if weight.shape().rank() >= 2 => Ok(weight),
        Some((_, weight)) => {
            Err(Error::shape(op, &[weight.shape()], "needs a weight of at least two axes, [O, I, ..]"))
        }
        None => Err(Error::state("weight", format!("is no parameter of the layer that `{op}` was given"))),
    }
}

//! Initialization of parameters: [`Init`] creates parameters, an [`Initializer`] says how their values are drawn.

mod initializer;
mod orthogonal;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use autograd::{Leaf, Residency};
use numcore::{DType, MemoryCategory, Result, Runtime, Scalar, Shape, Tensor, Within, ops::Spec, rng::philox4x32_10};

use crate::{Buffer, Param};

pub use initializer::{Fan, Initializer, Nonlinearity};

/// A residency that draws a value whenever it is read.
struct Drawn<R: Runtime> {
    how: Initializer,
    seed: u64,
    rt: R,
}

impl<R: Runtime> Residency<R> for Drawn<R> {
    fn fetch(&self, leaf: &Leaf<R>) -> Result<Tensor<R>> {
        let spec = leaf.spec();
        self.how.tensor(&self.rt, spec.shape, spec.dtype, self.seed)
    }
}

/// Creates a model's parameters. Each gets a separate seed, in the order of creation: a model built twice from the same
/// seed has the same values, on every runtime.
#[derive(Clone, Debug)]
pub struct Init<R: Runtime> {
    rt: R,
    dtype: DType,
    seed: u64,
    made: Arc<AtomicU64>,
    weights: Option<Initializer>,
    biases: Option<Initializer>,
    lazy: bool,
}

impl<R: Runtime> Init<R> {
    /// An initializer of `f32` parameters on `rt`, booked as parameters in its memory account.
    pub fn new(rt: &R, seed: u64) -> Self {
        Init {
            rt: rt.with_category(MemoryCategory::Parameters),
            dtype: DType::F32,
            seed,
            made: Arc::default(),
            weights: None,
            biases: None,
            lazy: false,
        }
    }

    /// Sets the floating dtype of the parameters.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Draws values only when they are read, and keeps none. It is for models that no rank holds in full, whose trainer
    /// takes a shard of each parameter. The values are those of an initialization without it.
    pub fn lazily(mut self) -> Self {
        self.lazy = true;
        self
    }

    /// Initializes weights (of linear layers, convolutions, embeddings, recurrent layers) by `how`, in place of each
    /// layer's default. The first call decides: the caller that builds a model overrides the model.
    pub fn weights(mut self, how: Initializer) -> Self {
        self.weights.get_or_insert(how);
        self
    }

    /// Initializes biases by `how`, in place of each layer's default. The first call decides.
    pub fn biases(mut self, how: Initializer) -> Self {
        self.biases.get_or_insert(how);
        self
    }

    /// Tells whether values are drawn only when they are read.
    pub fn is_lazy(&self) -> bool {
        self.lazy
    }

    /// The runtime of the parameters.
    pub fn runtime(&self) -> &R {
        &self.rt
    }

    /// A weight, initialized as [`weights`](Init::weights) says, or else by `default`.
    #[track_caller]
    pub fn weight(&self, shape: impl AsRef<[usize]>, default: Initializer) -> Result<Param<R>> {
        self.named("weight", shape, self.weights.unwrap_or(default)).at_caller()
    }

    /// A bias, initialized as [`biases`](Init::biases) says, or else by `default`.
    #[track_caller]
    pub fn bias(&self, shape: impl AsRef<[usize]>, default: Initializer) -> Result<Param<R>> {
        self.named("bias", shape, self.biases.unwrap_or(default)).at_caller()
    }

    /// A parameter initialized by `how`, regardless of the initializers set for weights and biases.
    #[track_caller]
    pub fn param(&self, shape: impl AsRef<[usize]>, how: Initializer) -> Result<Param<R>> {
        self.named("parameter", shape, how).at_caller()
    }

    /// A parameter that errors call so until its model names it.
    fn named(&self, name: &str, shape: impl AsRef<[usize]>, how: Initializer) -> Result<Param<R>> {
        if !self.lazy {
            return Ok(Param::of(Leaf::new(name, self.tensor(shape, how)?)?));
        }
        let spec = Spec { shape: Shape::new(shape.as_ref())?, dtype: self.dtype };
        let drawn = Drawn { how, seed: self.next_seed(), rt: self.rt.clone() };
        Ok(Param::of(Leaf::absent(name, &self.rt, spec, Arc::new(drawn))))
    }

    /// The value of the next parameter.
    #[track_caller]
    pub fn tensor(&self, shape: impl AsRef<[usize]>, how: Initializer) -> Result<Tensor<R>> {
        let seed = self.next_seed();
        how.tensor(&self.rt, shape, self.dtype, seed).at_caller()?.copy_for(MemoryCategory::Parameters)
    }

    /// A buffer filled with `value`.
    #[track_caller]
    pub fn buffer(&self, shape: impl AsRef<[usize]>, dtype: DType, value: impl Into<Scalar>) -> Result<Buffer<R>> {
        Ok(Buffer::new(Tensor::full(&self.rt, shape, dtype, value)?))
    }

    /// A buffer of the parameters' element type filled with `value`.
    #[track_caller]
    pub fn float_buffer(&self, shape: impl AsRef<[usize]>, value: f64) -> Result<Buffer<R>> {
        self.buffer(shape, self.dtype, value)
    }

    fn next_seed(&self) -> u64 {
        let n = self.made.fetch_add(1, Ordering::Relaxed);
        // The last word keeps these apart from the streams of `Philox` under the same seed, where it is 0.
        let [a, b, ..] =
            philox4x32_10([n as u32, (n >> 32) as u32, 0, 1], [self.seed as u32, (self.seed >> 32) as u32]);
        u64::from(a) | u64::from(b) << 32
    }
}

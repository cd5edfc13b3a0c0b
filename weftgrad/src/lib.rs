//! Tensors, autograd and training, written once and generic over the device.
//!
//! From a tensor to a trained model:
//!
//! ```
//! use weftgrad::prelude::*;
//!
//! // A model is a struct, generic over the device it will run on.
//! #[derive(Module)]
//! #[module(crate = "weftgrad::nn")]
//! struct Mlp<R: Runtime> {
//!     hidden: nn::Linear<R>,
//!     out: nn::Linear<R>,
//! }
//!
//! impl<R: Runtime> Mlp<R> {
//!     fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
//!         self.out.forward(&self.hidden.forward(x)?.tanh()?)
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! let cpu = Cpu::new();
//! let init = nn::Init::new(&cpu, 0);
//! let model = Mlp { hidden: nn::Linear::new(&init, 2, 16)?, out: nn::Linear::new(&init, 16, 1)? };
//! # Ok(())
//! # }
//! ```
//!
//! The rooms underneath: [`numcore`] (tensors, programs, the [`Runtime`] trait), [`autograd`] (the tape), [`nn`], [`optim`],
//! and [`runtime_cpu`].
#![forbid(unsafe_code)]

pub use autograd::{self, *};
pub use nn;
pub use numcore::{
    self, DType, DeviceId, Element, Error, ErrorKind, Flat, FlatLayout, Layout, MemoryStats, Result, Runtime, Scalar, Shape,
    Tensor, TensorMut, Use, fused, fused::NnOps, ops, pointwise, rng, safetensors,
};
pub use optim;
#[cfg(feature = "cpu")]
pub use runtime_cpu::{self, Cpu, Simd};

/// What most programs use: `use weftgrad::prelude::*`.
pub mod prelude {
    pub use autograd::{Backward, BackwardHook, Gradients, Var, backward_with_hooks, checkpoint, manual_seed, no_grad};
    pub use nn::{self, Forward, Module, ModuleExt};
    pub use numcore::{
        DType, Result, Runtime, Shape, Tensor,
        fused::NnOps,
        ops::{Apply, IndexOps, JoinOps, MatmulOps, PointwiseOps, ReduceOps, ScanOps, SortOps, ViewOps},
    };
    pub use optim;
    #[cfg(feature = "cpu")]
    pub use runtime_cpu::Cpu;
}

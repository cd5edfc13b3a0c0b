//! Tensors, autograd and training, for any device and for many of them.
//!
//! From a tensor to a trained model:
//!
//! ```
//! use weftgrad::{optim::{AdamW, AdamWConfig, Optimizer}, prelude::*};
//!
//! /// A model is a struct. This one is for the CPU; with a parameter `R: Runtime` in place of `Cpu`, for any device.
//! #[derive(Module)]
//! #[module(runtime = Cpu)]
//! struct Mlp {
//!     hidden: nn::Linear<Cpu>,
//!     out: nn::Linear<Cpu>,
//! }
//!
//! impl Forward<Cpu> for Mlp {
//!     fn forward(&self, x: &Var<Cpu>) -> Result<Var<Cpu>> {
//!         self.out.forward(&self.hidden.forward(x)?.tanh()?)
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! // A tensor carries its device; so does every result computed from it.
//! let cpu = Cpu::new();
//! let x = Tensor::uniform(&cpu, [256, 2], DType::F32, -1.0, 1.0, 7)?;
//! let y = x.square()?.sum_keepdim(&[1])?.sqrt()?;
//! let (x, y) = (Var::new(x), Var::new(y));
//!
//! // Parameters move into one flat buffer; their gradients into another with the same layout.
//! let init = nn::Init::new(&cpu, 0);
//! let model = Mlp { hidden: nn::Linear::new(&init, 2, 32)?, out: nn::Linear::new(&init, 32, 1)? };
//! let mut optimizer = AdamW::new(&model, AdamWConfig { lr: 1e-2, ..Default::default() })?;
//!
//! let mut last = f64::INFINITY;
//! for _ in 0..200 {
//!     let loss = nn::loss::mse(&model.forward(&x)?, &y, Default::default())?;
//!     optimizer.backward(&loss)?;
//!     optimizer.step()?;
//!     last = loss.item()?;
//! }
//! assert!(last < 5e-3, "{last}");
//! # Ok(())
//! # }
//! ```
//!
//! A program that depends on this crate should add these two profiles to its `Cargo.toml`, since profiles of a
//! dependency do not apply to it.
//!
//! ```toml
//! # Without this, kernels in debug builds are not optimised, and a training step takes about a hundred times as long.
//! [profile.dev.package."*"]
//! opt-level = 3
//!
//! # With this, a release build after a change of one line takes 0.7 s, and 2.5 s with `full` (a first one 22 and
//! # 91 s of processor).
//! [profile.release]
//! incremental = true
//! ```
//!
//! The crates of which this one consists are [`numcore`] (tensors, programs, the [`Runtime`] trait), [`autograd`] (the
//! tape), [`nn`], [`optim`] and [`runtime_cpu`]. Features, all of them in `full`, add crates of the same names. They
//! are `data` (datasets and loaders), `distributed` (many ranks), `adaptive` (slow links, uneven and changing ranks)
//! and `watch` (sinks, metrics, reports). The others are `train` (the training loop) and `planner` (what does a plan
//! cost, and is it still the model of one rank?). Likewise `models` adds pretrained models, `export` writes them as
//! GGUF and ONNX files, `import` reads ONNX files of other programs, and `linalg` solves and factorizes. Not in `full`
//! is `hub`, a client of the Hugging Face Hub.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

#[cfg(feature = "cpu")]
mod device;
#[cfg(all(feature = "cpu", feature = "distributed"))]
mod launcher;

#[cfg(feature = "adaptive")]
pub use adaptive;
pub use autograd::{self, *};
#[cfg(feature = "data")]
pub use data;
#[cfg(feature = "cpu")]
pub use device::{AnyRuntime, Device, ListedDevice, devices};
#[cfg(feature = "distributed")]
pub use distributed;
#[cfg(feature = "mpi")]
pub use engine_mpi as mpi;
#[cfg(feature = "nccl")]
pub use engine_nccl as nccl;
#[cfg(feature = "distributed")]
pub use engine_process as process;
#[cfg(all(feature = "cpu", feature = "distributed"))]
pub use launcher::Launcher;
#[cfg(feature = "linalg")]
pub use linalg;
#[cfg(feature = "models")]
pub use models;
#[cfg(feature = "export")]
pub use models_export as export;
#[cfg(feature = "import")]
pub use models_import as import;
pub use nn;
pub use numcore::{
    self, Capabilities, DType, DeviceId, Element, Error, ErrorKind, Flat, FlatLayout, Layout, MemoryCategory,
    MemoryStats, Result, Runtime, Scalar, Shape, Tensor, TensorMut, Within, fused, fused::NnOps, ops, pointwise, rng,
    safetensors, trace,
};
pub use optim;
#[cfg(feature = "planner")]
pub use planner;
#[cfg(feature = "cpu")]
pub use runtime_cpu::{self, Cpu, Simd};
#[cfg(feature = "cuda")]
pub use runtime_cuda::{self, Cuda};
#[cfg(feature = "wgpu")]
pub use runtime_wgpu::{self, Wgpu};
#[cfg(feature = "train")]
pub use train;
#[cfg(feature = "watch")]
pub use watch;

/// Makes a test that a training step on the ranks of each plan, as threads, is the step of one rank.
///
/// The arguments are the test's name, the plans by axes, and the functions of
/// [`Verify::run`](planner::verify::Verify::run): `make(mesh)`, `batch(runtime, step)` and `input(model, examples)`.
///
/// ```
/// use weftgrad::{
///     distributed::{comm::Communicator, train::{Loss, TrainStep}},
///     optim::AdamWConfig,
///     prelude::*,
/// };
///
/// weftgrad::test_on_ranks!(
///     the_model_is_that_of_one_rank,
///     [[Data 2], [Data 2, Shard 2]],
///     |mesh| {
///         let model = nn::Linear::new(&nn::Init::new(mesh.world().runtime(), 42), 4, 1)?;
///         let step = TrainStep::builder(mesh, &model).optimizer(AdamWConfig::default()).build()?;
///         Ok((model, step))
///     },
///     |rt, step| Ok(vec![Tensor::uniform(rt, [8, 4], DType::F32, -1.0, 1.0, step)?]),
///     |model, examples| {
///         let x = Var::new(examples.tensors[0].clone());
///         Loss::sum(model.forward(&x)?.square()?.sum_all()?, examples.rows() as f64)
///     },
/// );
/// ```
#[cfg(all(feature = "cpu", feature = "planner"))]
#[macro_export]
macro_rules! test_on_ranks {
    (
        $name:ident, [$([$($axis:ident $size:literal),+ $(,)?]),+ $(,)?], $make:expr, $batch:expr, $input:expr $(,)?
    ) => {
        #[test]
        fn $name() {
            use $crate::{distributed::plan::{Axis, ParallelPlan}, planner::verify::Verify};
            for axes in [$(&[$((Axis::$axis, $size)),+][..]),+] {
                let plan = ParallelPlan::of(axes.iter().copied()).unwrap();
                Verify::new(plan).run(|_| Ok($crate::Cpu::new()), $make, $batch, $input).unwrap().assert_equal();
            }
        }
    };
}

/// Names from other frameworks, for code that is translated: of [`distributed::compat`] and `train::compat`.
///
/// | name | here |
/// |---|---|
/// | `SimpleTrainer`, `ZeroStage1` to `ZeroStage3`, `Ddp` | a [`TrainStep`](distributed::train::TrainStep), its stages of ZeRO, and data parallelism by hand |
/// | `Trainer::setup`, `Trainer::head` | a `TrainSetup`: training steps in a loop of one's own |
/// | `Trainer::builder` | a `TrainerBuilder`: `Trainer::new` on every rank of a world of threads |
/// | `DistributedTrainConfig` | the arguments of [`Launcher::from_config`], in one struct |
#[cfg(all(feature = "cpu", feature = "distributed"))]
pub mod compat {
    #[doc(no_inline)]
    pub use distributed::compat::*;
    #[cfg(feature = "train")]
    #[doc(no_inline)]
    pub use train::compat::*;
}

/// The names that most programs use, and the crates: `use weftgrad::prelude::*`.
pub mod prelude {
    #[cfg(feature = "adaptive")]
    pub use adaptive;
    pub use autograd::{
        self, Backward, BackwardHook, Checkpoint, Gradients, Var, autocast, backward_with_hooks, checkpoint,
        manual_seed, no_grad, recomputed,
    };
    #[cfg(feature = "data")]
    pub use data;
    #[cfg(feature = "distributed")]
    pub use distributed::{
        self,
        comm::{Collectives, ReduceOp},
        mesh::Mesh,
        plan::ParallelPlan,
        train::TrainStep,
        zero::ZeroStage,
    };
    pub use nn::{self, Forward, ModuleExt, for_facade::Module};
    pub use numcore::{
        DType, Error, Result, Runtime, Shape, Tensor, TensorMut, Within,
        fused::ConvOptions,
        ops::{self, Ellipsis, NewAxis},
        prelude::*,
    };
    pub use optim::{self, AdamW, AdamWConfig, Optimizer};
    #[cfg(feature = "cpu")]
    pub use runtime_cpu::Cpu;
    #[cfg(feature = "cuda")]
    pub use runtime_cuda::Cuda;
    #[cfg(feature = "wgpu")]
    pub use runtime_wgpu::Wgpu;
    #[cfg(feature = "train")]
    pub use train;

    #[cfg(all(feature = "cpu", feature = "distributed"))]
    pub use crate::Launcher;
}

/// The chapters of the book in `docs/book/src`. Their code is compiled, and run unless it needs more than a test has.
#[cfg(all(doctest, feature = "cpu", feature = "export", feature = "import", feature = "linalg", feature = "train"))]
pub mod book {
    macro_rules! chapter {
        ($name:ident, $file:literal) => {
            #[doc = include_str!(concat!("../../docs/book/src/", $file))]
            pub mod $name {}
        };
    }

    chapter!(introduction, "introduction.md");
    chapter!(install, "install.md");
    chapter!(tensors, "tensors.md");
    chapter!(autograd, "autograd.md");
    chapter!(memory, "memory.md");
    chapter!(layers, "layers.md");
    chapter!(attention, "attention.md");
    chapter!(custom_ops, "custom-ops.md");
    chapter!(first_training_run, "first-training-run.md");
    chapter!(classify, "classify.md");
    chapter!(data, "data.md");
    chapter!(watching_a_run, "watching-a-run.md");
    chapter!(checkpoints_and_resuming, "checkpoints-and-resuming.md");
    chapter!(searching, "searching.md");
    chapter!(runtimes, "runtimes.md");
    chapter!(many_ranks, "many-ranks.md");
    chapter!(clusters, "clusters.md");
    chapter!(gpus, "gpus.md");
    chapter!(pipelines, "pipelines.md");
    chapter!(parallelism, "parallelism.md");
    chapter!(uneven_machines, "uneven-machines.md");
    chapter!(hugging_face, "hugging-face.md");
    #[cfg(feature = "text")]
    chapter!(chat, "chat.md");
    chapter!(preference_and_reinforcement, "preference-and-reinforcement.md");
    chapter!(coming_from, "coming-from.md");
    chapter!(verify, "verify.md");
    chapter!(planning, "planning.md");
    chapter!(replay, "replay.md");
    chapter!(conventions, "conventions.md");
    chapter!(errors, "errors.md");
    chapter!(performance, "performance.md");
    chapter!(design, "design.md");
    chapter!(glossary, "glossary.md");
}

//! A training run built from functions, which gives a trained model: [`Trainer::builder`].

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{Builder, JoinHandle},
};

use data::{Batch, Loader};
use distributed::{
    comm::{Communicator, Ranks, panic_message},
    mesh::{AsMesh, Mesh},
    train::Loss,
};
use nn::{Module, ModuleExt};
use numcore::{DType, Error, NullRuntime, Result, Runtime, Shape, Tensor, Within};
use optim::{IntoOptimizer, OptimizerSource};

use super::{PolicyStep, TrainConfig, Trainer};
use crate::{Callback, Event, Progress, Run, StopReason};

/// The functions of a run, which every rank calls for itself; [`Trainer::builder`] makes it.
#[must_use = "`run` trains"]
pub struct TrainerBuilder<'f, R: Runtime, M, B> {
    model: Make<'f, R, M>,
    optimizer: Box<dyn Fn() -> OptimizerSource<R> + Send + Sync + 'f>,
    loss: Box<LossOf<'f, R, M, B>>,
    loader: Option<Make<'f, R, Loader<B>>>,
    change: Box<Change<'f, R, M, B>>,
    config: TrainConfig,
}

/// Makes a value on the device of a rank.
type Make<'f, R, T> = Box<dyn Fn(&R) -> Result<T> + Send + Sync + 'f>;

/// Computes the loss of a batch.
type LossOf<'f, R, M, B> = dyn Fn(&M, &Batch<B>) -> Result<Loss<R>> + Send + Sync + 'f;

/// Sets options of a trainer.
type Change<'f, R, M, B> =
    dyn for<'t> Fn(Trainer<'t, R, M, PolicyStep<R>, B>) -> Trainer<'t, R, M, PolicyStep<R>, B> + Send + Sync + 'f;

impl Trainer<'_, NullRuntime, (), (), ()> {
    /// Builds a run from three functions: one makes the model on a device, one the optimizer, and one computes the loss
    /// of a batch. Every rank calls them for itself, so the code is equal for one device and for many.
    ///
    /// ```
    /// use data::{Array, Batch, Loader, Rows};
    /// use distributed::train::Loss;
    /// use nn::{Forward, Init, Linear};
    /// use numcore::Tensor;
    /// use optim::AdamWConfig;
    /// use runtime_cpu::Cpu;
    /// use train::{Length, Trainer};
    /// # use autograd::Var;
    /// # use numcore::ops::{PointwiseOps, ReduceOps};
    /// # fn main() -> numcore::Result<()> {
    /// let handle = Trainer::builder(
    ///     |cpu: &Cpu| Linear::new(&Init::new(cpu, 0), 2, 1),
    ///     || AdamWConfig::default(),
    ///     |model, batch: &Batch<Tensor<Cpu>>| {
    ///         let error = model.forward(&Var::new(batch.data.clone()))?.sub(2.0)?;
    ///         Loss::sum(error.square()?.sum_all()?, batch.count as f64)
    ///     },
    /// )
    /// .loader(|cpu: &Cpu| Ok(Loader::new(Rows::new(Array::new([8, 2], vec![0.5f32; 16])?)?).batch(4).stack().on(cpu)))
    /// .trainer(|trainer| trainer.until(Length::Epochs(3.0)))
    /// .run(2, |_| Ok(Cpu::with_threads(1)))?;
    /// let trained = handle.join()?;
    /// assert_eq!(trained.progress.step, 6);
    ///
    /// let model = Linear::new(&Init::new(&Cpu::new(), 1), 2, 1)?;
    /// trained.load_into(&model)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder<'f, R: Runtime, M: Module<R>, B, O: IntoOptimizer<R>>(
        model: impl Fn(&R) -> Result<M> + Send + Sync + 'f,
        optimizer: impl Fn() -> O + Send + Sync + 'f,
        loss: impl Fn(&M, &Batch<B>) -> Result<Loss<R>> + Send + Sync + 'f,
    ) -> TrainerBuilder<'f, R, M, B> {
        TrainerBuilder {
            model: Box::new(model),
            optimizer: Box::new(move || optimizer().into_source()),
            loss: Box::new(loss),
            loader: None,
            change: Box::new(|trainer| trainer),
            config: TrainConfig::default(),
        }
    }
}

impl<'f, R: Runtime, M: Module<R> + 'static, B: Send + 'static> TrainerBuilder<'f, R, M, B> {
    /// Sets the function that makes the loader of batches, of which each rank reads its share. A run needs one.
    pub fn loader(mut self, loader: impl Fn(&R) -> Result<Loader<B>> + Send + Sync + 'f) -> Self {
        self.loader = Some(Box::new(loader));
        self
    }

    /// Sets the configuration: the training step, its strategies and policy, the ranks, gradient weights and shares.
    pub fn config(mut self, config: TrainConfig) -> Self {
        self.config = config;
        self
    }

    /// Sets everything else that a [`Trainer`] takes: its length, callbacks, sinks, and the checkpoint to resume from.
    pub fn trainer<F>(mut self, change: F) -> Self
    where
        F: for<'t> Fn(Trainer<'t, R, M, PolicyStep<R>, B>) -> Trainer<'t, R, M, PolicyStep<R>, B> + Send + Sync + 'f,
    {
        self.change = Box::new(change);
        self
    }

    /// Trains on this rank, in the caller's thread, over a communicator of any engine or a
    /// [`Mesh`](distributed::mesh::Mesh). Every rank calls it.
    ///
    /// # Errors
    /// An error without a [`loader`](TrainerBuilder::loader). An error on any rank ends the run with that error on all
    /// ranks.
    pub fn run_on(&self, mesh: &impl AsMesh<R>) -> Result<Trained> {
        self.run_until(&mesh.as_mesh(), &AtomicBool::new(false))
    }

    fn run_until(&self, mesh: &Mesh<R>, stop: &AtomicBool) -> Result<Trained> {
        let rt = mesh.world().runtime();
        let why = "a run needs batches; give `TrainerBuilder::loader` a function that makes the loader";
        let loader = self.loader.as_ref().ok_or_else(|| Error::argument("TrainerBuilder::run", why))?;
        let model = (self.model)(rt)?;
        let setup = Trainer::setup_with(mesh, &model, (self.optimizer)(), self.config.clone())?;
        let trainer = (self.change)(setup.with_loader(loader(rt)?));
        let report = trainer.with(StopFlag(stop)).run(&self.loss)?;
        let tensor = |name: String, value: Tensor<R>| {
            Ok(TrainedTensor { name, dtype: value.dtype(), shape: *value.shape(), bytes: value.to_bytes()? })
        };
        let state = model.state_dict()?.into_iter().map(|(name, value)| tensor(name, value));
        Ok(Trained { state: state.collect::<Result<_>>()?, reason: report.reason, progress: report.progress })
    }

    /// Starts training on `ranks` ranks, threads of this process with a runtime each, and returns at once.
    ///
    /// # Errors
    /// An error if no thread can be started.
    #[track_caller]
    pub fn run(self, ranks: usize, runtime: impl Fn(usize) -> Result<R> + Send + 'static) -> Result<TrainHandle>
    where
        'f: 'static,
    {
        let stop = Arc::new(AtomicBool::new(false));
        let requested = stop.clone();
        let train = move || {
            if ranks == 1 {
                return self.run_until(&runtime(0)?.as_mesh(), &requested);
            }
            let all = Ranks::new(ranks).run(runtime, |comm| self.run_until(&comm.as_mesh(), &requested))?;
            all.into_iter()
                .next()
                .ok_or_else(|| Error::range("TrainerBuilder::run", "number of ranks", 0, "at least 1"))
        };
        let thread = Builder::new().name("trainer".into()).spawn(train);
        let failed = |e| Error::io("thread trainer", e);
        Ok(TrainHandle { thread: thread.map_err(failed).at_caller()?, stop })
    }
}

/// A run in background threads of this process.
pub struct TrainHandle {
    thread: JoinHandle<Result<Trained>>,
    stop: Arc<AtomicBool>,
}

impl TrainHandle {
    /// Ends the run after its current step.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    /// Tells whether the run is over.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the end of the run and returns rank 0's trained model.
    ///
    /// # Errors
    /// The error that ended the run, or an error if its thread panicked.
    #[track_caller]
    pub fn join(self) -> Result<Trained> {
        self.thread
            .join()
            .unwrap_or_else(|panic| {
                let why = format!("the thread that trains {}", panic_message(&*panic));
                Err(Error::internal("TrainHandle::join", why))
            })
            .at_caller()
    }
}

/// The result of a run, in host memory.
#[derive(Clone, Debug)]
pub struct Trained {
    /// Parameters and buffers by name, in the model's order.
    pub state: Vec<TrainedTensor>,
    /// The reason for which the run ended.
    pub reason: StopReason,
    /// The progress of the run at its end.
    pub progress: Progress,
}

/// A trained parameter or buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainedTensor {
    /// The name in the model's state dict.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// The shape of the tensor.
    pub shape: Shape,
    /// The elements, row-major.
    pub bytes: Vec<u8>,
}

impl Trained {
    /// Loads all parameters and buffers into a model, on any device.
    ///
    /// # Errors
    /// An error if names or shapes are not the model's.
    pub fn load_into<R: Runtime>(&self, model: &impl Module<R>) -> Result<()> {
        let Some(rt) = model.parameters().first().map(|p| p.leaf().runtime().clone()) else { return Ok(()) };
        let tensor = |t: &TrainedTensor| Ok((t.name.clone(), Tensor::from_bytes(&rt, t.shape, t.dtype, &t.bytes)?));
        let values = self.state.iter().map(tensor).collect::<Result<Vec<_>>>()?;
        model.load_state_dict(values).map(|_| ())
    }
}

/// Ends a run when its handle requests it.
struct StopFlag<'f>(&'f AtomicBool);

impl<R: Runtime, M, B> Callback<R, M, B> for StopFlag<'_> {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if matches!(event, Event::StepEnd(_)) && self.0.load(Ordering::SeqCst) {
            run.control().stop("requested by the handle of the run");
        }
        Ok(())
    }
}

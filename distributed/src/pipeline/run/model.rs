//! A model cut into stages, as one rank has it.

use autograd::Var;
use nn::{Module, Visitor, parallel::TensorPlan};
use numcore::{Result, Runtime};

use super::{LossFn, PipelineOptions, Stage, Tie};
use crate::{context_parallel::ContextExchange, loss::Loss, mesh::Mesh, pipeline::Checked};

/// A model cut into stages, as one rank has it: the schedule of its runs, this rank's stages, the loss, and tied
/// parameters. A [`Pipeline`](super::Pipeline) runs it, a [`TrainStep`](crate::train::TrainStep) trains it.
///
/// Schedule, ties and options must be the same on every rank.
///
/// ```
/// use distributed::pipeline::{Limits, Lowering, MicroBatches, PipeShape, PipelineModel, ScheduleKind, split};
/// use distributed::train::{Loss, TrainStep};
/// use nn::{Init, Linear, Sequential, Tanh};
/// use numcore::{DType, NullRuntime, Tensor};
/// use optim::AdamWConfig;
/// # fn main() -> numcore::Result<()> {
/// let rt = NullRuntime::new();
/// let shape = PipeShape { ranks: 1, stages_per_rank: 2, micro_batches: 4 };
/// let checked = ScheduleKind::Interleaved.generate(shape)?.lower(Lowering::default())?.check(Limits::default())?;
/// let init = Init::new(&rt, 0);
/// let model = Sequential::new().push(Linear::new(&init, 4, 8)?).push(Tanh).push(Linear::new(&init, 8, 1)?);
/// let stages = split(model.into_layers(), &[2])?;
/// let model = PipelineModel::on(0, checked, stages)
///     .loss(|y, target| Ok(Loss::mean(nn::loss::mse(&y[0], &target[0], Default::default())?)));
/// let mut step = TrainStep::builder(&rt, model).optimizer(AdamWConfig::default()).build()?;
/// let x = Tensor::zeros(&rt, [8, 4], DType::F32)?;
/// let y = Tensor::zeros(&rt, [8, 1], DType::F32)?;
/// let metrics = step.step(|_| MicroBatches::split(&[x.clone()], &[y.clone()], 4))?;
/// assert_eq!(metrics.global_step(), 1);
/// # Ok(())
/// # }
/// ```
pub struct PipelineModel<R: Runtime> {
    pub(crate) checked: Checked,
    pub(crate) stages: Vec<(usize, Box<dyn Stage<R>>)>,
    pub(super) loss: Option<Box<LossFn<R>>>,
    pub(crate) ties: Vec<Tie>,
    pub(super) options: PipelineOptions,
}

impl<R: Runtime> PipelineModel<R> {
    /// Makes the model from a rank's own stages, with their numbers.
    pub fn new(checked: Checked, stages: Vec<(usize, Box<dyn Stage<R>>)>) -> Self {
        PipelineModel { checked, stages, loss: None, ties: Vec::new(), options: PipelineOptions::default() }
    }

    /// Makes the model from all stages in order, and keeps those of `rank`. Ranks count on from one replica of the
    /// pipeline to the next, as in [`PipelineGroups::new`](super::PipelineGroups::new). On a mesh `rank` is the rank
    /// along the pipe axis. Parameters of several stages that are [duplicates](nn::Param::duplicate) of one another are
    /// tied.
    pub fn on<S: Stage<R> + 'static>(rank: usize, checked: Checked, all: impl IntoIterator<Item = S>) -> Self {
        let all: Vec<S> = all.into_iter().collect();
        let (placement, ties) = (checked.schedule().placement(), Tie::of_duplicates(&all));
        let here = Some(rank % placement.ranks());
        let own = all.into_iter().enumerate().filter(|(stage, _)| placement.rank_of(*stage) == here);
        let own = own.map(|(number, stage)| (number, Box::new(stage) as _)).collect();
        PipelineModel { ties, ..Self::new(checked, own) }
    }

    /// Sets the loss of a micro-batch: a function of the last stage's outputs and the micro-batch's targets. Only the
    /// rank of the last stage calls it. A schedule with backward passes requires it there.
    pub fn loss(self, loss: impl FnMut(&[Var<R>], &[Var<R>]) -> Result<Loss<R>> + Send + 'static) -> Self {
        PipelineModel { loss: Some(Box::new(loss)), ..self }
    }

    /// Adds parameters of which several stages have a copy to those that [`on`](PipelineModel::on) found. A training
    /// step keeps copies equal; a pipeline alone does not.
    pub fn ties(mut self, ties: Vec<Tie>) -> Self {
        let new = ties.into_iter().filter(|tie| !self.ties.contains(tie)).collect::<Vec<_>>();
        self.ties.extend(new);
        self
    }

    /// Sets the options of runs.
    pub fn options(self, options: PipelineOptions) -> Self {
        PipelineModel { options, ..self }
    }

    /// Cuts this rank's stages over the ranks along the tensor axis, as [`Mesh::parallelize`] cuts a model. A pattern
    /// of the plan may name parameters of a stage on another rank. Every rank of the mesh calls it.
    ///
    /// # Errors
    /// Fails as [`Mesh::parallelize`].
    #[doc(alias("parallelize_module"))]
    #[track_caller]
    pub fn parallelize(self, mesh: &Mesh<R>, plan: &TensorPlan) -> Result<Self> {
        mesh.parallelize(&StagesHere(&self.stages), plan)?;
        Ok(self)
    }

    /// Cuts the sequences of this rank's stages over the ranks along the context axis, as [`Mesh::context_parallel`]
    /// does for a model. The first stage takes its part of the tokens, and stages exchange parts. Every rank of the
    /// mesh calls it.
    ///
    /// Micro-batches have whole sequences and targets. A [loss](PipelineModel::loss) is computed from the part that the
    /// last stage makes, and stands for whole sequences. [`ContextSlot::loss`](nn::parallel::ContextSlot::loss) and
    /// [`NextTokenLoss`](nn::NextTokenLoss) make such losses.
    ///
    /// # Errors
    /// Fails as [`Mesh::context_parallel`].
    #[track_caller]
    pub fn context_parallel(self, mesh: &Mesh<R>, exchange: ContextExchange) -> Result<Self> {
        mesh.context_parallel(&StagesHere(&self.stages), exchange)?;
        Ok(self)
    }
}

/// The stages of a rank as one module, under the names of the unstaged model.
struct StagesHere<'a, R: Runtime>(&'a [(usize, Box<dyn Stage<R>>)]);

impl<R: Runtime> Module<R> for StagesHere<'_, R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        self.0.iter().for_each(|(_, stage)| stage.visit(name, visitor));
    }
}

//! What is sharded, and what makes a unit.

use std::{fmt, sync::Arc};

use numcore::{DType, Error, Result, Runtime};
use optim::StatePlace;

use crate::{
    buckets::Unused,
    combinations::{Feature, Features},
    comm::{Comm, Communicator, Label},
    mesh::Mesh,
    plan::Axis,
};

/// What is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum ZeroStage {
    /// Nothing: every rank has everything.
    None,
    /// Optimizer state.
    #[doc(alias("State"))]
    Optimizer,
    /// Optimizer state and gradients.
    Gradients,
    /// Optimizer state, gradients and parameters.
    #[default]
    Parameters,
}

impl ZeroStage {
    /// Stages that shard something.
    pub const ALL: [ZeroStage; 3] = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];

    /// The number of the stage in the paper; 0 of none.
    pub fn number(self) -> usize {
        self as usize
    }

    /// Whether gradients are kept in shards.
    pub fn shards_gradients(self) -> bool {
        self >= ZeroStage::Gradients
    }

    /// Whether parameters are kept in shards.
    pub fn shards_parameters(self) -> bool {
        self >= ZeroStage::Parameters
    }
}

/// Which unit a parameter belongs to, by its name in the model.
#[derive(Clone)]
pub struct UnitOf(Arc<dyn Fn(&str) -> String + Send + Sync>);

impl UnitOf {
    /// The unit's name for a parameter's. Parameters of one name are a unit; the empty name is the root, which stays gathered from its
    /// first use in a step to the end of its backward pass.
    pub fn new(of: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        UnitOf(Arc::new(of))
    }

    /// Every element of a list of layers is a unit (`blocks.3.attn.weight` belongs to `blocks.3`); all else is the root.
    pub fn layers() -> Self {
        Self::new(|name| {
            let parts: Vec<&str> = name.split('.').collect();
            let number = parts.iter().position(|p| p.bytes().all(|b| b.is_ascii_digit()) && !p.is_empty());
            number.map_or_else(String::new, |k| parts[..=k].join("."))
        })
    }

    /// Every field of the model is a unit.
    pub fn children() -> Self {
        Self::new(|name| name.split('.').next().unwrap_or_default().to_string())
    }

    /// The whole model is one unit.
    pub fn whole() -> Self {
        Self::new(|_| String::new())
    }

    pub(crate) fn of(&self, name: &str) -> String {
        (self.0)(name)
    }
}

impl Default for UnitOf {
    fn default() -> Self {
        Self::layers()
    }
}

impl fmt::Debug for UnitOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnitOf(..)")
    }
}

/// How a model is sharded.
#[derive(Clone, Debug, Default)]
pub struct ZeroOptions {
    /// What is sharded.
    pub stage: ZeroStage,
    /// What makes a unit.
    pub units: UnitOf,
    /// Parameters without a gradient. Where they are allowed, ranks may read different units; stage 3 then gathers all of them for the
    /// whole step, and only state and gradients stay sharded in it.
    pub unused: Unused,
    /// Where optimizer state lies between updates (DeepSpeed: `offload_optimizer`).
    #[doc(alias("offload_optimizer"))]
    pub state: StatePlace,
    /// Stage 3: where this rank's shards of parameters lie when they are not gathered or updated (FSDP: `CPUOffload`; DeepSpeed: `offload_param`). From host memory
    /// a shard is copied to the device for each gather of its unit, and there and back for its update; what is gathered is on the device. Units that are kept
    /// whole, of [`whole_up_to`](ZeroOptions::whole_up_to) elements, stay on the device.
    #[doc(alias("CPUOffload"))]
    #[doc(alias("offload_param"))]
    pub parameters: StatePlace,
    /// Stages 2 and 3: where this rank's shards of summed gradients lie from one backward pass of a step to the next, and until the update (DeepSpeed's
    /// ZeRO-Offload). Sums that arrive are copied to the host; those of further micro-batches are added on the device, so that no bit changes. Norm, check
    /// for finite values and update bring one unit's at a time. Whole gradients that wait for their exchange, with
    /// [`reduce_once`](ZeroOptions::reduce_once), are on the device.
    pub gradients: StatePlace,
    /// The type in which gradients travel and are summed over ranks: `bf16`, `f32` or `f64`; if there is none, that in which they are kept (PyTorch: `reduce_dtype` of
    /// `MixedPrecisionPolicy`). Sums are kept in the parameters' type, to which they are rounded when they arrive: for sums in `f32` that are
    /// never rounded, as FSDP has them, ask for [`main_gradients`](ZeroOptions::main_gradients) and leave this out. Gradients of `f16` parameters
    /// travel in `f16` without either: what leaves its range there is infinite, which loss scaling finds. `param_dtype` is that of the
    /// model's parameters, of which each shard has an `f32` master copy; the output of a model is cast where its loss is computed.
    #[doc(alias("MixedPrecisionPolicy"))]
    pub reduce_dtype: Option<DType>,
    /// Keeps gradients of half-precision parameters in `f32`: micro-batches are added up in it, and sums over ranks travel and are kept in it,
    /// as with [`BucketOptions::main_gradients`](crate::buckets::BucketOptions::main_gradients). A `reduce_dtype` of `bf16` halves what travels.
    #[doc(alias("main_grad"))]
    #[doc(alias("grad_accum_dtype"))]
    pub main_gradients: bool,
    /// Exchanges gradients in the last micro-batch of a step alone (PyTorch: `no_sync`), as stage 1 always does. Stages 2 and 3 do so in each otherwise: what it saves
    /// of their exchanges it costs in memory, as gradients are whole on every rank until then.
    #[doc(alias("no_sync"))]
    #[doc(alias("set_requires_gradient_sync"))]
    pub reduce_once: bool,
    /// Stage 3: keeps what a forward has gathered until its gradients are there (PyTorch: `reshard_after_forward=False`). A backward pass
    /// gathers nothing then, and all parameters are in memory when it begins. What an evaluation has gathered stays until the next step.
    ///
    /// A backward pass lets go what it is done with. In a pipeline several may follow one another without a forward between them: GPipe's, and the
    /// last of 1F1B. The first of these gathers nothing, and each of the others gathers its stage again.
    #[doc(alias("reshard_after_forward"))]
    pub gathered_until_backward: bool,
    /// Stage 3: units of at most so many elements are not sharded but kept whole, as stage 2 keeps them, and gathered once a step: gathers of
    /// small ones cost more time than they save memory (DeepSpeed: `stage3_param_persistence_threshold`). All parameters of a unit count, frozen
    /// ones and those of another type too; of a model that is cut over a tensor axis, this rank's pieces.
    #[doc(alias("stage3_param_persistence_threshold"))]
    pub whole_up_to: usize,
}

impl ZeroOptions {
    /// An error where gradients could not travel so, or for what its stage does not have.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |field, why| Err(Error::config("ZeroOptions", field, why));
        if self.stage == ZeroStage::None {
            return refuse("stage", "nothing is sharded: that is `DataParallel`".into());
        }
        match self.reduce_dtype {
            None | Some(DType::BF16 | DType::F32 | DType::F64) => {}
            Some(dtype) if dtype.is_float() => {
                let why = format!("sums of gradients leave the range of {dtype}: take bf16, f32 or f64");
                return refuse("reduce_dtype", why);
            }
            Some(dtype) => {
                return refuse("reduce_dtype", format!("{dtype} is no floating type: take bf16, f32 or f64"));
            }
        }
        let stage = self.stage.number();
        if self.gradients == StatePlace::Host && !self.stage.shards_gradients() {
            let why = "at stage 1 gradients are whole on every rank, and backward passes write them there: leave them on the device, or take \
                       stage 2 or 3";
            return refuse("gradients", why.into());
        }
        let why = format!("is of stage 3 alone, which shards parameters: leave it out at stage {stage}");
        match self.stage.shards_parameters() {
            false if self.gathered_until_backward => refuse("gathered_until_backward", why),
            false if self.parameters == StatePlace::Host => refuse("parameters", why),
            false if self.whole_up_to > 0 => refuse("whole_up_to", why),
            _ => Ok(()),
        }
    }

    /// An error if nothing is sharded, and options of shards were given.
    pub(crate) fn check_unsharded(&self) -> Result<()> {
        let ZeroOptions { unused, state, parameters, gradients, reduce_dtype, main_gradients, whole_up_to, .. } = self;
        let on_host = [state, parameters, gradients].into_iter().any(|place| *place == StatePlace::Host);
        let given = [
            ("unused", *unused == Unused::Allow),
            ("state", on_host),
            ("reduce_dtype", reduce_dtype.is_some()),
            ("main_gradients", *main_gradients),
            ("whole_up_to", *whole_up_to > 0),
        ];
        match given.into_iter().find(|(_, given)| *given && self.stage == ZeroStage::None) {
            Some((field, _)) => {
                let why =
                    "is of what is sharded, and `ZeroStage::None` shards nothing: see `BucketOptions`, or take a stage";
                Err(Error::config("ZeroOptions", field, why))
            }
            None => Ok(()),
        }
    }

    /// The features of a step that is sharded so.
    pub fn features(&self) -> Features {
        let each_pass = self.stage.shards_gradients() && !self.reduce_once;
        let as_read = self.stage.shards_parameters() && self.unused == Unused::Error;
        let stage = match self.stage {
            ZeroStage::None => Features::default(),
            ZeroStage::Optimizer => Features::of([Feature::ZeroOptimizer]),
            ZeroStage::Gradients => Features::of([Feature::ZeroGradients]),
            ZeroStage::Parameters => Features::of([Feature::ZeroParameters]),
        };
        let unused = self.stage != ZeroStage::None && self.unused == Unused::Allow;
        stage
            .and_if(unused, Feature::Unused)
            .and_if(each_pass, Feature::ReduceEachPass)
            .and_if(as_read, Feature::GatherAsRead)
    }

    /// How parameters of a dtype are sharded, which are of a unit of so many elements in all.
    pub(super) fn of_unit(&self, dtype: DType, elements: usize) -> UnitOptions {
        let whole = self.stage == ZeroStage::Parameters && elements <= self.whole_up_to;
        let stage = if whole { ZeroStage::Gradients } else { self.stage };
        let kept = if self.main_gradients && dtype.is_half() { DType::F32 } else { dtype };
        UnitOptions {
            stage,
            sent: self.reduce_dtype.unwrap_or(kept),
            kept,
            reduce_once: self.reduce_once,
            values: if whole { StatePlace::Device } else { self.parameters },
            gradients: self.gradients,
        }
    }
}

/// How one unit is sharded.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnitOptions {
    pub(super) stage: ZeroStage,
    /// The type in which gradients travel.
    pub(super) sent: DType,
    /// The type in which they are added up over micro-batches.
    pub(super) kept: DType,
    /// Whether they are exchanged in the last backward pass alone.
    pub(super) reduce_once: bool,
    /// Where this rank's values lie between uses.
    pub(super) values: StatePlace,
    /// Where this rank's summed gradients lie between uses.
    pub(super) gradients: StatePlace,
}

impl UnitOptions {
    /// The type of the whole gradients of backward passes: of one, or of all of a step.
    pub(super) fn whole(&self, parameters: DType) -> DType {
        if self.reduce_once || !self.stage.shards_gradients() { self.kept } else { parameters }
    }
}

/// The ranks of sharded training.
#[derive(Clone, Debug)]
pub(super) struct ShardGroups<R: Runtime> {
    /// All that gradients are summed over.
    pub(super) all: Comm<R>,
    /// The ranks that hold the shards of one replica.
    pub(super) shard: Comm<R>,
    /// The ranks that hold equal shards, if there are several replicas.
    pub(super) replicas: Option<Comm<R>>,
    /// What tells this trainer's calls apart from those of others on the same ranks.
    pub(super) label: Label,
}

impl<R: Runtime> ShardGroups<R> {
    /// The ranks of a mesh: shards along its shard and context axes and replicas along data, or, where it has no shard axis, shards along data
    /// and context.
    pub(super) fn of_mesh(mesh: &Mesh<R>) -> numcore::Result<Self> {
        let (all, label) = (mesh.gradients(), Label::next(mesh.gradients()));
        let (shard, replicas) = match (mesh.plan().size(Axis::Shard), mesh.plan().size(Axis::Data)) {
            (1, _) | (_, 1) => (all.clone(), None),
            _ => (mesh.group(&[Axis::Shard, Axis::Context])?, Some(label.over(mesh.axis(Axis::Data)))),
        };
        let (all, shard) = (label.over(all), label.over(&shard));
        Ok(ShardGroups { all, shard, replicas, label })
    }

    /// These groups, for the gathers and sums of a unit, with a note on it.
    pub(super) fn of(&self, unit: &str, note: &str) -> Self {
        let of = if unit.is_empty() { format!("the root unit{note}") } else { format!("unit `{unit}`{note}") };
        let named = |comm| self.label.named(comm, &of);
        let (all, label) = (self.all.clone(), self.label.clone());
        ShardGroups { all, shard: named(&self.shard), replicas: self.replicas.as_ref().map(named), label }
    }

    /// Whether this rank is of the replica that saves.
    pub(super) fn saves(&self) -> bool {
        self.replicas.as_ref().is_none_or(|r| r.rank() == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_units_and_the_rest_is_the_root() {
        let of = |name| UnitOf::layers().of(name);
        assert_eq!(["blocks.3.attn.weight", "wte.weight", "a.0.b.1.w"].map(of), ["blocks.3", "", "a.0"]);
        assert_eq!(UnitOf::children().of("a.weight"), "a");
    }
}

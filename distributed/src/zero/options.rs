//! Options of sharded training, and the division of a model into units.

use std::{fmt, sync::Arc};

use numcore::{DType, Error, Result, Runtime};
use optim::StatePlace;

use crate::{
    buckets::Unused,
    checkpoint::{CheckpointPart, share_out},
    combinations::{Feature, Features},
    comm::{Comm, Communicator, Label},
    mesh::Mesh,
    plan::Axis,
};

/// The degree of sharding: a stage of ZeRO, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum ZeroStage {
    /// Nothing is sharded: every rank has everything.
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
    /// The stages that shard something.
    pub const ALL: [ZeroStage; 3] = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];

    /// The number of the stage in the paper; 0 for `None`.
    pub fn number(self) -> usize {
        self as usize
    }

    /// Tells whether gradients are kept in shards.
    pub fn shards_gradients(self) -> bool {
        self >= ZeroStage::Gradients
    }

    /// Tells whether parameters are kept in shards.
    pub fn shards_parameters(self) -> bool {
        self >= ZeroStage::Parameters
    }
}

/// The division of a model into units, by the names of its parameters.
#[derive(Clone)]
pub struct UnitOf {
    of: Arc<dyn Fn(&str) -> String + Send + Sync>,
    /// Parameters of which several pipeline stages have a copy.
    tied: Arc<[String]>,
}

impl UnitOf {
    /// Makes a division from a function of a parameter's name to its unit's name. Parameters of one unit name are a
    /// unit. The empty name is the root, which stays gathered from its first use in a step to the end of its backward
    /// pass.
    pub fn new(of: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        UnitOf { of: Arc::new(of), tied: Arc::new([]) }
    }

    /// Makes each element of a list of layers a unit (`blocks.3.attn.weight` belongs to `blocks.3`), and all else the
    /// root.
    pub fn layers() -> Self {
        Self::new(|name| {
            let parts: Vec<&str> = name.split('.').collect();
            let number = parts.iter().position(|p| p.bytes().all(|b| b.is_ascii_digit()) && !p.is_empty());
            number.map_or_else(String::new, |k| parts[..=k].join("."))
        })
    }

    /// Makes each field of the model a unit.
    pub fn children() -> Self {
        Self::new(|name| name.split('.').next().unwrap_or_default().to_string())
    }

    /// Makes the model one unit.
    pub fn whole() -> Self {
        Self::new(|_| String::new())
    }

    /// Makes each tied parameter a unit of its own, so that it is cut alike in all stages.
    pub(crate) fn with_tied(self, names: impl IntoIterator<Item = String>) -> Self {
        UnitOf { tied: names.into_iter().collect(), ..self }
    }

    /// Tells whether a unit is a tied parameter.
    pub(super) fn is_tied(&self, unit: &str) -> bool {
        self.tied.iter().any(|own| own == unit)
    }

    /// The name of the unit of a parameter; empty for the root.
    pub fn of(&self, name: &str) -> String {
        if self.is_tied(name) { name.into() } else { (self.of)(name) }
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

/// Options of sharded training.
#[derive(Clone, Debug, Default)]
pub struct ZeroOptions {
    /// The degree of sharding.
    pub stage: ZeroStage,
    /// The division of the model into units.
    pub units: UnitOf,
    /// The treatment of parameters without a gradient. If they are allowed, ranks may read different units. ZeRO stage
    /// 3 then gathers all units for the whole step, and only state and gradients stay sharded in it.
    pub unused: Unused,
    /// The place of optimizer state between updates, device or host memory (DeepSpeed: `offload_optimizer`).
    #[doc(alias("offload_optimizer"))]
    pub state: StatePlace,
    /// The place of this rank's parameter shards at stage 3, while they are neither gathered nor updated (FSDP:
    /// `CPUOffload`; DeepSpeed: `offload_param`).
    ///
    /// A shard in host memory is copied to the device for each gather of its unit, and there and back for its update.
    /// Gathered values are on the device. Unsharded units, of at most [`whole_up_to`](ZeroOptions::whole_up_to)
    /// elements, stay on the device.
    #[doc(alias("CPUOffload"))]
    #[doc(alias("offload_param"))]
    pub parameters: StatePlace,
    /// The place of this rank's shards of summed gradients at stages 2 and 3, between backward passes and until the
    /// update (DeepSpeed's ZeRO-Offload).
    ///
    /// Sums that arrive are copied to the host. Those of further micro-batches are added on the device, so that no bit
    /// changes. The norm, the check for finite values and the update bring one unit at a time. Unsharded gradients that
    /// wait for their exchange, with [`reduce_once`](ZeroOptions::reduce_once), are on the device.
    pub gradients: StatePlace,
    /// The dtype in which gradients are sent and summed over ranks: `bf16`, `f32` or `f64` (PyTorch: `reduce_dtype` of
    /// `MixedPrecisionPolicy`). Without one it is the dtype in which gradients are kept.
    ///
    /// Sums are kept in the parameters' dtype, to which they are rounded when they arrive. For `f32` sums that are
    /// never rounded, as in FSDP, set [`main_gradients`](ZeroOptions::main_gradients) and leave this out. Gradients of
    /// `f16` parameters are sent in `f16` without either. Values beyond its range become infinite, which loss scaling
    /// finds.
    ///
    /// PyTorch's `param_dtype` is the dtype of the model's parameters, of which each shard has an `f32` master copy.
    /// The output of a model is cast where its loss is computed.
    #[doc(alias("MixedPrecisionPolicy"))]
    pub reduce_dtype: Option<DType>,
    /// True if gradients of half-precision parameters are kept in `f32`. Micro-batches are added up in it, and sums
    /// over ranks are sent and kept in it, as with
    /// [`BucketOptions::main_gradients`](crate::buckets::BucketOptions::main_gradients). A `reduce_dtype` of `bf16`
    /// halves the bytes sent.
    #[doc(alias("main_grad"))]
    #[doc(alias("grad_accum_dtype"))]
    pub main_gradients: bool,
    /// True if gradients are exchanged in the last micro-batch of a step alone (PyTorch: `no_sync`), as stage 1 always
    /// does. Stages 2 and 3 otherwise exchange in each. The saved exchanges cost memory: gradients are unsharded on
    /// every rank until the last.
    #[doc(alias("no_sync"))]
    #[doc(alias("set_requires_gradient_sync"))]
    pub reduce_once: bool,
    /// True if a forward of stage 3 keeps gathered values until their gradients are computed (PyTorch:
    /// `reshard_after_forward=False`). A backward pass then gathers nothing, and all parameters are in memory when it
    /// begins. Values that an evaluation gathered stay until the next step.
    ///
    /// A backward pass frees values after their last use. In a pipeline several may follow one another without a
    /// forward between them: GPipe's, and the last of 1F1B. The first of these gathers nothing, and each of the others
    /// gathers its stage again.
    #[doc(alias("reshard_after_forward"))]
    pub gathered_until_backward: bool,
    /// The number of elements up to which a unit of stage 3 is not sharded. It is kept as at stage 2, and gathered once
    /// a step: gathers of small units cost more time than they save memory (DeepSpeed:
    /// `stage3_param_persistence_threshold`). All parameters of a unit count, frozen ones and those of another dtype
    /// too. In a model that is cut along tensor, this rank's pieces count.
    #[doc(alias("stage3_param_persistence_threshold"))]
    pub whole_up_to: usize,
}

impl ZeroOptions {
    /// An error for options that the stage does not have, or a dtype in which gradients cannot be sent.
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

    /// The [`Feature`]s that these options give a training step; [`Features::check`] rejects those that exclude each
    /// other.
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

    /// The options of a buffer of parameters of `dtype`, in a unit of `elements` elements in all.
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

/// The options of one unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnitOptions {
    pub(super) stage: ZeroStage,
    /// The dtype in which gradients are sent.
    pub(super) sent: DType,
    /// The dtype in which gradients are added up over micro-batches.
    pub(super) kept: DType,
    /// True if gradients are exchanged in the last backward pass alone.
    pub(super) reduce_once: bool,
    /// The place of this rank's values between uses.
    pub(super) values: StatePlace,
    /// The place of this rank's summed gradients between uses.
    pub(super) gradients: StatePlace,
}

impl UnitOptions {
    /// The dtype of unsharded gradients of a backward pass or, with `reduce_once`, of a step.
    pub(super) fn whole(&self, parameters: DType) -> DType {
        if self.reduce_once || !self.stage.shards_gradients() { self.kept } else { parameters }
    }
}

/// The ranks of sharded training.
#[derive(Clone, Debug)]
pub(super) struct ShardGroups<R: Runtime> {
    /// The ranks over which gradients are summed.
    pub(super) all: Comm<R>,
    /// The ranks that hold the shards of one replica.
    pub(super) shard: Comm<R>,
    /// The ranks that hold equal shards, if there are several replicas.
    pub(super) replicas: Option<Comm<R>>,
    /// The label that separates this trainer's calls from those of others on the same ranks.
    pub(super) label: Label,
}

impl<R: Runtime> ShardGroups<R> {
    /// The groups of a mesh: shards along its shard and context axes, and replicas along data. A mesh without a shard
    /// axis has shards along data and context.
    pub(super) fn of_mesh(mesh: &Mesh<R>) -> numcore::Result<Self> {
        let (all, label) = (mesh.gradients(), Label::next(mesh.gradients()));
        let (shard, replicas) = match (mesh.plan().size(Axis::Shard), mesh.plan().size(Axis::Data)) {
            (1, _) | (_, 1) => (all.clone(), None),
            _ => (mesh.group(&[Axis::Shard, Axis::Context])?, Some(label.over(mesh.axis(Axis::Data)))),
        };
        let (all, shard) = (label.over(all), label.over(&shard));
        Ok(ShardGroups { all, shard, replicas, label })
    }

    /// The groups for the gathers and sums of a unit: their calls have the unit's name and `note`.
    pub(super) fn of(&self, unit: &str, note: &str) -> Self {
        let of = if unit.is_empty() { format!("the root unit{note}") } else { format!("unit `{unit}`{note}") };
        let named = |comm| self.label.named(comm, &of);
        let (all, label) = (self.all.clone(), self.label.clone());
        ShardGroups { all, shard: named(&self.shard), replicas: self.replicas.as_ref().map(named), label }
    }

    /// The parts of this rank's shard that it saves: replicas share them out.
    pub(super) fn saved(&self, parts: Vec<CheckpointPart<R>>) -> Vec<CheckpointPart<R>> {
        match &self.replicas {
            Some(replicas) => share_out(parts, replicas.rank(), replicas.size()),
            None => parts,
        }
    }
}

impl From<ZeroStage> for ZeroOptions {
    fn from(stage: ZeroStage) -> Self {
        ZeroOptions { stage, ..Default::default() }
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

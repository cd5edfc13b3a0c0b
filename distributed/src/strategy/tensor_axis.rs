//! The work of a training step along the tensor axis.

use std::{
    collections::{BTreeMap, HashMap},
    panic::Location,
    sync::Arc,
};

use autograd::{Leaf, random_state};
use nn::{
    Buffer, Module, ModuleExt, Param,
    parallel::{Cuts, Placed, TensorStyle, context_ranks},
};
use numcore::{Error, Result, Runtime, Tensor, placement::TensorPlacement};

use super::{BatchShare, StepRanks};
use crate::{
    combinations::{Feature, Features},
    comm::{Collectives, Comm, Communicator, Label, Partial, ReduceOp, all_gather_bool, memory},
    mesh::Mesh,
    plan::Axis,
    unused::used_anywhere,
};

/// The ranks of a mesh that take a step together, and this rank's pieces of a model along the tensor axis.
pub(crate) struct TensorAxis<R: Runtime> {
    /// The ranks along the axis, if there are several.
    ranks: Option<Comm<R>>,
    /// The ranks that take a training step together.
    everyone: Comm<R>,
    /// This rank's piece of each parameter, by the identity of its leaf.
    pub(super) placed: HashMap<usize, Arc<Placed<R>>>,
    /// The ranks that have the same piece, by their number, which is more than 1.
    pub(super) replicas: BTreeMap<usize, Comm<R>>,
    /// The label that separates this trainer's calls from those of others on the same ranks.
    pub(super) label: Label,
    /// True if the axis is that of experts, along which ranks read different examples.
    of_experts: bool,
}

impl<R: Runtime> TensorAxis<R> {
    /// Makes the tensor axis of `mesh`.
    ///
    /// # Errors
    /// Fails unless the model is cut over exactly the ranks along the axis. The ranks must also have the same model,
    /// train the same parameters, and draw the same random values.
    #[track_caller]
    pub(crate) fn new(mesh: &Mesh<R>, label: &Label, model: &(impl Module<R> + ?Sized)) -> Result<Self> {
        check_context(mesh, model)?;
        let size = mesh.plan().size(Axis::Tensor);
        let mut placed = HashMap::new();
        for (name, p) in model.named_parameters() {
            if !mesh.is_of_experts() && p.placed().is_some_and(|placed| placed.style() == TensorStyle::Experts) {
                let why = "is of experts that are shared out among ranks: call `experts()` of the builder of the training step";
                return Err(Error::state(name, why).on_rank(mesh.world().world_rank()));
            }
            require_known_ranks(mesh, &name, &p)?;
            let over = p.placed().map_or(1, |placed| placed.group().size());
            if over != size {
                let late = if p.placed().is_none() { "; adapters are put in before that" } else { "" };
                let why = format!(
                    "is cut over {over} ranks, and the mesh has {size} along {}: cut the model by `Mesh::parallelize` of \
                     the mesh that it is trained over{late}",
                    axis_name(mesh.is_of_experts())
                );
                return Err(Error::state(name, why).on_rank(mesh.world().world_rank()));
            }
            placed.extend(p.placed().map(|placed| (p.leaf().id(), placed)));
        }
        let (label, of_experts) = (label.clone(), mesh.is_of_experts());
        if size == 1 {
            let everyone = label.over(mesh.gradients());
            return Ok(TensorAxis { ranks: None, everyone, placed, replicas: BTreeMap::new(), label, of_experts });
        }
        let everyone = label.over(&mesh.group(Axis::STEP)?);
        let ranks = label.over(mesh.axis(Axis::Tensor));
        let mut replicas = BTreeMap::new();
        for count in placed.values().map(|p| p.replicas()).filter(|&count| count > 1) {
            replicas.insert(count, ranks.clone());
        }
        // In ascending order, so that all ranks split alike.
        for (&count, comm) in replicas.iter_mut().filter(|(count, _)| **count < size) {
            let none = || Error::internal("a training step", "the communicator gave no group");
            *comm = ranks.split_by(&|rank| rank / count, Location::caller())?.ok_or_else(none)?;
        }
        let axis = TensorAxis { ranks: Some(ranks), everyone, placed, replicas, label, of_experts };
        axis.agree_on_model(model)?;
        Ok(axis)
    }

    /// Checks that the ranks along the axis have the same model and random state: they compute the same values between
    /// the layers. Ranks along the expert axis may have different random states.
    fn agree_on_model(&self, model: &(impl Module<R> + ?Sized)) -> Result<()> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        ranks.agree("the model", described(&model.named_parameters(), &model.named_buffers()).as_bytes())?;
        if self.of_experts {
            return Ok(());
        }
        self.agree("the random state, which ranks along tensor share,", &format!("{:?}", random_state()))
    }

    /// An error unless the ranks along the axis give the same text.
    pub(crate) fn agree(&self, what: &str, text: &str) -> Result<()> {
        self.ranks.as_ref().map_or(Ok(()), |ranks| ranks.agree(what, text.as_bytes()))
    }

    /// Broadcasts each parameter from the first rank that has the same piece, and each buffer from the first rank along
    /// the axis.
    pub(crate) fn sync(&self, leaves: &[Arc<Leaf<R>>], buffers: &[(String, Buffer<R>)]) -> Result<()> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        for leaf in leaves {
            let replicas = self.placed.get(&leaf.id()).and_then(|placed| self.replicas.get(&placed.replicas()));
            let Some(comm) = replicas else { continue };
            leaf.set(self.first_of(comm, &leaf.name(), &leaf.value()?)?)?;
        }
        buffers.iter().try_for_each(|(name, buffer)| buffer.set(self.first_of(ranks, name, &buffer.value())?))
    }

    /// The value of the first rank of `comm`.
    fn first_of(&self, comm: &Comm<R>, name: &str, own: &Tensor<R>) -> Result<Tensor<R>> {
        let comm = self.label.named(comm, &format!("the first value of `{name}`"));
        comm.broadcast(memory(own)?, 0)?.wait()?.freeze()
    }

    /// The ranks that take a step together, and decide alike.
    pub(crate) fn everyone(&self) -> &Comm<R> {
        &self.everyone
    }

    /// The ranks of a training step over `mesh`, whose gradients are summed over `losses`.
    pub(crate) fn step_ranks(&self, mesh: &Mesh<R>, losses: &Comm<R>) -> StepRanks<R> {
        let share = BatchShare { index: mesh.batch().rank(), of: mesh.batch().size() };
        StepRanks {
            everyone: self.everyone.clone(),
            losses: losses.clone(),
            share,
            counts_examples: self.rank() == 0,
            context_ranks: losses.size() / share.of.max(1),
            random_stream: share.index,
        }
    }

    /// The features of a step over `mesh`.
    pub(crate) fn features(&self, mesh: &Mesh<R>) -> Features {
        let cut = if self.of_experts { Feature::Experts } else { Feature::Tensor };
        let context = mesh.plan().size(Axis::Context) > 1;
        let counted = self.placed.values().any(|placed| placed.examples().is_some());
        Features::default()
            .and_if(self.is_cut(), cut)
            .and_if(context, Feature::Context)
            .and_if(counted, Feature::CountedTokens)
    }

    /// Tells whether parameters are cut along the axis.
    pub(crate) fn is_cut(&self) -> bool {
        self.ranks.is_some()
    }

    /// This rank's place along the axis; 0 if nothing is cut.
    pub(crate) fn rank(&self) -> usize {
        self.ranks.as_ref().map_or(0, |ranks| ranks.rank())
    }

    /// Tells whether this rank's piece of a parameter counts in norms and is saved. Of the ranks that have the same
    /// piece, only the first does.
    pub(crate) fn counts(&self, leaf: &Arc<Leaf<R>>) -> bool {
        self.placed.get(&leaf.id()).is_none_or(|placed| placed.is_first_replica())
    }

    /// The pieces of a parameter that ranks along the axis have.
    pub(crate) fn placed(&self, leaf: &Arc<Leaf<R>>) -> Option<Arc<Placed<R>>> {
        self.placed.get(&leaf.id()).cloned()
    }

    /// The piece of a parameter on this rank.
    pub(crate) fn placement(&self, leaf: &Arc<Leaf<R>>) -> TensorPlacement {
        let whole = || TensorPlacement::whole(leaf.spec().shape);
        self.placed.get(&leaf.id()).map_or_else(whole, |placed| placed.placement().clone())
    }

    /// Tells whether ranks along the axis each have a part of a parameter's gradient.
    pub(crate) fn is_partial(&self, leaf: &Arc<Leaf<R>>) -> bool {
        let placed = self.placed.get(&leaf.id()).filter(|p| p.has_partial_gradient() && leaf.requires_grad());
        placed.is_some_and(|placed| self.replicas.contains_key(&placed.replicas()))
    }

    /// The elements of the smallest and of the largest piece of a parameter that ranks along the axis have.
    pub(crate) fn piece_sizes(&self, leaf: &Arc<Leaf<R>>) -> (usize, usize) {
        let own = leaf.spec().shape.numel();
        self.placed.get(&leaf.id()).map_or((own, own), |placed| sizes(placed))
    }

    /// Tells whether all ranks along the axis have equally large pieces of every parameter, so that they cut gradients
    /// into the same buckets.
    pub(crate) fn is_even(&self) -> bool {
        self.placed.values().map(|placed| sizes(placed)).all(|(smallest, largest)| smallest == largest)
    }

    /// The sum of the partial scalars of all ranks along the axis.
    pub(crate) fn sum(&self, own: Tensor<R>) -> Result<Tensor<R>> {
        match &self.ranks {
            Some(ranks) => Partial::new(own).combine(ranks, ReduceOp::Sum),
            None => Ok(own),
        }
    }

    /// The parameters that any rank along the axis used, one `bool` for each. `own` has those that this rank used, in
    /// the same order on all ranks. On one rank the pieces are one parameter.
    pub(crate) fn used_anywhere(&self, own: &[bool]) -> Result<Vec<bool>> {
        self.ranks.as_ref().map_or_else(|| Ok(own.to_vec()), |ranks| used_anywhere(ranks, own.iter().copied()))
    }

    /// Tells whether something holds on all ranks along the axis.
    pub(crate) fn all(&self, own: bool) -> Result<bool> {
        match &self.ranks {
            Some(ranks) => Ok(all_gather_bool(ranks, own)?.into_iter().all(|holds| holds)),
            None => Ok(own),
        }
    }
}

/// The elements of the smallest and of the largest piece of a parameter.
fn sizes<R: Runtime>(placed: &Placed<R>) -> (usize, usize) {
    let sizes = || placed.placements().iter().map(|piece| piece.local().numel());
    (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0))
}

/// A description of a whole model, a line for each parameter and buffer, on which ranks must agree.
pub(crate) fn described<R: Runtime>(parameters: &[(String, Param<R>)], buffers: &[(String, Buffer<R>)]) -> String {
    let parameter = |(name, p): &(String, Param<R>)| {
        let trained = if p.leaf().requires_grad() { "trained" } else { "frozen" };
        format!("{name} {} {} {trained}\n", p.dtype(), p.logical_shape())
    };
    let buffer =
        |(name, buffer): &(String, Buffer<R>)| format!("{name} {} {}\n", buffer.spec().dtype, buffer.spec().shape);
    parameters.iter().map(parameter).chain(buffers.iter().map(buffer)).collect()
}

/// An error unless a model's sequences are cut over exactly the ranks along context of a mesh, and these draw the same
/// random values.
#[track_caller]
fn check_context<R: Runtime>(mesh: &Mesh<R>, model: &(impl Module<R> + ?Sized)) -> Result<()> {
    let (ranks, places) = (mesh.axis(Axis::Context), context_ranks(model));
    // A stage may have no place to cut, if its layers look at no other token.
    let staged = mesh.plan().size(Axis::Pipe) > 1;
    let nowhere = || (places.is_empty() && ranks.size() > 1 && !staged).then(|| ("the model".to_string(), 1));
    if let Some((name, over)) = places.iter().find(|(_, over)| *over != ranks.size()).cloned().or_else(nowhere) {
        let here = if over == 1 { "are not cut".to_string() } else { format!("are cut over {over} ranks") };
        let why = format!(
            "has sequences that {here}, and the mesh has {} along context: cut those of all of the model by \
             `Mesh::context_parallel` of the mesh that it is trained over, after the last layer and adapter was put in",
            ranks_of(ranks.size())
        );
        return Err(Error::state(name, why).on_rank(mesh.world().world_rank()));
    }
    if ranks.size() == 1 {
        return Ok(());
    }
    ranks.agree("the random state, which ranks along context share,", format!("{:?}", random_state()).as_bytes())
}

fn ranks_of(count: usize) -> String {
    if count == 1 { "1 rank".into() } else { format!("{count} ranks") }
}

fn axis_name(of_experts: bool) -> &'static str {
    if of_experts { Axis::Expert.name() } else { Axis::Tensor.name() }
}

/// An error if ranks would each choose a mixture's expert assignment, or move its balance bias, by their own tokens
/// alone.
fn require_known_ranks<R: Runtime>(mesh: &Mesh<R>, name: &str, parameter: &Param<R>) -> Result<()> {
    let knows = parameter.placed().is_some_and(|placed| placed.examples().is_some());
    if mesh.gradients().size() == 1 || knows || parameter.cuts() != (Cuts::Experts { compete: true }) {
        return Ok(());
    }
    let why = "is of a mixture with a capacity or a balance bias, for which the tokens of all ranks count: name its experts in a plan \
               (`TensorPlan::experts`) and give it to `Mesh::parallelize`, also where each rank has all of them";
    Err(Error::state(name, why).on_rank(mesh.world().world_rank()))
}

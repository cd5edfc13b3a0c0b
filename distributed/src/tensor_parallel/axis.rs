//! What a training step does along the tensor axis.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use autograd::Leaf;
use nn::{Module, ModuleExt, parallel::Placed};
use numcore::{Error, Result, Runtime, Tensor, TensorMut, placement::TensorPlacement};

use crate::{
    comm::{Collectives, Comm, Communicator, Label, Partial, ReduceOp, Work, all_gather_bool},
    mesh::Mesh,
    plan::Axis,
};

/// The tensor axis of a mesh, and what this rank has along it of a model's parameters.
pub(crate) struct TensorAxis<R: Runtime> {
    /// The ranks along the axis, if there are several.
    ranks: Option<Comm<R>>,
    /// The ranks that take a training step together.
    everyone: Comm<R>,
    /// What is here of each parameter, by its leaf's identity.
    placed: HashMap<usize, Arc<Placed<R>>>,
    /// Ranks that have the same piece, by how many they are.
    replicas: BTreeMap<usize, Comm<R>>,
}

impl<R: Runtime> TensorAxis<R> {
    /// The axis of `mesh`. An error unless the model is cut over exactly its ranks.
    #[track_caller]
    pub(crate) fn new(mesh: &Mesh<R>, label: &Label, model: &(impl Module<R> + ?Sized)) -> Result<Self> {
        let (size, context) = (mesh.plan().size(Axis::Tensor), mesh.plan().size(Axis::Context));
        if context > 1 {
            let why = format!("the mesh has {context} ranks along context, and no layer cuts sequences over them");
            return Err(Error::config("a training step", "mesh", why));
        }
        let mut placed = HashMap::new();
        for (name, p) in model.named_parameters() {
            let over = p.placed().map_or(1, |placed| placed.group().size());
            if over != size {
                let why = format!(
                    "is cut over {over} ranks, and the mesh has {size} along tensor: cut the model by `Mesh::parallelize` of \
                     the mesh that it is trained over"
                );
                return Err(Error::state(name, why).on_rank(mesh.world().world_rank()));
            }
            placed.extend(p.placed().map(|placed| (p.leaf().id(), placed)));
        }
        if size == 1 {
            return Ok(TensorAxis {
                ranks: None,
                everyone: label.over(mesh.batch()),
                placed,
                replicas: BTreeMap::new(),
            });
        }
        let everyone = label.over(&mesh.group(&[Axis::Data, Axis::Shard, Axis::Tensor])?);
        let ranks = label.named(mesh.axis(Axis::Tensor), "partial gradients");
        let mut replicas = BTreeMap::new();
        for count in placed.values().filter(|p| p.has_partial_gradient()).map(|p| p.replicas()) {
            replicas.insert(count, ranks.clone());
        }
        // In ascending order, so on all ranks alike.
        for (&count, comm) in replicas.iter_mut().filter(|(count, _)| **count < size) {
            let none = || Error::internal("a training step", "the communicator gave no group");
            let own = ranks.split(Some(ranks.rank() / count), ranks.rank())?.ok_or_else(none)?;
            *comm = label.named(&own, "partial gradients");
        }
        Ok(TensorAxis { ranks: Some(ranks), everyone, placed, replicas })
    }

    /// The ranks that take a step together, and decide alike.
    pub(crate) fn everyone(&self) -> &Comm<R> {
        &self.everyone
    }

    /// Whether parameters are cut along the axis.
    pub(crate) fn is_cut(&self) -> bool {
        self.ranks.is_some()
    }

    /// This rank's place along the axis.
    pub(crate) fn rank(&self) -> usize {
        self.ranks.as_ref().map_or(0, |ranks| ranks.rank())
    }

    /// Whether this rank's piece of a parameter counts in norms, and is saved, and not that of another rank that has the same one.
    pub(crate) fn counts(&self, leaf: &Arc<Leaf<R>>) -> bool {
        self.placed.get(&leaf.id()).is_none_or(|placed| placed.is_first_replica())
    }

    /// What is here of a parameter.
    pub(crate) fn placement(&self, leaf: &Arc<Leaf<R>>) -> TensorPlacement {
        let whole = || TensorPlacement::whole(leaf.spec().shape);
        self.placed.get(&leaf.id()).map_or_else(whole, |placed| placed.placement().clone())
    }

    /// The ranks that each have a part of a parameter's gradient; none where gradients here are complete.
    pub(crate) fn summed_over(&self, leaf: &Arc<Leaf<R>>) -> Option<&Comm<R>> {
        let placed = self.placed.get(&leaf.id()).filter(|p| p.has_partial_gradient() && leaf.requires_grad())?;
        self.replicas.get(&placed.replicas())
    }

    /// Starts to sum a partial gradient.
    pub(crate) fn sum_gradient(&self, comm: &Comm<R>, own: TensorMut<R>) -> Result<Work<TensorMut<R>>> {
        comm.all_reduce(own, ReduceOp::Sum)
    }

    /// A sum of which each rank along the axis has its part.
    pub(crate) fn sum(&self, own: Tensor<R>) -> Result<Tensor<R>> {
        match &self.ranks {
            Some(ranks) => Partial::new(own).combine(ranks, ReduceOp::Sum),
            None => Ok(own),
        }
    }

    /// Whether something holds on all ranks along the axis.
    pub(crate) fn all(&self, own: bool) -> Result<bool> {
        match &self.ranks {
            Some(ranks) => Ok(all_gather_bool(ranks, own)?.into_iter().all(|holds| holds)),
            None => Ok(own),
        }
    }
}

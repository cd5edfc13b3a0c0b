//! The strategies of the experts and of the rest of a model, as one.

use nn::{Module, ModuleExt};
use numcore::{Error, Result, Runtime};

use super::part::{ModelPart, expert_leaves};
use crate::{
    combinations::Features,
    comm::{Collectives, Comm, Communicator, Named, memory},
    mesh::Mesh,
    plan::Axis,
    strategy::{SetKind, Strategy, StrategyPart, StrategySet, described},
};

/// Makes the strategy of what is trained over a mesh.
type MakeStrategy<'m, R> = dyn FnMut(&Mesh<R>, &dyn Module<R>) -> Result<Box<dyn Strategy<R>>> + 'm;

/// The strategies that `make` gives for a mesh and what is trained over it: of all but the experts that are shared out,
/// then of those that this rank has, if it has any. `means` tells whether gradients are sent as such. Every rank calls
/// this.
///
/// # Errors
/// As `make`.
#[track_caller]
pub(crate) fn of_part<R: Runtime>(
    mesh: &Mesh<R>,
    model: &dyn Module<R>,
    means: bool,
    make: &mut MakeStrategy<'_, R>,
) -> Result<Box<dyn Strategy<R>>> {
    let [experts, rest] = [true, false].map(|experts| ModelPart { model, experts });
    // The rest comes last: it leaves the thread in the random stream of its rank among all that share out examples.
    let of_experts = match expert_leaves(model).is_empty() {
        true => return make(mesh, &rest),
        false => {
            make_equal(mesh.axis(Axis::Tensor), &experts)?;
            make(&mesh.of_experts()?, &experts)?
        }
    };
    let of_rest = StrategyPart::new(make(mesh, &rest)?);
    let ranks = of_rest.strategy.ranks().clone();
    let of_experts = StrategyPart {
        // Of ranks along tensor, which have the same experts, the first saves them.
        saves: ranks.counts_examples,
        weighed_over: means.then(|| mesh.axis(Axis::Expert).clone()),
        serves_others: true,
        ..StrategyPart::new(of_experts)
    };
    let parts: Vec<(_, &dyn Module<R>)> = vec![(of_rest, &rest), (of_experts, &experts)];
    Ok(Box::new(StrategySet::new(parts, SetKind::Whole, ranks, Features::default())))
}

/// An error if a mesh has ranks along expert, and the model no experts that are shared out over them.
pub(crate) fn require_experts<R: Runtime>(mesh: &Mesh<R>, has_experts: bool) -> Result<()> {
    let size = mesh.plan().size(Axis::Expert);
    if size == 1 || has_experts {
        return Ok(());
    }
    let why = format!(
        "the mesh has {size} ranks along expert, and the model has no experts that are shared out over them: cut it by `Mesh::parallelize`, or its stages \
         by `PipelineModel::parallelize`, with a plan that names them (`TensorPlan::experts`)"
    );
    Err(Error::config("TrainStep::builder", "experts", why).on_rank(mesh.world().world_rank()))
}

/// Gives ranks along tensor, which have the same experts, the values of the first. An error unless they train them
/// alike.
fn make_equal<R: Runtime>(ranks: &Comm<R>, experts: &impl Module<R>) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let named: Vec<_> = experts.named_parameters().into_iter().map(|(name, p)| (name, p.leaf())).collect();
    ranks.agree("the experts", described(&named, &[]).as_bytes())?;
    named.iter().try_for_each(|(name, leaf)| {
        let comm = Named::over(ranks, &format!("the first value of `{name}`"));
        leaf.set(comm.broadcast(memory(&leaf.value()?)?, 0)?.wait()?.freeze()?)
    })
}

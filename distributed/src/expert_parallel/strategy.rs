//! A strategy set of two: one strategy for experts, one for the rest of a model.

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

/// Makes the strategy of a model that is trained over a mesh.
type MakeStrategy<'m, R> = dyn FnMut(&Mesh<R>, &dyn Module<R>) -> Result<Box<dyn Strategy<R>>> + 'm;

/// Makes the strategy of a model: one by `make` for all but the shared-out experts and, if there are such, another for
/// those. `means` tells whether gradients are sent as means. Collective: every rank calls this.
///
/// # Errors
/// The errors of `make`; and if ranks along tensor have different experts.
#[track_caller]
pub(crate) fn with_experts<R: Runtime>(
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
        // Ranks along tensor have the same experts; the first one saves them.
        saves: ranks.counts_examples,
        weighed_over: means.then(|| mesh.axis(Axis::Expert).clone()),
        serves_others: true,
        ..StrategyPart::new(of_experts)
    };
    let parts: Vec<(_, &dyn Module<R>)> = vec![(of_rest, &rest), (of_experts, &experts)];
    Ok(Box::new(StrategySet::new(parts, SetKind::Whole, ranks, Features::default())))
}

/// An error if the mesh has several ranks along its expert axis, and the model no experts that are shared out over
/// them.
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

/// Broadcasts the experts' values from the first of the ranks along tensor, which have the same experts. An error
/// unless these train them alike.
fn make_equal<R: Runtime>(ranks: &Comm<R>, experts: &impl Module<R>) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let named = experts.named_parameters();
    ranks.agree("the experts", described(&named, &[]).as_bytes())?;
    named.iter().map(|(name, p)| (name, p.leaf())).try_for_each(|(name, leaf)| {
        let comm = Named::over(ranks, &format!("the first value of `{name}`"));
        leaf.set(comm.broadcast(memory(&leaf.value()?)?, 0)?.wait()?.freeze()?)
    })
}

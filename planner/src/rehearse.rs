//! A rehearsal: the steps of one rank, as they are, without values and without the other ranks.

use std::collections::BTreeMap;

use distributed::{comm::Traffic, mesh::Mesh};
use numcore::{Error, KernelWork, NullRuntime, Result, Runtime};

use crate::{TrainingPlan, lone::LoneRank};

/// The costs of the third step of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rehearsal {
    /// The kernels.
    pub work: KernelWork,
    /// The most bytes that the rank held at once, without those that kernels and engines need for themselves.
    pub peak: u64,
    /// The exchanges, by the world ranks of the group and the kind of collective.
    pub exchanges: BTreeMap<(Vec<usize>, &'static str), Traffic>,
}

impl Rehearsal {
    /// Runs three steps of rank `rank` of a plan, with everything that a training step does. `build` makes the model
    /// and its step on the rank's mesh, as a program does, and returns a function that takes a step.
    ///
    /// Exchanges and kernels are counted one by one, which takes as long as the step's op calls. `recomputes` is
    /// [`Machine::recomputes`](crate::Machine::recomputes).
    ///
    /// # Errors
    /// Fails as the step does. Plans with a pipeline are refused: messages have the shapes of other ranks' values.
    pub fn of<S: FnMut() -> Result<()>>(
        plan: &TrainingPlan,
        rank: usize,
        recomputes: bool,
        build: impl FnOnce(&Mesh<NullRuntime>) -> Result<S>,
    ) -> Result<Self> {
        plan.check()?;
        if rank >= plan.world() {
            return Err(Error::range("Rehearsal", "rank", rank, format!("below {}", plan.world())));
        }
        if plan.stages() > 1 {
            let why = "stages get values from other ranks, whose shapes one rank does not know: use `SimulatedStep`";
            return Err(Error::unsupported("Rehearsal", why));
        }
        let rt = NullRuntime::recomputing(recomputes);
        let (comm, counts) = LoneRank::world(&rt, rank, plan.world());
        let mut step = build(&Mesh::new(&comm, plan.parallel()?)?)?;
        step()?;
        step()?;
        counts.take();
        rt.reset_peak();
        let before = rt.work();
        step()?;
        let mut exchanges: BTreeMap<_, Traffic> = BTreeMap::new();
        for ((group, kind, _), traffic) in counts.take().into_iter().filter(|((group, ..), _)| group.len() > 1) {
            let sum = exchanges.entry((group.to_vec(), kind)).or_default();
            *sum = *sum + traffic;
        }
        Ok(Rehearsal { work: rt.work().since(before), peak: rt.memory().total.peak as u64, exchanges })
    }
}

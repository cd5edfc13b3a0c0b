//! The forward passes of a step, observed: their op calls.

use std::collections::{BTreeMap, HashMap};

use autograd::{ObservedCall, observe_outputs, observed_pass};
use distributed::{
    pipeline::{Action, Schedule},
    train::{Step, StepInput, TrainStep},
};
use nn::{Module, ModuleExt, Visitor};
use numcore::{Result, Runtime};

use super::{
    call::CallRecord,
    record::{copies, modules},
};

/// The place of a forward pass in a step. Passes of one input and micro-batch follow each other by stage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PassPlace {
    /// The share or accumulated micro-batch whose input it takes.
    pub input: usize,
    /// The micro-batch in the schedule of a pipeline.
    pub micro_batch: usize,
    /// The stage of a pipeline; 0 for one rank, whose passes go through the whole model.
    pub stage: usize,
}

/// The forward passes of a step, without its backward passes and its update.
pub(super) struct ObservedForwards<'a, R: Runtime, M> {
    pub model: &'a M,
    pub step: &'a mut TrainStep<R>,
    /// True for a run on one rank, whose passes go through the whole model.
    pub is_alone: bool,
}

impl<R: Runtime, M: Module<R>> ObservedForwards<'_, R, M> {
    /// The op calls of `count` inputs, by pass.
    pub(super) fn passes(
        self,
        count: usize,
        mut input: impl FnMut(usize) -> Result<StepInput<R>>,
    ) -> Result<BTreeMap<PassPlace, Vec<CallRecord>>> {
        let all = modules(self.model, self.step);
        let copies = copies(&all, &self.step.properties().copies);
        let name_of = |name: String| copies.get(&name).cloned().unwrap_or(name);
        let named = all.iter().flat_map(|module| module.named_parameters());
        let names: HashMap<usize, String> = named.map(|(name, p)| (p.leaf().id(), name_of(name))).collect();
        let forwards = self.forwards()?;
        let mut passes: BTreeMap<PassPlace, Vec<ObservedCall<R>>> = BTreeMap::new();
        for k in 0..count {
            let (result, mut seen) = observe_outputs(|| observed_pass(|| input(k)));
            let mut places = vec![(0, 0)];
            if let StepInput::Run(batch) = result? {
                let (result, run) = observe_outputs(|| self.step.evaluate_stages(batch));
                result?;
                (seen, places) = (run, forwards.clone());
            }
            for call in seen {
                let place = call.op.pass.and_then(|pass| places.get(pass as usize));
                if let Some(&(micro_batch, stage)) = place {
                    let stage = if self.is_alone { 0 } else { stage };
                    passes.entry(PassPlace { input: k, micro_batch, stage }).or_default().push(call);
                }
            }
        }
        let all = JoinedModules(modules(self.model, self.step));
        passes.into_iter().map(|(place, seen)| Ok((place, CallRecord::all(&all, &names, seen)?))).collect()
    }

    /// The micro-batches and stages of the forward passes in an evaluation of a pipeline, in order.
    fn forwards(&self) -> Result<Vec<(usize, usize)>> {
        let Some(pipeline) = self.step.pipeline() else { return Ok(Vec::new()) };
        let (schedule, rank) = (pipeline.schedule(), pipeline.comm().rank());
        let evaluation = Schedule::forward_only(schedule.placement(), schedule.micro_batches())?;
        Ok(evaluation.rows()[rank].iter().flat_map(Action::computes).map(|pass| (pass.micro, pass.stage)).collect())
    }
}

/// Modules as one, under their own names.
struct JoinedModules<'a, R: Runtime>(Vec<&'a dyn Module<R>>);

impl<R: Runtime> Module<R> for JoinedModules<'_, R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        self.0.iter().for_each(|module| module.visit(name, visitor));
    }
}

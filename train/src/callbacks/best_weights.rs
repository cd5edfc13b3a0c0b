//! The weights of the best checkpoint, for the modules of a run that is over.

use std::collections::BTreeMap;

use distributed::{
    checkpoint::{CheckpointReader, Folder},
    combinations::Feature,
    comm::all_ok_after,
};
use nn::{Module, ModuleExt, Param};
use numcore::{Result, Runtime};

use super::weight_averaging;
use crate::Run;

/// An error if the run cannot end with the best weights.
pub(super) fn check<R: Runtime, M: Module<R>, B>(run: &mut Run<'_, R, M, B>) -> Result<()> {
    run.check_end(Feature::RestoreBest, "Checkpoints")
}

/// Loads the evaluated values of a step into all modules: its weights, or the averages of them.
pub(super) fn put<R: Runtime, M: Module<R>, B>(folder: &Folder, best: u64, run: &Run<'_, R, M, B>) -> Result<()> {
    let comm = run.comm();
    all_ok_after(comm, "Checkpoints", || {
        folder.await_step(best, comm.timeout().saturating_mul(2))?;
        let mut reader = CheckpointReader::open(folder.step(best))?;
        let evaluated = weight_averaging::evaluated_names(reader.manifest());
        let copies = run.copies();
        run.modules().into_iter().try_for_each(|module| {
            let copied = |(name, p): (String, Param<R>)| Some((name, copies.get(&p.leaf().id())?.clone()));
            let copied: BTreeMap<String, String> = module.named_parameters().into_iter().filter_map(copied).collect();
            let saved = |name: &str| copied.get(name).map_or(name, String::as_str).to_string();
            reader.load_tensors(module, |name| Some(evaluated(&saved(name))))
        })
    })
}

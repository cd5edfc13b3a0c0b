//! Training and evaluation modes of a model's parts, and restoring them.

use nn::{Mode, Module, ModuleEntry, walk};
use numcore::Runtime;

/// The modes of modules, true for training mode, in the order of visits.
pub(crate) struct Modes(Vec<bool>);

impl Modes {
    /// Puts a model into evaluation mode; returns the modes from before.
    pub(crate) fn evaluating<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Modes {
        // All are read before one is changed: a part that is shared is visited more than once.
        let mut were = Vec::new();
        each_mode(model, |mode| were.push(mode.is_training()));
        each_mode(model, |mode| mode.set_training(false));
        Modes(were)
    }

    /// Puts a model back into the modes it was in.
    pub(crate) fn restore<R: Runtime>(self, model: &(impl Module<R> + ?Sized)) {
        let mut were = self.0.into_iter();
        each_mode(model, |mode| mode.set_training(were.next().unwrap_or(true)));
    }
}

fn each_mode<R: Runtime>(model: &(impl Module<R> + ?Sized), mut see: impl FnMut(&Mode)) {
    walk(model, |_, entry| {
        if let ModuleEntry::Mode(mode) = entry {
            see(mode);
        }
    });
}

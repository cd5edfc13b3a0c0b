//! Cutting the sequences of a model over ranks, and the roles of its slots.

use std::sync::Arc;

use numcore::{Error, Result, Runtime};

use super::{ContextGroup, ContextSlot, context::ContextRole};
use crate::{Module, ModuleEntry, walk};

/// Cuts the sequences of a model over the ranks of a group. Each rank computes on its part, with all parameters of the
/// model. Inputs of the model are whole sequences; its outputs are this rank's part.
///
/// On a group of one rank the model is only checked.
///
/// # Errors
/// An error if the sequences are cut already, a layer needs them whole, or the model has no slot that cuts or none that
/// attends. The model is then unchanged.
#[track_caller]
pub fn cut_sequences<R: Runtime>(model: &(impl Module<R> + ?Sized), group: &Arc<dyn ContextGroup<R>>) -> Result<()> {
    cut_sequences_of_part(model, group, ContextRoles::of(model))
}

/// The roles of the slots that a model has; a rank may hold only some of its layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextRoles {
    /// True if a module takes a rank's part of sequences ([`ContextSlot::cuts`]).
    pub cuts: bool,
    /// True if a module attends over ranks ([`ContextSlot::attends`]).
    pub attends: bool,
}

impl ContextRoles {
    /// The roles of the slots in a model, or in a part of one.
    pub fn of<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Self {
        let slots = context_slots(model);
        let has = |role| slots.iter().any(|(_, slot)| slot.role() == role);
        ContextRoles { cuts: has(ContextRole::Cuts), attends: has(ContextRole::Attends) }
    }
}

/// Cuts sequences as [`cut_sequences`] does, for one part of a model that is spread over ranks. `all` are the roles of
/// the slots in all parts.
///
/// # Errors
/// Errors of [`cut_sequences`].
pub fn cut_sequences_of_part<R: Runtime>(
    model: &(impl Module<R> + ?Sized),
    group: &Arc<dyn ContextGroup<R>>,
    all: ContextRoles,
) -> Result<()> {
    let slots = context_slots(model);
    if let Some((name, _)) = slots.iter().find(|(_, slot)| slot.role() == ContextRole::Refuses) {
        let why = "uses all tokens of a sequence, and does not support sequences that are cut over ranks";
        return Err(Error::state(name.clone(), why));
    }
    if let Some((name, _)) = slots.iter().find(|(_, slot)| slot.ranks() > 1) {
        return Err(Error::state(name.clone(), "has its sequences cut already: a model is cut once"));
    }
    for (has, why) in [
        (all.cuts, "takes a rank's part of a sequence: a model that can has a `ContextSlot::cuts`"),
        (all.attends, "attends over ranks: attention that can goes through a `ContextSlot::attends`"),
    ] {
        if !has {
            return Err(Error::config("context parallelism", "model", format!("nothing in the model {why}")));
        }
    }
    if group.size() > 1 {
        for (name, slot) in slots {
            slot.fill(group, name);
        }
    }
    Ok(())
}

/// The number of ranks that sequences are cut over, for each slot of a model, with the name of its module. It is 1 if
/// they are not cut.
pub fn context_ranks<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Vec<(String, usize)> {
    context_slots(model).into_iter().map(|(name, slot)| (name, slot.ranks())).collect()
}

/// The slots of a model's layers of attention, with the names of the layers.
pub fn attention_slots<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Vec<(String, ContextSlot<R>)> {
    context_slots(model).into_iter().filter(|(_, slot)| slot.is_attention()).collect()
}

/// All slots of a model, with the names of their modules.
fn context_slots<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Vec<(String, ContextSlot<R>)> {
    let mut slots = Vec::new();
    walk(model, |name, entry| {
        if let ModuleEntry::Context(slot) = entry {
            slots.push((if name.is_empty() { "the model" } else { name }.to_string(), slot.clone()));
        }
    });
    slots
}

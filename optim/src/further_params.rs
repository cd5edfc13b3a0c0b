//! Parameters that are added to an existing optimizer.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Error, Result, Runtime, ops::Spec};

use crate::{FlatOptimizer, OwnGradients, UpdateRule, flat_optimizer::refuse, param_part::ParamPart, params::by_dtype};

/// A function from a parameter's name and shape to its group.
type GroupOf = Arc<dyn Fn(&str, &Spec) -> usize + Send + Sync>;

/// The groups of parameters that are known by name.
pub(crate) struct GroupsByName<C> {
    pub(crate) group_of: GroupOf,
    pub(crate) configs: Vec<C>,
    /// The group of each configuration, if it has parameters.
    pub(crate) groups: Vec<Option<usize>>,
}

impl<R: Runtime, C: UpdateRule> FlatOptimizer<R, C> {
    /// The group of a further parameter, which may have had no parameters so far.
    fn group_for(&mut self, leaf: &Leaf<R>) -> Result<usize> {
        let Some(by_name) = &mut self.by_name else {
            let why = format!(
                "none of the {} groups of {} is known to have it: make the optimizer before parameters are frozen, or of `ParamGroups`",
                self.groups.len(),
                C::NAME
            );
            return if self.groups.len() == 1 { Ok(0) } else { Err(Error::state(&*leaf.name(), why)) };
        };
        let k = (by_name.group_of)(&leaf.name(), &leaf.spec());
        let group = *by_name.groups[k].get_or_insert_with(|| {
            self.groups.push(by_name.configs[k].clone());
            self.groups.len() - 1
        });
        Ok(group)
    }

    /// Adds parameters to their groups.
    pub(crate) fn take_in(&mut self, leaves: &[Arc<Leaf<R>>]) -> Result<()> {
        self.require_new(leaves)?;
        let groups = leaves.iter().map(|leaf| self.group_for(leaf)).collect::<Result<Vec<_>>>()?;
        let mut parts = Vec::new();
        for (k, config) in self.groups.iter().enumerate() {
            let own = leaves.iter().zip(&groups).filter(|(_, group)| **group == k).map(|(leaf, _)| leaf.clone());
            let own: Vec<Arc<Leaf<R>>> = own.collect();
            refuse(config, &own)?;
            for leaves in by_dtype(own) {
                parts.push(ParamPart::new(k, config, leaves)?);
            }
        }
        self.parts.extend(parts);
        self.frozen.retain(|frozen| leaves.iter().all(|leaf| leaf.id() != frozen.id()));
        self.own = OwnGradients::default();
        Ok(())
    }
}

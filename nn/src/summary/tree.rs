//! The modules of a model, and whose a parameter is.

use std::collections::HashMap;

use numcore::Runtime;

use crate::{Module, Param, Visitor};

/// A module, by its path in the model.
pub(super) struct ModuleNode {
    pub path: String,
    /// The module that it is a part of; none for the whole model.
    pub parent: Option<usize>,
}

/// The modules of a model in its own order, and the parameters of each. Index 0 is the whole model.
pub(super) struct ModuleTree<R: Runtime> {
    pub modules: Vec<ModuleNode>,
    /// A parameter and its module, each parameter once, under its first name.
    pub parameters: Vec<(usize, Param<R>)>,
    /// The module of a leaf, by its identity.
    pub of_leaf: HashMap<usize, usize>,
    open: Vec<usize>,
}

impl<R: Runtime> ModuleTree<R> {
    pub(super) fn of(model: &(impl Module<R> + ?Sized)) -> Self {
        let root = ModuleNode { path: String::new(), parent: None };
        let mut tree =
            ModuleTree { modules: vec![root], parameters: Vec::new(), of_leaf: HashMap::new(), open: vec![0] };
        model.visit("", &mut tree);
        tree
    }

    fn present(&self) -> usize {
        self.open.last().copied().unwrap_or(0)
    }

    /// A module, the one it is a part of, and so on up to the whole model.
    pub(super) fn upwards(&self, module: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(module), |&module| self.modules[module].parent)
    }

    /// The innermost module of which both are parts.
    pub(super) fn common(&self, a: usize, b: usize) -> usize {
        let above: Vec<usize> = self.upwards(a).collect();
        self.upwards(b).find(|module| above.contains(module)).unwrap_or(0)
    }
}

impl<R: Runtime> Visitor<R> for ModuleTree<R> {
    fn enter(&mut self, name: &str) {
        let present = self.present();
        // Flattened parts are the module's own.
        if name.is_empty() {
            self.open.push(present);
            return;
        }
        let path = &self.modules[present].path;
        let path = if path.is_empty() { name.into() } else { format!("{path}.{name}") };
        self.modules.push(ModuleNode { path, parent: Some(present) });
        self.open.push(self.modules.len() - 1);
    }

    fn leave(&mut self) {
        self.open.pop();
    }

    fn parameter(&mut self, _: &str, parameter: &Param<R>) {
        let module = self.present();
        if let std::collections::hash_map::Entry::Vacant(new) = self.of_leaf.entry(parameter.leaf().id()) {
            new.insert(module);
            self.parameters.push((module, parameter.clone()));
        }
    }
}

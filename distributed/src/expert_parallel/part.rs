//! The experts of a model, and the rest of it, as two models.

use std::collections::HashSet;

use nn::{
    AdapterSlot, Buffer, Mode, Module, ModuleExt, Param, Visitor,
    parallel::{ContextSlot, TensorStyle},
};
use numcore::Runtime;

/// One of the two parts of a model, with the names of the whole model.
pub(super) struct ModelPart<'m, M: ?Sized> {
    pub(super) model: &'m M,
    /// True for the part of experts that are shared out; buffers, modes, adapters and context slots belong to the rest.
    pub(super) experts: bool,
}

impl<R: Runtime, M: Module<R> + ?Sized> Module<R> for ModelPart<'_, M> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        self.model.visit(name, &mut PartVisitor { experts: self.experts, visitor });
    }
}

struct PartVisitor<'v, R: Runtime> {
    experts: bool,
    visitor: &'v mut dyn Visitor<R>,
}

impl<R: Runtime> Visitor<R> for PartVisitor<'_, R> {
    fn enter(&mut self, name: &str) {
        self.visitor.enter(name);
    }

    fn leave(&mut self) {
        self.visitor.leave();
    }

    fn parameter(&mut self, name: &str, parameter: &Param<R>) {
        if is_expert(parameter) == self.experts {
            self.visitor.parameter(name, parameter);
        }
    }

    fn buffer(&mut self, name: &str, buffer: &Buffer<R>) {
        if !self.experts {
            self.visitor.buffer(name, buffer);
        }
    }

    fn mode(&mut self, mode: &Mode) {
        if !self.experts {
            self.visitor.mode(mode);
        }
    }

    fn adapter(&mut self, slot: &AdapterSlot<R>) {
        if !self.experts {
            self.visitor.adapter(slot);
        }
    }

    fn context(&mut self, slot: &ContextSlot<R>) {
        if !self.experts {
            self.visitor.context(slot);
        }
    }
}

/// Tells whether a model has experts that are shared out among ranks.
pub(crate) fn has_experts<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> bool {
    model.parameters().iter().any(is_expert)
}

/// The leaf ids of the experts of a model that are shared out among ranks.
pub(crate) fn expert_leaves<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> HashSet<usize> {
    model.parameters().iter().filter(|parameter| is_expert(parameter)).map(|parameter| parameter.leaf().id()).collect()
}

/// Tells whether a parameter belongs to experts that are shared out among ranks.
fn is_expert<R: Runtime>(parameter: &Param<R>) -> bool {
    parameter.placed().is_some_and(|placed| placed.style() == TensorStyle::Experts)
}

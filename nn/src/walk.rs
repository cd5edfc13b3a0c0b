//! A model's parts with their full names, in the model's own order.

use numcore::Runtime;

use crate::{AdapterSlot, Buffer, Mode, Module, Param, Visitor, parallel::ContextSlot};

/// An entry of a model that holds state.
pub enum ModuleEntry<'a, R: Runtime> {
    /// A parameter of the model.
    Parameter(&'a Param<R>),
    /// A buffer of the model.
    Buffer(&'a Buffer<R>),
    /// A flag that switches between training and evaluation; its name is that of its module.
    Mode(&'a Mode),
    /// The place of a linear layer's adapter; its name is that of the layer.
    Adapter(&'a AdapterSlot<R>),
    /// The place of the ranks that sequences are cut over; its name is that of its module.
    Context(&'a ContextSlot<R>),
}

/// Calls back for every part of `module` with its full name, such as `blocks.0.attn.weight`. A shared part is visited
/// wherever it occurs.
pub fn walk<R: Runtime>(module: &(impl Module<R> + ?Sized), mut see: impl FnMut(&str, ModuleEntry<'_, R>)) {
    module.visit("", &mut WalkVisitor { path: String::new(), parents: Vec::new(), see: &mut see });
}

struct WalkVisitor<'f, R: Runtime> {
    path: String,
    parents: Vec<usize>,
    see: &'f mut dyn FnMut(&str, ModuleEntry<'_, R>),
}

impl<R: Runtime> WalkVisitor<'_, R> {
    /// Appends `name` to the path; empty names are dropped.
    fn push(&mut self, name: &str) {
        self.parents.push(self.path.len());
        if !name.is_empty() && !self.path.is_empty() {
            self.path.push('.');
        }
        self.path.push_str(name);
    }

    fn pop(&mut self) {
        self.path.truncate(self.parents.pop().unwrap_or(0));
    }

    fn show(&mut self, name: &str, entry: ModuleEntry<'_, R>) {
        self.push(name);
        (self.see)(&self.path, entry);
        self.pop();
    }
}

impl<R: Runtime> Visitor<R> for WalkVisitor<'_, R> {
    fn enter(&mut self, name: &str) {
        self.push(name);
    }

    fn leave(&mut self) {
        self.pop();
    }

    fn parameter(&mut self, name: &str, parameter: &Param<R>) {
        self.show(name, ModuleEntry::Parameter(parameter));
    }

    fn buffer(&mut self, name: &str, buffer: &Buffer<R>) {
        self.show(name, ModuleEntry::Buffer(buffer));
    }

    fn mode(&mut self, mode: &Mode) {
        self.show("", ModuleEntry::Mode(mode));
    }

    fn adapter(&mut self, slot: &AdapterSlot<R>) {
        self.show("", ModuleEntry::Adapter(slot));
    }

    fn context(&mut self, slot: &ContextSlot<R>) {
        self.show("", ModuleEntry::Context(slot));
    }
}

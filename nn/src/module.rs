//! [`Module`]: the one trait of every type that holds state. It only exposes its parts; a [`Visitor`] operates on them.

use std::sync::Arc;

use autograd::Var;
use numcore::{Error, Result, Runtime};

use crate::{AdapterSlot, Buffer, Mode, Param, parallel::ContextSlot};

/// Something that holds parameters, buffers or modes: a model, a layer, or one of those three.
///
/// Derive it. By hand, call [`Visitor::enter`], `visit` of every part with its name, and [`Visitor::leave`]. Call them
/// always in the same order: it is the order of the model's parameters.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no module on `{R}`",
    label = "holds nothing a model can visit",
    note = "derive `Module` for it, or, if it is a field that holds no parameters, mark it `#[module(skip)]`"
)]
#[doc(alias("HasGraph"))]
pub trait Module<R: Runtime>: Send + Sync {
    /// Visits every part with `visitor`; `name` is this module's own name among its parent's parts, empty for the whole
    /// model.
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>);
}

/// A module that maps one value to one value.
#[diagnostic::on_unimplemented(message = "`{Self}` does not make one variable of another on `{R}`")]
pub trait Forward<R: Runtime>: Module<R> {
    /// Applies the module to `x`.
    fn forward(&self, x: &Var<R>) -> Result<Var<R>>;
}

/// A part of a model that one rank of a pipeline runs as a whole. Several values go in, and several out, of any shapes
/// and element types. Its parameters are those it visits as a [`Module`]; a parameter's name should be its name in the
/// whole model.
///
/// A stage is given what the stage before made, in its order. The first is given a micro-batch's inputs; the values of
/// the last go to the loss. It must make values of the same shapes and dtypes for every micro-batch. Gradients flow
/// back to the floating inputs that needed them where they were made: integers and masks travel forward alone.
#[doc(alias("TrainablePipelineStage"))]
pub trait Stage<R: Runtime>: Module<R> {
    /// Applies it to one micro-batch.
    fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>>;
}

/// The only input of a stage that takes one.
pub(crate) fn one_value<'a, R: Runtime>(of: &'static str, inputs: &'a [Var<R>]) -> Result<&'a Var<R>> {
    match inputs {
        [x] => Ok(x),
        _ => Err(Error::range(of, "number of values", inputs.len(), 1)),
    }
}

/// Callbacks for the parts of a module.
pub trait Visitor<R: Runtime> {
    /// The parts that follow, up to the matching [`leave`](Visitor::leave), belong to the part `name`.
    fn enter(&mut self, name: &str) {
        let _ = name;
    }
    /// The part entered last is complete.
    fn leave(&mut self) {}
    /// Called for each parameter.
    fn parameter(&mut self, name: &str, parameter: &Param<R>) {
        let _ = (name, parameter);
    }
    /// Called for each buffer.
    fn buffer(&mut self, name: &str, buffer: &Buffer<R>) {
        let _ = (name, buffer);
    }
    /// Called for each flag that switches between training and evaluation.
    fn mode(&mut self, mode: &Mode) {
        let _ = mode;
    }
    /// Called for the place of a linear layer's adapter, before the adapter's own parts.
    fn adapter(&mut self, slot: &AdapterSlot<R>) {
        let _ = slot;
    }
    /// Called for the place of the ranks that sequences are cut over.
    fn context(&mut self, slot: &ContextSlot<R>) {
        let _ = slot;
    }
}

impl<R: Runtime> Module<R> for Param<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.parameter(name, self);
    }
}

impl<R: Runtime> Module<R> for Buffer<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.buffer(name, self);
    }
}

impl<R: Runtime> Module<R> for Mode {
    fn visit(&self, _: &str, visitor: &mut dyn Visitor<R>) {
        visitor.mode(self);
    }
}

/// Children "0", "1", ….
impl<R: Runtime, M: Module<R>> Module<R> for Vec<M> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        self.iter().enumerate().for_each(|(i, child)| child.visit(&i.to_string(), visitor));
        visitor.leave();
    }
}

impl<R: Runtime, M: Module<R>> Module<R> for Option<M> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        if let Some(module) = self {
            module.visit(name, visitor);
        }
    }
}

macro_rules! pointer {
    ($($pointer:ident),*) => {$(
        impl<R: Runtime, M: Module<R> + ?Sized> Module<R> for $pointer<M> {
            fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
                (**self).visit(name, visitor);
            }
        }

        impl<R: Runtime, M: Forward<R> + ?Sized> Forward<R> for $pointer<M> {
            #[track_caller]
            fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
                (**self).forward(x)
            }
        }

        impl<R: Runtime, M: Stage<R> + ?Sized> Stage<R> for $pointer<M> {
            fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
                (**self).forward_values(inputs)
            }
        }
    )*};
}

pointer!(Box, Arc);

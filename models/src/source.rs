//! Weights of files as values of parameters, and parameters as weights of files.

use std::sync::Arc;

use autograd::{Leaf, Residency};
use nn::Param;
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor,
    ops::{PointwiseOps, Spec, ViewOps, cat},
    placement::TensorPlacement,
};

use crate::{
    convert::{Change, StackNames},
    files::{WeightWriter, Weights},
};

/// A parameter's value in a file, read each time the parameter is read while it has no memory.
pub(crate) struct Source {
    pub weights: Arc<Weights>,
    pub names: SourceNames,
}

/// The names of the weights that a value is made of.
pub(crate) enum SourceNames {
    /// A single weight, and its change.
    Weight(String, Change),
    /// The weights of each expert, part by part.
    Experts(Vec<Vec<String>>),
}

impl Source {
    /// The reason why the weights do not fit a parameter, if they do not.
    pub(crate) fn unfit(&self, due: Spec) -> Option<String> {
        match &self.names {
            SourceNames::Weight(name, change) => self.unfit_weight(name, due.shape, changed_shape(*change, due.shape)),
            SourceNames::Experts(experts) => experts.iter().find_map(|names| {
                let part = part_shape(due.shape, names.len())?;
                names.iter().find_map(|name| self.unfit_weight(name, part, part))
            }),
        }
    }

    fn unfit_weight(&self, name: &str, due: Shape, here: Shape) -> Option<String> {
        let (dtype, shape) = match self.weights.spec(name) {
            Ok(spec) => spec,
            Err(e) => return Some(e.to_string()),
        };
        if !dtype.is_float() {
            return Some(format!("is {dtype} in files as {name}, and no quantised weights are read"));
        }
        (shape != here).then(|| format!("is {due} here, {shape} in files as {name}"))
    }
}

impl Source {
    fn read<R: Runtime>(&self, leaf: &Leaf<R>, name: &str) -> Result<Tensor<R>> {
        self.weights.tensor(leaf.runtime(), name)?.to_dtype(leaf.spec().dtype)
    }

    /// The weights of some experts as one tensor, `[E, n · F, C]`.
    fn stacked<R: Runtime>(&self, leaf: &Leaf<R>, experts: &[Vec<String>]) -> Result<Tensor<R>> {
        let shape = leaf.spec().shape.with(0, experts.len());
        let weights = experts.iter().flatten().map(|name| self.read(leaf, name)).collect::<Result<Vec<_>>>()?;
        cat(&weights.iter().collect::<Vec<_>>(), 0)?.reshape(shape)
    }
}

impl<R: Runtime> Residency<R> for Source {
    fn fetch(&self, leaf: &Leaf<R>) -> Result<Tensor<R>> {
        match &self.names {
            SourceNames::Weight(name, change) => changed(*change, self.read(leaf, name)?),
            SourceNames::Experts(experts) => self.stacked(leaf, experts),
        }
    }

    /// Reads only the bytes of the piece of a single weight, and only the experts in the piece of a stack.
    fn fetch_piece(&self, leaf: &Leaf<R>, piece: &TensorPlacement) -> Result<Tensor<R>> {
        if let SourceNames::Weight(name, change) = &self.names {
            let value = self.weights.piece(leaf.runtime(), name, &changed_piece(*change, piece)?)?;
            return changed(*change, value.to_dtype(leaf.spec().dtype)?);
        }
        if let SourceNames::Experts(experts) = &self.names
            && let [own] = piece.ranges(0)
        {
            let read = self.stacked(leaf, &experts[own.clone()])?;
            let mut within: Vec<_> = (0..piece.logical().rank()).map(|dim| piece.ranges(dim).to_vec()).collect();
            within[0] = std::iter::once(0..own.len()).collect();
            let within = TensorPlacement::new(*read.shape(), within)?;
            return if within.is_whole() { Ok(read) } else { within.take(&read)?.copy() };
        }
        piece.take(&Residency::<R>::fetch(self, leaf)?)?.copy()
    }
}

/// Returns an error if a parameter that files have in several parts is cut over ranks.
pub(crate) fn require_uncut<R: Runtime>(name: &str, parameter: &Param<R>) -> Result<()> {
    let why = "is cut over ranks, and has several parts in files: save a copy of the model (`models::gathered`)";
    let is_cut = parameter.placed().is_some_and(|placed| !placed.placement().is_whole());
    if is_cut { Err(Error::state(name, why)) } else { Ok(()) }
}

/// The writer of a parameter's weight, in the layout of files.
pub(crate) fn written<'a, R: Runtime>(
    parameter: &'a Param<R>,
    name: String,
    change: Change,
    dtype: DType,
) -> WeightWriter<'a, R> {
    let value = move || changed(change, parameter.gathered()?)?.to_dtype(dtype);
    WeightWriter { name, shape: changed_shape(change, parameter.logical_shape()), dtype, value: Box::new(value) }
}

/// The writers of each expert's weights, from a parameter of all experts.
pub(crate) fn written_experts<'a, R: Runtime>(
    parameter: &'a Param<R>,
    names: &StackNames,
    dtype: DType,
) -> impl Iterator<Item = WeightWriter<'a, R>> {
    let (shape, parts) = (parameter.shape(), names.parts());
    let writer = move |(name, expert, part): (String, usize, usize)| {
        let rows = shape[1] / parts;
        // Only this expert is read from a parameter that has no memory.
        let value = move || {
            let own = [expert..expert + 1, part * rows..(part + 1) * rows, 0..shape[2]];
            let own = TensorPlacement::new(shape, own.into_iter().map(|range| vec![range]).collect())?;
            parameter.leaf().piece(&own)?.reshape([rows, shape[2]])?.to_dtype(dtype)
        };
        let shape = [rows, shape[2]].into();
        WeightWriter { name, shape, dtype, value: Box::new(value) }
    };
    let names: Vec<_> = (0..shape[0])
        .flat_map(|expert| (0..parts).map(move |part| (expert, part)))
        .map(|(expert, part)| (names.of(expert, part), expert, part))
        .collect();
    names.into_iter().map(writer)
}

/// The shape of each of an expert's `parts` weights, from a parameter `[E, n · F, C]`.
fn part_shape(of: Shape, parts: usize) -> Option<Shape> {
    match of[..] {
        [_, rows, columns] if parts > 0 => Some([rows / parts, columns].into()),
        _ => None,
    }
}

pub(crate) fn changed<R: Runtime>(change: Change, value: Tensor<R>) -> Result<Tensor<R>> {
    if change == Change::Transpose && value.shape().rank() == 2 { value.t()?.contiguous() } else { Ok(value) }
}

/// The piece of a file's weight that becomes this piece after the change.
fn changed_piece(change: Change, piece: &TensorPlacement) -> Result<TensorPlacement> {
    let shape = piece.logical();
    let ranges = |dims: &[usize]| dims.iter().map(|&dim| piece.ranges(dim).to_vec()).collect();
    match (change, shape.rank()) {
        (Change::Transpose, 2) => TensorPlacement::new(changed_shape(change, shape), ranges(&[1, 0])),
        _ => Ok(piece.clone()),
    }
}

pub(crate) fn changed_shape(change: Change, shape: Shape) -> Shape {
    match (change, &shape[..]) {
        (Change::Transpose, &[a, b]) => [b, a].into(),
        _ => shape,
    }
}

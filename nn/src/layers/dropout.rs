//! Dropout layers.

use std::sync::LazyLock;

use autograd::{Var, next_seed};
use numcore::{
    Error, Result, Runtime, Shape, Tensor, Within,
    fused::NnOps,
    ops::{Apply, PointwiseOps},
    pointwise::Program,
};

use crate::{Forward, Mode, Module, parallel::SequencePart};

/// Drops the elements of a mask, and scales the others as [`NnOps::dropout`] does.
static DROPPED: LazyLock<Program> =
    LazyLock::new(|| Program::new("dropped", |[x, dropped], [scale]| [dropped.select(0.0, x * scale)]));

/// The parts of a value that [`Dropout`] drops or keeps as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DropUnit {
    /// Each element by itself.
    #[default]
    Element,
    /// Each channel of each example, `x[n, c, ..]` (Tompson et al. 2015): PyTorch's `Dropout1d` to `Dropout3d`.
    Channel,
    /// Each example, `x[n, ..]`: stochastic depth (Huang et al. 2016) of a residual branch, also named drop path.
    Example,
}

impl DropUnit {
    /// The number of axes that number the units of a value of `rank` axes.
    fn axes(self, rank: usize) -> usize {
        match self {
            DropUnit::Element => rank,
            DropUnit::Channel => 2,
            DropUnit::Example => 1,
        }
    }

    /// The shape of the mask of values of a shape: the axes within a unit have size 1.
    fn mask(self, shape: Shape) -> Shape {
        (self.axes(shape.rank())..shape.rank()).fold(shape, |shape, dim| shape.with(dim, 1))
    }
}

/// Dropout (Srivastava et al. 2014): in training, elements become 0 with probability `p` and the others `1/(1−p)` times
/// as large. Larger parts are dropped as one with [`of`](Dropout::of).
///
/// Each call draws a seed from its thread's stream ([`autograd::manual_seed`]); the mask depends only on that seed.
#[doc(alias("Dropout1d", "Dropout2d", "Dropout3d", "DropPath", "StochasticDepth"))]
#[derive(Debug, Module)]
pub struct Dropout {
    p: f64,
    #[module(skip)]
    unit: DropUnit,
    /// The mode of the layer, training or evaluation.
    pub mode: Mode,
}

impl Dropout {
    /// A layer with drop probability `p` in `[0, 1)`.
    #[track_caller]
    pub fn new(p: f64) -> Result<Self> {
        if !(0.0..1.0).contains(&p) {
            return Err(Error::range("dropout", "probability", p, "in [0, 1)")).at_caller();
        }
        Ok(Dropout { p, unit: DropUnit::default(), mode: Mode::default() })
    }

    /// Drops these parts of `x` as one, of `x: [N, C, ..]` for channels and `x: [N, ..]` for examples.
    pub fn of(self, unit: DropUnit) -> Self {
        Dropout { unit, ..self }
    }

    /// Applies dropout to values `[.., T, C]` of a part of a sequence, with the mask that the whole sequence would have
    /// there. Without a part, it is applied to `x` itself. For models whose values are cut along the sequence
    /// ([`ContextSlot::part_of_values`](crate::parallel::ContextSlot::part_of_values)).
    ///
    /// Each rank draws the mask of the whole sequence, one byte per element until it takes its part. So the random
    /// numbers that a rank draws do not decrease with the number of ranks.
    #[track_caller]
    pub fn forward_part<R: Runtime>(&self, x: &Var<R>, part: Option<&SequencePart>) -> Result<Var<R>> {
        let Some(part) = part.filter(|_| !self.is_identity()) else { return self.forward(x) };
        let shape = x.spec().shape;
        let Some(dim) = shape.rank().checked_sub(2).filter(|&dim| shape[dim] == part.len()) else {
            let why = format!("needs [.., T, C], with {} tokens of a sequence", part.len());
            return Err(Error::shape("dropout", &[shape], why));
        };
        self.forward_piece(x, &[(dim, part)])
    }

    /// Applies dropout to a piece of a value, which is cut along some dimensions. The dropped elements are those that
    /// the whole value would lose, for any cut.
    ///
    /// # Errors
    /// An error if a dimension is missing, or is not as long as its part.
    #[track_caller]
    pub fn forward_piece<R: Runtime>(&self, x: &Var<R>, parts: &[(usize, &SequencePart)]) -> Result<Var<R>> {
        let cut = parts.iter().any(|(_, part)| !part.is_whole());
        if self.is_identity() || !cut {
            return self.forward(x);
        }
        let mut whole = x.spec().shape;
        for (dim, part) in parts {
            if *dim >= whole.rank() || whole[*dim] != part.len() {
                let why = format!("needs {} elements along dimension {dim}, of {}", part.len(), part.tokens());
                return Err(Error::shape("dropout", &[x.spec().shape], why));
            }
            whole = whole.with(*dim, part.tokens());
        }
        self.by_mask(x, whole, parts)
    }

    /// Drops by the mask of a value of shape `whole`, of which `x` is the piece in these parts.
    #[track_caller]
    fn by_mask<R: Runtime>(&self, x: &Var<R>, whole: Shape, parts: &[(usize, &SequencePart)]) -> Result<Var<R>> {
        let (mask, least) = (self.unit.mask(whole), self.unit.axes(0));
        if whole.rank() < least {
            let why = format!("has no {:?} to drop, which needs {least} axes or more: [N, C, ..]", self.unit);
            return Err(Error::shape("dropout", &[whole], why));
        }
        let dropped = Tensor::bernoulli(x.runtime(), mask, self.p, next_seed())?;
        // Within a unit all parts have the same mask.
        let cut = parts.iter().filter(|(dim, _)| mask[*dim] == whole[*dim]);
        let here = cut.clone().try_fold(dropped, |dropped, (dim, part)| part.take(&dropped, *dim))?;
        let here = if cut.count() > 0 { here.copy()? } else { here };
        x.apply_program(&DROPPED, &[&Var::new(here)], &[(1.0 / (1.0 - self.p)).into()])
    }

    /// Tells whether the layer returns its input: in evaluation, and with probability 0.
    pub fn is_identity(&self) -> bool {
        self.p == 0.0 || !self.mode.is_training()
    }
}

impl<R: Runtime> Forward<R> for Dropout {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        if self.is_identity() {
            return Ok(x.clone());
        }
        match self.unit {
            DropUnit::Element => x.dropout(self.p, next_seed()).at_caller(),
            _ => self.by_mask(x, x.spec().shape, &[]).at_caller(),
        }
    }
}

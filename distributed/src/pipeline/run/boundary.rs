//! The values that pass between two stages: agreed on for each micro-batch, or with the first one for all.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use autograd::Var;
use numcore::{DType, Error, Result, Runtime, Shape, ops::Apply, ops::Spec};

/// The values that a stage makes for the next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Boundary(Vec<BoundaryValue>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BoundaryValue {
    spec: Spec,
    /// True if its gradient is sent back.
    grad: bool,
}

impl Boundary {
    pub(super) fn of<R: Runtime>(values: &[Var<R>]) -> Self {
        Boundary(values.iter().map(|value| BoundaryValue { spec: value.spec(), grad: value.requires_grad() }).collect())
    }

    /// The specs of all values.
    pub(super) fn values(&self) -> Vec<Spec> {
        self.0.iter().map(|part| part.spec).collect()
    }

    /// The specs of the values whose gradients are sent back.
    pub(super) fn gradients(&self) -> Vec<Spec> {
        self.0.iter().filter(|part| part.grad).map(|part| part.spec).collect()
    }

    /// Tells whether a value that may have a gradient has none.
    fn is_frozen(&self) -> bool {
        self.0.iter().any(|part| !part.grad && part.spec.dtype.is_float())
    }

    fn shapes(&self) -> Vec<Shape> {
        self.0.iter().map(|part| part.spec.shape).collect()
    }

    pub(super) fn wants(&self, value: usize) -> bool {
        self.0.get(value).is_some_and(|part| part.grad)
    }

    /// The words of a header. For each value: dtype, 1 if its gradient is sent back, rank, sizes.
    pub(super) fn to_words(&self) -> Vec<i64> {
        let words = |part: &BoundaryValue| {
            let Spec { shape, dtype } = part.spec;
            let head = [dtype as i64, part.grad.into(), shape.rank() as i64];
            head.into_iter().chain(shape.iter().map(|&d| d as i64)).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(words).collect()
    }

    pub(super) fn from_words(words: &[i64]) -> Result<Self> {
        let mut words = words.iter().copied();
        let mut parts = Vec::new();
        while let Some(dtype) = words.next() {
            let part = part(dtype, &mut words);
            parts.push(part.ok_or_else(|| Error::format("a pipeline header", "it cannot be decoded"))?);
        }
        Ok(Boundary(parts))
    }

    /// An error unless a stage made the same values as before.
    fn require(&self, stage: usize, micro: usize, made: &Boundary) -> Result<()> {
        if self == made {
            return Ok(());
        }
        let why = format!(
            "stage {stage} made {made} of micro-batch {micro}, but {self} of the first one: micro-batches have the same shapes and \
             dtypes, unless `PipelineOptions::dynamic_shapes` lets them differ"
        );
        Err(Error::shape("pipeline stage", &made.shapes(), why))
    }
}

/// The boundaries that a rank knows, by the earlier of the two stages and the micro-batch. A rank announces those of
/// its own stages to the rank of the next stage, once.
#[derive(Default)]
pub(super) struct Boundaries {
    /// True if micro-batches may have boundaries of their own, which are those of one run. Otherwise all have one.
    each: bool,
    known: BTreeMap<(usize, usize), Boundary>,
    announced: BTreeSet<(usize, usize)>,
}

impl Boundaries {
    /// Begins a run. Boundaries of the run before are forgotten if each micro-batch may have its own. Otherwise those
    /// with a value without gradient are: stages before them may be unfrozen between runs.
    pub(super) fn begin(&mut self, each: bool) {
        self.each = each;
        self.known.retain(|_, boundary| !each && !boundary.is_frozen());
        self.announced.retain(|at| self.known.contains_key(at));
    }

    fn at(&self, boundary: usize, micro: usize) -> (usize, usize) {
        (boundary, if self.each { micro } else { 0 })
    }

    pub(super) fn get(&self, boundary: usize, micro: usize) -> Option<&Boundary> {
        self.known.get(&self.at(boundary, micro))
    }

    pub(super) fn learn(&mut self, boundary: usize, micro: usize, values: Boundary) {
        self.known.insert(self.at(boundary, micro), values);
    }

    /// Learns the values that a stage made, or requires the agreed ones.
    pub(super) fn agree(&mut self, stage: usize, micro: usize, made: Boundary) -> Result<()> {
        match self.get(stage, micro) {
            Some(agreed) => agreed.require(stage, micro, &made),
            None => {
                self.learn(stage, micro, made);
                Ok(())
            }
        }
    }

    /// The boundary that the receiver of a stage's values does not know yet; `None` if it does.
    pub(super) fn announce(&mut self, stage: usize, micro: usize) -> Option<&Boundary> {
        let at = self.at(stage, micro);
        self.known.get(&at).filter(|_| self.announced.insert(at))
    }
}

fn part(dtype: i64, words: &mut impl Iterator<Item = i64>) -> Option<BoundaryValue> {
    let dtype = DType::ALL.into_iter().find(|d| *d as i64 == dtype)?;
    let (grad, rank) = (words.next()? != 0, usize::try_from(words.next()?).ok()?);
    let dims = words.take(rank).map(|d| usize::try_from(d).ok()).collect::<Option<Vec<_>>>()?;
    let shape = Shape::new(&dims).ok().filter(|_| dims.len() == rank)?;
    Some(BoundaryValue { spec: Spec { shape, dtype }, grad })
}

impl fmt::Display for Boundary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self
            .0
            .iter()
            .map(|part| {
                let without = if part.grad || !part.spec.dtype.is_float() { "" } else { " without gradient" };
                format!("{} {}{without}", part.spec.dtype, part.spec.shape)
            })
            .collect();
        if texts.is_empty() { f.write_str("nothing") } else { f.write_str(&texts.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_read_back() {
        let part = |dims: &[usize], dtype, grad| BoundaryValue {
            spec: Spec { shape: Shape::new(dims).unwrap(), dtype },
            grad,
        };
        let boundary = Boundary(vec![
            part(&[2, 3], DType::F32, true),
            part(&[], DType::Bool, false),
            part(&[0, 7, 1], DType::I64, false),
        ]);
        assert_eq!(Boundary::from_words(&boundary.to_words()).unwrap(), boundary);
        assert_eq!(boundary.gradients(), [boundary.values()[0]]);
        for cut in 1..3 {
            assert!(Boundary::from_words(&boundary.to_words()[..cut]).is_err());
        }
        assert!(Boundary::from_words(&[99, 0, 0]).is_err() && Boundary::from_words(&[0, 0, -1]).is_err());
    }
}

//! An op case: inputs, and an op computed from them. Many sections run the same cases.

use autograd::Var;
use numcore::{DType, Error, Result, Runtime, Tensor, rng::Philox};

use super::sample::Sample;

/// The computation of a case.
pub(crate) type CaseFn<R> = fn(&[Var<R>]) -> Result<Var<R>>;

/// An op with inputs.
pub(crate) struct OpCase<R: Runtime> {
    pub(crate) name: String,
    pub(crate) inputs: Vec<Sample>,
    pub(crate) f: CaseFn<R>,
    /// True if the gradient can be differentiated, and is not 0 everywhere.
    pub(crate) twice: bool,
    /// A factor on the tolerance in narrow types.
    pub(crate) slack: f64,
}

/// A case that can be differentiated twice.
pub(crate) fn case<R: Runtime>(name: &str, inputs: impl IntoIterator<Item = Sample>, f: CaseFn<R>) -> OpCase<R> {
    let inputs = inputs.into_iter().enumerate().map(|(k, s)| s.turned(k)).collect();
    OpCase { name: name.into(), inputs, f, twice: true, slack: 1.0 }
}

impl<R: Runtime> OpCase<R> {
    /// Removes the check of the second derivative, which is 0 or not needed.
    pub(crate) fn once(self) -> Self {
        OpCase { twice: false, ..self }
    }

    /// Sets a factor on the tolerance in narrow types, for long sums and cancellation.
    pub(crate) fn slack(self, slack: f64) -> Self {
        OpCase { slack, ..self }
    }

    /// Uploads the inputs to a device; reals get the type `dtype`.
    pub(crate) fn tensors(&self, rt: &R, dtype: DType) -> Result<Vec<Tensor<R>>> {
        self.inputs.iter().map(|s| s.on(rt, dtype)).collect()
    }

    /// Variables of these values; real inputs are leaves.
    pub(crate) fn vars(&self, tensors: &[Tensor<R>]) -> Result<Vec<Var<R>>> {
        let var = |(i, (s, t)): (usize, (&Sample, &Tensor<R>))| {
            if s.is_real() { Var::leaf(&format!("in{i}"), t.clone()) } else { Ok(Var::new(t.clone())) }
        };
        self.inputs.iter().zip(tensors).enumerate().map(var).collect()
    }

    /// The leaves among variables.
    pub(crate) fn leaves<'a>(&self, vars: &'a [Var<R>]) -> Vec<&'a Var<R>> {
        self.inputs.iter().zip(vars).filter(|(s, _)| s.is_real()).map(|(_, v)| v).collect()
    }
}

/// An upstream gradient of the shape of `like`, in which every element has another fixed weight. The weights are
/// sixteenths, which every floating type holds exactly.
pub(crate) fn weights<R: Runtime>(rt: &R, like: &Var<R>, seed: u64) -> Result<Var<R>> {
    let mut rng = Philox::new(seed, 9);
    let shape = numcore::ops::Apply::spec(like).shape;
    Ok(Var::new(Tensor::from_f64_fn(rt, shape, like.dtype(), || 0.5 + rng.below(16) as f64 / 16.0)?))
}

/// An error for a missing gradient of input `i`.
pub(crate) fn no_gradient(i: usize) -> Error {
    Error::argument("conformance", format!("no gradient reached input {i}"))
}

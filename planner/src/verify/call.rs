//! Op calls of a forward pass, with the values of their outputs.

use autograd::{ObservedCall, ObservedOp};
use nn::{Module, modules_of_calls};
use numcore::{Result, Runtime, Tensor, ops::Rule};

/// An op call.
pub(super) struct CallRecord {
    pub op: &'static str,
    /// The full name of its module; empty for the whole model.
    pub module: String,
    /// The names of the parameters among its inputs, in order.
    pub parameters: Vec<String>,
    /// True if the call uses random values.
    pub draws: bool,
    pub outputs: Vec<CallOutput>,
}

/// An output of a call: rows along its last dimension. A scalar has none.
#[derive(Clone)]
pub(super) struct CallOutput {
    pub width: usize,
    pub values: Vec<f64>,
    /// The dtype is a floating-point one.
    pub is_float: bool,
}

impl CallRecord {
    /// The records of the calls of a model's forward pass.
    pub(super) fn all<R: Runtime>(model: &impl Module<R>, seen: Vec<ObservedCall<R>>) -> Result<Vec<CallRecord>> {
        let (calls, outputs): (Vec<ObservedOp>, Vec<_>) = seen.into_iter().unzip();
        let modules = modules_of_calls(model, &calls);
        let record = |((call, module), outputs): ((ObservedOp, String), Vec<Tensor<R>>)| {
            let outputs = outputs.iter().map(CallOutput::of).collect::<Result<_>>()?;
            let parameters = call.parameters.iter().map(|name| name.to_string()).collect();
            Ok(CallRecord { op: call.op.name(), module, parameters, draws: call.draws, outputs })
        };
        calls.into_iter().zip(modules).zip(outputs).map(record).collect()
    }

    /// Tells whether two calls do the same with the same parameters.
    pub(super) fn is_like(&self, other: &CallRecord) -> bool {
        self.op == other.op && self.parameters == other.parameters && self.outputs.len() == other.outputs.len()
    }

    /// The call in messages.
    pub(super) fn what(&self) -> String {
        match &self.parameters[..] {
            [] => self.op.into(),
            parameters => format!("{} with {}", self.op, parameters.join(", ")),
        }
    }
}

impl CallOutput {
    fn of<R: Runtime>(tensor: &Tensor<R>) -> Result<Self> {
        let is_float = tensor.dtype().is_float();
        // A vector is a row of one number for each of its elements.
        let width = match tensor.shape().dims() {
            [] => 0,
            [_] => 1,
            [.., last] => *last,
        };
        Ok(CallOutput { width, values: if is_float { tensor.to_f64s()? } else { Vec::new() }, is_float })
    }

    /// The rows; none for a scalar.
    pub(super) fn rows(&self) -> impl ExactSizeIterator<Item = &[f64]> {
        self.values[..if self.width == 0 { 0 } else { self.values.len() }].chunks_exact(self.width.max(1))
    }

    /// The sum of this output and others, element by element; none if they have other shapes.
    pub(super) fn plus<'a>(&self, others: impl IntoIterator<Item = &'a CallOutput>) -> Option<CallOutput> {
        let mut sum = self.clone();
        for other in others {
            if other.width != sum.width || other.values.len() != sum.values.len() {
                return None;
            }
            sum.values.iter_mut().zip(&other.values).for_each(|(a, b)| *a += b);
        }
        Some(sum)
    }
}

/// Pairs of equal calls of two passes, in order: a longest common subsequence between their common ends.
pub(super) fn aligned(a: &[CallRecord], b: &[CallRecord]) -> Vec<(usize, usize)> {
    let first = a.iter().zip(b).take_while(|(a, b)| a.is_like(b)).count();
    let (rest_a, rest_b) = (&a[first..], &b[first..]);
    let last = rest_a.iter().rev().zip(rest_b.iter().rev()).take_while(|(a, b)| a.is_like(b)).count();
    let between = subsequence(&rest_a[..rest_a.len() - last], &rest_b[..rest_b.len() - last]);
    let ends = (0..last).rev().map(|k| (a.len() - 1 - k, b.len() - 1 - k));
    (0..first).map(|k| (k, k)).chain(between.into_iter().map(|(i, j)| (first + i, first + j))).chain(ends).collect()
}

/// A longest common subsequence.
fn subsequence(a: &[CallRecord], b: &[CallRecord]) -> Vec<(usize, usize)> {
    let (rows, columns) = (a.len() + 1, b.len() + 1);
    let mut longest = vec![0u32; rows * columns];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            let best = longest[(i + 1) * columns + j].max(longest[i * columns + j + 1]);
            let both = u32::from(a[i].is_like(&b[j])) * (1 + longest[(i + 1) * columns + j + 1]);
            longest[i * columns + j] = best.max(both);
        }
    }
    let (mut pairs, mut i, mut j) = (Vec::new(), 0, 0);
    while i < a.len() && j < b.len() {
        let here = longest[i * columns + j];
        if a[i].is_like(&b[j]) && here == 1 + longest[(i + 1) * columns + j + 1] {
            pairs.push((i, j));
            (i, j) = (i + 1, j + 1);
        } else if here == longest[(i + 1) * columns + j] {
            i += 1;
        } else {
            j += 1;
        }
    }
    pairs
}

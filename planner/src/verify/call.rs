//! Op calls of a forward pass, with the values of their outputs.

use std::collections::{BTreeMap, HashMap};

use autograd::{ObservedCall, ObservedOp};
use nn::{Module, modules_of_calls};
use numcore::{Result, Runtime, Tensor, ops::Rule};

/// An op call.
pub(super) struct CallRecord {
    pub op: &'static str,
    /// The full name of its module; empty for the whole model.
    pub module: String,
    /// The names in checkpoints of the parameters among its inputs, in order.
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
    /// The records of the calls of a forward pass. `names` has the names of the model's leaves.
    pub(super) fn all<R: Runtime>(
        model: &impl Module<R>,
        names: &HashMap<usize, String>,
        seen: Vec<ObservedCall<R>>,
    ) -> Result<Vec<CallRecord>> {
        let (calls, outputs): (Vec<ObservedOp>, Vec<_>) = seen.into_iter().map(|call| (call.op, call.outputs)).unzip();
        let modules = modules_of_calls(model, &calls);
        let record = |((call, module), outputs): ((ObservedOp, String), Vec<Tensor<R>>)| {
            let outputs = outputs.iter().map(CallOutput::of).collect::<Result<_>>()?;
            let parameters = call.leaves.iter().filter_map(|leaf| names.get(leaf).cloned()).collect();
            Ok(CallRecord { op: call.op.name(), module, parameters, draws: call.draws, outputs })
        };
        calls.into_iter().zip(modules).zip(outputs).map(record).collect()
    }

    /// Tells whether two calls do the same with the same parameters.
    pub(super) fn is_like(&self, other: &CallRecord) -> bool {
        self.op == other.op && self.parameters == other.parameters && self.outputs.len() == other.outputs.len()
    }

    /// Adds the rows of other calls that are like this one; outputs of other widths have none.
    pub(super) fn join(&mut self, others: &[CallRecord]) {
        for (k, own) in self.outputs.iter_mut().enumerate().filter(|_| !others.is_empty()) {
            let all: Vec<&CallOutput> = [&*own].into_iter().chain(others.iter().map(|call| &call.outputs[k])).collect();
            *own = CallOutput::joined(&all).unwrap_or(CallOutput { width: 0, values: Vec::new(), is_float: false });
        }
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

    /// The rows of all outputs; none if they have other widths.
    pub(super) fn joined(outputs: &[&CallOutput]) -> Option<CallOutput> {
        let is_like = |other: &&CallOutput| (other.width, other.is_float) == (outputs[0].width, outputs[0].is_float);
        let values = || outputs.iter().flat_map(|output| &output.values).copied().collect();
        outputs.iter().all(is_like).then(|| CallOutput { values: values(), ..(*outputs[0]).clone() })
    }

    /// The sum of all outputs, element by element; none if they have other shapes.
    pub(super) fn summed(outputs: &[&CallOutput]) -> Option<CallOutput> {
        let (first, others) = outputs.split_first()?;
        let mut sum = (*first).clone();
        for other in others {
            if other.width != sum.width || other.values.len() != sum.values.len() {
                return None;
            }
            sum.values.iter_mut().zip(&other.values).for_each(|(a, b)| *a += b);
        }
        Some(sum)
    }
}

/// Pairs of equal calls of two passes, in order. Calls that read the same parameters, as often in both, are pairs. So
/// are equal calls between these.
pub(super) fn aligned(a: &[&CallRecord], b: &[&CallRecord]) -> Vec<(usize, usize)> {
    let with_parameters = |calls: &[&CallRecord]| -> BTreeMap<_, Vec<usize>> {
        let mut places = BTreeMap::<_, Vec<usize>>::new();
        for (k, call) in calls.iter().enumerate().filter(|(_, call)| !call.parameters.is_empty()) {
            places.entry((call.op, call.parameters.clone(), call.outputs.len())).or_default().push(k);
        }
        places
    };
    let (in_a, in_b) = (with_parameters(a), with_parameters(b));
    let same = in_a.iter().filter_map(|(key, in_a)| Some((in_a, in_b.get(key)?))).filter(|(a, b)| a.len() == b.len());
    let mut anchors: Vec<(usize, usize)> = same.flat_map(|(a, b)| a.iter().copied().zip(b.iter().copied())).collect();
    anchors.sort_unstable_by_key(|(_, j)| *j);
    let (mut pairs, mut start) = (Vec::new(), (0, 0));
    for (i, j) in anchors {
        // Calls in another order have no pair.
        if i < start.0 {
            continue;
        }
        pairs.extend(between(a, b, [(start.0, i), (start.1, j)]));
        pairs.push((i, j));
        start = (i + 1, j + 1);
    }
    pairs.extend(between(a, b, [(start.0, a.len()), (start.1, b.len())]));
    pairs
}

/// Pairs of equal calls between two pairs, given by ranges of both.
fn between(
    a: &[&CallRecord],
    b: &[&CallRecord],
    [(from_a, to_a), (from_b, to_b)]: [(usize, usize); 2],
) -> Vec<(usize, usize)> {
    let (calls, others) = (&a[from_a..to_a], &b[from_b..to_b]);
    let is_like = |(i, j): &(usize, usize)| calls[*i].is_like(others[*j]);
    let count = calls.len().min(others.len());
    let first = (0..count).map(|k| (k, k)).take_while(is_like).count();
    let last = (1..=count - first).map(|k| (calls.len() - k, others.len() - k)).take_while(is_like).count();
    // Where one reads other parameters, calls equal those next to a pair alone.
    let middle = match others.iter().any(|call| !call.parameters.is_empty()) {
        true => Vec::new(),
        false => subsequence(&calls[first..calls.len() - last], &others[first..others.len() - last]),
    };
    let middle = middle.into_iter().map(|(i, j)| (first + i, first + j));
    let ends = (1..=last).rev().map(|k| (calls.len() - k, others.len() - k));
    (0..first).map(|k| (k, k)).chain(middle).chain(ends).map(|(i, j)| (from_a + i, from_b + j)).collect()
}

/// A longest common subsequence.
fn subsequence(a: &[&CallRecord], b: &[&CallRecord]) -> Vec<(usize, usize)> {
    let (rows, columns) = (a.len() + 1, b.len() + 1);
    let mut longest = vec![0u32; rows * columns];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            let best = longest[(i + 1) * columns + j].max(longest[i * columns + j + 1]);
            let both = u32::from(a[i].is_like(b[j])) * (1 + longest[(i + 1) * columns + j + 1]);
            longest[i * columns + j] = best.max(both);
        }
    }
    let (mut pairs, mut i, mut j) = (Vec::new(), 0, 0);
    while i < a.len() && j < b.len() {
        let here = longest[i * columns + j];
        if a[i].is_like(b[j]) && here == 1 + longest[(i + 1) * columns + j + 1] {
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

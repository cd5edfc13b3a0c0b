//! Cross-entropy: a row's logsumexp and loss in one pass, and its gradient straight from the logits.

use numcore::{Error, Result, Support, fused::CrossEntropy};

use super::{Call, Float, grain, lanes, one, softmax::finite};
use crate::{math::Math, simd::leveled};

/// The part of the options that does not depend on the row.
struct Terms<'a, T> {
    weight: Option<&'a [T]>,
    /// Σ of the class weights.
    joint: T,
    /// `1 − ε`.
    target: T,
    /// `ε / C`.
    spread: T,
    smooth: bool,
}

impl<'a, T: Float> Terms<'a, T> {
    fn new(op: &CrossEntropy, weight: Option<&'a [T]>, classes: usize) -> Self {
        Terms {
            weight,
            joint: weight.map_or(T::from_f64(classes as f64), lanes::sum),
            target: T::from_f64(1.0 - op.label_smoothing),
            spread: T::from_f64(op.label_smoothing / classes as f64),
            smooth: op.label_smoothing != 0.0,
        }
    }

    fn of_class(&self, c: usize) -> T {
        self.weight.map_or(one::<T>(), |w| w[c])
    }
}

pub(super) fn forward<T: Float>(call: &Call<'_>, op: &CrossEntropy) -> Result<Support> {
    let (rows, classes) = call.rows(0);
    let (x, loss, lse) = (call.input::<T>(0), call.output::<T>(0), call.output::<T>(1));
    let targets = targets(call, op, classes)?;
    let terms = Terms::<T>::new(op, weight(call, op, 2, classes), classes);
    call.engine().ranges(rows, grain(classes), |part| {
        for row in part {
            // SAFETY: a row of contiguous logits.
            let x = unsafe { x.slice((row * classes) as isize, classes) };
            let (norm, total) = row_sums(call.engine().simd, x, terms.weight, terms.smooth);
            let value = match targets[row] {
                t if t == op.ignore_index => T::default(),
                t => {
                    let nll = (norm - x[t as usize]) * terms.of_class(t as usize);
                    if terms.smooth { nll * terms.target + (norm * terms.joint - total) * terms.spread } else { nll }
                }
            };
            // SAFETY: this row's places of the outputs, which are this task's alone.
            unsafe {
                loss.set(row as isize, value);
                lse.set(row as isize, norm);
            }
        }
    });
    Ok(Support::Done)
}

pub(super) fn backward<T: Float>(call: &Call<'_>, op: &CrossEntropy) -> Result<Support> {
    let (rows, classes) = call.rows(0);
    let (x, lse, g, d) = (call.input::<T>(0), call.input::<T>(2), call.input::<T>(3), call.output::<T>(0));
    let targets = targets(call, op, classes)?;
    let terms = Terms::<T>::new(op, weight(call, op, 4, classes), classes);
    call.engine().ranges(rows, grain(classes), |part| {
        for row in part {
            let (i, from) = (row as isize, (row * classes) as isize);
            // SAFETY: a row of contiguous operands; the output row is this task's alone.
            let (x, lse, g, d) = unsafe { (x.slice(from, classes), lse.get(i), g.get(i), d.slice_mut(from, classes)) };
            let target = targets[row];
            if target == op.ignore_index {
                d.fill(T::default());
                continue;
            }
            let own = terms.of_class(target as usize) * terms.target;
            let scale = if terms.smooth { own + terms.spread * terms.joint } else { own };
            probabilities(call.engine().simd, x, d, lse, scale * g);
            if terms.smooth {
                for (c, v) in d.iter_mut().enumerate() {
                    *v = *v - terms.spread * terms.of_class(c) * g;
                }
            }
            d[target as usize] = d[target as usize] - own * g;
        }
    });
    Ok(Support::Done)
}

fn weight<'a, T: Float>(call: &Call<'a>, op: &CrossEntropy, at: usize, classes: usize) -> Option<&'a [T]> {
    // SAFETY: the class weights, contiguous, of this length.
    op.weighted.then(|| unsafe { call.input::<T>(at).slice(0, classes) })
}

fn targets<'a>(call: &Call<'a>, op: &CrossEntropy, classes: usize) -> Result<&'a [i64]> {
    // SAFETY: one class per row, contiguous.
    let targets = unsafe { call.input::<i64>(1).slice(0, call.ins[1].layout.numel()) };
    match targets.iter().position(|&t| t != op.ignore_index && !(0..classes as i64).contains(&t)) {
        None => Ok(targets),
        Some(i) => {
            let why = format!("class {} at row {i} is not in 0..{classes} (ignored: {})", targets[i], op.ignore_index);
            Err(Error::argument("cross_entropy", why))
        }
    }
}

leveled! {
    /// A row's logsumexp, and its (weighted) sum if that is asked for.
    fn row_sums<T: (Float)>(x: &[T], weight: Option<&[T]>, total: bool) -> (T, T) {
        let top = finite(lanes::max(x));
        let lse = Math::log(lanes::fold(x, T::default(), |v| Math::exp(v - top), |a, b| a + b)) + top;
        let total = match weight {
            _ if !total => T::default(),
            Some(w) => lanes::sum2(x, w, |x, w| x * w),
            None => lanes::sum(x),
        };
        (lse, total)
    }

    fn probabilities<T: (Float)>(x: &[T], d: &mut [T], lse: T, scale: T) {
        for (o, &v) in d.iter_mut().zip(x) {
            *o = Math::exp(v - lse) * scale;
        }
    }
}

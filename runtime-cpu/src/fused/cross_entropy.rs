//! Cross-entropy: a row's largest logit, the logarithm of its sum of exponentials and its loss while it is in cache,
//! and its gradient straight from the logits.

use numcore::{
    ErrorKind, Result, Support,
    fused::{CrossEntropy, CrossEntropyGrad},
};

use super::{Float, FusedCall, StoredFloat, grain, half_rows, one, row_reduce, softmax::finite};
use crate::{Simd, math::Math, simd::multiversion};

/// The part of the options that does not depend on the row.
struct Terms<'a, T> {
    weight: Option<&'a [T]>,
    /// The sum of the class weights.
    joint: T,
    /// The weight of the target class, `1 − ε`.
    target: T,
    /// The weight of every class, `ε / C`.
    spread: T,
    smooth: bool,
}

impl<'a, T: Float> Terms<'a, T> {
    fn new(op: &CrossEntropy, weight: Option<&'a [T]>, classes: usize) -> Self {
        Terms {
            weight,
            joint: weight.map_or(T::from_f64(classes as f64), row_reduce::sum),
            target: T::from_f64(1.0 - op.label_smoothing),
            spread: T::from_f64(op.label_smoothing / classes as f64),
            smooth: op.label_smoothing != 0.0,
        }
    }

    fn of_class(&self, c: usize) -> T {
        self.weight.map_or(one::<T>(), |w| w[c])
    }

    /// A row's gradient, of its logits, their statistics and the gradient of its loss.
    fn gradient(&self, simd: Simd, target: usize, (x, stats, g): (&[T], Stats<T>, T), d: &mut [T]) {
        let own = self.of_class(target) * self.target;
        let scale = if self.smooth { own + self.spread * self.joint } else { own };
        probabilities(simd, x, d, stats, scale * g);
        if self.smooth {
            for (c, v) in d.iter_mut().enumerate() {
                *v = *v - self.spread * self.of_class(c) * g;
            }
        }
        d[target] = d[target] - own * g;
    }
}

/// Statistics of a row's logits that its loss and its gradient read.
#[derive(Clone, Copy)]
struct Stats<T> {
    /// The largest, or 0 where that is infinite.
    top: T,
    /// The logarithm `ln Σ exp(x − top)`.
    log_sum: T,
}

pub(super) fn forward<S: StoredFloat>(call: &FusedCall<'_>, op: &CrossEntropy) -> Result<Support> {
    let (rows, classes) = call.rows(0);
    let x = call.input::<S>(CrossEntropy::LOGITS);
    let [losses, tops, log_sums] =
        [CrossEntropy::LOSS, CrossEntropy::TOP, CrossEntropy::LOG_SUM].map(|i| call.output::<S::Lane>(i));
    let targets = targets(call, op, classes)?;
    let mut buffer = None;
    let weight = op.weighted.then(|| call.parameter::<S>(2, classes, &mut buffer)).transpose()?;
    let terms = Terms::new(op, weight, classes);
    call.engine().ranges(rows, grain(classes), |part| {
        half_rows::each::<S, 1>(part, classes, |row, [x_buffer]| {
            // SAFETY: a row of contiguous logits.
            let x = unsafe { x.slice((row * classes) as isize, classes) };
            let x = half_rows::read(call.engine().simd, x, x_buffer);
            let (stats, total) = row_sums(call.engine().simd, x, terms.weight, terms.smooth);
            let value = match targets[row] {
                t if t == op.ignore_index => S::Lane::default(),
                t => {
                    let nll = (stats.log_sum - (x[t as usize] - stats.top)) * terms.of_class(t as usize);
                    if terms.smooth {
                        nll * terms.target + (stats.log_sum * terms.joint - total) * terms.spread
                    } else {
                        nll
                    }
                }
            };
            // SAFETY: this row's elements of the outputs, which are this task's alone.
            unsafe {
                losses.set(row as isize, value);
                tops.set(row as isize, stats.top);
                log_sums.set(row as isize, stats.log_sum);
            }
        });
    });
    Ok(Support::Done)
}

pub(super) fn backward<S: StoredFloat>(call: &FusedCall<'_>, op: &CrossEntropy) -> Result<Support> {
    let (rows, classes) = call.rows(0);
    let (x, d) = (call.input::<S>(CrossEntropyGrad::LOGITS), call.output::<S>(0));
    let [tops, log_sums, g] =
        [CrossEntropyGrad::TOP, CrossEntropyGrad::LOG_SUM, CrossEntropyGrad::GRAD].map(|i| call.input::<S::Lane>(i));
    let targets = targets(call, op, classes)?;
    let mut buffer = None;
    let weight = op.weighted.then(|| call.parameter::<S>(5, classes, &mut buffer)).transpose()?;
    let terms = Terms::new(op, weight, classes);
    call.engine().ranges(rows, grain(classes), |part| {
        half_rows::each::<S, 2>(part, classes, |row, [x_buffer, d_buffer]| {
            let (i, from, simd) = (row as isize, (row * classes) as isize, call.engine().simd);
            // SAFETY: a row of contiguous operands; the output row is this task's alone.
            let (x, g, d) = unsafe { (x.slice(from, classes), g.get(i), d.slice_mut(from, classes)) };
            // SAFETY: one statistic for each row.
            let stats = unsafe { Stats { top: tops.get(i), log_sum: log_sums.get(i) } };
            let x = half_rows::read(simd, x, x_buffer);
            half_rows::write(simd, d, d_buffer, |d| match targets[row] {
                t if t == op.ignore_index => d.fill(S::Lane::default()),
                t => terms.gradient(simd, t as usize, (x, stats, g), d),
            });
        });
    });
    Ok(Support::Done)
}

fn targets<'a>(call: &FusedCall<'a>, op: &CrossEntropy, classes: usize) -> Result<&'a [i64]> {
    // SAFETY: one class per row, contiguous.
    let targets =
        unsafe { call.input::<i64>(CrossEntropy::TARGETS).slice(0, call.ins[CrossEntropy::TARGETS].layout.numel()) };
    match targets.iter().position(|&t| t != op.ignore_index && !(0..classes as i64).contains(&t)) {
        None => Ok(targets),
        Some(i) => {
            let of = [targets.len()].into();
            let op = "cross_entropy";
            Err(ErrorKind::Index { op, index: Some(targets[i]), position: [i].into(), of, size: Some(classes) }.into())
        }
    }
}

multiversion! {
    /// A row's statistics, and the (weighted) sum of `x − top` if `total`.
    fn row_sums<T: (Float)>(x: &[T], weight: Option<&[T]>, total: bool) -> (Stats<T>, T) {
        let largest = row_reduce::max(x);
        let top = finite(largest);
        let sum = if top == largest {
            row_reduce::sum1(x, [], |v| Math::exp_negative(v - top))
        } else {
            row_reduce::sum1(x, [], |v| Math::exp(v - top))
        };
        let total = match weight {
            _ if !total => T::default(),
            Some(w) => row_reduce::sum2(x, w, [], |x, w| (x - top) * w),
            None => row_reduce::sum1(x, [], |x| x - top),
        };
        (Stats { top, log_sum: Math::log(sum) }, total)
    }

    fn probabilities<T: (Float)>(x: &[T], d: &mut [T], stats: Stats<T>, scale: T) {
        for (o, &v) in d.iter_mut().zip(x) {
            *o = Math::exp((v - stats.top) - stats.log_sum) * scale;
        }
    }
}

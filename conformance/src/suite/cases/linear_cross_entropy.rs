//! The cross-entropy of a linear layer's outputs, in chunks that divide the rows, that do not, and that are longer.

use autograd::Var;
use numcore::{
    Result, Runtime,
    fused::{CrossEntropyOptions, LinearCrossEntropy, NnOps, Reduction},
    ops::{Apply, Bits, ReduceOps},
};

use crate::suite::{
    case::{OpCase, case},
    sample::{Sample, centered, index, indices},
};

const PLAIN: CrossEntropyOptions =
    CrossEntropyOptions { ignore_index: -100, label_smoothing: 0.0, reduction: Reduction::Mean };

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let whole = || vec![centered(&[7, 3]), centered(&[5, 3]), index(&[7], 5)];
    let biased = || vec![centered(&[7, 3]), centered(&[5, 3]), centered(&[5]), index(&[7], 5)];
    let some_ignored = || with_classes(&[3, -100, 0, -100, 4, -100, -100]);
    let cases = vec![
        case("linear_cross_entropy", whole(), |x| x[0].linear_cross_entropy(&x[1], &x[2])),
        case("linear_cross_entropy of sequences", [centered(&[2, 3, 4]), centered(&[5, 4]), index(&[2, 3], 5)], |x| {
            x[0].linear_cross_entropy(&x[1], &x[2])
        }),
        case("linear_cross_entropy with a bias, smoothed", biased(), |x| {
            let options = CrossEntropyOptions { label_smoothing: 0.2, ..PLAIN };
            x[0].linear_cross_entropy_with(&x[1], Some(&x[2]), &x[3], options)
        }),
        case("linear_cross_entropy none", biased(), |x| {
            let options = CrossEntropyOptions { reduction: Reduction::None, ..PLAIN };
            x[0].linear_cross_entropy_with(&x[1], Some(&x[2]), &x[3], options)
        }),
        case("linear_cross_entropy ignoring", some_ignored(), |x| x[0].linear_cross_entropy(&x[1], &x[2])),
        case("linear_cross_entropy in chunks", whole(), |x| chunked(x, 2, true, 0.0)),
        case("linear_cross_entropy in chunks of one", biased(), |x| chunked(x, 1, true, 0.1)),
        case("linear_cross_entropy in chunks, none", biased(), |x| chunked(x, 4, false, 0.0)),
        case("linear_cross_entropy in chunks, ignoring", some_ignored(), |x| chunked(x, 2, true, 0.1)),
        case("linear_cross_entropy of rows that repeat", [centered(&[1, 3]), centered(&[5, 3]), index(&[4], 5)], |x| {
            use numcore::ops::ViewOps;
            chunked(&[x[0].broadcast_to([4, 3])?, x[1].clone(), x[2].clone()], 3, true, 0.0)
        }),
    ];
    cases.into_iter().map(|c| c.slack(8.0)).collect()
}

fn with_classes(classes: &[i64]) -> Vec<Sample> {
    vec![centered(&[classes.len(), 3]), centered(&[5, 3]), indices(&[classes.len()], classes)]
}

/// The operation on operands `x`, `w`, a bias if there are four operands, and classes.
fn chunked<R: Runtime>(x: &[Var<R>], chunk: usize, summed: bool, label_smoothing: f64) -> Result<Var<R>> {
    let op = LinearCrossEntropy {
        ignore_index: -100,
        label_smoothing,
        bias: x.len() == 4,
        summed,
        chunk: Some(chunk),
        gradients: Bits::NONE,
    };
    let loss = Var::apply1(op, &x.iter().collect::<Vec<_>>())?;
    if summed { Ok(loss) } else { loss.sum_all() }
}

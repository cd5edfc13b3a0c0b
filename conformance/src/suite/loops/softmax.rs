//! Softmax of rows with NaN, or with nothing but infinities.

use numcore::{Result, Runtime, Tensor, fused::NnOps};

use crate::suite::report::{Section, Verdict};

const INF: f32 = f32::INFINITY;

pub(crate) fn softmax<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("softmax");
    for (at, rest) in [(0, 1.0), (40, -3.0), (69, -INF), (69, INF)] {
        section.check(format!("a NaN at {at} among {rest} makes its whole row NaN"), || {
            let mut x = row([rest; 3], rest);
            x[at] = f32::NAN;
            let y = softmax_of(rt, &x)?;
            Ok(Verdict::when(y.iter().all(|y| y.is_nan()), || format!("{y:?}")))
        });
    }
    section.check("a row of negative infinities is a row of zeros", || {
        let y = softmax_of(rt, &row([-INF; 3], -INF))?;
        Ok(Verdict::when(y.iter().all(|&y| y == 0.0), || format!("{y:?}")))
    });
    section.check("negative infinities weigh nothing", || {
        let y = softmax_of(rt, &row([2.0, -INF, 2.0], -INF))?;
        Ok(Verdict::when((y[0], y[1], y[2], y[69]) == (0.5, 0.0, 0.5, 0.0), || format!("{y:?}")))
    });
    // Finite values vanish next to an infinite one, except those whose exponential is infinite, too.
    section.check("an infinity among finite values", || {
        let y = softmax_of(rt, &row([INF, 5.0, 1000.0], -1000.0))?;
        let right = y[0].is_nan() && y[1] == 0.0 && y[2].is_nan() && y[3..].iter().all(|&y| y == 0.0);
        Ok(Verdict::when(right, || format!("{y:?}")))
    });
    section
}

/// A row of 70 elements: whole vectors and a remainder.
fn row(first: [f32; 3], rest: f32) -> Vec<f32> {
    first.into_iter().chain(std::iter::repeat(rest)).take(70).collect()
}

fn softmax_of<R: Runtime>(rt: &R, x: &[f32]) -> Result<Vec<f32>> {
    Tensor::from_slice(rt, [x.len()], x)?.softmax(-1)?.to_vec::<f32>()
}

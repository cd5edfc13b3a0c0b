//! Measurement of the machine that this program runs on.

use std::time::Instant;

use autograd::Var;
use distributed::comm::{Collectives, Comm, Communicator, ReduceOp, memory};
use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{MatmulOps, PointwiseOps, ReduceOps},
};

use crate::{LinkSpeed, Machine};

/// Repetitions of a measurement.
const TIMES: u32 = 20;

/// Measures the ranks of a communicator: products and copies on each rank while all others do the same, and sums over
/// all. Every rank calls it, with nothing else running. `memory_of_rank` are the bytes that a rank may use.
///
/// All links are those of the communicator. A world of one has none: its links are as fast as its memory.
pub fn calibrate<R: Runtime>(comm: &Comm<R>, memory_of_rank: f64) -> Result<Machine> {
    let rt = comm.runtime();
    let zeros = |shape: &[usize]| Tensor::zeros(rt, shape, DType::F32);
    let mut flops = 0.0_f64;
    for n in [128, 256, 512] {
        let (a, b) = (zeros(&[n, n])?, zeros(&[n, n])?);
        flops = flops.max(2.0 * (n as f64).powi(3) / mean(comm, || a.matmul(&b).map(drop))?);
    }
    // Larger than caches: two operands are read, and one is written.
    let numel = 8 << 20;
    let (a, b) = (zeros(&[numel])?, zeros(&[numel])?);
    let memory_bandwidth = 3.0 * 4.0 * numel as f64 / mean(comm, || a.add(&b).map(drop))?;
    let kernel_seconds = kernel_seconds(comm)?;
    let link = match comm.size() {
        1 => LinkSpeed { latency: 0.0, bandwidth: memory_bandwidth },
        n => {
            let mut points = Vec::new();
            for bytes in [1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20] {
                let x = zeros(&[bytes / 4])?;
                let seconds = mean(comm, || comm.all_reduce(memory(&x)?, ReduceOp::Sum)?.wait().map(drop))?;
                points.push(((2 * (n - 1) * bytes / n) as f64, seconds));
            }
            line(&points)
        }
    };
    Ok(Machine {
        name: "this machine".into(),
        ranks_per_node: comm.size(),
        memory: memory_of_rank,
        peak_flops: flops,
        flops,
        memory_bandwidth,
        kernel_seconds,
        node: link,
        network: link,
        blocking_transfers: false,
        late_gradients: false,
        recomputes: rt.recomputes_in_backward(),
    })
}

/// The seconds of a kernel beside its work, with the tape's share: those of small products, forward and backward.
fn kernel_seconds<R: Runtime>(comm: &Comm<R>) -> Result<f64> {
    const DEPTH: usize = 50;
    let (x, w) = (
        Tensor::zeros(comm.runtime(), [16, 16], DType::F32)?,
        Var::leaf("w", Tensor::zeros(comm.runtime(), [16, 16], DType::F32)?)?,
    );
    let pass = || {
        let y = (0..DEPTH).try_fold(Var::new(x.clone()), |y, _| y.matmul(&w)?.relu())?;
        y.sum_all()?.backward().map(drop)
    };
    // A product and an activation forward, two products and an activation backward.
    Ok(mean(comm, pass)? / (5 * DEPTH) as f64)
}

/// The mean seconds of `f` on a rank, with what it has queued, while all ranks run it.
fn mean<R: Runtime>(comm: &Comm<R>, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    f()?;
    comm.runtime().synchronize()?;
    comm.exchange_equal([0])?;
    let begun = Instant::now();
    (0..TIMES).try_for_each(|_| f())?;
    comm.runtime().synchronize()?;
    comm.exchange_equal([0])?;
    Ok((begun.elapsed().as_secs_f64() / f64::from(TIMES)).max(1e-9))
}

/// The link whose times fit pairs of bytes and seconds best, in proportion to the times.
pub(crate) fn line(points: &[(f64, f64)]) -> LinkSpeed {
    let sum = |f: &dyn Fn(f64, f64, f64) -> f64| -> f64 { points.iter().map(|&(x, y)| f(x, y, 1.0 / (y * y))).sum() };
    let [w, wx, wxx, wy, wxy] = [
        sum(&|_, _, w| w),
        sum(&|x, _, w| w * x),
        sum(&|x, _, w| w * x * x),
        sum(&|_, y, w| w * y),
        sum(&|x, y, w| w * x * y),
    ];
    let slope = (w * wxy - wx * wy) / (w * wxx - wx * wx);
    let latency = (wy - slope * wx) / w;
    // Noise can tilt a line that is nearly flat.
    LinkSpeed { latency: latency.max(0.0), bandwidth: if slope > 0.0 { 1.0 / slope } else { 1e15 } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again() {
        let link = line(&[1e3, 1e4, 1e5, 1e6, 1e7].map(|bytes| (bytes, 2e-5 + bytes / 3e9)));
        assert!((link.latency / 2e-5 - 1.0).abs() < 1e-6 && (link.bandwidth / 3e9 - 1.0).abs() < 1e-6, "{link:?}");
        let flat = line(&[(1e3, 1e-3), (1e6, 0.9e-3)]);
        assert!(flat.latency > 0.0 && flat.bandwidth > 0.0);
    }
}

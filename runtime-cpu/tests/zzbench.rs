//! Times.
mod common;
use common::T;
use numcore::{fused::{Conv, ConvKind, FusedOp}, ops::Apply};
use runtime_cpu::Cpu;

#[test]
fn bench() {
    let threads: usize = std::env::var("TH").ok().and_then(|x| x.parse().ok()).unwrap_or(2);
    let cpu = Cpu::builder().threads(threads).build();
    let made = |s: &[usize]| T::from_slice(&cpu, s, &(0..s.iter().product::<usize>()).map(|i| ((i * 7919 % 1000) as f32) / 500.0 - 1.0).collect::<Vec<_>>()).unwrap();
    let which = std::env::var("CASE").unwrap_or("64 32 26 64 3 0 1".into());
    let v: Vec<usize> = which.split(' ').map(|x| x.parse().unwrap()).collect();
    let [n, c, hw, o, k, p, s] = v[..] else { panic!() };
    let out = (hw + 2 * p - k) / s + 1;
    let (x, w, y) = (made(&[n, c, hw, hw]), made(&[o, c, k, k]), made(&[n, o, out, out]));
    let op = |kind| FusedOp::Conv(Conv { kind, stride: [s, s], padding: [p, p], dilation: [1, 1], groups: 1, bias: false });
    let cases = [("forward", op(ConvKind::Forward), [&x, &w]), ("input", op(ConvKind::Input([hw, hw])), [&y, &w]), ("weight", op(ConvKind::Weight([k, k])), [&x, &y])];
    let flop = 2.0 * (n * c * o * k * k * out * out) as f64;
    for (name, op, ins) in cases {
        let mut best = f64::MAX;
        for _ in 0..40 {
            let t = std::time::Instant::now();
            let r = T::apply(op.clone().into(), &ins).unwrap();
            drop(r);
            best = best.min(t.elapsed().as_secs_f64());
        }
        println!("{which} {name}: {:.3} ms {:.0} GFLOP/s", best * 1e3, flop / best / 1e9);
    }
}

//! What a span costs, off and on, by clock: `cargo run --release -p weftgrad-runtime-cpu --example span_cost`.
//!
//! The clock that stands still shows what the recorder costs without a clock; a span reads the clock twice.

use std::{hint::black_box, time::Instant};

use numcore::{
    Result, Runtime,
    trace::{ClockSource, Recording, RecordingOptions, SpanKind, span},
};

const SPANS: u32 = 2_000_000;

fn nanoseconds() -> f64 {
    let begun = Instant::now();
    for _ in 0..SPANS {
        drop(black_box(span(SpanKind::Op, black_box("matmul"))));
    }
    begun.elapsed().as_nanos() as f64 / f64::from(SPANS)
}

fn best_of(rounds: usize, mut f: impl FnMut() -> Result<f64>) -> Result<f64> {
    (0..rounds).try_fold(f64::INFINITY, |best, _| Ok(best.min(f()?)))
}

fn main() -> Result<()> {
    let recorded = |clock| {
        best_of(9, || {
            let recording = Recording::start(RecordingOptions { clock, ..Default::default() })?;
            let time = nanoseconds();
            drop(recording);
            Ok(time)
        })
    };
    let reading = best_of(9, || {
        let begun = Instant::now();
        for _ in 0..SPANS {
            black_box(Instant::now());
        }
        Ok(begun.elapsed().as_nanos() as f64 / f64::from(SPANS))
    })?;
    println!("off                        {:6.1} ns", best_of(9, || Ok(nanoseconds()))?);
    println!("on, a clock that stands    {:6.1} ns", recorded(ClockSource::Counter(|| 1 << 40))?);
    println!("on, the system's clock     {:6.1} ns", recorded(ClockSource::System)?);
    println!("on, the CPU's counter      {:6.1} ns", recorded(runtime_cpu::Cpu::with_threads(1).clock())?);
    println!("one reading of that clock  {reading:6.1} ns");
    Ok(())
}

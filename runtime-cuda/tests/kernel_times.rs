//! A recording shows when kernels ran on the device, on a track of its queue; and which ran.
#![cfg(feature = "emulate")]

use std::{path::Path, sync::Mutex};

use autograd::{Backward, Gradients, Var};
use numcore::{
    DType, Result, Runtime, Tensor,
    fused::NnOps,
    ops::{MatmulOps, PointwiseOps},
    trace::{self, Recording, RecordingOptions, SpanKind, ThreadTrace},
};

/// A process has one recording at a time, which is of all its kernels.
static ONE_RECORDING: Mutex<()> = Mutex::new(());

#[test]
fn kernels_have_spans_on_a_track_of_their_queue() {
    let _alone = ONE_RECORDING.lock();
    let cuda = emulated_gpu::open(Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated")).unwrap();
    let x = Tensor::from_slice(&cuda, [2, 2], &[1f32, 2.0, 3.0, 4.0]).unwrap();
    // Before the recording: no part of it.
    let y = x.add(&x).unwrap();
    trace::set_rank(3);
    let recording = Recording::start(RecordingOptions::default()).unwrap();
    for _ in 0..3 {
        x.matmul(&y).unwrap();
    }
    let sum = x.add(&y).unwrap();
    cuda.synchronize().unwrap();
    let trace = recording.stop();
    assert_eq!(sum.to_vec::<f32>().unwrap(), [3.0, 6.0, 9.0, 12.0]);
    let is_kernel = |thread: &&ThreadTrace| thread.spans.iter().any(|span| span.kind == SpanKind::Kernel);
    let [track] = trace.threads.iter().filter(is_kernel).collect::<Vec<_>>()[..] else { panic!("{trace:?}") };
    assert_eq!(track.name, format!("{} kernels", cuda.device()));
    let names: Vec<&str> = track.spans.iter().map(|span| &*span.name).collect();
    assert_eq!(names[..3], ["matmul"; 3]);
    assert_eq!(names.len(), 4);
    assert_eq!(track.spans[0].of.as_deref(), Some("[2, 2] x [2, 2] f32 -> f32"));
    for pair in track.spans.windows(2) {
        assert!(pair[0].start <= pair[0].end && pair[0].end <= pair[1].start, "{pair:?}");
    }
    assert!(track.spans.iter().all(|span| span.rank == Some(3)));

    // Nothing is measured without a recording, and a second one works as the first.
    x.matmul(&y).unwrap();
    let recording = Recording::start(RecordingOptions::default()).unwrap();
    x.matmul(&y).unwrap();
    cuda.synchronize().unwrap();
    let trace = recording.stop();
    let kernels = trace.threads.iter().flat_map(|t| &t.spans).filter(|span| span.kind == SpanKind::Kernel);
    assert_eq!(kernels.count(), 1);
}

/// In a block that adds a normalized value's branch to the value, the norm's gradient goes on top of the residual's: two kernels for all of
/// a norm's gradients, and none that adds.
#[test]
fn the_residual_gradient_is_added_by_the_norm() -> Result<()> {
    let _alone = ONE_RECORDING.lock();
    let rt = &emulated_gpu::open(Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated"))?;
    let zeros = |shape: &[usize]| Tensor::zeros(rt, shape, DType::BF16);
    let leaf = |name: &str, shape: &[usize]| Var::leaf(name, zeros(shape)?);
    let (x, w, b) = (leaf("x", &[5, 64])?, leaf("w", &[64])?, leaf("b", &[64])?);
    let h = x.mul(2.0)?;
    let y = h.layer_norm(Some(&w), Some(&b), 1e-5)?.mul(3.0)?.add(&h)?.mul(4.0)?;
    let seed = Var::new(zeros(&[5, 64])?);
    rt.synchronize()?;
    let recording = Recording::start(RecordingOptions::default())?;
    let mut gradients = Gradients::new();
    Backward::from(&y, &seed)?.run(&mut gradients)?;
    rt.synchronize()?;
    let trace = recording.stop();
    let kernels = trace.threads.iter().flat_map(|t| &t.spans).filter(|span| span.kind == SpanKind::Kernel);
    let names: Vec<&str> = kernels.map(|span| &*span.name).collect();
    assert_eq!(names, ["mul", "mul", "norm_grad", "norm_grad", "mul"]);
    Ok(())
}

//! A recording shows when kernels ran on the device, on a track of its queue.
#![cfg(feature = "emulate")]

use std::path::Path;

use numcore::{
    Runtime, Tensor,
    ops::{MatmulOps, PointwiseOps},
    trace::{self, Recording, RecordingOptions, SpanKind, ThreadTrace},
};
use runtime_cuda::Cuda;

#[test]
fn kernels_have_spans_on_a_track_of_their_queue() {
    let cuda = Cuda::emulated(Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated")).unwrap();
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

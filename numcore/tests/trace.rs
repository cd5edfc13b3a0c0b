//! Recordings contain the events that happened while they ran, and no others.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use numcore::{
    DType, MemoryCategory, NullRuntime, Pool, Tensor,
    ops::{MatmulOps, PointwiseOps, ViewOps},
    trace::{self, ClockSource, Detail, Recording, RecordingOptions, SpanKind, Trace, TraceSpan, span, span_of},
};

/// A process has one recording at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn record(options: RecordingOptions, f: impl FnOnce()) -> Trace {
    let recording = Recording::start(options).unwrap();
    f();
    recording.stop()
}

fn names(trace: &Trace) -> Vec<&str> {
    trace.threads.iter().flat_map(|thread| thread.spans.iter().map(|span| &*span.name)).collect()
}

/// A clock that grows by ten with each reading.
fn tens() -> u64 {
    static TIME: AtomicU64 = AtomicU64::new(0);
    TIME.fetch_add(10, Ordering::Relaxed)
}

#[test]
fn spans_nest_and_say_what_they_are_of() {
    let _alone = alone();
    let trace = record(RecordingOptions { clock: ClockSource::Counter(tens), ..Default::default() }, || {
        let _outer = span(SpanKind::Phase, "step");
        drop(span_of(SpanKind::Collective, "all_reduce", Some("bucket 3")));
        let start = trace::now();
        trace::ended(SpanKind::Wait, "all_reduce", None, start, 42);
    });
    assert_eq!(trace.threads.len(), 1);
    let spans = &trace.threads[0].spans;
    let told = |s: &TraceSpan| (s.kind, s.name.to_string(), s.of.as_deref().map(String::from), s.bytes);
    assert_eq!(
        spans.iter().map(told).collect::<Vec<_>>(),
        [
            (SpanKind::Collective, "all_reduce".into(), Some("bucket 3".into()), 0),
            (SpanKind::Wait, "all_reduce".into(), None, 42),
            (SpanKind::Phase, "step".into(), None, 0),
        ]
    );
    // Seven readings: one by the recording, six by the spans, before the last by the recording.
    let ticks: Vec<u64> = [1, 2, 3, 4, 0, 5].iter().map(|n| (n + 1) * trace.length / 7).collect();
    let found = [spans[0].start, spans[0].end, spans[1].start, spans[1].end, spans[2].start, spans[2].end];
    assert!(found.iter().zip(&ticks).all(|(a, b)| a.abs_diff(*b) <= 1), "{found:?} {ticks:?}");
}

#[test]
fn nothing_is_recorded_before_and_after() {
    let _alone = alone();
    let before = span(SpanKind::Phase, "before");
    let mut over = None;
    let first = record(RecordingOptions::default(), || {
        drop(before);
        over = Some(span(SpanKind::Phase, "not over"));
        drop(span(SpanKind::Phase, "within"));
    });
    drop(span(SpanKind::Phase, "after"));
    let second = record(RecordingOptions::default(), || drop(over.take()));
    assert_eq!((names(&first), names(&second)), (vec!["within"], vec![]));
    assert!(!trace::is_recorded(SpanKind::Phase));
}

#[test]
fn one_recording_at_a_time() {
    let _alone = alone();
    let one = Recording::start(RecordingOptions::default()).unwrap();
    let error = Recording::start(RecordingOptions::default()).unwrap_err().to_string();
    assert!(error.contains("recorded already"), "{error}");
    assert!(trace::is_recorded(SpanKind::Phase), "the first goes on");
    drop(one);
    drop(Recording::start(RecordingOptions::default()).unwrap());
}

#[test]
fn op_calls_are_spans_where_everything_is_recorded() {
    let _alone = alone();
    let rt = NullRuntime::new();
    let work = || {
        let x = Tensor::zeros(&rt, [4, 3], DType::F32).unwrap();
        let y = x.transpose(0, 1).unwrap();
        x.matmul(&y).unwrap().exp().unwrap();
    };
    let everything = record(RecordingOptions::default(), work);
    assert_eq!(names(&everything), ["matmul", "exp"], "views launch nothing");
    let steps = record(RecordingOptions { detail: Detail::Steps, ..Default::default() }, work);
    assert_eq!(names(&steps), Vec::<&str>::new());
}

#[test]
fn memory_is_a_counter_of_its_category_and_pool() {
    let _alone = alone();
    let (mut one, mut two) = (Pool::<()>::default(), Pool::<()>::default());
    one.book(9, MemoryCategory::Parameters);
    let trace = record(RecordingOptions::default(), || {
        one.book(100, MemoryCategory::Gradients);
        two.book(7, MemoryCategory::Gradients);
        one.book(50, MemoryCategory::Optimizer);
        one.unbook(60, MemoryCategory::Gradients);
    });
    let counters = &trace.threads[0].counters;
    let told: Vec<(&str, bool, u64)> =
        counters.iter().map(|c| (&*c.name, c.source == counters[0].source, c.value)).collect();
    // The first change of an account records the bytes that it already had.
    let first = |own: bool, parameters: u64, gradients: u64| {
        ["activations", "parameters", "gradients", "optimizer", "communication"]
            .into_iter()
            .zip([0, parameters, gradients, 0, 0])
            .map(move |(name, value)| (name, own, value))
    };
    let changes = [("optimizer", true, 50), ("gradients", true, 40)];
    assert_eq!(told, first(true, 9, 100).chain(first(false, 0, 7)).chain(changes).collect::<Vec<_>>());
    assert!(counters.is_sorted_by_key(|c| c.at));
}

#[test]
fn threads_have_their_own_spans_rank_and_ring() {
    let _alone = alone();
    let trace = record(RecordingOptions { per_thread: 4, ..Default::default() }, || {
        for rank in 0..2 {
            let work = move || {
                trace::set_rank(rank);
                assert_eq!(trace::rank(), Some(rank));
                (0..10).for_each(|_| drop(span(SpanKind::Phase, "work")));
            };
            thread::Builder::new().name(format!("rank-{rank}")).spawn(work).unwrap().join().unwrap();
        }
    });
    for (rank, thread) in trace.threads.iter().enumerate() {
        assert_eq!((thread.name.as_str(), thread.spans.len(), thread.lost), (&*format!("rank-{rank}"), 4, 6));
        assert!(thread.spans.iter().all(|span| span.rank == Some(rank)));
    }
    assert_eq!(trace.threads.len(), 2);
}

#[test]
fn what_a_device_measured_is_shown_when_it_was() {
    let _alone = alone();
    let before = Instant::now();
    let trace = record(RecordingOptions::default(), || {
        let start = Instant::now();
        trace::measured(SpanKind::Kernel, "early", None, before, before);
        trace::measured(SpanKind::Kernel, "matmul", Some("2 x 3 x 4"), start, Instant::now());
    });
    let spans: Vec<&TraceSpan> = trace.threads.iter().flat_map(|thread| &thread.spans).collect();
    let [span] = spans[..] else { panic!("{spans:?}") };
    assert_eq!((span.kind, &*span.name, span.of.as_deref()), (SpanKind::Kernel, "matmul", Some("2 x 3 x 4")));
    assert!(span.start <= span.end, "{span:?}");
}

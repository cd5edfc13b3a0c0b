//! A small recording, as a timeline, as trace events and as a picture.

use std::sync::Arc;

use numcore::trace::{SpanKind, ThreadTrace, Trace, TraceCounter, TraceSpan};
use serde_json::{Value, json};
use watch::recorder::{CounterSeries, RankTimeline, RunTimeline, Track, TrackSpan};

/// A span of a rank, or of the process, from a start to an end.
fn span(kind: SpanKind, name: &str, rank: Option<usize>, start: u64, end: u64) -> TraceSpan {
    let of = (kind == SpanKind::Collective).then(|| Arc::from("a bucket"));
    TraceSpan { kind, name: name.into(), of, rank, start, end, bytes: end % 2 }
}

fn counter(name: &str, source: u64, rank: Option<usize>, at: u64, value: u64) -> TraceCounter {
    TraceCounter { name: name.into(), source, rank, at, value }
}

/// A process of rank 4 that has a thread of rank 6 too.
fn recording() -> Trace {
    use SpanKind::{Collective, Data, Kernel, Op, Phase};
    let main = ThreadTrace {
        name: "main".into(),
        spans: vec![
            span(Op, "linear", None, 1500, 2000),
            span(Kernel, "gemm", None, 3000, 4001),
            span(Collective, "send", None, 2500, 5000),
            span(Collective, "gather", None, 5000, 6000),
            span(Collective, "reduce", None, 4500, 7000),
            span(Phase, "forward", None, 1500, 9000),
            span(Data, "wait", None, 9000, 9000),
        ],
        counters: vec![
            counter("activations", 1, None, 1000, 10),
            counter("parameters", 1, None, 1000, 100),
            counter("activations", 1, None, 2000, 0),
            counter("activations", 2, None, 2000, 4),
        ],
        lost: 2,
    };
    let other = ThreadTrace {
        name: "other".into(),
        spans: vec![span(Data, "make", Some(6), 100, 600), span(Collective, "send", Some(6), 700, 800)],
        counters: vec![counter("activations", 2, Some(4), 1500, 7), counter("cpu %", 1, Some(6), 3000, 50)],
        lost: 1,
    };
    Trace { threads: vec![main, other], length: 10_000 }
}

/// Names of the spans of each track.
fn names(rank: &RankTimeline) -> Vec<(&str, Vec<&str>)> {
    rank.tracks.iter().map(|track| (&*track.name, track.spans.iter().map(|span| &*span.name).collect())).collect()
}

#[test]
fn spans_and_counters_are_those_of_their_ranks() {
    let timeline = RunTimeline::of(&recording(), 4);
    assert_eq!((timeline.length, timeline.lost), (10_000, 3));
    let [four, six] = &timeline.ranks[..] else { panic!("{timeline:?}") };
    assert_eq!((four.rank, six.rank), (4, 6));
    let main = ("main", vec!["forward", "linear", "gemm", "wait"]);
    assert_eq!(names(four), [main, ("communication", vec!["send", "gather"]), ("communication 2", vec!["reduce"])]);
    assert_eq!(names(six), [("other", vec!["make"]), ("communication", vec!["send"])]);
    assert_eq!(four.tracks[0].depths(), [0, 1, 1, 1], "an empty span at the end of another is within it");
    let series = |name: &str, points: &[(u64, u64)]| CounterSeries { name: name.into(), points: points.to_vec() };
    let activations = series("activations", &[(1000, 10), (1500, 17), (2000, 4)]);
    assert_eq!(four.counters, [activations, series("parameters", &[(1000, 100)])]);
    assert_eq!(six.counters, [series("cpu %", &[(3000, 50)])]);
}

#[test]
fn a_recording_is_these_trace_events() {
    let events = |rank: usize| {
        let file: Value = serde_json::from_str(&RunTimeline::of(&recording(), 4).to_chrome_json_of(rank, 8)).unwrap();
        assert_eq!(file["distributedInfo"], json!({"rank": rank, "world_size": 8, "backend": "weftgrad"}));
        let all = file["traceEvents"].as_array().unwrap().clone();
        let has = |ph: &'static str| all.iter().filter(move |event| event["ph"] == ph).cloned().collect::<Vec<_>>();
        ["M", "X", "s", "f", "C"].map(has)
    };
    let [metadata, spans, starts, ends, counters] = events(4);
    let process = |name: &str, args: Value| json!({"ph": "M", "name": name, "pid": 4, "args": args});
    let of_process =
        [process("process_name", json!({"name": "rank 4"})), process("process_sort_index", json!({"sort_index": 4}))];
    let thread =
        |tid: u64, name: &str, args: Value| json!({"ph": "M", "name": name, "pid": 4, "tid": tid, "args": args});
    let of_thread = |(tid, name): (u64, &str)| {
        [
            thread(tid, "thread_name", json!({"name": name})),
            thread(tid, "thread_sort_index", json!({"sort_index": tid})),
        ]
    };
    let of_threads = [(0, "main"), (1, "communication"), (2, "communication 2")].into_iter().flat_map(of_thread);
    assert_eq!(metadata, of_process.into_iter().chain(of_threads).collect::<Vec<_>>());
    let span = |tid: u64, name: &str, cat: &str, ts: f64, dur: f64, args: Value| json!({"ph": "X", "name": name, "pid": 4, "tid": tid, "cat": cat, "ts": ts, "dur": dur, "args": args});
    let collective = |tid: u64, number: u64| json!({"of": "a bucket", "stream": tid, "correlation": number});
    let expected = [
        span(0, "forward", "user_annotation", 1.5, 7.5, json!({})),
        span(0, "linear", "cpu_op", 1.5, 0.5, json!({})),
        span(0, "gemm", "kernel", 3.0, 1.001, json!({"bytes": 1, "stream": 0, "correlation": 2})),
        span(0, "wait", "user_annotation", 9.0, 0.0, json!({})),
        span(1, "send of a bucket", "kernel", 2.5, 2.5, collective(1, 0)),
        span(1, "gather of a bucket", "kernel", 5.0, 1.0, collective(1, 1)),
        span(2, "reduce of a bucket", "kernel", 4.5, 2.5, collective(2, 0)),
    ];
    assert_eq!(spans, expected);
    let arrow = |ph: &str, tid: u64, id: u64, ts: f64| json!({"ph": ph, "name": "start", "pid": 4, "tid": tid, "cat": "flow", "id": id, "ts": ts});
    assert_eq!(starts, [arrow("s", 0, 0, 2.5), arrow("s", 0, 1, 5.0), arrow("s", 0, 2, 4.5)]);
    let mut expected = [arrow("f", 1, 0, 2.5), arrow("f", 1, 1, 5.0), arrow("f", 2, 2, 4.5)];
    expected.iter_mut().for_each(|arrow| arrow["bp"] = "e".into());
    assert_eq!(ends, expected);
    let memory = |ts: f64, args: Value| json!({"ph": "C", "name": "memory", "pid": 4, "ts": ts, "args": args});
    let activations = |value: u64| json!({"activations": value, "parameters": 100});
    let expected = [(1.0, 10), (1.5, 17), (2.0, 4)].map(|(ts, value)| memory(ts, activations(value)));
    assert_eq!(counters, expected, "every event has all categories");
    // Nothing was running when the collective of rank 6 was started.
    let [_, spans, starts, ends, counters] = events(6);
    assert_eq!((spans.len(), starts.len(), ends.len()), (2, 0, 0));
    assert_eq!(counters, [json!({"ph": "C", "name": "cpu %", "pid": 6, "ts": 3.0, "args": {"cpu %": 50}})]);
}

#[test]
fn a_picture_leaves_out_spans_that_are_too_deep_or_too_narrow() {
    let span = |start: u64, end: u64| TrackSpan { start, end, ..nothing() };
    // Eight spans, each within the one before; and a short one.
    let nested = (0..8).map(|depth| span(depth * 1000, 100_000 - depth * 1000));
    let spans: Vec<TrackSpan> = nested.chain([span(100_000, 100_001), span(150_000, 200_000)]).collect();
    let track = Track { name: "main".into(), spans };
    let rank = RankTimeline { rank: 0, tracks: vec![track.clone(), track], counters: Vec::new() };
    let svg = RunTimeline { ranks: vec![rank], length: 200_000, lost: 5 }.to_svg();
    assert!(svg.contains("6 spans too narrow or too deep to be seen, 5 overwritten"), "{svg}");
    // Six of the nested ones and the last, in 1200 pixels to the right of a margin of 150; two bands of six lines.
    assert_eq!(svg.matches("<rect").count(), 2 * 7);
    assert!(svg.contains("<rect x=\"1050.00\" y=\"24.0\" width=\"300.00\""), "{svg}");
    assert!(svg.contains("<rect x=\"180.00\" y=\"104.0\" width=\"540.00\""), "{svg}");
    assert!(svg.contains("<rect x=\"1050.00\" y=\"126.0\" width=\"300.00\""), "{svg}");
    assert!(svg.contains("height=\"248\""), "{svg}");
}

fn nothing() -> TrackSpan {
    TrackSpan { kind: SpanKind::Phase, name: "x".into(), of: None, start: 0, end: 0, bytes: 0 }
}

#[test]
fn the_costliest_operations_come_first() {
    use SpanKind::{Kernel, Op};
    let spans = vec![
        span(Op, "norm", None, 0, 2_000_000),
        // A composed operation, whose parts are operations too; the kernel is no operation.
        span(Op, "attention", None, 2_000_000, 9_000_000),
        span(Op, "matmul", None, 3_000_000, 6_000_001),
        span(Kernel, "gemm", None, 3_000_000, 5_000_000),
        span(Op, "matmul", None, 7_000_000, 8_000_001),
    ];
    let other =
        ThreadTrace { name: "b".into(), spans: vec![span(Op, "norm", Some(6), 0, 500_000)], ..Default::default() };
    let main = ThreadTrace { name: "a".into(), spans, ..Default::default() };
    let timeline = RunTimeline::of(&Trace { threads: vec![main, other], length: 10_000_000 }, 4);
    let costs: Vec<_> = timeline.costs(Op).into_iter().map(|c| (c.name.to_string(), c.calls, c.total, c.own)).collect();
    let expected = [
        ("matmul", 2, 4_000_002, 4_000_002),
        ("attention", 1, 7_000_000, 2_999_998),
        ("norm", 2, 2_500_000, 2_500_000),
    ];
    assert_eq!(costs, expected.map(|(name, calls, total, own)| (name.to_string(), calls, total, own)));
    let table = timeline.costliest(Op, 2);
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    let expected = [
        vec!["op", "calls", "own", "ms", "%", "mean", "µs", "MB"],
        vec!["matmul", "2", "4.000", "42.1", "2000.0", "0.0"],
        vec!["attention", "1", "3.000", "31.6", "7000.0", "–"],
    ];
    assert_eq!(lines, expected);
    assert_eq!(timeline.costliest(Kernel, 9).lines().count(), 2);
    assert_eq!(timeline.costliest(SpanKind::Wait, 9), "");
}

//! Trace events in JSON, as `chrome://tracing`, Perfetto and Holistic Trace Analysis read them.
//!
//! A process is a rank, a thread is a track. Memory is one counter with a series for each category, so it is drawn
//! stacked. A collective has an arrow from the first track that was busy when it was started. Categories have the names
//! of Kineto, PyTorch's profiler.

use std::collections::BTreeMap;

use numcore::{MemoryCategory, trace::SpanKind};

use super::{RankTimeline, RunTimeline, Track, TrackSpan};
use crate::json::{object, quoted};

impl RunTimeline {
    /// The events of all ranks in one file.
    pub fn to_chrome_json(&self) -> String {
        let events = self.ranks.iter().flat_map(RankTimeline::to_events).collect();
        file(events, None)
    }

    /// The events of one rank of `ranks`, for tools that compare ranks and read one file for each.
    pub fn to_chrome_json_of(&self, rank: usize, ranks: usize) -> String {
        let own = self.ranks.iter().filter(|r| r.rank == rank);
        let backend = quoted("weftgrad");
        let info = [("rank", rank.to_string()), ("world_size", ranks.to_string()), ("backend", backend)];
        file(own.flat_map(RankTimeline::to_events).collect(), Some(object(info)))
    }
}

fn file(events: Vec<String>, distributed: Option<String>) -> String {
    let info = distributed.map(|info| format!("\"distributedInfo\":{info},")).unwrap_or_default();
    format!("{{{info}\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", events.join(",\n"))
}

impl RankTimeline {
    fn to_events(&self) -> Vec<String> {
        let mut events = vec![
            self.metadata("process_name", None, ("name", quoted(&format!("rank {}", self.rank)))),
            self.metadata("process_sort_index", None, ("sort_index", self.rank.to_string())),
        ];
        for (tid, track) in self.tracks.iter().enumerate() {
            events.push(self.metadata("thread_name", Some(tid), ("name", quoted(&track.name))));
            events.push(self.metadata("thread_sort_index", Some(tid), ("sort_index", tid.to_string())));
            events.extend(track.spans.iter().enumerate().map(|(k, span)| self.complete(tid, k, span)));
        }
        events.extend(self.flows());
        events.extend(self.counter_events());
        events
    }

    fn event(&self, ph: &str, tid: Option<usize>, name: &str, more: &[(&str, String)]) -> String {
        let start = [("ph", quoted(ph)), ("name", quoted(name)), ("pid", self.rank.to_string())];
        let tid = tid.map(|tid| ("tid", tid.to_string()));
        object(start.into_iter().chain(tid).chain(more.iter().map(|(key, value)| (*key, value.clone()))))
    }

    fn metadata(&self, name: &str, tid: Option<usize>, arg: (&str, String)) -> String {
        self.event("M", tid, name, &[("args", object([arg]))])
    }

    fn complete(&self, tid: usize, number: usize, span: &TrackSpan) -> String {
        let mut args = Vec::new();
        args.extend(span.of.as_ref().map(|of| ("of", quoted(of))));
        args.extend((span.bytes > 0).then(|| ("bytes", span.bytes.to_string())));
        if category(span.kind) == "kernel" {
            args.extend([("stream", tid.to_string()), ("correlation", number.to_string())]);
        }
        let times = [("ts", micros(span.start)), ("dur", micros(span.length()))];
        let more: Vec<(&str, String)> =
            [("cat", quoted(category(span.kind)))].into_iter().chain(times).chain([("args", object(args))]).collect();
        self.event("X", Some(tid), &span.label(), &more)
    }

    /// Arrows to every collective, from the first track with a span that was running when it began.
    fn flows(&self) -> Vec<String> {
        let collectives = self.tracks.iter().enumerate().flat_map(|(tid, track)| {
            track.spans.iter().filter(|span| span.kind == SpanKind::Collective).map(move |span| (tid, span))
        });
        let arrow = |(id, (to, span)): (usize, (usize, &TrackSpan))| {
            let from = self.tracks.iter().position(|track| track.is_busy_at(span.start))?;
            let common = [("cat", quoted("flow")), ("id", id.to_string()), ("ts", micros(span.start))];
            let end = [&common[..], &[("bp", quoted("e"))]].concat();
            Some([self.event("s", Some(from), "start", &common), self.event("f", Some(to), "start", &end)])
        };
        collectives.enumerate().filter_map(arrow).flatten().collect()
    }

    fn counter_events(&self) -> Vec<String> {
        let is_memory = |name: &str| MemoryCategory::ALL.iter().any(|category| category.name() == name);
        let (memory, others): (Vec<_>, Vec<_>) = self.counters.iter().partition(|counter| is_memory(&counter.name));
        let mut changes: BTreeMap<u64, Vec<(&str, u64)>> = BTreeMap::new();
        for counter in memory {
            for &(at, value) in &counter.points {
                changes.entry(at).or_default().push((&counter.name, value));
            }
        }
        let mut now: BTreeMap<&str, u64> = BTreeMap::new();
        let mut events = Vec::new();
        for (at, changed) in changes {
            now.extend(changed);
            let args = object(now.iter().map(|(name, value)| (name, value.to_string())));
            events.push(self.event("C", None, "memory", &[("ts", micros(at)), ("args", args)]));
        }
        for counter in others {
            let event = |&(at, value): &(u64, u64)| {
                let args = object([(&counter.name, value.to_string())]);
                self.event("C", None, &counter.name, &[("ts", micros(at)), ("args", args)])
            };
            events.extend(counter.points.iter().map(event));
        }
        events
    }
}

impl Track {
    /// Tells whether one of its spans, collectives excepted, contains a moment.
    fn is_busy_at(&self, at: u64) -> bool {
        let started = self.spans.partition_point(|span| span.start <= at);
        self.spans[..started].iter().any(|span| span.kind != SpanKind::Collective && span.end >= at)
    }
}

/// Kineto's name of the category.
fn category(kind: SpanKind) -> &'static str {
    match kind {
        SpanKind::Phase | SpanKind::Data | SpanKind::Wait => "user_annotation",
        SpanKind::Op => "cpu_op",
        SpanKind::Kernel | SpanKind::Collective => "kernel",
    }
}

/// Nanoseconds as microseconds, exactly.
fn micros(nanoseconds: u64) -> String {
    format!("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000)
}

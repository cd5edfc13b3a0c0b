//! [`RunTimeline`]: spans by rank and track.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use numcore::trace::{SpanKind, Trace, TraceCounter, TraceSpan};
use pipeline_schedule as pipeline;

/// The spans and counters of every rank that this process has recorded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunTimeline {
    /// Ranks in ascending order.
    pub ranks: Vec<RankTimeline>,
    /// The length in nanoseconds.
    pub length: u64,
    /// The number of spans and counters that were overwritten before the end: the oldest ones.
    pub lost: u64,
}

/// The spans and counters of one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankTimeline {
    /// The rank.
    pub rank: usize,
    /// Threads in the order of their first span, then collectives.
    pub tracks: Vec<Track>,
    /// Values over time, by name.
    pub counters: Vec<CounterSeries>,
}

/// Spans of which two are either disjoint, or one is within the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Track {
    /// The name of the thread, or `communication`.
    pub name: String,
    /// Spans by their start; of spans with equal starts the longest first.
    pub spans: Vec<TrackSpan>,
}

/// An interval of time in which a track did one operation, like an event of a PyTorch profiler trace.
///
/// Times count from the start of the recording. In a timeline of a pipeline schedule they are ticks from the start of
/// the step.
#[derive(Clone, Debug, PartialEq)]
pub struct TrackSpan {
    /// The kind of work: a phase of the step, data, a collective, waiting, an op or a kernel.
    pub kind: SpanKind,
    /// The name of the operation. In a timeline of a pipeline schedule, its action.
    pub name: Arc<str>,
    /// The name of the object that the operation was applied to, if it has one: a gradient bucket, a unit.
    pub of: Option<Arc<str>>,
    /// The start, in nanoseconds or ticks.
    pub start: u64,
    /// The end, in nanoseconds or ticks.
    pub end: u64,
    /// The number of bytes that the operation moved; 0 if unknown.
    pub bytes: u64,
}

/// A value over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CounterSeries {
    /// The name of the value: a category of memory, `cpu %`.
    pub name: String,
    /// Moments in nanoseconds, and the value from then on.
    pub points: Vec<(u64, u64)>,
}

impl RunTimeline {
    /// The timeline of a recording. Spans of threads without a rank are shown at `rank`, the rank of the process.
    pub fn of(trace: &Trace, rank: usize) -> Self {
        let mut ranks = BTreeMap::new();
        for thread in &trace.threads {
            for (rank, spans) in by_rank(&thread.spans, |span| span.rank.unwrap_or(rank)) {
                let host = spans.into_iter().filter(|span| span.kind != SpanKind::Collective);
                let track = Track::nested(&thread.name, host.map(TrackSpan::of).collect());
                of_rank(&mut ranks, rank).tracks.extend(track);
            }
        }
        let all: Vec<TraceSpan> = trace.threads.iter().flat_map(|thread| thread.spans.iter().cloned()).collect();
        for (rank, spans) in by_rank(&all, |span| span.rank.unwrap_or(rank)) {
            let collectives = spans.into_iter().filter(|span| span.kind == SpanKind::Collective).map(TrackSpan::of);
            of_rank(&mut ranks, rank).tracks.extend(lanes("communication", collectives.collect()));
        }
        let all: Vec<TraceCounter> = trace.threads.iter().flat_map(|thread| thread.counters.iter().cloned()).collect();
        for (rank, counters) in by_rank(&all, |counter| counter.rank.unwrap_or(rank)) {
            of_rank(&mut ranks, rank).counters = series(counters);
        }
        let lost = trace.threads.iter().map(|thread| thread.lost).sum();
        RunTimeline { ranks: ranks.into_values().collect(), length: trace.length, lost }
    }

    /// The counter of a name on a rank.
    pub fn counter(&self, rank: usize, name: &str) -> Option<&CounterSeries> {
        let of_rank = self.ranks.iter().find(|r| r.rank == rank)?;
        of_rank.counters.iter().find(|counter| counter.name == name)
    }
}

/// The timeline of a pipeline, simulated or measured: a track per rank, a tick as a nanosecond.
impl From<&pipeline::Timeline> for RunTimeline {
    fn from(timeline: &pipeline::Timeline) -> Self {
        let span = |event: &pipeline::TimelineEvent| TrackSpan {
            kind: SpanKind::Phase,
            name: event.action.to_string().into(),
            of: None,
            start: event.start,
            end: event.end,
            bytes: 0,
        };
        let rank = |(rank, events): (usize, &Vec<pipeline::TimelineEvent>)| RankTimeline {
            rank,
            tracks: lanes("pipeline", events.iter().map(span).collect()),
            counters: Vec::new(),
        };
        RunTimeline { ranks: timeline.ranks.iter().enumerate().map(rank).collect(), length: timeline.end(), lost: 0 }
    }
}

impl TrackSpan {
    fn of(span: &TraceSpan) -> Self {
        let TraceSpan { kind, name, of, start, end, bytes, .. } = span.clone();
        TrackSpan { kind, name, of, start, end, bytes }
    }

    /// The name of the operation, with the object it was applied to.
    pub fn label(&self) -> String {
        self.of.as_ref().map_or_else(|| self.name.to_string(), |of| format!("{} of {of}", self.name))
    }

    /// The duration in nanoseconds.
    pub fn length(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

impl Track {
    /// A track of spans of one thread, which nest by themselves; none without spans.
    fn nested(name: &str, mut spans: Vec<TrackSpan>) -> Option<Self> {
        sort(&mut spans);
        (!spans.is_empty()).then(|| Track { name: name.into(), spans })
    }

    /// The number of spans around each span.
    pub fn depths(&self) -> Vec<usize> {
        let mut open: Vec<u64> = Vec::new();
        let depth = |span: &TrackSpan| {
            while open.last().is_some_and(|&end| end <= span.start && end < span.end) {
                open.pop();
            }
            open.push(span.end);
            open.len() - 1
        };
        self.spans.iter().map(depth).collect()
    }
}

fn sort(spans: &mut [TrackSpan]) {
    spans.sort_by_key(|span| (span.start, std::cmp::Reverse(span.end)));
}

/// Distributes spans that may overlap over as many tracks as it takes.
fn lanes(name: &str, mut spans: Vec<TrackSpan>) -> Vec<Track> {
    sort(&mut spans);
    let mut lanes: Vec<Track> = Vec::new();
    for span in spans {
        let free = |lane: &&mut Track| lane.spans.last().is_none_or(|last| last.end <= span.start);
        match lanes.iter_mut().find(free) {
            Some(lane) => lane.spans.push(span),
            None => {
                let name = if lanes.is_empty() { name.into() } else { format!("{name} {}", lanes.len() + 1) };
                lanes.push(Track { name, spans: vec![span] });
            }
        }
    }
    lanes
}

fn by_rank<T>(all: &[T], rank: impl Fn(&T) -> usize) -> BTreeMap<usize, Vec<&T>> {
    let mut ranks: BTreeMap<usize, Vec<&T>> = BTreeMap::new();
    all.iter().for_each(|one| ranks.entry(rank(one)).or_default().push(one));
    ranks
}

fn of_rank(ranks: &mut BTreeMap<usize, RankTimeline>, rank: usize) -> &mut RankTimeline {
    ranks.entry(rank).or_insert_with(|| RankTimeline { rank, ..RankTimeline::default() })
}

/// Joins counters of one name into one series: the sum of the last values of their sources.
fn series(mut counters: Vec<&TraceCounter>) -> Vec<CounterSeries> {
    counters.sort_by_key(|counter| counter.at);
    let names: BTreeSet<&str> = counters.iter().map(|counter| &*counter.name).collect();
    let of_name = |name: &str| {
        let (mut sources, mut points) = (BTreeMap::new(), Vec::<(u64, u64)>::new());
        for counter in counters.iter().filter(|counter| &*counter.name == name) {
            sources.insert(counter.source, counter.value);
            let sum = sources.values().sum();
            match points.last_mut().filter(|(at, _)| *at == counter.at) {
                Some(last) => last.1 = sum,
                None => points.push((counter.at, sum)),
            }
        }
        CounterSeries { name: name.into(), points }
    };
    names.into_iter().map(of_name).collect()
}

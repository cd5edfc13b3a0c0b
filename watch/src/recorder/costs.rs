//! [`OperationCost`]: operations by the time they took.

use std::{collections::BTreeMap, sync::Arc};

use numcore::trace::SpanKind;

use super::{RunTimeline, Track, TrackSpan};

/// The calls of one operation in a recording, and their time on all recorded ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationCost {
    /// The name of the operation.
    pub name: Arc<str>,
    /// The number of calls.
    pub calls: u64,
    /// The sum of their durations, in nanoseconds.
    pub total: u64,
    /// The time outside of operations of the same kind within them, in nanoseconds.
    pub own: u64,
    /// The number of bytes that they moved; 0 if unknown.
    pub bytes: u64,
}

impl RunTimeline {
    /// The operations of a kind, the one with the most own time first, and by name where times are equal.
    #[doc(alias("key_averages", "profile", "hot spots"))]
    pub fn costs(&self, kind: SpanKind) -> Vec<OperationCost> {
        let mut costs: BTreeMap<Arc<str>, OperationCost> = BTreeMap::new();
        for track in self.ranks.iter().flat_map(|rank| &rank.tracks) {
            for (span, own) in own_times(track, kind) {
                let new = || OperationCost { name: span.name.clone(), calls: 0, total: 0, own: 0, bytes: 0 };
                let cost = costs.entry(span.name.clone()).or_insert_with(new);
                cost.calls += 1;
                cost.total += span.length();
                cost.own += own;
                cost.bytes += span.bytes;
            }
        }
        let mut costs: Vec<OperationCost> = costs.into_values().collect();
        costs.sort_by_key(|cost| std::cmp::Reverse(cost.own));
        costs
    }

    /// A table of the costliest operations of a kind, at most `most` of them; empty if the recording has none.
    ///
    /// Columns are the calls, the own time, its share of that of all, the mean duration of a call, and the bytes moved.
    pub fn costliest(&self, kind: SpanKind, most: usize) -> String {
        let costs = self.costs(kind);
        let all: u64 = costs.iter().map(|cost| cost.own).sum();
        let cells = |cost: &OperationCost| {
            [
                cost.name.to_string(),
                cost.calls.to_string(),
                format!("{:.3}", cost.own as f64 / 1e6),
                format!("{:.1}", 100.0 * cost.own as f64 / all.max(1) as f64),
                format!("{:.1}", cost.total as f64 / 1e3 / cost.calls as f64),
                if cost.bytes == 0 { "–".into() } else { format!("{:.1}", cost.bytes as f64 / 1e6) },
            ]
        };
        let titles = [kind.name(), "calls", "own ms", "%", "mean µs", "MB"].map(String::from);
        let rows: Vec<_> = [titles].into_iter().chain(costs.iter().take(most).map(cells)).collect();
        if costs.is_empty() {
            return String::new();
        }
        let [a, b, c, d, e, f] = std::array::from_fn(|column| {
            let widths = rows.iter().map(|row: &[String; 6]| row[column].chars().count());
            widths.max().unwrap_or(0)
        });
        let line = |[name, calls, own, share, mean, bytes]: &[String; 6]| {
            format!("{name:<a$}  {calls:>b$}  {own:>c$}  {share:>d$}  {mean:>e$}  {bytes:>f$}\n")
        };
        rows.iter().map(line).collect()
    }
}

/// The spans of a kind, each with its time outside of those of this kind within it.
fn own_times(track: &Track, kind: SpanKind) -> impl Iterator<Item = (&TrackSpan, u64)> {
    let mut own: Vec<u64> = track.spans.iter().map(TrackSpan::length).collect();
    let mut open: Vec<usize> = Vec::new();
    for (k, depth) in track.depths().into_iter().enumerate() {
        open.truncate(depth);
        let around = open.iter().rev().find(|&&around| track.spans[around].kind == kind);
        if let Some(&around) = around.filter(|_| track.spans[k].kind == kind) {
            own[around] = own[around].saturating_sub(track.spans[k].length());
        }
        open.push(k);
    }
    track.spans.iter().zip(own).filter(move |(span, _)| span.kind == kind)
}

//! The flight recorder: the last calls of every rank, for the messages of errors.

use std::{collections::VecDeque, fmt::Write, sync::Arc};

use super::Fingerprint;

/// The number of calls kept of each rank.
const KEPT: usize = 4;

/// The last calls of the ranks of a world.
#[derive(Debug, Default)]
pub struct FlightRecorder(Vec<VecDeque<RecordedCall>>);

/// A call: its number in its group, and the world ranks of that group.
type RecordedCall = (Arc<[usize]>, u64, Fingerprint);

impl FlightRecorder {
    /// Makes the empty recorder of a world of `ranks` ranks.
    pub fn new(ranks: usize) -> Self {
        FlightRecorder(vec![VecDeque::with_capacity(KEPT); ranks])
    }

    /// Notes call `number` of world rank `rank` in the group of these world ranks.
    pub fn note(&mut self, rank: usize, group: Arc<[usize]>, number: u64, call: Fingerprint) {
        // Another process may take itself for a member of a world that this one made without it.
        let Some(calls) = self.0.get_mut(rank) else { return };
        if calls.len() == KEPT {
            calls.pop_front();
        }
        calls.push_back((group, number, call));
    }

    /// The text of all calls, a line for each rank.
    pub fn lines(&self) -> String {
        let mut text = String::from("last calls:");
        for (rank, calls) in self.0.iter().enumerate() {
            let line = |(group, n, call): &RecordedCall| {
                let call = call.in_world(group);
                if group.iter().copied().eq(0..self.0.len()) {
                    format!("#{n} {call}")
                } else {
                    format!("#{n} of ranks {group:?} {call}")
                }
            };
            let calls: Vec<String> = calls.iter().rev().map(line).collect();
            // Writing to a String cannot fail.
            let _ =
                write!(text, "\n  rank {rank}: {}", if calls.is_empty() { "none".into() } else { calls.join(" ← ") });
        }
        text
    }
}

//! The positions of sends and receives.
//!
//! The schedule is played with the expected costs and overlapped sends. Every message then gets a moment, equal for
//! both its ends. It is the first at which the value is ready, its reader will not be late, and both ranks are between
//! two passes. Without such a moment one rank has to wait for the other, and the moment with the least wait is taken.
//! Each rank's list is its passes and messages by time.
//!
//! All lists are parts of one total order, in which every action comes after its inputs and a message is one event.
//! Synchronous sends therefore cannot deadlock. Overlapped sends delay no pass at all. Synchronous sends delay no pass
//! if their messages found both ranks between passes. With F = I = W that was true of all messages at every size
//! tested. The exception is Interleaved1F1B, whose forwards can coincide with the middle of a neighbour's backward.
//!
//! Two alternatives were rejected. Sending right after the producing pass and receiving right before the reading one
//! deadlocks 1F1B. Placing both ends as soon as a walk over the ranks in turn can is safe, but ignores time.

use numcore::{Error, Result};

use crate::action::{Action, Direction, Message};
use crate::costs::Costs;
use crate::deadlock::deadlock_error;
use crate::replay::{SendMode, Span, replay};
use crate::schedule::{PassInput, Schedule};

/// A message, its moment, and the ranks at its ends.
struct Transfer {
    send: Message,
    recv: Message,
    from: usize,
    to: usize,
    moment: u64,
}

impl Transfer {
    /// The total order of messages. At one moment a complete ring of neighbours may have something to send. Odd and
    /// even senders in turn make that take two transfers or three, not one per rank. (LoopedBFS at (v, m, p) = (2, 16,
    /// 8) with synchronous messages of 0.3 F takes 161 F, and 219 F with senders in plain order.)
    fn key(&self) -> (u64, Direction, usize, usize, usize, usize) {
        let Message { stage, direction, micro, .. } = self.send;
        (self.moment, direction, self.from % 2, self.from, stage, micro)
    }
}

/// The rows with their messages.
pub(super) fn add(schedule: &Schedule, costs: &Costs) -> Result<Vec<Vec<Action>>> {
    let spans =
        replay(schedule, costs, SendMode::Overlapped).map_err(|stuck| deadlock_error("pipeline lowering", &stuck))?;
    if spans.iter().flatten().any(|span| span.end == u64::MAX) {
        return Err(Error::schedule("pipeline lowering", "the expected costs add up to more ticks than 64 bits hold"));
    }
    let mut transfers = transfers(schedule, costs, &spans);
    transfers.sort_by_key(Transfer::key);
    let mut ends: Vec<Vec<(u64, Action)>> = vec![Vec::new(); spans.len()];
    for transfer in &transfers {
        ends[transfer.from].push((transfer.moment, transfer.send.into()));
        ends[transfer.to].push((transfer.moment, transfer.recv.into()));
    }
    Ok(schedule.rows().iter().zip(&spans).zip(&ends).map(|((row, spans), ends)| merge(row, spans, ends)).collect())
}

/// A rank's passes and message ends by time; a message is before the pass that starts at its moment.
fn merge(row: &[Action], spans: &[Span], ends: &[(u64, Action)]) -> Vec<Action> {
    let mut merged = Vec::with_capacity(row.len() + ends.len());
    let mut ends = ends.iter().peekable();
    for (&pass, span) in row.iter().zip(spans) {
        while let Some((_, end)) = ends.next_if(|(moment, _)| *moment <= span.start) {
            merged.push(*end);
        }
        merged.push(pass);
    }
    merged.extend(ends.map(|(_, end)| *end));
    merged
}

fn transfers(schedule: &Schedule, costs: &Costs, spans: &[Vec<Span>]) -> Vec<Transfer> {
    let made = times(schedule, spans);
    let mut transfers = Vec::new();
    for (to, position, action) in schedule.actions() {
        let needed = spans[to][position].start;
        for compute in action.computes() {
            let PassInput::Received(recv) = schedule.input(compute) else { continue };
            let Some(send) = recv.peer() else { continue };
            let Some(from) = schedule.placement().rank_of(send.stage) else { continue };
            let ready = made[send.direction as usize][send.stage * schedule.micro_batches() + send.micro];
            let latest = needed.saturating_sub(costs.comm);
            let moment = transfer_time(&spans[from], &spans[to], ready, latest);
            transfers.push(Transfer { send, recv, from, to, moment });
        }
    }
    transfers
}

/// The times at which each stage's outputs and input gradients are ready.
fn times(schedule: &Schedule, spans: &[Vec<Span>]) -> [Vec<u64>; 2] {
    let size = schedule.stages() * schedule.micro_batches();
    let mut made = [vec![0; size], vec![0; size]];
    for (rank, position, action) in schedule.actions() {
        for compute in action.computes() {
            if let Some(direction) = compute.pass.makes() {
                let at = compute.stage * schedule.micro_batches() + compute.micro;
                made[direction as usize][at] = spans[rank][position].end;
            }
        }
    }
    made
}

/// The moment from `ready` to `latest` at which the ranks wait least for each other; the first of several. A moment
/// within a pass of the sender counts only if that pass ends in time for the reader.
fn transfer_time(from: &[Span], to: &[Span], ready: u64, latest: u64) -> u64 {
    let (mut best, mut least) = (ready, u64::MAX);
    let mut moment = Some(ready);
    while let Some(now) = moment.filter(|&now| least > 0 && now <= latest.max(ready)) {
        let (sender, receiver) = (busy_until(from, now), busy_until(to, now));
        let wait = sender.max(receiver).map_or(0, |end| end - now);
        if wait < least && sender.is_none_or(|end| end <= latest) {
            (best, least) = (now, wait);
        }
        moment = [sender, receiver].into_iter().flatten().min();
    }
    best
}

/// The end of the pass that contains this moment.
fn busy_until(spans: &[Span], moment: u64) -> Option<u64> {
    let next = spans.partition_point(|span| span.end <= moment);
    spans.get(next).filter(|span| span.start < moment).map(|span| span.end)
}

//! Where sends and receives stand.
//!
//! The schedule is played with the expected costs and free sends. Then every message gets a moment, the same for both its
//! ends: the first at which it is there, both ranks stand between two passes, and its reader will not be late. Each rank's
//! list is its passes and messages by time.
//!
//! All lists are parts of one total order in which everything comes after what it needs and a message is one event, so
//! synchronous sends cannot deadlock. A message at a moment when both ranks are between passes makes neither wait. Where there is
//! no such moment before the reader starts, the message goes when it is there, and the receiver takes it after the pass it is in.
//! (Sending right after the producing pass and receiving right before the reading one deadlocks 1F1B; putting both ends
//! down in whatever order a walk over the ranks finds them, as `torch.distributed.pipelining` does, is safe but lets passes wait.)

use numcore::Result;

use crate::pipeline::action::{Action, Direction, Message};
use crate::pipeline::costs::Costs;
use crate::pipeline::play::{Sends, Span, play};
use crate::pipeline::schedule::{Input, Schedule};
use crate::pipeline::stuck::stuck_error;

/// A message, its moment, and the ranks at its ends.
struct Transfer {
    send: Message,
    recv: Message,
    from: usize,
    to: usize,
    moment: u64,
}

impl Transfer {
    /// The total order of messages. At one moment chains of neighbours may all want to pass something on; odd and even senders in
    /// turn make that take two transfers, not one per rank.
    fn key(&self) -> (u64, Direction, usize, usize, usize, usize) {
        let Message { stage, direction, micro, .. } = self.send;
        (self.moment, direction, self.from % 2, self.from, stage, micro)
    }
}

/// The rows with their messages.
pub(super) fn add(schedule: &Schedule, costs: &Costs) -> Result<Vec<Vec<Action>>> {
    let spans = play(schedule, costs, Sends::Overlapped).map_err(|stuck| stuck_error("pipeline lowering", &stuck))?;
    let mut transfers = transfers(schedule, costs, &spans);
    transfers.sort_by_key(Transfer::key);
    let mut ends: Vec<Vec<(u64, Action)>> = vec![Vec::new(); spans.len()];
    for transfer in &transfers {
        ends[transfer.from].push((transfer.moment, transfer.send.into()));
        ends[transfer.to].push((transfer.moment, transfer.recv.into()));
    }
    Ok(schedule.rows().iter().zip(&spans).zip(&ends).map(|((row, spans), ends)| merge(row, spans, ends)).collect())
}

/// A rank's passes and message ends by time; a message before the pass that starts at its moment.
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
            let Input::Received(recv) = schedule.input(compute) else { continue };
            let Some(send) = recv.peer() else { continue };
            let Some(from) = schedule.placement().rank_of(send.stage) else { continue };
            let ready = made[send.direction as usize][send.stage * schedule.micro_batches() + send.micro];
            let latest = needed.saturating_sub(costs.comm);
            let moment = common_pause(&spans[from], &spans[to], ready, latest).unwrap_or(ready);
            transfers.push(Transfer { send, recv, from, to, moment });
        }
    }
    transfers
}

/// When each stage's outputs and input gradients are there.
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

/// The first moment from `ready` to `latest` at which neither rank is in the middle of a pass.
fn common_pause(from: &[Span], to: &[Span], ready: u64, latest: u64) -> Option<u64> {
    let mut moment = ready;
    while moment <= latest {
        match busy_until(from, moment).max(busy_until(to, moment)) {
            None => return Some(moment),
            Some(end) => moment = end,
        }
    }
    None
}

/// The end of the pass this moment is in the middle of.
fn busy_until(spans: &[Span], moment: u64) -> Option<u64> {
    let next = spans.partition_point(|span| span.end <= moment);
    spans.get(next).filter(|span| span.start < moment).map(|span| span.end)
}

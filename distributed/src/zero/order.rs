//! The order in which units are read, and the order in which their gradients are sent.

/// The order in which a model reads sets of units, recorded from the last forward. Prefetches follow it.
#[derive(Default)]
pub(super) struct ReadOrder {
    order: Vec<usize>,
    seen: Vec<usize>,
    pub(super) backward: bool,
}

impl ReadOrder {
    /// Notes that a set is about to be read.
    pub(super) fn note(&mut self, set: usize) {
        if !self.backward && !self.seen.contains(&set) {
            self.seen.push(set);
        }
    }

    /// Begins a step. Reads since the last backward pass, in an evaluation, are discarded.
    pub(super) fn begin_step(&mut self) {
        self.seen.clear();
        self.backward = false;
    }

    /// Begins a backward pass, after the forward.
    pub(super) fn begin_sweep(&mut self) {
        self.backward = true;
        if !self.seen.is_empty() {
            self.order = std::mem::take(&mut self.seen);
        }
    }

    /// The set that was read after this one or, in backward, before it.
    pub(super) fn following(&self, set: usize) -> Option<usize> {
        let at = self.order.iter().position(|&other| other == set)?;
        let next = if self.backward { at.checked_sub(1) } else { Some(at + 1) };
        next.and_then(|at| self.order.get(at).copied())
    }
}

/// The order in which units with gradients are sent, which is equal on every rank.
pub(super) struct SendOrder {
    order: Vec<usize>,
    /// The number of units sent in this backward pass.
    next: usize,
    /// Units in the order in which they became complete in this backward pass.
    complete: Vec<usize>,
}

impl SendOrder {
    /// Makes a send order, of which all units count as sent until a backward pass begins.
    pub(super) fn new(order: Vec<usize>) -> Self {
        SendOrder { next: order.len(), order, complete: Vec::new() }
    }

    /// Sends a further unit from now on, after all others.
    pub(super) fn add(&mut self, unit: usize) {
        self.order.push(unit);
        self.end();
    }

    pub(super) fn begin_sweep(&mut self) {
        self.next = 0;
        self.complete.clear();
    }

    /// Sends nothing until a backward pass begins.
    pub(super) fn end(&mut self) {
        self.next = self.order.len();
    }

    /// The next unit to be sent; none if all were sent.
    pub(super) fn next(&self) -> Option<usize> {
        self.order.get(self.next).copied()
    }

    /// Counts the next unit as sent.
    pub(super) fn advance(&mut self) {
        self.next += 1;
    }

    /// Notes that a unit became complete.
    pub(super) fn note(&mut self, unit: usize) {
        if !self.complete.contains(&unit) {
            self.complete.push(unit);
        }
    }

    /// The order in which units became complete, as bytes that ranks exchange.
    pub(super) fn seen(&self) -> Vec<u8> {
        self.complete.iter().flat_map(|&unit| (unit as u64).to_le_bytes()).collect()
    }

    /// Sends units in the order `seen` of a rank from now on. Units that it lacks come last, in their previous order.
    pub(super) fn follow(&mut self, seen: &[u8]) {
        let word = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).unwrap_or(u64::MAX) as usize;
        let first: Vec<usize> = seen.chunks(8).map(word).filter(|unit| self.order.contains(unit)).collect();
        let rest = self.order.iter().copied().filter(|unit| !first.contains(unit));
        self.order = first.iter().copied().chain(rest).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_follow_what_was_seen() {
        let mut sends = SendOrder::new(vec![3, 2, 0]);
        sends.begin_sweep();
        [2, 3, 2].into_iter().for_each(|unit| sends.note(unit));
        let seen = sends.seen();
        sends.follow(&seen);
        assert_eq!(sends.order, [2, 3, 0]);
        // A unit that is not sent, and a rank that has seen nothing.
        sends.follow(&7u64.to_le_bytes());
        sends.follow(&[]);
        assert_eq!(sends.order, [2, 3, 0]);
    }
}

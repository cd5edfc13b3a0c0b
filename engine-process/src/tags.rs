//! The tags of the messages of calls.

use std::ops::Range;

/// Tags of messages to each process: consecutive numbers, which wrap around to 0 at the limit.
pub(crate) struct Tags {
    next: Vec<u32>,
    limit: u32,
    /// Tags of calls that ended before their messages, for which the receiver may wait forever; they are never used
    /// again.
    lost: Vec<Vec<Range<u32>>>,
}

impl Tags {
    /// Creates counters of tags below `limit`, one for each of `processes` processes.
    pub(crate) fn new(processes: usize, limit: u32) -> Self {
        Tags { next: vec![0; processes], limit, lost: vec![Vec::new(); processes] }
    }

    /// The first of `count` consecutive tags for messages to a process, none of them in `used`. `None` if there are not
    /// enough in a row.
    pub(crate) fn take(&mut self, to: usize, count: u32, used: &[Range<u32>]) -> Option<u32> {
        let (mut begin, mut laps) = (self.next[to], 0);
        loop {
            let end = begin.saturating_add(count);
            if end >= self.limit {
                (begin, laps) = (0, laps + 1);
                if laps == 2 {
                    return None;
                }
                continue;
            }
            let is_hit = |range: &&Range<u32>| range.start < end && begin < range.end;
            match used.iter().chain(&self.lost[to]).find(is_hit) {
                Some(range) => begin = range.end,
                None => {
                    self.next[to] = end;
                    return Some(begin);
                }
            }
        }
    }

    /// Retires the tags of a call that has ended before its messages.
    pub(crate) fn lose(&mut self, to: usize, range: Range<u32>) {
        if !range.is_empty() {
            self.lost[to].push(range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_begin_anew_with_those_that_no_call_has() {
        let mut tags = Tags::new(2, 10);
        let own = |tags: &mut Tags, count, used: Option<Range<u32>>| tags.take(1, count, used.as_slice());
        assert_eq!([3, 3].map(|count| own(&mut tags, count, None)), [Some(0), Some(3)]);
        assert_eq!(tags.take(0, 3, &[]), Some(0), "each process has its own");
        // The tag below the limit is never given.
        assert_eq!(own(&mut tags, 3, None), Some(6));
        assert_eq!(own(&mut tags, 1, Some(0..3)), Some(3), "the first call is under way");
        tags.lose(1, 4..6);
        assert_eq!(own(&mut tags, 2, None), Some(6));
        assert_eq!(own(&mut tags, 2, None), Some(0));
        assert_eq!(own(&mut tags, 3, None), Some(6));
        assert_eq!(own(&mut tags, 4, Some(3..4)), None, "no four in a row");
        assert_eq!(own(&mut tags, 0, Some(0..9)), Some(9), "none are needed");
        assert_eq!(own(&mut tags, 10, None), None);
    }
}

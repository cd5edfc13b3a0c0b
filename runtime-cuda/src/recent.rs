//! The last launches of a queue. A fault of the device is reported by the next call, whichever it is, so its message
//! lists the launches before it.

use std::{collections::VecDeque, fmt::Write};

use parking_lot::Mutex;

use crate::driver::Grid;

/// The number of launches that are kept.
const KEPT: usize = 16;

struct RecentLaunch {
    op: &'static str,
    entry: String,
    blocks: [usize; 3],
    threads: [u32; 2],
}

/// The last launches of a queue, oldest first. Once `KEPT` are held, noting one more allocates nothing.
#[derive(Default)]
pub(crate) struct RecentLaunches(Mutex<VecDeque<RecentLaunch>>);

impl RecentLaunches {
    pub(crate) fn note(&self, op: &'static str, entry: &str, grid: Grid) {
        let mut all = self.0.lock();
        let oldest = if all.len() == KEPT { all.pop_front() } else { None };
        let mut name = oldest.map_or_else(String::new, |launch| launch.entry);
        name.clear();
        name.push_str(entry);
        all.push_back(RecentLaunch { op, entry: name, blocks: grid.blocks, threads: grid.threads });
    }

    /// One line for each launch; empty if there was none.
    pub(crate) fn listing(&self) -> String {
        let all = self.0.lock();
        let mut text = String::new();
        if !all.is_empty() {
            text.push_str("\nthe launches before it, oldest first:");
        }
        for RecentLaunch { op, entry, blocks: [x, y, z], threads: [tx, ty] } in all.iter() {
            // Writing to a String cannot fail.
            let _ = write!(text, "\n  {op}: {entry}, {x}x{y}x{z} blocks of {tx}x{ty}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_sixteen_are_told_in_order() {
        let recent = RecentLaunches::default();
        assert_eq!(recent.listing(), "");
        for i in 0..20 {
            recent.note("add", &format!("k{i}"), Grid { blocks: [i, 1, 1], threads: [256, 1], shared: 0 });
        }
        let listed = recent.listing();
        let lines: Vec<&str> = listed.lines().skip(2).collect();
        assert_eq!(lines.len(), KEPT);
        assert_eq!(lines[0], "  add: k4, 4x1x1 blocks of 256x1");
        assert_eq!(lines[KEPT - 1], "  add: k19, 19x1x1 blocks of 256x1");
    }
}

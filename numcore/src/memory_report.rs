//! The report on a device's memory that an out-of-memory error carries.

use std::fmt;

use crate::{Bytes, MemoryCategory, MemoryStats};

/// The holders of a device's memory, as far as they are known: the queue that requested memory, other queues, the
/// driver.
///
/// `Display` writes one line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// The account of the queue that requested memory.
    pub stats: MemoryStats,
    /// Free bytes that the pool of that queue keeps for reuse.
    pub kept: usize,
    /// The size in bytes of the largest of these free blocks.
    pub largest_kept: usize,
    /// The totals of the other queues of the device; `None` if queues do not know each other.
    pub others: Option<OtherQueues>,
    /// The device's memory as its driver reports it; `None` if it does not.
    pub device: Option<DeviceBytes>,
}

/// The memory of all other queues of a device together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OtherQueues {
    /// The number of these queues.
    pub count: usize,
    /// Bytes in use by these queues.
    pub live: usize,
    /// Free bytes that their pools keep for reuse.
    pub kept: usize,
}

/// The memory of a device, as its driver reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceBytes {
    /// The size of the memory in bytes.
    pub capacity: usize,
    /// Bytes that no process has allocated.
    pub free: usize,
}

impl MemoryReport {
    /// A report that only has the number of bytes in use.
    pub fn of_live(live: usize) -> Self {
        let stats = MemoryStats { total: Bytes { live, peak: live }, ..MemoryStats::default() };
        MemoryReport { stats, ..MemoryReport::default() }
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(DeviceBytes { capacity, free }) = self.device {
            write!(f, "the device has {}, of which {} are free; ", Size(capacity), Size(free))?;
        }
        write!(f, "{} are in use", Size(self.stats.total.live))?;
        let mut before = " (";
        for category in MemoryCategory::ALL {
            let live = self.stats.of(category).live;
            if live > 0 {
                write!(f, "{before}{} {}", category.name(), Size(live))?;
                before = ", ";
            }
        }
        f.write_str(if before == ", " { ")" } else { "" })?;
        if self.kept > 0 {
            write!(f, ", {} are kept for reuse, {} the largest block", Size(self.kept), Size(self.largest_kept))?;
        }
        match self.others {
            Some(OtherQueues { count, live, kept }) if count > 0 => {
                let queues = if count == 1 { "queue" } else { "queues" };
                write!(f, "; {count} other {queues}: {} in use, {} kept for reuse", Size(live), Size(kept))
            }
            _ => Ok(()),
        }
    }
}

/// A number of bytes, displayed in the largest unit that gives at least 1.
struct Size(usize);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
        match units.into_iter().find(|(_, bits)| self.0 >> bits > 0) {
            Some((name, bits)) => write!(f, "{:.1} {name}", self.0 as f64 / (1u64 << bits) as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_is_said_and_nothing_else() {
        assert_eq!(MemoryReport::of_live(1000).to_string(), "1000 B are in use");
        let mut stats = MemoryStats::default();
        let live = |bytes| Bytes { live: bytes, peak: bytes };
        stats.total = live(5 << 30);
        stats.by_use[MemoryCategory::Activations as usize] = live(4 << 30);
        stats.by_use[MemoryCategory::Optimizer as usize] = live(1 << 30);
        let report = MemoryReport {
            stats,
            kept: 3 << 20,
            largest_kept: 1536 << 10,
            others: Some(OtherQueues { count: 2, live: 7 << 10, kept: 0 }),
            device: Some(DeviceBytes { capacity: 6 << 30, free: 100 }),
        };
        assert_eq!(
            report.to_string(),
            "the device has 6.0 GiB, of which 100 B are free; 5.0 GiB are in use (activations 4.0 GiB, optimizer 1.0 GiB), 3.0 MiB are kept \
             for reuse, 1.5 MiB the largest block; 2 other queues: 7.0 KiB in use, 0 B kept for reuse"
        );
    }
}

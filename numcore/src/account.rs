//! The memory account of a runtime: bytes in use by category, and bytes allocated from the system.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::{MemoryCategory, MemoryStats, trace};

/// An account of bytes in use and bytes allocated from the system, which also reports changes to an active recording.
#[derive(Debug)]
pub struct MemoryAccount {
    stats: MemoryStats,
    /// The number of this account, which distinguishes it from others in a recording.
    number: u32,
    /// The number of the recording that has received the live bytes of all categories.
    recorded: u64,
}

impl Default for MemoryAccount {
    fn default() -> Self {
        static ACCOUNTS: AtomicU32 = AtomicU32::new(0);
        let number = ACCOUNTS.fetch_add(1, Ordering::Relaxed);
        MemoryAccount { stats: MemoryStats::default(), number, recorded: 0 }
    }
}

impl MemoryAccount {
    /// The booked bytes.
    pub fn stats(&self) -> &MemoryStats {
        &self.stats
    }

    /// Books `bytes` under a category, as in use from now on.
    pub fn book(&mut self, bytes: usize, use_: MemoryCategory) {
        self.stats.allocations += 1;
        for account in [&mut self.stats.by_use[use_ as usize], &mut self.stats.total] {
            account.live += bytes;
            account.peak = account.peak.max(account.live);
        }
        self.trace(use_);
    }

    /// Books `bytes` that are no longer in use.
    pub fn unbook(&mut self, bytes: usize, use_: MemoryCategory) {
        self.stats.by_use[use_ as usize].live -= bytes;
        self.stats.total.live -= bytes;
        self.trace(use_);
    }

    /// Sets the number of bytes that are allocated from the system now, in use or kept for reuse.
    pub fn set_reserved(&mut self, bytes: usize) {
        self.stats.reserved = bytes;
    }

    /// Resets peaks to the bytes that are live now.
    pub fn reset_peak(&mut self) {
        let stats = &mut self.stats;
        stats.by_use.iter_mut().chain([&mut stats.total]).for_each(|b| b.peak = b.live);
    }

    /// Records a change of one category. The first change in a recording records all categories, since others may not
    /// change.
    #[inline]
    fn trace(&mut self, use_: MemoryCategory) {
        let Some(recording) = trace::counted_in() else { return };
        let note = |use_: MemoryCategory| trace::counter(use_.name(), self.number, self.stats.of(use_).live as u64);
        if self.recorded == recording {
            note(use_);
        } else {
            MemoryCategory::ALL.into_iter().for_each(note);
            self.recorded = recording;
        }
    }
}

//! The ways in which a kernel moves operands that are larger than the caches. The speed of a way differs between CPUs
//! by up to a half. So each kernel tries all of them in its first large launches, and keeps the fastest. Results have
//! the same bits.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Instant,
};

/// A way of moving operands that are larger than the caches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::pointwise) struct Way {
    /// The number of elements that are computed at once; `None` for as many as blocks in L1 allow.
    pub block: Option<usize>,
    /// The prefetch distance in bytes; 0 to leave it to the hardware.
    pub ahead: usize,
    /// True if outputs are computed in L1 and copied from there by non-temporal stores, which do not read the line they
    /// write.
    pub bypass: bool,
}

/// The ways that a kernel may take; `record/` has measurements. The first is taken where nothing is tried.
pub(in crate::pointwise) const WAYS: [Way; 4] = [
    Way { block: None, ahead: 0, bypass: false },
    Way { block: Some(256), ahead: 1024, bypass: false },
    Way { block: Some(256), ahead: 512, bypass: true },
    Way { block: Some(128), ahead: 1024, bypass: true },
];

/// The number of timed launches of each way: the first may fault pages in.
const ROUNDS: usize = 3;

/// The times of a kernel's launches, by way.
#[derive(Debug, Default)]
pub(in crate::pointwise) struct FastestWay {
    launches: AtomicU32,
    /// The least time of each way, in femtoseconds for an element; 0 before the first launch.
    least: [AtomicU64; WAYS.len()],
}

impl FastestWay {
    /// Runs `launch` over `n` elements in one of the first `ways` ways: the next to be tried, or the fastest.
    pub(in crate::pointwise) fn run(&self, ways: usize, n: usize, launch: impl FnOnce(usize)) {
        let launches = self.launches.load(Ordering::Relaxed) as usize;
        if launches >= ROUNDS * ways {
            return launch(self.fastest(ways));
        }
        self.launches.fetch_add(1, Ordering::Relaxed);
        let (way, begun) = (launches % ways, Instant::now());
        launch(way);
        self.took(way, begun.elapsed().as_nanos() as u64, n);
    }

    fn took(&self, way: usize, nanoseconds: u64, n: usize) {
        let each = (nanoseconds.saturating_mul(1_000_000) / n.max(1) as u64).max(1);
        let least = |before: u64| (before == 0 || each < before).then_some(each);
        // A lower time that another thread has found meanwhile stays.
        let _ = self.least[way].fetch_update(Ordering::Relaxed, Ordering::Relaxed, least);
    }

    fn fastest(&self, ways: usize) -> usize {
        let time = |way: &usize| match self.least[*way].load(Ordering::Relaxed) {
            0 => u64::MAX,
            time => time,
        };
        (0..ways).min_by_key(time).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_is_tried_and_the_fastest_is_kept() {
        let known = FastestWay::default();
        let mut tried = Vec::new();
        for _ in 0..ROUNDS * WAYS.len() {
            known.run(WAYS.len(), 1000, |way| tried.push(way));
        }
        assert_eq!(tried, [0, 1, 2, 3].repeat(ROUNDS));
        let known = FastestWay { launches: AtomicU32::new(100), ..Default::default() };
        for (way, time) in [(0, 500), (1, 300), (2, 900), (1, 700), (2, 200), (3, 400)] {
            known.took(way, time, 1000);
        }
        let kept = |ways| {
            let mut kept = None;
            known.run(ways, 1000, |way| kept = Some(way));
            kept
        };
        assert_eq!((kept(4), kept(2)), (Some(2), Some(1)));
    }
}

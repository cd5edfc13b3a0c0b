//! Formulas of pipeline schedules: the time that they idle, and the activations that they hold.

use distributed::pipeline::{PipeShape, ScheduleKind};

use super::StageSeconds;

/// Tells whether a schedule splits backward passes. DualPipeV splits few.
pub(super) fn splits(kind: ScheduleKind) -> bool {
    use ScheduleKind::{InterleavedZeroBubble, ZbH1, ZbH2, Zbv};
    matches!(kind, ZbH1 | ZbH2 | InterleavedZeroBubble | Zbv)
}

impl StageSeconds {
    /// The time of a micro-batch.
    pub(super) fn busy(&self, kind: ScheduleKind) -> f64 {
        self.f + if splits(kind) { self.i + self.w } else { self.b }
    }

    /// The time of a micro-batch until the gradient of its input is made.
    pub(super) fn trip(&self, kind: ScheduleKind) -> f64 {
        self.f + if splits(kind) { self.i } else { self.b }
    }

    /// The idle time in a step of `v` stages a rank (Narayanan et al. 2021, Qi et al. 2023 and 2024, DeepSeek-AI 2024).
    pub(super) fn idle(&self, kind: ScheduleKind, v: usize) -> f64 {
        let StageSeconds { f, b, i, w, .. } = *self;
        let idle = match kind {
            ScheduleKind::GPipe | ScheduleKind::OneFOneB => f + b,
            ScheduleKind::Interleaved | ScheduleKind::LoopedBfs => (f + b) / v as f64,
            ScheduleKind::ZbH1 => f + i - w,
            ScheduleKind::ZbH2 => f + i - 2.0 * w,
            ScheduleKind::InterleavedZeroBubble => (f + i - w) / v as f64,
            ScheduleKind::Zbv => (f + i - 2.0 * w) / 2.0,
            ScheduleKind::DualPipeV => (f + 2.0 * i - w) / 2.0,
        };
        idle.max(0.0)
    }
}

/// The stage inputs that rank `rank` holds at once, each of one of its `v` stages.
pub(super) fn in_flight(kind: ScheduleKind, shape: PipeShape, rank: usize) -> usize {
    let PipeShape { ranks: p, stages_per_rank: v, micro_batches: m } = shape;
    let all = m * v;
    let held = match kind {
        ScheduleKind::GPipe | ScheduleKind::LoopedBfs => all,
        ScheduleKind::OneFOneB => p - rank,
        // Chunks take turns for groups of micro-batches, which are larger than `p` where `p` does not divide `m`.
        ScheduleKind::Interleaved => 2 * (p - rank - 1) + (v - 1) * (m / (m / p).max(1)) + 1,
        ScheduleKind::ZbH1 => p,
        ScheduleKind::ZbH2 => 2 * p - 1,
        ScheduleKind::InterleavedZeroBubble => v * p,
        ScheduleKind::Zbv => 2 * p,
        ScheduleKind::DualPipeV => 2 * p + 1,
    };
    held.min(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The peaks of the generated schedules, also where `p` does not divide `m`.
    #[test]
    fn chunks_in_flight_are_those_of_the_schedule() {
        for (p, v, m, held) in [(8, 6, 15, 90), (16, 4, 31, 124), (8, 6, 30, 65), (4, 3, 6, 18), (4, 3, 16, 15)] {
            let shape = PipeShape { ranks: p, stages_per_rank: v, micro_batches: m };
            assert_eq!(in_flight(ScheduleKind::Interleaved, shape, 0), held, "{shape:?}");
        }
    }
}

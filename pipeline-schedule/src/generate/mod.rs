//! Well-known schedules, by name. Each file writes down one order of passes; this one names them.
//!
//! Symbols throughout: `p` ranks, `v` stages per rank, `m` micro-batches, `r` a rank.

mod dualpipe_v;
mod forward_only;
mod gpipe;
mod interleaved;
mod interleaved_zero_bubble;
mod looped_bfs;
mod one_f_one_b;
mod row;
mod zb_h1;
mod zb_h2;
mod zbv;

use std::{fmt, str::FromStr};

use numcore::{Error, Result};

use super::placement::StagePlacement;
use super::schedule::Schedule;
use row::RowBuilder;

/// A schedule: its name in text and aliases, the placement of its stages, its preconditions, and its generator.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal $(| $alias:literal)*, $generator:path;)*) => {
        /// The schedules that can be generated.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ScheduleKind { $($(#[$doc])* $kind,)* }

        impl ScheduleKind {
            /// All kinds.
            pub const ALL: &[ScheduleKind] = &[$(ScheduleKind::$kind),*];

            fn names(self) -> &'static [&'static str] {
                match self { $(ScheduleKind::$kind => &[$name $(, $alias)*],)* }
            }

            fn generator(self) -> &'static Generator {
                match self { $(ScheduleKind::$kind => &$generator,)* }
            }
        }
    };
}

kinds! {
    /// All forwards, then all backwards (Huang 2019).
    #[doc(alias("ScheduleGPipe"))]
    GPipe = "GPipe", gpipe::GENERATOR;
    /// One forward, one backward: PipeDream-flush (Narayanan 2021).
    #[doc(alias("Schedule1F1B"))]
    OneFOneB = "1F1B", one_f_one_b::GENERATOR;
    /// 1F1B over several stages per rank (Narayanan 2021).
    #[doc(alias("ScheduleInterleaved1F1B"))]
    Interleaved = "Interleaved1F1B" | "Interleaved", interleaved::GENERATOR;
    /// Breadth first: every micro-batch through a stage before the rank's next stage (Lamy-Poirier 2023).
    #[doc(alias("ScheduleLoopedBFS"))]
    LoopedBfs = "LoopedBFS", looped_bfs::GENERATOR;
    /// Zero bubble within the memory of 1F1B (Qi 2023).
    ZbH1 = "ZB-H1" | "ZBH1", zb_h1::GENERATOR;
    /// Zero bubble with twice that memory (Qi 2023).
    ZbH2 = "ZB-H2" | "ZBH2", zb_h2::GENERATOR;
    /// Zero bubble within the memory of 1F1B, over several stages per rank.
    #[doc(alias("ScheduleInterleavedZeroBubble"))]
    InterleavedZeroBubble = "InterleavedZeroBubble" | "InterleavedZB", interleaved_zero_bubble::GENERATOR;
    /// Zero bubble on a fold of two stages per rank (Qi 2024).
    #[doc(alias("ScheduleZBVZeroBubble"))]
    Zbv = "ZBV" | "ZBVZeroBubble", zbv::GENERATOR;
    /// Overlapped forward and backward on a fold (DeepSeek and Sea AI Lab 2025).
    #[doc(alias("ScheduleDualPipeV"))]
    DualPipeV = "DualPipeV", dualpipe_v::GENERATOR;
}

/// The size of a pipeline schedule. Each kind of schedule has [preconditions](ScheduleKind::generate) on these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PipeShape {
    /// The number `p` of pipeline-parallel ranks.
    pub ranks: usize,
    /// The number `v` of stages on each rank, Megatron's virtual pipeline size; the model has `p·v` stages.
    pub stages_per_rank: usize,
    /// The number `m` of micro-batches in one execution of the schedule.
    pub micro_batches: usize,
}

impl ScheduleKind {
    /// Generates the forward and backward passes of every rank, in order. Messages between ranks are not in it;
    /// [`lower`](Schedule::lower) adds them.
    ///
    /// # Errors
    /// Fails unless the preconditions hold, and names the first that does not, with `p`, `v` and `m`:
    ///
    /// | kind | precondition |
    /// |---|---|
    /// | all | `p`, `v`, `m` ≥ 1 and `p·v·m` ≤ 2^26 |
    /// | [`GPipe`](Self::GPipe), [`OneFOneB`](Self::OneFOneB), [`ZbH1`](Self::ZbH1) | `v` = 1 |
    /// | [`ZbH2`](Self::ZbH2) | `v` = 1 and `m` ≥ `2p − 1` |
    /// | [`Interleaved`](Self::Interleaved) | `m` ≥ `p` and `m` divisible by `⌊m/p⌋` |
    /// | [`InterleavedZeroBubble`](Self::InterleavedZeroBubble) | as [`Interleaved`](Self::Interleaved) |
    /// | [`Zbv`](Self::Zbv) | `v` = 2 and `m` ≥ `2p − 1` |
    /// | [`DualPipeV`](Self::DualPipeV) | `v` = 2 and `m` ≥ `2p` |
    pub fn generate(self, shape: PipeShape) -> Result<Schedule> {
        let placement = self.placement(shape)?;
        let PipeShape { ranks: p, stages_per_rank: v, micro_batches: m } = shape;
        let (generator, size) = (self.generator(), Size { p, v, m });
        let row = |r| RowBuilder::new(placement.stages_on(r).collect(), m);
        let rows = (0..p).map(|r| (generator.row)(size, r, row(r)).finish()).collect();
        Schedule::new(placement.clone(), m, rows)
    }
}

impl ScheduleKind {
    /// The placement of the stages of a shape.
    ///
    /// # Errors
    /// Fails as [`generate`](ScheduleKind::generate) does.
    pub fn placement(self, shape: PipeShape) -> Result<StagePlacement> {
        self.check(shape)?;
        Ok(match self.generator().shape {
            StageLayout::Loop => StagePlacement::looped(shape.ranks, shape.stages_per_rank),
            StageLayout::Fold => StagePlacement::folded(shape.ranks),
        })
    }

    /// Checks the preconditions of [`generate`](ScheduleKind::generate), without making the passes.
    ///
    /// # Errors
    /// Fails as [`generate`](ScheduleKind::generate) does.
    pub fn check(self, shape: PipeShape) -> Result<()> {
        let PipeShape { ranks: p, stages_per_rank: v, micro_batches: m } = shape;
        let (generator, size) = (self.generator(), Size { p, v, m });
        let needs = [POSITIVE, BOUNDED];
        let Some((need, _)) = needs.iter().chain(generator.needs).find(|(_, holds)| !holds(size)) else {
            return Ok(());
        };
        let why = format!("{self} needs {need}; got p = {p} ranks, v = {v} stages per rank, m = {m} micro-batches");
        Err(Error::schedule("pipeline schedule", why))
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.names()[0])
    }
}

impl FromStr for ScheduleKind {
    type Err = Error;

    /// Reads a name or an alias, in upper or lower case.
    fn from_str(text: &str) -> Result<ScheduleKind> {
        let named = |kind: &&ScheduleKind| kind.names().iter().any(|name| name.eq_ignore_ascii_case(text));
        ScheduleKind::ALL.iter().find(named).copied().ok_or_else(|| {
            let names: Vec<String> = ScheduleKind::ALL.iter().map(ScheduleKind::to_string).collect();
            Error::schedule("pipeline schedule", format!("unknown schedule `{text}`; there are {}", names.join(", ")))
        })
    }
}

/// The generator of a schedule.
struct Generator {
    shape: StageLayout,
    needs: &'static [Need],
    /// The passes of rank `r`, appended to its empty row.
    row: fn(Size, usize, RowBuilder) -> RowBuilder,
}

/// The placement of stages.
enum StageLayout {
    Loop,
    Fold,
}

/// A precondition: its text and its test.
type Need = (&'static str, fn(Size) -> bool);

const POSITIVE: Need = ("p ≥ 1, v ≥ 1 and m ≥ 1", |size| size.p.min(size.v).min(size.m) >= 1);
/// Longer lists would take gigabytes.
const BOUNDED: Need = ("p·v·m ≤ 2^26", |size| {
    size.p.checked_mul(size.v).and_then(|stages| stages.checked_mul(size.m)).is_some_and(|passes| passes <= 1 << 26)
});
const ONE_STAGE: Need = ("v = 1", |size| size.v == 1);
const TWO_STAGES: Need = ("v = 2", |size| size.v == 2);

#[derive(Clone, Copy)]
struct Size {
    p: usize,
    v: usize,
    m: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for &kind in ScheduleKind::ALL {
            for name in kind.names() {
                assert_eq!(name.to_lowercase().parse::<ScheduleKind>().unwrap(), kind);
            }
            assert_eq!(kind.to_string().parse::<ScheduleKind>().unwrap(), kind);
        }
        assert!("2F2B".parse::<ScheduleKind>().unwrap_err().to_string().contains("GPipe, 1F1B,"));
    }
}

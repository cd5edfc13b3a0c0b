//! Idle time and live activations against the published formulas, exactly: times are whole ticks.

use distributed::pipeline::{Action, RankReport};

use crate::{pipeline_common::shape, prelude::*};

/// (v, m, p).
const GRID: [(usize, usize, usize); 8] =
    [(1, 1, 4), (1, 4, 4), (1, 8, 4), (2, 4, 2), (2, 8, 4), (4, 10, 5), (2, 15, 4), (4, 128, 64)];

/// (F, I, W): equal, and 1, 1.2, 0.6.
const COSTS: [(u64, u64, u64); 2] = [(10, 10, 10), (10, 12, 6)];

fn ranks(kind: ScheduleKind, (v, m, p): (usize, usize, usize), costs: &Costs) -> Vec<RankReport> {
    let schedule = kind.generate(shape(p, v, m)).unwrap();
    schedule.simulate(costs, SendMode::Overlapped).unwrap().ranks()
}

fn expect(name: &str, size: (usize, usize, usize), costs: &Costs, got: Vec<u64>, formula: u64) {
    assert!(got.iter().all(|&x| x == formula), "{name} (v, m, p) = {size:?}, {costs:?}: {got:?}, formula {formula}");
}

fn idle(reports: &[RankReport]) -> Vec<u64> {
    reports.iter().map(|report| report.idle).collect()
}

fn peaks(reports: &[RankReport]) -> Vec<usize> {
    reports.iter().map(|report| report.peak_live).collect()
}

/// Every (m, p) of the grid, for schedules with `v` stages per rank.
fn sizes(v: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    GRID.into_iter().map(move |(_, m, p)| (v, m, p))
}

#[test]
fn gpipe() {
    for size @ (_, m, p) in sizes(1) {
        for (f, i, w) in COSTS {
            let costs = Costs::uniform(f, i, w);
            let reports = ranks(ScheduleKind::GPipe, size, &costs);
            expect("GPipe", size, &costs, idle(&reports), (p as u64 - 1) * (f + i + w));
            assert!(peaks(&reports).iter().all(|&peak| peak == m));
        }
    }
}

#[test]
fn one_f_one_b() {
    for size @ (_, m, p) in sizes(1) {
        for (f, i, w) in COSTS {
            let costs = Costs::uniform(f, i, w);
            let reports = ranks(ScheduleKind::OneFOneB, size, &costs);
            expect("1F1B", size, &costs, idle(&reports), (p as u64 - 1) * (f + i + w));
            assert_eq!(peaks(&reports), (0..p).map(|r| (p - r).min(m)).collect::<Vec<_>>());
        }
    }
}

#[test]
fn fewer_micro_batches_than_ranks() {
    let costs = Costs::default();
    for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
        let schedule = kind.generate(shape(4, 1, 1)).unwrap();
        let simulation = schedule.simulate(&costs, SendMode::Overlapped).unwrap();
        for report in simulation.ranks() {
            assert_eq!(4 * report.idle, 3 * simulation.makespan(), "{kind}: idle fraction .75");
        }
    }
}

#[test]
fn interleaved() {
    for size @ (v, m, p) in GRID.into_iter().filter(|&(_, m, p)| m >= p) {
        for (f, i, w) in COSTS {
            // A stage takes f, i, w; a rank's whole passes take v times that.
            let costs = Costs::uniform(f, i, w);
            let reports = ranks(ScheduleKind::Interleaved, size, &costs);
            expect("Interleaved1F1B", size, &costs, idle(&reports), (p as u64 - 1) * (f + i + w));
            let g = m / (m / p).max(1);
            let peak = |r: usize| ((v - 1) * g + 2 * (p - 1 - r) + 1).min(v * m);
            assert_eq!(peaks(&reports), (0..p).map(peak).collect::<Vec<_>>());
        }
    }
}

#[test]
fn looped_bfs() {
    for size @ (v, m, p) in GRID.into_iter().filter(|&(_, m, p)| m >= p) {
        for (f, i, w) in COSTS {
            let costs = Costs::uniform(f, i, w);
            let reports = ranks(ScheduleKind::LoopedBfs, size, &costs);
            expect("LoopedBFS", size, &costs, idle(&reports), (p as u64 - 1) * (f + i + w));
            assert!(peaks(&reports).iter().all(|&peak| peak == v * m));
        }
    }
}

#[test]
fn fractions() {
    for (v, m, p) in GRID.into_iter().filter(|&(_, m, p)| m >= p) {
        for (kind, v) in [
            (ScheduleKind::GPipe, 1),
            (ScheduleKind::OneFOneB, 1),
            (ScheduleKind::Interleaved, v),
            (ScheduleKind::LoopedBfs, v),
        ] {
            let schedule = kind.generate(shape(p, v, m)).unwrap();
            let simulation = schedule.simulate(&Costs::default(), SendMode::Overlapped).unwrap();
            for report in simulation.ranks() {
                // idle / makespan = (p−1) / (vm + p−1)
                assert_eq!(report.idle * (v * m + p - 1) as u64, simulation.makespan() * (p as u64 - 1), "{kind}");
            }
        }
    }
}

#[test]
fn zb_h1() {
    for size @ (_, _, p) in sizes(1).filter(|&(_, m, p)| m >= p) {
        for (f, i, w) in COSTS {
            let costs = Costs::uniform(f, i, w);
            let reports = ranks(ScheduleKind::ZbH1, size, &costs);
            expect("ZB-H1", size, &costs, idle(&reports), (p as u64 - 1) * (f + i - w));
            assert_eq!(peaks(&reports), vec![p; p]);
        }
    }
}

#[test]
fn zb_h2() {
    for size @ (_, _, p) in sizes(1).filter(|&(_, m, p)| m >= 2 * p - 1) {
        for (f, i, w) in COSTS {
            let costs = Costs::uniform(f, i, w);
            let reports = ranks(ScheduleKind::ZbH2, size, &costs);
            let span = reports.iter().map(|report| report.gaps).max().unwrap();
            assert_eq!(span, (p as u64 - 1) * (f + i - 2 * w), "ZB-H2 (v, m, p) = {size:?}, {costs:?}");
            assert_eq!(peaks(&reports), vec![2 * p - 1; p]);
        }
    }
}

#[test]
fn interleaved_zero_bubble() {
    for size @ (v, m, p) in GRID.into_iter().filter(|&(_, m, p)| m >= p) {
        for (f, i, w) in COSTS {
            // A stage takes f, i, w; a rank's whole passes take v times that.
            let costs = Costs::uniform(f, i, w);
            let reports = ranks(ScheduleKind::InterleavedZeroBubble, size, &costs);
            expect("InterleavedZeroBubble", size, &costs, idle(&reports), (p as u64 - 1) * (f + i - w));
            let g = m / (m / p).max(1);
            assert_eq!(peaks(&reports), vec![(v - 1) * g + p; p], "(v, m, p) = {size:?}");
        }
    }
}

#[test]
fn one_stage_on_each_rank_is_zb_h1() {
    for (m, p) in [(4, 4), (8, 4), (5, 5), (6, 2)] {
        let [many, one] = [ScheduleKind::InterleavedZeroBubble, ScheduleKind::ZbH1]
            .map(|kind| kind.generate(shape(p, 1, m)).unwrap());
        for costs in COSTS.map(|(f, i, w)| Costs::uniform(f, i, w)) {
            let of = |schedule: &Schedule| schedule.simulate(&costs, SendMode::Overlapped).unwrap().makespan();
            assert_eq!(of(&many), of(&one));
        }
    }
}

#[test]
fn zbv() {
    for size @ (_, _, p) in sizes(2).filter(|&(_, m, p)| m >= 2 * p - 1) {
        let reports = ranks(ScheduleKind::Zbv, size, &Costs::default());
        assert!(reports.iter().all(|report| report.gaps == 0), "ZBV (v, m, p) = {size:?}: {reports:?}");
        assert_eq!(peaks(&reports), vec![2 * p; p]);
    }
}

/// Holds for F = I ≥ W, which is what is tested. Outside it this order idles otherwise: with p = 4 and no saving, F, I, W =
/// 10, 12, 6 gives 26 per (p−1), not 28; 10, 8, 6 gives 22, not 20; 10, 10, 13 gives 20, not 17. Why is not worked out.
#[test]
fn dualpipe_v() {
    for size @ (v, m, p) in sizes(2).filter(|&(_, m, p)| m >= 2 * p) {
        let pairs = overlapped(&ScheduleKind::DualPipeV.generate(shape(p, v, m)).unwrap());
        for w in [0, 5, 10] {
            for saves in [0, 3, 7, 10] {
                let costs = Costs { overlap_saves: saves, ..Costs::uniform(10, 10, w) };
                let reports = ranks(ScheduleKind::DualPipeV, size, &costs);
                let (pair, b) = (20 + w - saves, 10 + w);
                let formula = (p as u64 - 1) * (pair + b - 3 * w);
                // A rank that overlaps fewer pairs than the last one works, rather than idles, that much longer.
                let level =
                    idle(&reports).iter().zip(&pairs).map(|(idle, n)| idle + (pairs[p - 1] - n) * saves).collect();
                expect("DualPipeV", size, &costs, level, formula);
                assert_eq!(idle(&reports).into_iter().max(), Some(formula));
                assert_eq!(peaks(&reports), vec![2 * p + 1; p]);
            }
        }
    }
}

/// The number of overlapped pairs of each rank.
fn overlapped(schedule: &Schedule) -> Vec<u64> {
    let pairs = |row: &Vec<Action>| row.iter().filter(|action| matches!(action, Action::Overlap(..))).count() as u64;
    schedule.rows().iter().map(pairs).collect()
}

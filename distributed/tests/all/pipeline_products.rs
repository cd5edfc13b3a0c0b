//! Pipelines times replicas, each stage by any strategy, against one rank that sees the joined batch.
//!
//! In `f64`: both sides compute the same sums of a few hundred terms in another order, each a few times 10⁻¹⁶ off, and AdamW divides by
//! the root of a second moment, which may be a thousand times smaller than the largest gradient. 10⁻¹¹ of the largest value leaves room for
//! that and for nothing else: a gradient that counts twice, or a norm of the wrong parts, is off by more than a tenth.

use crate::pipeline_staged::*;
use crate::{
    common::{WORLDS, config},
    pipeline_common::{TIMEOUT, cpu},
};
use distributed::{
    buckets::Unused,
    comm::{Comm, Ranks},
    pipeline::{Checked, Kind, PipelineOptions, PipelineTrainer, ZeroPipelineTrainer},
    zero::ZeroOptions,
};
use numcore::Result;
use runtime_cpu::Cpu;

const STEPS: usize = 3;
const BOUND: f64 = 1e-11;

/// One rank's part of a training run.
fn trained(comm: &Comm<Cpu>, model: Model, layers: usize, checked: &Checked, how: How) -> Result<Told> {
    let (staged, options) = (model.staged(comm, checked, layers), PipelineOptions::default());
    match how.zero() {
        None => {
            let mut trainer = PipelineTrainer::new(comm, checked.clone(), staged, config(), options)?;
            steps(comm, model, &mut trainer, 0..STEPS, |_| Ok(()))
        }
        Some(zero) => {
            let mut trainer = ZeroPipelineTrainer::new(comm, checked.clone(), staged, config(), options, zero)?;
            steps(comm, model, &mut trainer, 0..STEPS, |t| t.gather_full_params())
        }
    }
}

/// Trains this product by these strategies and schedules; gives how many runs that were.
fn product(model: Model, p: usize, replicas: usize, kinds: &[Kind], hows: &[How]) -> usize {
    let mut runs = 0;
    for v in [1, 2] {
        let m = 2 * p;
        let want = reference(model, p * v, m * replicas, STEPS);
        for &how in hows {
            for (kind, checked) in kinds.iter().filter_map(|&kind| Some((kind, how.checked(kind, p, v, m)?))) {
                let what = format!("{model:?}, {kind}, pipe {p} x {replicas} replicas, {v} stages each, {how:?}");
                let ranks = everywhere(p * replicas, |comm| trained(&comm, model, p * v, &checked, how));
                let off = difference(&joined(ranks.unwrap_or_else(|e| panic!("{what}: {e}"))), &want);
                assert!(off <= BOUND, "{what}: {off:e}");
                runs += 1;
            }
        }
    }
    runs
}

/// A plain one, one with I and W apart, one with stages in turn, one folded.
const SOME: [Kind; 4] = [Kind::OneFOneB, Kind::ZbH1, Kind::Interleaved, Kind::Zbv];

#[test]
fn an_mlp_trains_as_on_one_rank() {
    let runs: usize = [(2, 2), (2, 4), (4, 2)].map(|(p, n)| product(Model::Mlp, p, n, &SOME, &HOWS)).into_iter().sum();
    assert_eq!(runs, 3 * 5 * HOWS.len());
}

#[test]
fn a_gpt_with_a_shared_table_trains_as_on_one_rank() {
    let runs: usize = [(2, 2), (2, 4), (4, 2)].map(|(p, n)| product(Model::Gpt, p, n, &SOME, &HOWS)).into_iter().sum();
    assert_eq!(runs, 3 * 5 * HOWS.len());
}

#[test]
fn a_pipeline_alone_and_replicas_alone() {
    for n in WORLDS {
        assert!(product(Model::Gpt, n, 1, &[Kind::OneFOneB, Kind::DualPipeV], &[How::Replicas, How::Gathered]) >= 4);
        assert!(product(Model::Gpt, 1, n, &[Kind::GPipe, Kind::LoopedBfs], &HOWS) >= 2 * HOWS.len());
    }
}

#[test]
fn unused_parameters_cannot_be_allowed() {
    let checked = How::Replicas.checked(Kind::OneFOneB, 2, 1, 2).unwrap();
    let outcomes = Ranks::new(2).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let (staged, options) = (Model::Gpt.staged(&comm, &checked, 2), PipelineOptions::default());
        let zero = ZeroOptions { unused: Unused::Allow, ..Default::default() };
        ZeroPipelineTrainer::new(&comm, checked.clone(), staged, config(), options, zero).map(|_| ())
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("unused parameters cannot be allowed in a pipeline"), "{error}");
    }
}

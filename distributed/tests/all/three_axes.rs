//! Eight ranks as 2 × 2 × 2 of any three axes: twenty steps of AdamW, clipped by the global norm, are those of one rank.

use crate::{
    expert_common::ExpertCase,
    expert_pipelines::Staged,
    pipeline_staged::How,
    prelude::*,
    tensor_common::{TensorCase, apart},
    tensor_pipeline_common::StagedCase,
};

/// `f64` sums in another order, amplified by AdamW's division by a small second moment.
const CLOSE: f64 = 1e-11;

const AXES: [Axis; 5] = [Axis::Pipe, Axis::Data, Axis::Shard, Axis::Context, Axis::Tensor];

/// Stages of ZeRO in turn.
const STAGES: [ZeroStage; 3] = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];

fn triples() -> impl Iterator<Item = [Axis; 3]> {
    let after = |i: usize| (i + 1..AXES.len()).flat_map(move |j| (j + 1..AXES.len()).map(move |k| [i, j, k]));
    (0..AXES.len()).flat_map(after).map(|triple| triple.map(|k| AXES[k]))
}

/// Whether the tests take case `k`: four of ten, among them every stage of ZeRO; all in the stage `soak`.
fn is_taken(k: usize) -> bool {
    (k % 5).is_multiple_of(4) || all_cases()
}

#[test]
fn twenty_clipped_steps_of_eight_ranks_are_those_of_one() {
    for (k, triple) in triples().enumerate().filter(|(k, _)| is_taken(*k)) {
        let axes = triple.map(|axis| (axis, 2));
        let has = |axis| triple.contains(&axis);
        // Every stage of ZeRO with some triple.
        let zero = has(Axis::Shard).then_some(STAGES[k % 3]);
        let mut case = TensorCase::new(2);
        (case.steps, case.max_norm, case.sequences) = (20, 0.05, 8);
        (case.model.tied_head, case.sequence, case.zero) = (k % 2 == 0, has(Axis::Tensor) && k % 3 == 0, zero);
        let together = match has(Axis::Pipe) {
            false => case.on(&axes),
            true => {
                let how = zero.map_or(How::Replicas, How::Zero);
                let mut staged = StagedCase::new(2, ScheduleKind::OneFOneB, 1, how);
                staged.micros = 2;
                staged.case = TensorCase { zero: None, ..case.clone() };
                staged.on(&axes)
            }
        };
        let off = apart(&together, &TensorCase { zero: None, ..case }.alone());
        assert!(off <= CLOSE, "{triple:?}: {off:e}");
    }
    assert_eq!(triples().count(), 10);
}

/// Experts over two ranks, beside any two axes. Expert ranks are among those that read different tokens: where a pair has none, or an axis that
/// cuts sequences, which are short, replicas are added.
#[test]
fn so_are_those_with_experts_and_two_other_axes() {
    let pairs = AXES.iter().enumerate().flat_map(|(i, &one)| AXES[i + 1..].iter().map(move |&two| [one, two]));
    for (k, pair) in pairs.enumerate().filter(|(k, _)| is_taken(*k)) {
        let has = |axis| pair.contains(&axis);
        let mut axes: Vec<(Axis, usize)> = pair.into_iter().map(|axis| (axis, 2)).collect();
        match axes.iter_mut().find(|(axis, _)| matches!(axis, Axis::Data | Axis::Shard)) {
            Some((_, ranks)) => *ranks = 4,
            None => axes.push((Axis::Data, 2)),
        }
        axes.push((Axis::Expert, 2));
        let zero = has(Axis::Shard).then_some(STAGES[k % 3]);
        let case = ExpertCase { steps: 20, max_norm: 0.05, router: [0.3, 0.1], ..ExpertCase::new(4) };
        if has(Axis::Pipe) {
            let how = zero.map_or(How::Replicas, How::Zero);
            Staged { case, micros: 2, how, ..Staged::new(4) }.same(&axes);
            continue;
        }
        // The losses of routers are those of all tokens of a micro-batch: of a step, where it has one.
        let together = ExpertCase { zero, ..case.clone() }.on(&axes);
        let off = apart(&together, &case.alone());
        assert!(off <= CLOSE, "{axes:?}: {off:e}");
    }
}

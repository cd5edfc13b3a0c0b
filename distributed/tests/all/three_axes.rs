//! Eight ranks as 2 × 2 × 2 of any three axes: twenty steps of AdamW, clipped by the global norm, are those of one rank.

use distributed::{pipeline::ScheduleKind, plan::Axis, zero::ZeroStage};

use crate::{
    pipeline_staged::How,
    tensor_common::{TensorCase, apart},
    tensor_pipeline_common::StagedCase,
};

/// `f64` sums in another order, amplified by AdamW's division by a small second moment.
const CLOSE: f64 = 1e-11;

const AXES: [Axis; 5] = [Axis::Pipe, Axis::Data, Axis::Shard, Axis::Context, Axis::Tensor];

fn triples() -> impl Iterator<Item = [Axis; 3]> {
    let after = |i: usize| (i + 1..AXES.len()).flat_map(move |j| (j + 1..AXES.len()).map(move |k| [i, j, k]));
    (0..AXES.len()).flat_map(after).map(|triple| triple.map(|k| AXES[k]))
}

#[test]
fn twenty_clipped_steps_of_eight_ranks_are_those_of_one() {
    for (k, triple) in triples().enumerate() {
        let axes = triple.map(|axis| (axis, 2));
        let has = |axis| triple.contains(&axis);
        // Every stage of ZeRO with some triple.
        let stage = [ZeroStage::State, ZeroStage::Gradients, ZeroStage::Parameters][k % 3];
        let zero = has(Axis::Shard).then_some(stage);
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

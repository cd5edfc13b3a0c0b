//! Experts over ranks that have parts of sequences: a model with both trains as the whole one does on one rank.

use crate::{expert_common::ExpertCase, prelude::*, tensor_common::apart};

/// `f64` sums in another order, amplified by AdamW's division by a small second moment.
const CLOSE: f64 = 1e-11;

fn same(case: &ExpertCase, axes: &[(Axis, usize)]) {
    let off = apart(&case.on(axes), &case.alone());
    assert!(off <= CLOSE, "{axes:?} {case:?}: {off:e}");
}

#[test]
fn parts_of_sequences_share_experts_as_examples_do() {
    for (axes, experts) in [
        (&[(Axis::Context, 2), (Axis::Expert, 2)][..], 4),
        (&[(Axis::Context, 2)], 3),
        (&[(Axis::Data, 2), (Axis::Context, 2), (Axis::Expert, 2)], 4),
        (&[(Axis::Data, 2), (Axis::Context, 2), (Axis::Expert, 4)], 4),
        (&[(Axis::Data, 3), (Axis::Context, 2), (Axis::Expert, 2)], 4),
    ] {
        same(&ExpertCase { router: [0.3, 0.1], ..ExpertCase::new(experts) }, axes);
    }
}

#[test]
fn every_stage_of_zero_on_eight_ranks() {
    let stages = [Some(ZeroStage::Optimizer), Some(ZeroStage::Gradients), Some(ZeroStage::Parameters), None];
    let arrangements = [
        &[(Axis::Data, 2), (Axis::Shard, 2), (Axis::Context, 2), (Axis::Expert, 4)][..],
        &[(Axis::Shard, 4), (Axis::Context, 2), (Axis::Expert, 8)],
        &[(Axis::Shard, 2), (Axis::Context, 2), (Axis::Tensor, 2), (Axis::Expert, 2)],
    ];
    for (zero, axes) in half(&stages, &arrangements) {
        same(&ExpertCase { zero, router: [0.0, 0.01], accumulation: 2, ..ExpertCase::new(8) }, axes);
    }
}

#[test]
fn every_exchange_and_frozen_experts() {
    for exchange in [ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses] {
        let case = ExpertCase { exchange, router: [0.3, 0.0], frozen: &["blocks.0.mlp.experts"], ..ExpertCase::new(4) };
        same(&case, &[(Axis::Data, 2), (Axis::Context, 2), (Axis::Expert, 2)]);
    }
}

#[test]
fn a_balance_bias_moves_by_the_loads_of_all_parts() {
    let case = ExpertCase { bias_rate: 0.1, ..ExpertCase::new(4) };
    let model = MoeConfig { balance_bias: true, ..case.model.clone() };
    same(&ExpertCase { model, ..case }, &[(Axis::Data, 2), (Axis::Context, 2), (Axis::Expert, 2)]);
}

#[test]
fn capacities_of_parts_of_sequences_are_refused() {
    let capacity = Some(Capacity { factor: 1.0, drop: DropBy::Position });
    let case = ExpertCase::new(4);
    let case = ExpertCase { model: MoeConfig { capacity, ..case.model.clone() }, ..case };
    let outcome = Ranks::new(2)
        .run(cpu, |comm| case.build(&Mesh::new(&comm, ParallelPlan::of([(Axis::Context, comm.size())])?)?).map(drop));
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("blocks.0.mlp") && error.contains("all tokens of a sequence"), "{error}");
}

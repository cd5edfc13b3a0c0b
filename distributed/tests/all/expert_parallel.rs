//! Expert parallelism: a model whose experts are shared out trains as the whole one does, and with every strategy.

use crate::{
    expert_common::{ExpertCase, WIDTH},
    prelude::*,
    tensor_common::apart,
};

/// `f64` sums in another order, amplified by AdamW's division by a small second moment.
const CLOSE: f64 = 1e-11;

fn same(case: &ExpertCase, axes: &[(Axis, usize)]) {
    let off = apart(&case.on(axes), &case.alone());
    assert!(off <= CLOSE, "{axes:?} {case:?}: {off:e}");
}

#[test]
fn a_model_trains_over_data_and_expert_as_on_one_rank() {
    same(&ExpertCase::new(4), &[(Axis::Data, 4), (Axis::Expert, 2)]);
}

#[test]
fn any_number_of_ranks_trains_as_one() {
    for (ranks, experts, expert_ranks) in
        [(1, 3, 1), (2, 4, 2), (2, 4, 1), (3, 6, 3), (4, 4, 4), (4, 8, 2), (5, 5, 5), (8, 8, 8), (8, 8, 4), (6, 4, 2)]
    {
        same(&ExpertCase::new(experts), &[(Axis::Data, ranks), (Axis::Expert, expert_ranks)]);
    }
}

#[test]
fn twenty_clipped_steps_are_those_of_one_rank() {
    let case = ExpertCase { steps: 20, max_norm: 0.05, router: [0.01, 0.001], ..ExpertCase::new(4) };
    same(&case, &[(Axis::Data, 4), (Axis::Expert, 2)]);
    same(&ExpertCase { zero: Some(ZeroStage::Parameters), ..case }, &[(Axis::Shard, 4), (Axis::Expert, 2)]);
}

#[test]
fn single_precision_stays_within_its_rounding() {
    for dtype in [DType::F32, DType::BF16] {
        let case = ExpertCase { dtype, steps: 1, ..ExpertCase::new(4) };
        let (many, one) = (case.on(&[(Axis::Data, 4), (Axis::Expert, 2)]), case.alone());
        let close = if dtype == DType::F32 { 1e-5 } else { 0.05 };
        assert!((many.losses[0] - one.losses[0]).abs() <= close * one.losses[0], "{many:?}");
        assert!((many.norms[0] - one.norms[0]).abs() <= close * one.norms[0], "{many:?}");
    }
}

#[test]
fn every_stage_of_zero_shards_the_experts_over_their_own_ranks() {
    let arrangements = [
        &[(Axis::Data, 2), (Axis::Expert, 2)][..],
        &[(Axis::Data, 4), (Axis::Expert, 2)],
        &[(Axis::Shard, 4), (Axis::Expert, 2)],
        &[(Axis::Data, 2), (Axis::Shard, 4), (Axis::Expert, 2)],
        &[(Axis::Data, 2), (Axis::Shard, 2), (Axis::Expert, 4)],
        &[(Axis::Data, 2), (Axis::Shard, 3), (Axis::Expert, 2)],
    ];
    for (stage, axes) in half(&ZeroStage::ALL, &arrangements) {
        same(&ExpertCase { zero: Some(stage), ..ExpertCase::new(4) }, axes);
    }
}

#[test]
fn losses_of_routers_are_those_of_all_tokens() {
    for zero in [None, Some(ZeroStage::Parameters)] {
        for (scores, expert_ranks) in
            [(RouterScores::Softmax, 4), (RouterScores::Sigmoid, 2), (RouterScores::Softmax, 1)]
        {
            let case = ExpertCase { router: [0.3, 0.1], zero, ..ExpertCase::new(4) };
            let model = MoeConfig { scores, ..case.model.clone() };
            same(&ExpertCase { model, ..case }, &[(Axis::Data, 4), (Axis::Expert, expert_ranks)]);
        }
    }
}

#[test]
fn a_bias_moves_by_the_loads_of_all_ranks() {
    let case = ExpertCase { bias_rate: 0.1, steps: 6, ..ExpertCase::new(4) };
    let scores = RouterScores::Sigmoid;
    let model = MoeConfig { balance_bias: true, scores, weight_scale: 2.5, ..case.model.clone() };
    let case = ExpertCase { model, ..case };
    for expert_ranks in [1, 2, 4] {
        same(&case, &[(Axis::Data, 4), (Axis::Expert, expert_ranks)]);
    }
}

#[test]
fn capacities_drop_what_one_rank_drops() {
    for drop in [DropBy::Position, DropBy::Weight] {
        for (factor, expert_ranks) in [(0.25, 2), (0.8, 4), (1.2, 1), (4.0, 2)] {
            let case = ExpertCase::new(4);
            let model = MoeConfig { capacity: Some(Capacity { factor, drop }), ..case.model.clone() };
            same(&ExpertCase { model, router: [0.1, 0.0], ..case }, &[(Axis::Data, 4), (Axis::Expert, expert_ranks)]);
        }
    }
}

#[test]
fn shared_experts_and_other_choices_train_alike() {
    let base = || MoeConfig::new(WIDTH, 5, 4, 2);
    for model in [
        MoeConfig { shared_hidden: 7, ..base() },
        MoeConfig { top_k: 1, normalize_weights: false, ..base() },
        MoeConfig { top_k: 4, ..base() },
        MoeConfig { normalize_weights: false, weight_scale: 0.5, ..base() },
    ] {
        for zero in [None, Some(ZeroStage::Gradients)] {
            same(
                &ExpertCase { model: model.clone(), zero, ..ExpertCase::new(4) },
                &[(Axis::Data, 4), (Axis::Expert, 2)],
            );
        }
    }
}

#[test]
fn accumulated_and_frozen_parameters_train_alike() {
    let stages = [None, Some(ZeroStage::Optimizer), Some(ZeroStage::Gradients), Some(ZeroStage::Parameters)];
    let frozen = [
        &[][..],
        &["blocks.0.mlp.experts"],
        &["blocks.0.mlp.experts.down_proj", "wte"],
        &["blocks.0", "blocks.1.mlp.gate"],
        &["blocks.0.mlp.experts", "blocks.1.mlp.experts"],
    ];
    for (zero, frozen) in half(&stages, &frozen) {
        let case = ExpertCase { zero, frozen, accumulation: 3, ..ExpertCase::new(4) };
        same(&case, &[(Axis::Data, 4), (Axis::Expert, 2)]);
    }
}

#[test]
fn layers_over_a_tensor_axis_stand_beside_shared_out_experts() {
    for zero in [None, Some(ZeroStage::Optimizer), Some(ZeroStage::Gradients), Some(ZeroStage::Parameters)] {
        let case = ExpertCase { zero, router: [0.1, 0.1], ..ExpertCase::new(4) };
        for axes in [
            &[(Axis::Data, 2), (Axis::Tensor, 2), (Axis::Expert, 2)][..],
            &[(Axis::Data, 4), (Axis::Tensor, 2), (Axis::Expert, 2)],
            &[(Axis::Shard, 2), (Axis::Tensor, 2), (Axis::Expert, 1)],
        ] {
            same(&case, axes);
        }
    }
}

//! Tables of ways to train mixtures of experts, each of which is one rank: routers, biases, capacities, frozen experts.

use crate::prelude::*;

const FOUR: [(Axis, usize); 3] = [(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Expert, 2)];

#[test]
fn routers_lose_and_drop_what_those_of_one_rank_do() {
    let four = |experts| [(Axis::Data, 4), (Axis::Expert, experts)];
    for (stage, scores, experts) in [
        (ZeroStage::None, RouterScores::Softmax, 4),
        (ZeroStage::None, RouterScores::Sigmoid, 2),
        (ZeroStage::Parameters, RouterScores::Sigmoid, 2),
        (ZeroStage::Parameters, RouterScores::Softmax, 1),
    ] {
        let way = Way::mixture(4).config(|moe| moe.scores = scores).zero(stage).over(&four(experts));
        Way { router: [0.3, 0.1], ..way }.same();
    }
    for drop in [DropBy::Position, DropBy::Weight] {
        for (factor, experts) in [(0.25, 2), (0.8, 4), (1.2, 1), (4.0, 2)] {
            let way = Way::mixture(4).config(|moe| moe.capacity = Some(Capacity { factor, drop }));
            Way { router: [0.1, 0.0], ..way.over(&four(experts)) }.same();
        }
    }
}

/// Tokens compete in the order of whole sequences, of which ranks have parts.
#[test]
fn capacities_count_parts_of_sequences() {
    use Axis::{Context, Data, Expert, Pipe, Shard};
    let meshes: [&[(Axis, usize)]; 5] = [
        &[(Context, 2)],
        &[(Context, 2), (Expert, 2)],
        &[(Data, 2), (Context, 2), (Expert, 4)],
        &[(Shard, 3), (Context, 2), (Expert, 2)],
        &[(Pipe, 2), (Data, 2), (Context, 2), (Expert, 2)],
    ];
    for (k, mesh) in meshes.into_iter().enumerate() {
        for exchange in [ContextExchange::AllGather, ContextExchange::Ring] {
            for (drop, factor) in [(DropBy::Position, 0.6), (DropBy::Weight, 0.6), (DropBy::Position, 1.0)] {
                let way = Way::mixture(4).config(|moe| moe.capacity = Some(Capacity { factor, drop }));
                let way = Way { exchange, examples: 12, router: [0.1, 0.0], ..way };
                let staged = if k == 4 { way.staged(ScheduleKind::OneFOneB, 1).micros(1) } else { way };
                staged.zero(if k == 3 { ZeroStage::Parameters } else { ZeroStage::None }).over(mesh).same();
            }
        }
    }
}

#[test]
fn capacities_of_parts_of_sequences_need_a_plan() {
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let capacity = Some(Capacity { factor: 1.0, drop: DropBy::Position });
        let way = Way::mixture(4).config(|moe| moe.capacity = capacity);
        let model = way.whole_mixture(&Init::new(comm.runtime(), 7))?;
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Context, 2)])?)?;
        mesh.context_parallel(&model, ContextExchange::AllGather)?;
        model.forward_values(&[Var::new(Tensor::zeros(comm.runtime(), [1, 4], DType::I64)?)]).map(drop)
    });
    refused(outcomes.unwrap(), &["tokens compete for experts", "`TensorPlan::experts`"]);
}

#[test]
fn balance_biases_move_by_the_loads_of_all_tokens() {
    let way = || {
        let scores = RouterScores::Sigmoid;
        let way = Way::mixture(4).config(|moe| (moe.balance_bias, moe.scores, moe.weight_scale) = (true, scores, 2.5));
        Way { bias_rate: 0.1, steps: 5, ..way }
    };
    for experts in [1, 2, 4] {
        way().over(&[(Axis::Data, 4), (Axis::Expert, experts)]).same();
    }
    way().over(&[(Axis::Data, 2), (Axis::Context, 2), (Axis::Expert, 2)]).same();
    let staged = || way().staged(ScheduleKind::OneFOneB, 1);
    staged().over(&FOUR).same();
    staged().over(&[(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Tensor, 2), (Axis::Expert, 2)]).same();
}

#[test]
fn other_mixtures() {
    type Set = fn(&mut MoeConfig);
    let all: [Set; 4] = [
        |moe| moe.shared_hidden = 7,
        |moe| (moe.top_k, moe.normalize_weights) = (1, false),
        |moe| moe.top_k = 4,
        |moe| (moe.normalize_weights, moe.weight_scale) = (false, 0.5),
    ];
    for set in all {
        for stage in [ZeroStage::None, ZeroStage::Gradients] {
            Way::mixture(4).config(set).zero(stage).over(&[(Axis::Data, 4), (Axis::Expert, 2)]).same();
        }
    }
}

#[test]
fn frozen_experts_and_experts_without_tokens() {
    let frozen = [
        &["blocks.0.mlp.experts"][..],
        &["blocks.1.mlp.experts.down_proj", "wte"],
        &["blocks.0", "blocks.1.mlp.gate"],
        &["blocks.0.mlp.experts", "blocks.1.mlp.experts"],
    ];
    for (k, (frozen, stage)) in half(&frozen, &STAGES).into_iter().enumerate() {
        if k % 2 == 0 {
            let way = Way { frozen, accumulation: 3, ..Way::mixture(4).zero(stage) };
            way.over(&[(Axis::Data, 4), (Axis::Expert, 2)]).same();
            continue;
        }
        // Two tokens of each micro-batch for each of eight experts, if they were even.
        let few = Way::mixture(8).staged(ScheduleKind::OneFOneB, 1).micros(2).zero(stage);
        Way { frozen, accumulation: 2, router: [0.3, 0.1], ..few.over(&FOUR) }.same();
    }
}

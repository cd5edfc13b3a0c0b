//! DPO (Rafailov et al. 2023): a policy learns to prefer even tokens to odd ones. It is trained alone, in shards (ZeRO
//! stage 3) and in a pipeline of two stages. The reference is a frozen copy. The first loss is exactly ln 2 everywhere, since policy
//! and reference have the same bits; later losses are those of one rank.
#![forbid(unsafe_code)]

use std::{ops::Range, slice::from_ref};

use weftgrad::{
    distributed::{
        comm::{Comm, Communicator},
        mesh::Mesh,
        pipeline::{Limits, Lowering, MicroBatches, PipeShape, PipelineModel, ScheduleKind},
        plan::{Axis, ParallelPlan},
        train::{Loss, TrainStep},
        zero::ZeroStage,
    },
    fused::{CrossEntropyOptions, Reduction},
    models::Decoder,
    nn::loss::{self, DpoOptions},
    prelude::*,
};
use weftgrad_examples::{Outcome, small};

const STEPS: usize = 16;
const MICRO_BATCHES: usize = 4;
/// Tokens of a prompt, which do not count, and of a row.
const PROMPT: usize = 4;
const TOKENS: usize = 12;

fn main() -> Outcome<()> {
    let alone = small::on_ranks(1, in_shards)?;
    println!("the loss falls from {} to {:.4}", alone[0], alone[STEPS - 1]);
    if alone[0] != f64::ln(2.0) || alone[STEPS - 1] > 0.6 {
        return Err(format!("the policy does not begin as the reference, or learns nothing: {alone:?}").into());
    }
    small::compare("in shards", &small::on_ranks(2, in_shards)?, &alone)?;
    small::compare("in a pipeline", &small::on_ranks(2, in_a_pipeline)?, &alone)
}

fn in_shards(comm: Comm<Cpu>) -> Result<Vec<f64>> {
    let (policy, reference) = (small::decoder(&comm, 0)?, small::decoder(&comm, 0)?);
    let mut step =
        TrainStep::builder(&comm, &policy).optimizer(small::adamw(1e-3)).zero(ZeroStage::Parameters).build()?;
    let mut run = |k| {
        let [tokens, targets, fixed] = pairs(&comm, &reference, k, small::share(&comm))?;
        step.step(|_| preference(&policy.forward(&Var::new(tokens.clone()))?, [&targets, &fixed].map(var)))?.loss()
    };
    (0..STEPS).map(&mut run).collect()
}

fn in_a_pipeline(comm: Comm<Cpu>) -> Result<Vec<f64>> {
    let (policy, reference) = (small::decoder(&comm, 0)?, small::decoder(&comm, 0)?);
    let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Pipe, comm.size())])?)?;
    let shape = PipeShape { ranks: comm.size(), stages_per_rank: 1, micro_batches: MICRO_BATCHES };
    let schedule = ScheduleKind::OneFOneB.generate(shape)?.lower(Lowering::default())?.check(Limits::default())?;
    let model = PipelineModel::on(comm.rank(), schedule, policy.split(comm.size())?)
        .loss(|y, t| preference(&y[0], [t[0].clone(), t[1].clone()]));
    let mut step = TrainStep::builder(&mesh, model).optimizer(small::adamw(1e-3)).build()?;
    let mut run = |k| {
        let [tokens, targets, fixed] = pairs(&comm, &reference, k, 0..small::ROWS)?;
        step.step(|_| MicroBatches::split(from_ref(&tokens), &[targets.clone(), fixed.clone()], MICRO_BATCHES))?.loss()
    };
    (0..STEPS).map(&mut run).collect()
}

fn var(x: &Tensor<Cpu>) -> Var<Cpu> {
    Var::new(x.clone())
}

/// The loss of pairs of rows, chosen and rejected, of logits `[2 P, T, V]`.
fn preference(logits: &Var<Cpu>, [targets, fixed]: [Var<Cpu>; 2]) -> Result<Loss<Cpu>> {
    let pairs = targets.dims()[0] / 2;
    let of = |sums: &Var<Cpu>, which| sums.reshape([pairs, 2])?.narrow(1, which, 1);
    let new = summed(logits, &targets)?;
    let (policy, reference) = ([of(&new, 0)?, of(&new, 1)?], [of(&fixed, 0)?, of(&fixed, 1)?]);
    let options = DpoOptions { reduction: Reduction::Sum, ..Default::default() };
    Loss::sum(loss::dpo(policy.each_ref(), reference.each_ref(), options)?, pairs as f64)
}

/// The log-probability of each row's completion, `[N, 1]`.
fn summed(logits: &Var<Cpu>, targets: &Var<Cpu>) -> Result<Var<Cpu>> {
    let each = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
    logits.cross_entropy_with(targets, each)?.neg()?.sum_keepdim(&[1])
}

/// Rows of a step, which alternate between a chosen and a rejected completion of a prompt: tokens, the tokens after
/// them, and the reference's log-probabilities.
fn pairs(comm: &Comm<Cpu>, reference: &Decoder<Cpu>, step: usize, rows: Range<usize>) -> Result<[Tensor<Cpu>; 3]> {
    let token = |row: usize, at: usize| {
        let any = (step * 31 + row / 2 * 7 + at * at * 5 + at) % small::VOCAB;
        if at < PROMPT { any } else { any / 2 * 2 + row % 2 }
    };
    let of = |from: usize| {
        let hidden = |at| from == 1 && at < PROMPT;
        let row = |row| (from..from + TOKENS).map(move |at| if hidden(at) { -100 } else { token(row, at) as i64 });
        let all: Vec<i64> = rows.clone().flat_map(row).collect();
        Tensor::from_slice(comm.runtime(), [rows.len(), TOKENS], &all)
    };
    let (tokens, targets) = (of(0)?, of(1)?);
    let fixed = no_grad(|| summed(&reference.forward(&var(&tokens))?, &var(&targets)))?.value()?;
    Ok([tokens, targets, fixed])
}

//! A loop over a mesh with a context axis: batches are shared out along data alone, and each token counts once.

use data::Array;
use distributed::context_parallel::ContextExchange;
use nn::{Gpt, GptConfig, parallel::VocabularyLoss};
use numcore::{
    Tensor,
    fused::{CrossEntropyOptions, Reduction},
};

use crate::{common::*, prelude::*};

const TOKENS: usize = 12;

/// Batches of 4 of `n` rows of tokens.
fn texts(rt: &Cpu, n: usize) -> Loader<Rows> {
    let token = |i: usize| ((i * 7 + i / 5) % 16) as f64;
    let rows = Array::new([n, TOKENS + 1], (0..n * (TOKENS + 1)).map(token).collect::<Vec<f64>>()).unwrap();
    Loader::new(data::Rows::new(rows).unwrap()).batch(4).workers(0).stack().on(rt)
}

fn tokens(batch: &Batch<Rows>, first: usize) -> Result<Var<Cpu>> {
    Ok(Var::new(batch.data.narrow(1, first, TOKENS)?.to_dtype(DType::I64)?.contiguous()?))
}

fn loss(model: &Gpt<Cpu>, batch: &Batch<Rows>) -> Result<Loss<Cpu>> {
    let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    let options = VocabularyLoss { cross_entropy, z_loss: 0.0 };
    let sum = model.next_token_loss(&tokens(batch, 0)?, &tokens(batch, 1)?, &options)?;
    Loss::sum(sum, (batch.rows * TOKENS) as f64)
}

/// The share of tokens here whose likeliest successor is right, and how many tokens there are.
fn right(model: &Gpt<Cpu>, batch: &Batch<Rows>) -> Result<(f64, f64)> {
    let best = model.forward(&tokens(batch, 0)?)?.value()?.argmax(-1)?;
    let due = model.context.take(&tokens(batch, 1)?.value()?, 1)?;
    let hits: Tensor<Cpu> = best.eq(&due)?.to_dtype(DType::F64)?;
    Ok((hits.sum_all()?.item()?, hits.shape().numel() as f64))
}

/// Trains on the ranks of a plan; what was recorded, and the tokens that were counted.
fn train(comm: &Comm<Cpu>, plan: ParallelPlan, memory: &Memory) -> Result<()> {
    let (rt, mesh) = (comm.runtime(), Mesh::new(comm, plan)?);
    let config = GptConfig { vocab: 16, context: TOKENS, layers: 1, heads: 2, width: 8, ..Default::default() };
    let model = Gpt::new(&Init::new(rt, 3).dtype(DType::F64), config)?;
    mesh.context_parallel(&model, ContextExchange::AllGather)?;
    let step = TrainStep::builder(&mesh, &model).optimizer(adamw()).max_norm(0.5).build()?;
    let evaluate = Evaluate::on(texts(rt, 7)).every(Interval::Steps(2));
    let evaluate = evaluate.predict(right).measure("right", |right, _| Ok(*right));
    Trainer::new(&model, step, texts(rt, 23))
        .until(Length::Tokens((20 * TOKENS) as u64))
        .record_every(Interval::Steps(2))
        .with(evaluate)
        .sink(memory.clone())
        .run(|model, batch| {
            let (hits, count) = right(model, batch)?;
            record_scalar("right", hits / count);
            loss(model, batch)
        })
        .map(drop)
}

#[test]
fn each_token_counts_once() {
    let (many, alone) = (Memory::default(), Memory::default());
    let plan = |axes: &[(Axis, usize)]| ParallelPlan::of(axes.to_vec()).unwrap();
    on_ranks(4, |comm| train(comm, plan(&[(Axis::Data, 2), (Axis::Context, 2)]), &many)).unwrap();
    on_ranks(1, |comm| train(comm, plan(&[]), &alone)).unwrap();
    for name in ["loss", "right", "validation/loss", "validation/right"] {
        let (many, alone) = (many.of(name), alone.of(name));
        assert!(many.len() >= 2 && many.len() == alone.len(), "{name}: {many:?} {alone:?}");
        for ((step, a), (due, b)) in many.iter().zip(&alone) {
            assert!(step == due && (a - b).abs() <= 1e-11 * b.abs().max(1e-3), "{name}: {many:?} {alone:?}");
        }
    }
}

//! DPO (Rafailov et al. 2023) of SmolLM2, which learns to prefer a sum as a number alone to a sentence: on one rank, in
//! shards (ZeRO stage 3) and in a pipeline of two stages.
//!
//! The first loss is exactly ln 2 everywhere, since policy and reference have the same bits. Later losses are those of
//! one rank. It reads the folder of `conformance/against/real_models.py`:
//! `cargo run --release -p weftgrad-models --features text --example real_dpo -- FOLDER`

mod real;

use std::path::Path;

use autograd::Var;
use comm::{Comm, Communicator, Ranks};
use data::pad;
use distributed::{plan::Axis, train::Loss};
use models::{GenerationOptions, generate};
use nn::loss::{self, DpoOptions};
use numcore::{
    Error, Result,
    fused::Reduction,
    ops::{ReduceOps, ViewOps},
};
use real::{LAYOUTS, Policy, Sums, reward};
use runtime_cpu::Cpu;

const STEPS: usize = 12;
/// Pairs of a step, each of two rows.
const PAIRS: usize = 4;

fn main() -> Result<()> {
    let file = real::file("real_dpo")?;
    for seed in 0..3 {
        let mut alone: Option<Vec<f64>> = None;
        for (name, axis, ranks) in LAYOUTS.into_iter().take(if seed == 0 { LAYOUTS.len() } else { 1 }) {
            let train = |comm| train(&comm, &file, axis, seed);
            let [rewards, losses] = Ranks::new(ranks).run(|_| Ok(Cpu::new()), train)?.swap_remove(0);
            println!("{name}, seed {seed}: losses {losses:.6?}, greedy answers are worth {rewards:.3?}");
            let one = alone.get_or_insert_with(|| losses.clone());
            let is_close = losses.iter().zip(&*one).all(|(a, b)| (a - b).abs() <= 1e-4);
            if losses[0] != f64::from(std::f32::consts::LN_2) || !is_close || rewards[1] < rewards[0] + 0.3 {
                return Err(Error::state("real_dpo", format!("{name}, seed {seed}: not as it should be: {one:?}")));
            }
        }
    }
    Ok(())
}

/// Mean rewards of greedy answers before and after, and the losses of steps.
fn train(comm: &Comm<Cpu>, file: &Path, axis: Axis, seed: u64) -> Result<[Vec<f64>; 2]> {
    let sums = Sums::open(file)?;
    let loss = |new: &Var<Cpu>, others: &[Var<Cpu>]| {
        let pairs = new.dims()[0] / 2;
        let halves = |sums: &Var<Cpu>| -> Result<[Var<Cpu>; 2]> {
            let sums = sums.reshape([pairs, 2])?;
            Ok([sums.narrow(1, 0, 1)?, sums.narrow(1, 1, 1)?])
        };
        let (policy, fixed) = (halves(&new.sum(&[1])?)?, halves(&others[0].sum(&[1])?)?);
        let options = DpoOptions { reduction: Reduction::Sum, ..Default::default() };
        Loss::sum(loss::dpo(policy.each_ref(), fixed.each_ref(), options)?, pairs as f64)
    };
    let mut policy = Policy::new(comm, file, seed, axis, 1e-3, loss)?;
    let asked = |policy: &Policy<_>| -> Result<f64> {
        let whole = policy.step.gather_full_params()?;
        let prompts = (0..16).map(|i| Ok(sums.question(i)?.into())).collect::<Result<Vec<_>>>()?;
        let options =
            GenerationOptions { max_new_tokens: 6, eos_token_ids: sums.end.clone(), ..GenerationOptions::default() };
        let answers = generate(&policy.model, &prompts, &options, None)?;
        drop(whole);
        let worth = |(i, answer): (usize, &models::Generated)| {
            Ok(reward(&sums.tokenizer.decode(&answer.tokens)?, Sums::numbers(i).iter().sum()))
        };
        Ok(answers.iter().enumerate().map(worth).sum::<Result<f64>>()? / answers.len() as f64)
    };
    let before = asked(&policy)?;
    let own = PAIRS / policy.batch.size();
    let mut losses = vec![];
    for step in 0..STEPS {
        let first = seed as usize + step * PAIRS + policy.batch.rank() * own;
        let [tokens, targets] = pairs(comm, &sums, first, own)?;
        let fixed = policy.reference(&tokens, &targets)?;
        losses.push(policy.train(&tokens, &targets, &[fixed])?);
    }
    Ok([vec![before, asked(&policy)?], losses])
}

/// Rows that alternate between the chosen and the rejected answer to a question, `[2 P, T]`: tokens, and the tokens
/// after them, −100 but in answers.
fn pairs(comm: &Comm<Cpu>, sums: &Sums, first: usize, pairs: usize) -> Result<[Var<Cpu>; 2]> {
    let row = |i: usize| {
        let [a, b] = Sums::numbers(first + i / 2);
        let answer =
            if i.is_multiple_of(2) { format!("{}", a + b) } else { format!("The sum of {a} and {b} is {}.", a + b) };
        let answered = Sums::conversation(first + i / 2).with("assistant", &answer);
        sums.template.encode(&sums.tokenizer, &answered)
    };
    let rows = (0..2 * pairs).map(row).collect::<Result<Vec<_>>>()?;
    let tokens: Vec<Vec<i64>> = rows.iter().map(|row| row.tokens.iter().map(|&t| i64::from(t)).collect()).collect();
    let targets: Vec<_> = rows.iter().map(|row| row.targets()).collect();
    let padded = |rows: &[Vec<i64>], filler| -> Result<_> {
        Ok(Var::new(pad(rows, filler, 1)?.values.to_tensor(comm.runtime())?))
    };
    Ok([padded(&tokens, 0)?, padded(&targets, -100)?])
}

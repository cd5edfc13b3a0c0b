//! GRPO (Shao et al. 2024) of SmolLM2, which learns to answer sums with the number alone: on one rank, in shards (ZeRO
//! stage 3) and in a pipeline of two stages.
//!
//! Trainer and sampler have the same bits: importance ratios are exactly 1 after every round of sampling, and the first
//! divergence is exactly 0. It reads the folder of `conformance/against/real_models.py`:
//! `cargo run --release -p weftgrad-models --features text --example real_grpo -- FOLDER`

mod real;

use std::{
    ops::Range,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use autograd::Var;
use comm::{Comm, Communicator, Ranks};
use distributed::{plan::Axis, train::Loss};
use models::{Generated, GenerationOptions, Prompt, RolloutBatch, Sampling, rollouts};
use nn::loss::{self, PolicyOptions};
use numcore::{
    Error, Result, Tensor,
    ops::{PointwiseOps, ReduceOps},
};
use real::{LAYOUTS, Policy, Sums, reward};
use runtime_cpu::Cpu;

const ROUNDS: usize = 8;
/// Prompts of a round, and completions of each.
const PROMPTS: usize = 4;
const GROUP: usize = 8;

/// A rank's mean rewards and the losses of rounds; of each update how far ratios are from 1 and divergences from 0.
struct Run {
    rewards: Vec<f64>,
    losses: Vec<f64>,
    off: Vec<[f64; 2]>,
}

fn main() -> Result<()> {
    let file = real::file("real_grpo")?;
    for (name, axis, ranks) in LAYOUTS {
        for seed in 0..if ranks == 1 { 3 } else { 1 } {
            let runs = Ranks::new(ranks).run(|_| Ok(Cpu::new()), |comm| train(&comm, &file, axis, seed))?;
            let mean = |rounds: Range<usize>| {
                let of = runs.iter().flat_map(|run| &run.rewards[rounds.clone()]);
                of.sum::<f64>() / (rounds.len() * ranks) as f64
            };
            let rewards: Vec<f64> = (0..ROUNDS).map(|round| mean(round..round + 1)).collect();
            println!("{name}, seed {seed}: rewards {rewards:.3?}, losses {:.4?}", runs[0].losses);
            // Ranks without a last stage see no update.
            let off: Vec<_> = runs.iter().map(|run| &run.off).filter(|off| !off.is_empty()).collect();
            let ratio = off.iter().flat_map(|off| off.iter()).map(|off| off[0]).fold(0.0, f64::max);
            let divergence = off.iter().map(|off| off[0][1]).fold(0.0, f64::max);
            let gain = mean(ROUNDS - 3..ROUNDS) - mean(0..3);
            println!("    ratios are {ratio} from 1, the first divergence {divergence}; rewards rise by {gain:.3}");
            // The mean of 96 answers has a deviation of 0.03.
            if off.is_empty() || [ratio, divergence] != [0.0; 2] || gain < 0.15 {
                return Err(Error::state(
                    "real_grpo",
                    "ratios, the first divergence or rewards are not as they should be",
                ));
            }
        }
    }
    Ok(())
}

fn train(comm: &Comm<Cpu>, file: &Path, axis: Axis, seed: u64) -> Result<Run> {
    let (sums, off) = (Sums::open(file)?, Arc::new(Mutex::new(vec![])));
    let seen = off.clone();
    let loss = move |new: &Var<Cpu>, others: &[Var<Cpu>]| {
        let [old, fixed, advantages, mask] = others else {
            return Err(Error::state("real_grpo", "four tensors beside log-probabilities"));
        };
        let furthest = |a: &Var<Cpu>, b| a.sub(b)?.abs()?.amax_all()?.item();
        seen.lock().unwrap_or_else(PoisonError::into_inner).push([furthest(new, old)?, furthest(new, fixed)?]);
        let (rows, options) = (new.dims()[0] as f64, PolicyOptions { kl: 0.04, ..Default::default() });
        Loss::sum(loss::grpo(new, old, fixed, advantages, mask, options)?.mul(rows)?, rows)
    };
    let mut policy = Policy::new(comm, file, seed, axis, 1e-3, loss)?;
    let (own, options) = (
        PROMPTS / policy.batch.size(),
        GenerationOptions {
            max_new_tokens: 6,
            eos_token_ids: sums.end.clone(),
            sampling: Some(Sampling::default()),
            seed,
            ..Default::default()
        },
    );
    let (mut rewards, mut losses) = (vec![], vec![]);
    for round in 0..ROUNDS {
        let first = round * PROMPTS + policy.batch.rank() * own;
        let prompt = |i| Ok(Prompt { tokens: sums.question(i)?, stream: i as u64 });
        let prompts = (first..first + own).map(prompt).collect::<Result<Vec<_>>>()?;
        let rewarded = |prompt: &Prompt, text: &Generated| {
            let numbers = Sums::numbers(prompt.stream as usize / GROUP);
            Ok(reward(&sums.tokenizer.decode(&text.tokens)?, numbers.iter().sum()))
        };
        let whole = policy.step.gather_full_params()?;
        let sampled = rollouts(&policy.model, &prompts, GROUP, &options, None, rewarded)?;
        drop(whole);
        let each: Vec<f64> = sampled.iter().map(|rollout| rollout.reward).collect();
        rewards.push(each.iter().sum::<f64>() / each.len() as f64);
        let advantages: Vec<f32> = loss::group_advantages(&each, GROUP, true)?.into_iter().map(|a| a as f32).collect();
        let advantages = Var::new(Tensor::from_slice(comm.runtime(), [each.len(), 1], &advantages)?);
        let RolloutBatch { tokens, targets, old, mask } = RolloutBatch::new(&policy.model, &sampled)?;
        let fixed = policy.reference(&tokens, &targets)?;
        losses.push(policy.train(&tokens, &targets, &[old, fixed, advantages, mask])?);
    }
    let off = off.lock().unwrap_or_else(PoisonError::into_inner).clone();
    Ok(Run { rewards, losses, off })
}

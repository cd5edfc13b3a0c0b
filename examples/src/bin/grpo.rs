//! GRPO (Shao et al. 2024) of two models: a policy in shards (ZeRO stage 3), which samples its own texts, and the
//! frozen reference that it began as. At first, ratios are exactly 1 and divergences exactly 0.
#![forbid(unsafe_code)]

use weftgrad::{
    distributed::{
        comm::{Comm, Communicator},
        train::{Loss, TrainStep},
        zero::ZeroStage,
    },
    fused::{CrossEntropyOptions, Reduction},
    models::{Decoder, Generated, GenerationOptions, Prompt, Sampling, generate},
    prelude::*,
};
use weftgrad_examples::{Outcome, small};

/// Answers to each prompt, and their tokens.
const GROUP: usize = 4;
const TOKENS: usize = 12;

fn main() -> Outcome<()> {
    let [rewards, losses, apart] = small::on_ranks(4, train)?;
    println!("in the first update, ratios are {} from 1 and divergences {} from 0", apart[0], apart[1]);
    if apart[..2] != [0.0, 0.0] || rewards.last() <= rewards.first() {
        return Err(format!("the policy does not begin as the reference, or learns nothing: {rewards:?}").into());
    }
    let [alone, losses_alone, _] = small::on_ranks(1, train)?;
    small::compare("mean rewards", &rewards, &alone)?;
    small::compare("losses", &losses, &losses_alone)
}

/// Returns the mean reward of each round; of each update the loss, and how far ratios and divergences are off.
fn train(comm: Comm<Cpu>) -> Result<[Vec<f64>; 3]> {
    let (policy, reference) = (small::decoder(&comm, 0)?, small::decoder(&comm, 0)?);
    let mut step =
        TrainStep::builder(&comm, &policy).optimizer(small::adamw(2e-2)).zero(ZeroStage::Parameters).build()?;
    let (mut means, mut losses, mut off) = (vec![], vec![], vec![]);
    for round in 0..8 {
        let whole = step.gather_full_params()?;
        let [rows, rewards] = answers(&comm, &policy, round)?;
        drop(whole);
        means.push(small::of_all(&comm, rewards.mean_all()?.item()?)?.iter().sum::<f64>() / comm.size() as f64);
        let (mean, deviation) = (rewards.mean_keepdim(&[1])?, rewards.std_keepdim(&[1], 1)?);
        let gains = Var::new(rewards.sub(&mean)?.div(&deviation.add(1e-6)?)?.reshape([rows.shape()[0], 1])?);
        let (old, fixed) = (no_grad(|| log_probs(&policy, &rows))?, no_grad(|| log_probs(&reference, &rows))?);
        for _ in 0..2 {
            let metrics = step.step(|_| {
                let new = log_probs(&policy, &rows)?;
                let (ratio, apart) = (new.sub(&old)?.exp()?, fixed.sub(&new)?);
                let divergence = apart.exp()?.sub(&apart)?.sub(1.0)?;
                let gain = ratio.mul(&gains)?.minimum(&ratio.clamp(0.8, 1.2)?.mul(&gains)?)?;
                off.extend([ratio.sub(1.0)?.abs()?.amax_all()?.item()?, divergence.amax_all()?.item()?]);
                Loss::sum(divergence.mul(0.04)?.sub(&gain)?.sum_all()?, (rows.shape()[0] * TOKENS) as f64)
            })?;
            losses.push(metrics.loss()?);
        }
    }
    Ok([means, losses, off])
}

/// This rank's prompts with answers `[B, 1 + T]`, and rewards `[P, G]`: the share of an answer's tokens that are even.
fn answers(comm: &Comm<Cpu>, policy: &Decoder<Cpu>, round: usize) -> Result<[Tensor<Cpu>; 2]> {
    let (own, rt) = (small::share(comm), comm.runtime());
    let prompt = |at| Prompt { tokens: vec![(at / GROUP) as u32], stream: (round * small::ROWS + at) as u64 };
    let prompts: Vec<Prompt> = own.clone().map(prompt).collect();
    let options =
        GenerationOptions { max_new_tokens: TOKENS, sampling: Some(Sampling::default()), ..Default::default() };
    let answers = generate(policy, &prompts, &options, None)?;
    let text = prompts.iter().zip(&answers).flat_map(|(prompt, answer)| prompt.tokens.iter().chain(&answer.tokens));
    let even = |answer: &Generated| answer.tokens.iter().filter(|token| *token % 2 == 0).count() as f64 / TOKENS as f64;
    let rows = Tensor::from_slice(rt, [own.len(), 1 + TOKENS], &text.map(|&t| i64::from(t)).collect::<Vec<_>>())?;
    Ok([rows, Tensor::from_slice(rt, [own.len() / GROUP, GROUP], &answers.iter().map(even).collect::<Vec<_>>())?])
}

/// The log-probability of each token of the answers, `[B, T]`.
fn log_probs(model: &Decoder<Cpu>, rows: &Tensor<Cpu>) -> Result<Var<Cpu>> {
    let each = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
    let logits = model.forward(&Var::new(rows.narrow(1, 0, TOKENS)?))?;
    logits.cross_entropy_with(&Var::new(rows.narrow(1, 1, TOKENS)?), each)?.neg()
}

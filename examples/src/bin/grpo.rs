//! GRPO (Shao et al. 2024) of two models: a policy that samples its own texts, alone or in shards (ZeRO stage 3), and
//! the frozen reference that it began as. Rewards are for even tokens. Trainer and sampler have the same bits: in the
//! first update ratios are exactly 1 and divergences exactly 0.
#![forbid(unsafe_code)]

use weftgrad::{
    distributed::{
        comm::{Comm, Communicator},
        train::{Loss, TrainStep},
        zero::ZeroStage,
    },
    models::{Decoder, DecoderInputs, Generated, GenerationOptions, Prompt, RolloutBatch, Sampling, rollouts},
    nn::loss::{self, PolicyOptions, TokenMean},
    prelude::*,
};
use weftgrad_examples::{Outcome, small};

/// Completions of each prompt, and the tokens of each.
const GROUP: usize = 4;
const TOKENS: usize = 12;
const ROUNDS: usize = 8;

fn main() -> Outcome<()> {
    for seed in 0..3 {
        let [rewards, losses, apart] = small::on_ranks(4, |comm| train(comm, seed))?;
        println!("in the first update, ratios are {} from 1 and divergences {} from 0", apart[0], apart[1]);
        // The deviation of a round's mean of 192 tokens, half of them even by chance, is 0.036.
        let gain = rewards[ROUNDS - 1] - rewards[0];
        println!("seed {seed}: the mean reward rises by {gain:.3}");
        if apart[..2] != [0.0, 0.0] || gain < 0.15 {
            return Err(format!("the policy does not begin as the reference, or learns nothing: {rewards:?}").into());
        }
        if seed == 0 {
            let [alone, losses_alone, _] = small::on_ranks(1, |comm| train(comm, seed))?;
            small::compare("mean rewards", &rewards, &alone)?;
            small::compare("losses", &losses, &losses_alone)?;
        }
    }
    Ok(())
}

/// Returns the mean reward of each round; of each update the loss, and how far ratios and divergences are off.
fn train(comm: Comm<Cpu>, seed: u64) -> Result<[Vec<f64>; 3]> {
    let (policy, reference) = (small::decoder(&comm, 0)?, small::decoder(&comm, 0)?);
    let mut step =
        TrainStep::builder(&comm, &policy).optimizer(small::adamw(2e-2)).zero(ZeroStage::Parameters).build()?;
    let own = small::share(&comm);
    let sampling = Some(Sampling::default());
    let options = GenerationOptions { max_new_tokens: TOKENS, sampling, seed, rows: Some(3), ..Default::default() };
    let even = |_: &Prompt, text: &Generated| {
        Ok(text.tokens.iter().filter(|token| *token % 2 == 0).count() as f64 / text.tokens.len() as f64)
    };
    let policy_options = PolicyOptions { kl: 0.04, mean: TokenMean::Length(TOKENS), ..Default::default() };
    let (mut means, mut losses, mut off) = (vec![], vec![], vec![]);
    for round in 0..ROUNDS {
        let prompt = |i: usize| Prompt { tokens: vec![i as u32], stream: (round * small::ROWS / GROUP + i) as u64 };
        let prompts: Vec<_> = (own.start / GROUP..own.end / GROUP).map(prompt).collect();
        let whole = step.gather_full_params()?;
        let sampled = rollouts(&policy, &prompts, GROUP, &options, None, even)?;
        drop(whole);
        let rewards: Vec<_> = sampled.iter().map(|rollout| rollout.reward).collect();
        let sums = small::of_all(&comm, rewards.iter().sum())?;
        means.push(sums.iter().sum::<f64>() / small::ROWS as f64);
        // Each rank has whole groups, whose advantages need no other rank.
        let advantages = loss::group_advantages(&rewards, GROUP, true)?;
        let advantages = Var::new(Tensor::from_slice(comm.runtime(), [own.len(), 1], &advantages)?);
        let batch = RolloutBatch::new(&policy, &sampled)?;
        let fixed = no_grad(|| logprobs(&reference, &batch))?;
        for _ in 0..2 {
            let metrics = step.step(|_| {
                let new = logprobs(&policy, &batch)?;
                let (ratio, apart) = (new.sub(&batch.old)?.exp()?, fixed.sub(&new)?);
                let divergence = apart.expm1()?.sub(&apart)?;
                off.extend([ratio.sub(1.0)?.abs()?.amax_all()?.item()?, divergence.amax_all()?.item()?]);
                let loss = loss::grpo(&new, &batch.old, &fixed, &advantages, &batch.mask, policy_options)?;
                Loss::sum(loss.mul(own.len() as f64)?, own.len() as f64)
            })?;
            losses.push(metrics.loss()?);
        }
    }
    Ok([means, losses, off])
}

/// The log-probability of each token of the completions, `[N, T]`.
fn logprobs(model: &Decoder<Cpu>, batch: &RolloutBatch<Cpu>) -> Result<Var<Cpu>> {
    model.logprobs(&model.states(&batch.tokens, DecoderInputs::default())?, &batch.targets)
}

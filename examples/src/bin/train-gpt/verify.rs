//! `--verify`: the configured plan on threads, compared with one rank.

use weftgrad::{
    AnyRuntime, Device,
    data::sources::Characters,
    distributed::plan::Axis,
    planner::verify::{Examples, Verification, Verify},
    prelude::*,
};

use crate::{
    config::{Config, Together},
    input, step_of,
};

/// Compares two steps of the configuration with those of one rank, on the first sequences of the text.
pub(crate) fn verify(config: &Config, text: &str) -> Result<Verification> {
    if config.run.together == Together::Local {
        let why =
            "local updates are not the training of one rank: verify the configuration with `run.together = \"sums\"`";
        return Err(Error::config("verify", "run.together", why));
    }
    let alone = Config { mesh: Config::default().mesh, ..config.clone() };
    let characters = Characters::of(text);
    let (tokens, vocab) = (characters.encode(text)?, characters.len());
    let (plan, context) = (config.plan(config.ranks)?, config.model.context);
    let shares = plan.size(Axis::Data) * plan.size(Axis::Shard);
    let rows = config.data.batch.next_multiple_of(shares * config.run.accumulation);
    let batch = |rt: &AnyRuntime, step: u64| {
        let token = |i: usize| i64::from(tokens[(step as usize * rows * context + i) % tokens.len()]);
        let shifted = |by: usize| {
            let row = |row: usize| (0..context).map(move |k| row * context + k + by);
            let tokens: Vec<i64> = (0..rows).flat_map(row).map(token).collect();
            Tensor::from_slice(rt, [rows, context], &tokens)
        };
        Ok(vec![shifted(0)?, shifted(1)?])
    };
    Verify::new(plan).run(
        |_| Device::Cpu.open_with(Some(1)),
        |mesh| step_of(mesh, if mesh.plan().world() == 1 { &alone } else { config }, vocab),
        batch,
        |model, Examples { tensors, .. }| {
            input(model, &(tensors[0].clone(), tensors[1].clone()), config.run.accumulation)
        },
    )
}

//! An optimizer that looks at whole matrices says that it cannot be sharded, and what can.

use distributed::{comm::Comm, train::TrainingConfig, zero::{ZeroOptions, ZeroTrainer}};
use nn::Linear;
use numcore::{NullRuntime, Result};
use optim::{Muon, MuonConfig, ParamGroups};

fn train(comm: &Comm<NullRuntime>, model: &Linear<NullRuntime>, muon: Muon<NullRuntime>) -> Result<()> {
    ZeroTrainer::with(comm, model, muon, TrainingConfig::default(), ZeroOptions::default())?;
    ParamGroups::new(MuonConfig::default());
    Ok(())
}

fn main() {}

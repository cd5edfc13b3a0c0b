//! An optimizer that looks at whole matrices says that it cannot be sharded, and what can.

use distributed::{comm::Comm, train::TrainStep, zero::ZeroStage};
use nn::Linear;
use numcore::{NullRuntime, Result};
use optim::{Muon, MuonConfig, ParamGroups};

fn train(comm: &Comm<NullRuntime>, model: &Linear<NullRuntime>, muon: Muon<NullRuntime>) -> Result<()> {
    TrainStep::builder(comm, model).optimizer(muon).zero(ZeroStage::Parameters).build()?;
    ParamGroups::new(MuonConfig::default());
    Ok(())
}

fn main() {}

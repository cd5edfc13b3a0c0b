//! ZeRO with a schedule that gives no number: an error on every rank, and weights stay what they are.

use crate::prelude::*;

fn trainer(comm: &Comm<Cpu>, model: &Mlp<Cpu>, options: ZeroOptions, rate: f64) -> Result<TrainStep<Cpu>> {
    let broken = move |base: f64, step: u64| if step == 1 { rate } else { base };
    // Two groups: a rule with one of each.
    let groups = ParamGroups::new(AdamWConfig::default()).group(|name, _| name == "b.weight", |c| c.lr = 0.5);
    TrainStep::builder(comm, model).optimizer(groups.scheduled(broken)).config(config()).zero(options).build()
}

#[test]
fn is_an_error_at_every_stage() {
    for stage in ZeroStage::ALL {
        for (rate, state) in [f64::NAN, f64::INFINITY].into_iter().zip([StatePlace::Device, StatePlace::Host]) {
            let options = || ZeroOptions { stage, units: UnitOf::children(), state, ..Default::default() };
            let what = format!("stage {}, {rate}", stage.number());
            let rt = Cpu::with_threads(1);
            let model = Mlp::new(&Init::new(&rt, 0)).unwrap();
            let comm = Arc::new(NoOpCommunicator::new(&rt)) as Comm<Cpu>;
            let mut alone = trainer(&comm, &model, options(), rate).unwrap();
            let all: Vec<usize> = (0..EXAMPLES).collect();
            alone.step(|_| model.loss(&rt, 0, &all)).unwrap();
            let before = weights(&model).unwrap();
            let error = alone.step(|_| model.loss(&rt, 1, &all)).map(|_| ()).expect_err(&what).to_string();
            assert!(error.contains("learning rate is") && error.contains("group 0"), "{what}: {error}");
            assert!(weights(&model).unwrap() == before, "{what}");

            let told = Ranks::new(3).outcomes(cpu, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
                let mut trainer = trainer(&comm, &model, options(), rate)?;
                trainer.step(|_| model.loss(comm.runtime(), 0, &own(&comm)))?;
                // Where parameters are sharded, nobody can gather them once the world has failed.
                let seen = || if stage.shards_parameters() { Ok(Vec::new()) } else { weights(&model) };
                let before = seen()?;
                let done = trainer.step(|_| model.loss(comm.runtime(), 1, &own(&comm)));
                Ok((done.map(|_| ()).expect_err("no rate").to_string(), seen()? == before))
            });
            for outcome in told.unwrap() {
                let (error, same) = outcome.unwrap_or_else(|e| panic!("{what}: {e}"));
                assert!(error.contains("learning rate is") && error.contains("group 0") && same, "{what}: {error}");
            }
        }
    }
}

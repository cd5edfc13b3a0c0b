//! Values that are put into parameters after a trainer was made are those it trains from, whatever the strategy.

use crate::prelude::*;

/// What is put into the model, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Put {
    /// Every parameter, by a state dict.
    All,
    /// One parameter of a unit of two.
    Weight,
    /// The other one.
    Bias,
}

const PUTS: [Put; 3] = [Put::All, Put::Weight, Put::Bias];

fn put(model: &Mlp<Cpu>, rt: &Cpu, what: Put) -> Result<()> {
    let other = Mlp::new(&Init::new(rt, 9).dtype(model.a.weight.dtype()))?;
    match (what, &model.b.bias, &other.a.bias) {
        (Put::All, ..) => model.load_state_dict(other.state_dict()?).map(|_| ()),
        (Put::Weight, ..) => model.b.weight.set(numcore::ops::PointwiseOps::mul(&model.b.weight.value()?, 0.5)?),
        (Put::Bias, Some(own), _) => own.set(numcore::ops::PointwiseOps::add(&own.value()?, 0.25)?),
        (Put::Bias, ..) => panic!("the layer has a bias"),
    }
}

/// Every rank computes the same examples: at any number of ranks the mean gradient is that of one.
const SEEN: [usize; 3] = [0, 1, 2];

fn alone(dtype: DType, what: Put, before: usize) -> Trace {
    let rt = Cpu::with_threads(1);
    let model = Mlp::new(&Init::new(&rt, 0).dtype(dtype)).unwrap();
    let mut trainer = simple(&rt, &model, config()).unwrap();
    let mut trace = Trace::default();
    for step in 0..before + 2 {
        if step == before {
            put(&model, &rt, what).unwrap();
            trace.weights.push(weights(&model).unwrap());
        }
        trace.losses.push(trainer.step(|_| model.loss(&rt, step, &SEEN)).unwrap().loss().unwrap());
    }
    trace.weights.push(weights(&model).unwrap());
    trace
}

fn many(comm: &Comm<Cpu>, how: ZeroStage, dtype: DType, what: Put, before: usize, scoped: bool) -> Result<Trace> {
    let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(dtype))?;
    let mut trainer = Any::new(comm, &model, how, config())?;
    let mut trace = Trace::default();
    for step in 0..before + 2 {
        if step == before {
            let scope = scoped.then(|| trainer.full()).transpose()?;
            put(&model, comm.runtime(), what)?;
            drop(scope);
            trace.weights.push(trainer.weights(&model)?);
        }
        trace.losses.push(trainer.step_with(|_| model.loss(comm.runtime(), step, &SEEN))?.loss()?);
    }
    trace.weights.push(trainer.weights(&model)?);
    Ok(trace)
}

#[test]
fn training_goes_on_from_them_under_every_strategy() {
    let mut turns = Turns::one_of(3);
    for (dtype, bound) in [(DType::F64, 1e-11), (DType::BF16, 2e-2)] {
        for (what, before) in PUTS.into_iter().flat_map(|what| [(what, 0), (what, 2)]) {
            let one = alone(dtype, what, before);
            for n in [1, 2, 3] {
                let hows = STAGES.into_iter().flat_map(|how| [(how, false), (how, true)]);
                for (how, scoped) in hows.filter(|_| turns.come()) {
                    let got = everywhere(n, |comm| many(&comm, how, dtype, what, before, scoped));
                    let off = difference(&got, &one);
                    assert!(
                        off <= bound,
                        "{how:?} {dtype} on {n}, {what:?} after {before} steps, in a scope: {scoped}: {off:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_value_put_there_while_the_next_is_on_its_way_wins() {
    // After an update of stages 1 and 2 gathers are in flight; one parameter is replaced before any was read.
    for how in STAGES {
        everywhere(3, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
            let mut trainer = Any::new(&comm, &model, how, config())?;
            trainer.step_with(|_| model.loss(comm.runtime(), 0, &SEEN))?;
            let value = Mlp::new(&Init::new(comm.runtime(), 5).dtype(DType::F64))?.c.weight.value()?;
            model.c.weight.set(value.clone())?;
            // Reads the bias of the same unit, whose gather is still in flight.
            autograd::no_grad(|| model.loss(comm.runtime(), 0, &SEEN))?;
            let _scope = trainer.full()?;
            assert_eq!(model.c.weight.value()?.to_vec::<f64>()?, value.to_vec::<f64>()?, "{how:?}");
            Ok(Trace::default())
        });
    }
}

/// What a program takes out of a leaf, its trainer still has.
#[test]
fn a_value_that_was_taken_out_can_be_read_and_trained() {
    for how in STAGES {
        let (tell, told) = std::sync::mpsc::channel();
        let program = move || {
            let done = Ranks::new(2).run(cpu, |comm| {
                let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
                let mut trainer = Any::new(&comm, &model, how, config())?;
                trainer.step_with(|_| model.loss(comm.runtime(), 0, &SEEN))?;
                let scope = trainer.full()?;
                let leaf = model.c.weight.leaf();
                let seen = leaf.value()?.to_vec::<f64>()?;
                let taken = leaf.take().filter(|_| how == ZeroStage::None);
                // Buckets have no other place that a value could come from.
                if how == ZeroStage::None {
                    assert!(leaf.value().is_err());
                    leaf.put(taken.expect("it was there"))?;
                }
                assert_eq!(leaf.value()?.to_vec::<f64>()?, seen, "{how:?}");
                drop(scope);
                trainer.step_with(|_| model.loss(comm.runtime(), 1, &SEEN))?;
                trainer.weights(&model)
            });
            // The receiver is gone once the time is up.
            let _ = tell.send(done);
        };
        std::thread::spawn(program);
        let done = told.recv_timeout(std::time::Duration::from_secs(60));
        let ranks = done.unwrap_or_else(|e| panic!("{how:?}: {e}")).unwrap();
        let through = everywhere(2, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
            let mut trainer = Any::new(&comm, &model, how, config())?;
            (0..2).try_for_each(|step| trainer.step_with(|_| model.loss(comm.runtime(), step, &SEEN)).map(|_| ()))?;
            Ok(Trace { weights: vec![trainer.weights(&model)?], ..Default::default() })
        });
        assert!(ranks.iter().all(|rank| *rank == through.weights[0]), "{how:?}");
    }
}

#[test]
fn checkpoints_have_them() {
    for how in STAGES {
        let scratch = Scratch::new(&format!("replaced-{how:?}"));
        let folder = scratch.folder();
        let saved = everywhere(2, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut trainer = Any::new(&comm, &model, how, config())?;
            trainer.step_with(|_| model.loss(comm.runtime(), 0, &SEEN))?;
            put(&model, comm.runtime(), Put::Weight)?;
            trainer.save(&folder)?;
            Ok(Trace { weights: vec![trainer.weights(&model)?], ..Default::default() })
        });
        let loaded = everywhere(2, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 7))?;
            let mut trainer = Any::new(&comm, &model, how, config())?;
            // What is loaded wins over what was put there before.
            put(&model, comm.runtime(), Put::All)?;
            trainer.load(&folder)?;
            Ok(Trace { weights: vec![trainer.weights(&model)?], ..Default::default() })
        });
        assert_eq!(saved, loaded, "{how:?}");
    }
}

#[test]
fn no_rank_keeps_them_whole_where_parameters_are_sharded() {
    Ranks::new(2)
        .run(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut trainer = Any::new(&comm, &model, ZeroStage::Parameters, TrainingConfig::default())?;
            put(&model, comm.runtime(), Put::All)?;
            trainer.step_with(|_| model.loss(comm.runtime(), 0, &SEEN))?;
            let here = model.named_parameters();
            assert!(here.iter().all(|(_, p)| !p.leaf().is_resident()));
            Ok(())
        })
        .unwrap();
}

//! Ranks that train by themselves and meet: what ends a step or a synchronization, what is refused, and buffers.

use crate::{
    local_updates::{EXAMPLES, SGD, adam, every, model, own, sgd},
    prelude::*,
};

/// A model with running statistics.
#[derive(Module)]
#[module(crate = "::nn")]
struct Normed<R: Runtime> {
    a: Linear<R>,
    norm: BatchNorm<R>,
}

#[test]
fn a_rank_that_fails_ends_the_step_of_all_and_frozen_parameters_stay() {
    let outcome = Ranks::new(3).run(cpu, |comm| {
        let (rt, model) = (comm.runtime(), model(comm.runtime())?);
        model.b.weight.set_requires_grad(false);
        let frozen = model.b.weight.value()?.to_vec::<f64>()?;
        let mut step = LocalSteps::new(&comm, &model, adam(rt, &model)?, DiLoCo::default(), every(2))?;
        for k in 0..2 {
            step.step(|_| model.loss(rt, k, &own(comm.rank(), 3)))?;
        }
        assert!(model.b.weight.value()?.to_vec::<f64>()? == frozen);
        let before = weights(&model)?;
        let failed = |k: usize| {
            step.step(|_| {
                if comm.rank() == 1 { Err(Error::state("a loss", "fails on purpose")) } else { model.loss(rt, k, &[0]) }
            })
            .map(drop)
        };
        let mut failed = failed;
        // The others meet after two steps, and learn of it there.
        let why = (2..6).find_map(|k| failed(k).err()).ok_or_else(|| Error::state("a test", "nothing failed"))?;
        Ok((why.to_string(), comm.rank() == 1 && weights(&model)? != before))
    });
    for (why, changed) in outcome.unwrap() {
        assert!(why.contains("fails on purpose"), "{why}");
        assert!(!changed, "a failed step changes nothing");
    }
}

#[test]
fn a_rank_that_trains_what_was_frozen_ends_the_step_of_all() {
    let outcomes = Ranks::new(3).outcomes(cpu, |comm| {
        let (rt, model) = (comm.runtime(), model(comm.runtime())?);
        model.b.weight.set_requires_grad(false);
        let mut step = LocalSteps::new(&comm, &model, adam(rt, &model)?, LocalSgd, every(2))?;
        model.b.weight.set_requires_grad(comm.rank() == 1);
        let steps = (0..2).try_for_each(|k| step.step(|_| model.loss(rt, k, &own(comm.rank(), 3))).map(drop));
        // The rank itself goes on.
        Ok([steps.unwrap_err().to_string(), comm.barrier().unwrap_err().to_string()])
    });
    for outcome in outcomes.unwrap() {
        let errors = outcome.unwrap();
        let refused = |error: &String| error.contains("local updates and parameters that are unfrozen exclude each");
        assert!(errors.iter().all(refused), "{errors:?}");
    }
}

#[test]
fn options_that_differ_are_told() {
    let outcome = Ranks::new(2).run(cpu, |comm| {
        let (rt, model) = (comm.runtime(), model(comm.runtime())?);
        LocalSteps::new(&comm, &model, adam(rt, &model)?, LocalSgd, every(1 + comm.rank() as u64)).map(drop)
    });
    assert!(outcome.unwrap_err().to_string().contains("the synchronization of ranks"));
}

#[test]
fn weights_that_are_not_finite_meet_nobody() {
    let outcome = Ranks::new(3).run(cpu, |comm| {
        let (rt, model) = (comm.runtime(), model(comm.runtime())?);
        let mut step = LocalSteps::new(&comm, &model, adam(rt, &model)?, DiLoCo::default(), every(100))?;
        step.step(|_| model.loss(rt, 0, &own(comm.rank(), 3)))?;
        if comm.rank() == 1 {
            model.b.weight.leaf().set(model.b.weight.value()?.mul(f64::NAN)?)?;
        }
        let before = weights(&model)?;
        let why = step.synchronize().unwrap_err().to_string();
        let same = weights(&model)?.iter().zip(&before).all(|(a, b)| a.to_bits() == b.to_bits());
        Ok((why, same))
    });
    for (why, same) in outcome.unwrap() {
        assert!(why.contains("weights of rank 1 are not finite"), "{why}");
        assert!(same, "nothing has changed");
    }
}

/// A synchronization that fails at any of its calls leaves the weights as they were before it.
#[test]
fn a_meeting_that_fails_changes_no_weights() {
    let mut failures = 0;
    for at in 0..60 {
        let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
            let faulty = comm.rank() == 1;
            let comm: Comm<Cpu> = if faulty { Arc::new(FaultyCommunicator::new(comm, at, Fault::Error)) } else { comm };
            let (rt, model) = (comm.runtime(), model(comm.runtime())?);
            let mut step = LocalSteps::new(&comm, &model, adam(rt, &model)?, DiLoCo::default(), every(100))?;
            step.step(|_| model.loss(rt, 0, &own(comm.rank(), 2)))?;
            let before = weights(&model)?;
            let failed = step.synchronize().is_err();
            Ok((failed, weights(&model)? == before))
        });
        // An error is one of the calls before the synchronization.
        for (failed, same) in outcomes.unwrap().into_iter().flatten() {
            assert_eq!(failed, same, "call {at}");
            failures += usize::from(failed);
        }
    }
    assert!(failures > 2, "{failures} synchronizations failed");
}

/// A load that fails at any of its reads leaves all as it was, or no step is taken after it.
#[test]
fn a_load_that_fails_half_way_is_seen() {
    let rt = cpu(0).unwrap();
    let (comm, model) = (Arc::new(NoOpCommunicator::new(&rt)) as Comm<Cpu>, model(&rt).unwrap());
    let options = LocalUpdates { fragments: 2, ..every(2) };
    let mut step = LocalSteps::new(&comm, &model, adam(&rt, &model).unwrap(), DiLoCo::default(), options).unwrap();
    let take = |step: &mut LocalSteps<Cpu, _>, k| step.step(|_| model.loss(&rt, k, &[0, 1])).map(drop);
    let state = |step: &LocalSteps<Cpu, _>| -> BTreeMap<String, Tensor<Cpu>> {
        let rows = step.parts().unwrap().into_iter().map(|part| (part.name, part.row.on(&rt).unwrap()));
        // Later steps write over what they own.
        rows.map(|(name, row)| (name, row.add(0.0).unwrap())).collect()
    };
    (0..3).for_each(|k| take(&mut step, k).unwrap());
    let (saved, numbers) = (state(&step), step.numbers());
    let read = |wanted: &Wanted| {
        let Range { start, end } = wanted.elements;
        saved[&wanted.name].narrow(0, start, end - start)
    };
    let mut seen = 0;
    for fails_at in 0.. {
        (0..2).for_each(|k| take(&mut step, k).unwrap());
        let (before, mut reads) = (state(&step), 0);
        step.expect(&numbers);
        let loaded = step.restore(
            &mut |wanted| {
                reads += 1;
                if reads > fails_at {
                    return Err(Error::state("a read", "fails on purpose"));
                }
                read(wanted)
            },
            &numbers,
        );
        if loaded.is_ok() {
            break;
        }
        let same = || state(&step).iter().all(|(name, row)| row.to_vec::<f64>().ok() == before[name].to_vec().ok());
        if step.parts().is_ok() {
            assert!(same(), "read {fails_at}");
        } else {
            assert!(take(&mut step, 0).unwrap_err().to_string().contains("a load failed"));
            seen += 1;
        }
        step.expect(&numbers);
        step.restore(&mut { read }, &numbers).unwrap();
    }
    assert!(seen > 2, "{seen}");
}

#[test]
fn halves_and_what_was_not_saved_are_refused() {
    let halves = Ranks::new(2).run(cpu, |comm| {
        let model: Mlp<Cpu> = Mlp::new(&Init::new(comm.runtime(), 3).dtype(DType::BF16))?;
        LocalSteps::new(&comm, &model, adam(comm.runtime(), &model)?, LocalSgd, every(2)).map(drop)
    });
    assert!(halves.unwrap_err().to_string().contains("compute in halves by `autocast`"));
    let scratch = Scratch::new("local-updates-frozen");
    let folder = scratch.folder();
    let with = |frozen: bool, load: bool| {
        Ranks::new(2).run(cpu, |comm| {
            let model = model(comm.runtime())?;
            model.b.weight.set_requires_grad(!frozen);
            let mut step = LocalSteps::new(&comm, &model, sgd(comm.runtime(), &model)?, LocalSgd, every(2))?;
            if load {
                return step.load(&folder).map(drop);
            }
            step.save(&folder, &Default::default())
        })
    };
    with(true, false).unwrap();
    with(true, true).unwrap();
    let why = with(false, true).unwrap_err().to_string();
    assert!(why.contains("local/parameter/b.weight"), "{why}");
}

#[test]
fn buffers_are_averaged_and_are_in_checkpoints_for_everybody() {
    let make = |rt: &Cpu| {
        let init = Init::new(rt, 3).dtype(DType::F64);
        Ok::<_, Error>(Normed { a: Linear::new(&init, 2, 4)?, norm: BatchNorm::new(&init, 4)? })
    };
    // All fragments at once, where there are two.
    for fragments in [1, 2] {
        let options = LocalUpdates { fragments, ..every(2) };
        let scratch = Scratch::new("local-updates-buffers");
        let folder = scratch.folder();
        let means = Ranks::new(3).run(cpu, |comm| {
            let model = make(comm.runtime())?;
            let inner =
                TrainStep::builder(&NoOpCommunicator::new(comm.runtime()), &model).optimizer(adamw()).build()?;
            let mut step = LocalSteps::new(&comm, &model, inner, LocalSgd, options.clone())?;
            for k in 0..2 {
                let x = Tensor::normal(comm.runtime(), [6, 2], DType::F64, 0.0, 1.0, (10 * k + comm.rank()) as u64)?;
                step.step(|_| {
                    Loss::sum(model.norm.forward(&model.a.forward(&Var::new(x.clone()))?)?.square()?.sum_all()?, 6.0)
                })?;
            }
            if options.fragments > 1 {
                step.synchronize()?;
            }
            step.save(&folder, &Default::default())?;
            model.norm.running_mean.value().to_vec::<f64>()
        });
        let means = means.unwrap();
        assert!(means.iter().all(|mean| *mean == means[0] && mean.iter().any(|value| *value != 0.0)));
        let rt = cpu(0).unwrap();
        let other = make(&rt).unwrap();
        CheckpointReader::open(folder.step(2)).unwrap().load_parameters(&other, |name| Some(name.into())).unwrap();
        assert!(other.norm.running_mean.value().to_vec::<f64>().unwrap() == means[0]);
    }
}

/// Of several ranks one never has examples; there is a step in which nobody has.
#[test]
fn meeting_after_every_step_of_sgd_is_data_parallelism() {
    for n in WORLDS {
        let all = Ranks::new(n).run(cpu, |comm| {
            let rt = comm.runtime();
            let (local, whole) = (model(rt)?, model(rt)?);
            let mut local_steps = LocalSteps::new(&comm, &local, sgd(rt, &local)?, LocalSgd, every(1))?;
            let config = SgdConfig { lr: SGD, momentum: 0.9, weight_decay: 0.01, ..Default::default() };
            let mut ddp = TrainStep::builder(&comm, &whole).optimizer(config).build()?;
            let (mine, idles) = (own(comm.rank(), n.max(2) - 1), comm.rank() + 1 == n.max(2));
            for k in 0..4 {
                let metrics = match (idles, k) {
                    (_, 2) | (true, 0) => local_steps.idle()?,
                    (true, _) => local_steps.step(|_| local.loss(rt, k, &[0])?.weightless())?,
                    (false, _) => local_steps.step(|_| local.loss(rt, k, &mine))?,
                };
                assert!(metrics.stepped() && metrics.loss()?.is_finite());
                assert_eq!(local_steps.weight_of_all()?, if k == 2 { 0.0 } else { (3 * EXAMPLES) as f64 });
                match (idles, k) {
                    (_, 2) => {}
                    (true, _) => _ = ddp.idle()?,
                    (false, _) => _ = ddp.step(|_| whole.loss(rt, k, &mine))?,
                }
            }
            assert_eq!((local_steps.global_step(), local_steps.synchronizations()), (4, 4));
            Ok((weights(&local)?, weights(&whole)?))
        });
        for (local, whole) in all.unwrap() {
            close(&local, &whole, 1e-12, &format!("{n} ranks"));
        }
    }
}

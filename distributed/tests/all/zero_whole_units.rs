//! Units of ZeRO that are kept whole among others that are sharded.

use crate::{prelude::*, zero_stages::options};

const LAYERS: usize = 5;

/// Layers of which every second is smaller: what it reads is narrowed, and widened again.
fn uneven(rt: &Cpu) -> Result<Vec<Linear<Cpu>>> {
    let init = Init::new(rt, 0);
    (0..LAYERS).map(|k| if k % 2 == 0 { Linear::new(&init, 128, 128) } else { Linear::new(&init, 8, 8) }).collect()
}

fn loss_of_uneven(model: &[Linear<Cpu>], rt: &Cpu) -> Result<Loss<Cpu>> {
    let x = autograd::Var::new(Tensor::normal(rt, [4, 128], DType::F32, 0.0, 1.0, 1)?);
    let layer = |x: autograd::Var<Cpu>, layer: &Linear<Cpu>| match layer.weight.shape()[1] {
        128 => layer.forward(&x)?.tanh(),
        narrow => x.add(&layer.forward(&x.narrow(1, 0, narrow)?)?.tanh()?.mean_keepdim(&[1])?),
    };
    Loss::sum(model.iter().try_fold(x, layer)?.square()?.sum_all()?, 4.0)
}

#[test]
fn units_that_are_whole_do_not_come_between_gathers_of_the_others() {
    let gathers = |accumulation: usize, whole_up_to: usize| {
        let counts = Ranks::new(2).run(cpu, |comm| {
            let counting = Arc::new(CountingCommunicator::new(comm));
            let (comm, rt): (Comm<Cpu>, _) = (counting.clone(), counting.runtime());
            let model = uneven(rt)?;
            let config = TrainingConfig { accumulation, ..Default::default() };
            let options = ZeroOptions { whole_up_to, ..options(ZeroStage::Parameters, UnitOf::layers()) };
            let mut trainer = sharded(&comm, &model, config, options)?;
            let mut counts = Vec::new();
            for _ in 0..3 {
                counting.reset();
                trainer.step(|_| loss_of_uneven(&model, rt))?;
                counts.push(counting.of("all_gather").calls);
            }
            Ok(counts)
        });
        counts.unwrap().swap_remove(0)
    };
    for accumulation in [1, 2, 3] {
        let n = accumulation as u64;
        assert_eq!(gathers(accumulation, 0)[1..], [n * (2 * 5 - 1); 2], "all are sharded");
        // Three are sharded; two are gathered after the update.
        assert_eq!(gathers(accumulation, 72)[1..], [n * (2 * 3 - 1) + 2; 2], "{accumulation} micro-batches");
    }
}

/// Values that take the place of weights for a while reach each rank in its parts, whatever of it is whole.
#[test]
fn values_are_put_into_parts_without_a_whole_model() {
    for (stage, whole_up_to) in [(ZeroStage::Parameters, 0), (ZeroStage::Parameters, 72), (ZeroStage::Gradients, 0)] {
        let ranks = Ranks::new(3).run(cpu, |comm| {
            let rt = comm.runtime();
            let model = uneven(rt)?;
            let before = weights(&model)?;
            let options = ZeroOptions { whole_up_to, ..options(stage, UnitOf::layers()) };
            let mut trainer = sharded(&comm, &model, TrainingConfig::default(), options)?;
            let rows = trainer.parameter_parts()?.into_iter();
            let rows = rows.map(|part| part.row.on(rt)?.add(1.0)).collect::<Result<Vec<_>>>()?;
            rt.reset_peak();
            let live = rt.memory().of(MemoryCategory::Parameters).live;
            assert!(trainer.swap_parameter_parts(&rows)?, "{stage:?} {whole_up_to}");
            assert_eq!(rt.memory().of(MemoryCategory::Parameters).peak, live, "{stage:?} {whole_up_to}");
            let _all = trainer.gather_full_params()?;
            Ok((before, weights(&model)?))
        });
        for (before, after) in ranks.unwrap() {
            let moved = before.iter().zip(&after).all(|(a, b)| (b - a - 1.0).abs() < 1e-6);
            assert!(moved && !before.is_empty(), "{stage:?} {whole_up_to}");
        }
    }
}

/// Trained and frozen halves of a layer are one unit, though each is a buffer of its own.
#[test]
fn a_unit_is_whole_by_all_of_its_elements() {
    let kept = |whole_up_to| {
        let live = Ranks::new(2).run(cpu, |comm| {
            let model = vec![Linear::new(&Init::new(comm.runtime(), 0), 64, 64)?];
            model[0].bias.as_ref().unwrap().set_requires_grad(false);
            let options = ZeroOptions { whole_up_to, ..options(ZeroStage::Parameters, UnitOf::layers()) };
            let _trainer = sharded(&comm, &model, TrainingConfig::default(), options)?;
            Ok(comm.runtime().memory().of(MemoryCategory::Parameters).live)
        });
        live.unwrap()[0]
    };
    let sharded = kept(0);
    assert_eq!(kept(64 * 64), sharded, "its weight alone has as many");
    assert!(kept(64 * 64 + 64) > sharded);
}

//! Buckets are rebuilt once, before the second step, in the order in which gradients became final on rank 0.

use crate::prelude::*;

/// In which order rank `r` applies the layers in a step: all are used everywhere, and become ready from the last to the first.
fn order(rank: usize, step: usize) -> [usize; 3] {
    [[1, 0, 2], [0, 1, 2], [2, 1, 0]][(rank + step / 2) % 3]
}

fn layers(rt: &Cpu) -> Result<Vec<Linear<Cpu>>> {
    let init = Init::new(rt, 4).dtype(DType::F64);
    (0..3).map(|_| Linear::new(&init, 3, 3).map(Linear::without_bias)).collect()
}

fn loss(layers: &[Linear<Cpu>], rt: &Cpu, rank: usize, step: usize) -> Result<Loss<Cpu>> {
    let x = Var::new(Tensor::normal(rt, [2, 3], DType::F64, 0.0, 1.0, (10 * step + rank) as u64)?);
    let y = order(rank, step).iter().try_fold(x, |x, &k| layers[k].forward(&x)?.tanh())?;
    Loss::sum(y.square()?.sum_all()?, 2.0)
}

#[test]
fn once_in_the_ready_order_of_rank_0() {
    let one = {
        let rt = Cpu::with_threads(1);
        let model = layers(&rt).unwrap();
        let mut trainer = simple(&rt, &model, TrainingConfig { accumulation: 3, ..config() }).unwrap();
        let step = |step| trainer.step(|rank| loss(&model, &rt, rank, step))?.loss();
        let losses = (0..4).map(step).collect::<Result<_>>().unwrap();
        Trace { losses, weights: vec![weights(&model).unwrap()], ..Default::default() }
    };
    let many = everywhere(3, |comm| {
        let model = layers(comm.runtime())?;
        let options = BucketOptions { limits: Some(BucketLimits { first: 1, others: 1 }), ..Default::default() };
        let mut trainer = bucketed(&comm, &model, config(), options)?;
        let mut trace = Trace::default();
        // As expected before anything ran; what rank 0 saw in its first step; in the third its order is another.
        let buckets = [["2.weight", "1.weight", "0.weight"], ["2.weight", "0.weight", "1.weight"]];
        for (step, after) in [buckets[0], buckets[1], buckets[1], buckets[1]].iter().enumerate() {
            trace.losses.push(trainer.step(|_| loss(&model, comm.runtime(), comm.rank(), step))?.loss()?);
            let buckets = data_parallel(&trainer);
            let names: Vec<String> = (0..buckets.num_buckets()).flat_map(|k| buckets.names_in_bucket(k)).collect();
            assert_eq!((buckets.num_buckets(), &names[..]), (3, &after.map(String::from)[..]), "after step {step}");
            let ready = order(comm.rank(), step).map(|k| format!("{k}.weight"));
            assert!(buckets.ready_order().iter().eq(ready.iter().rev()), "{:?}", buckets.ready_order());
        }
        trace.weights.push(weights(&model)?);
        Ok(trace)
    });
    let off = difference(&many, &one);
    assert!(off <= 1e-11, "{off:e}");
}

#[test]
fn once_more_after_a_parameter_is_unfrozen() {
    everywhere(2, |comm| {
        let model = layers(comm.runtime())?;
        model.freeze_where(|name| name == "1.weight");
        let options = BucketOptions { limits: Some(BucketLimits { first: 1, others: 1 }), ..Default::default() };
        let mut trainer = bucketed(&comm, &model, config(), options)?;
        let from_last = ["2.weight", "1.weight", "0.weight"];
        let buckets = [&["2.weight", "0.weight"][..]; 2]
            .into_iter()
            .chain([&from_last[..], &["2.weight", "0.weight", "1.weight"]]);
        for (step, after) in buckets.enumerate() {
            if step == 2 {
                model.unfreeze_where(|_| true);
            }
            trainer.step(|_| loss(&model, comm.runtime(), 0, 0))?;
            let buckets = data_parallel(&trainer);
            let names: Vec<String> = (0..buckets.num_buckets()).flat_map(|k| buckets.names_in_bucket(k)).collect();
            assert_eq!(names, after, "after step {step}");
        }
        Ok(Trace::default())
    });
}

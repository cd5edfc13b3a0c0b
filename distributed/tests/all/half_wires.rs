//! Gradients that travel as halves are means: sums over many examples may be far out of their range.

use crate::prelude::*;

/// A loss over `examples`, each of which has the gradient 100.
fn loss(model: &Linear<Cpu>, rt: &Cpu, examples: usize) -> Result<Loss<Cpu>> {
    let x = Var::new(Tensor::full(rt, [examples, 1], DType::F32, 100.0)?);
    Loss::sum(model.forward(&x)?.sum_all()?, examples as f64)
}

/// Two steps of micro-batches of so many examples, the second of a few only.
fn train(comm: &Comm<Cpu>, compression: GradCompression, micro: [usize; 2], scaled: bool) -> Result<Trace> {
    let model = Linear::new(&Init::new(comm.runtime(), 0), 1, 1)?.without_bias();
    let leaves: Vec<_> = model.parameters().iter().map(|p| p.leaf()).collect();
    let sgd = Sgd::over(SgdConfig { lr: 1e-6, ..Default::default() }, leaves)?;
    let loss_scaling = scaled.then(|| LossScaler::starting_at(16.0)).transpose()?;
    let config = TrainingConfig { accumulation: 2, loss_scaling, ..Default::default() };
    let options = BucketOptions { compression, ..Default::default() };
    let mut trainer = TrainStep::builder(comm, &model).optimizer(sgd).config(config).buckets(options).build()?;
    let mut trace = Trace::default();
    for step in 0..2 {
        let rows = |k: usize| (micro[k] >> (4 * step)).max(1);
        let metrics = trainer.step(|k| loss(&model, comm.runtime(), rows(k)))?;
        assert!(metrics.stepped());
        trace.weights.push(weights(&model)?);
    }
    Ok(trace)
}

#[test]
fn sums_may_be_out_of_the_range_of_a_half() {
    for n in [2, 3] {
        // The gradient's sum is 409600 and more, the mean 100. The weight of every micro-batch counts.
        for (micro, scaled) in [([4096, 4096], false), ([4096, 1], false), ([1, 4096], false), ([4096, 4096], true)] {
            let with = |compression| everywhere(n, |comm| train(&comm, compression, micro, scaled));
            let exact = with(GradCompression::Own);
            for compression in [GradCompression::F16, GradCompression::Bf16] {
                let got = with(compression);
                assert!(
                    got.weights.iter().flatten().all(|w| w.is_finite()),
                    "{compression:?} on {n}, {micro:?}: {got:?}"
                );
                let off = difference(&got, &exact);
                assert!(off <= 1e-5, "{compression:?} on {n}, {micro:?}: {off:e}");
            }
        }
    }
}

#[test]
fn ranks_that_run_out_weigh_nothing() {
    for compression in [GradCompression::F16, GradCompression::Bf16, GradCompression::Own] {
        let traces = distributed::comm::Ranks::new(3).run(cpu, |comm| {
            let model = Linear::new(&Init::new(comm.runtime(), 0), 1, 1)?.without_bias();
            let options = BucketOptions { compression, ..Default::default() };
            let mut trainer = bucketed(&comm, &model, TrainingConfig::default(), options)?;
            trainer.run(0..=comm.rank(), |_| loss(&model, comm.runtime(), 4096), |_| Ok(()))?;
            weights(&model)
        });
        let traces = traces.unwrap();
        assert!(traces.iter().all(|w| *w == traces[0] && w[0].is_finite()), "{compression:?}: {traces:?}");
    }
}

//! Canonical order: which chunk is computed where changes no bit, whatever chunks weigh and whichever parameters they use.

use crate::{data_parallel::small, data_parallel_unused::Branches, prelude::*};

const CHUNKS: usize = 12;
/// Sums of these depend on the order they are added in.
const WEIGHTS: [f64; CHUNKS] = [0.1, 0.7, 0.3, 1e-3, 0.9, 0.123, 2.2, 0.4, 1.0 / 3.0, 0.05, 0.6, 0.77];

fn run(n: usize, dtype: DType, canonical: bool) -> Trace {
    everywhere(n, |comm| {
        let model = <Gpt<Cpu> as Task>::new(&Init::new(comm.runtime(), 0).dtype(dtype))?;
        let options = BucketOptions { canonical, ..small() };
        let config = TrainingConfig { accumulation: CHUNKS / comm.size(), ..config() };
        let mut trainer = bucketed(&comm, &model, config, options)?;
        let mut trace = Trace::default();
        for step in 0..STEPS {
            let metrics = trainer.step(|k| {
                // Chunk c is one example; rank r computes r, n + r, 2n + r …
                let chunk = k * comm.size() + comm.rank();
                let loss = model.loss(comm.runtime(), step, &[chunk])?;
                let weight = WEIGHTS[(chunk + step) % CHUNKS];
                Loss::sum(loss.total().mul(weight)?, weight)
            })?;
            trace.losses.push(metrics.loss()?);
            trace.norms.extend(metrics.grad_norm()?);
            trace.weights.push(weights(&model)?);
        }
        Ok(trace)
    })
}

#[test]
fn weights_of_any_kind_are_added_in_the_order_of_chunks() {
    for dtype in [DType::F32, DType::BF16] {
        let one = run(1, dtype, true);
        for n in [2, 3, 4, 6, 12] {
            assert!(run(n, dtype, true) == one, "{dtype} on {n} ranks");
        }
    }
    assert!(difference(&run(3, DType::F32, true), &run(1, DType::F32, false)) < 2e-4);
}

/// Some steps in which the first chunk uses one branch and the second the other.
fn branches(canonical: bool, unused: Unused) -> Trace {
    everywhere(1, |comm| {
        let model = Branches::new(comm.runtime())?;
        nn::ModuleExt::<Cpu>::freeze_where(&model, |name| unused == Unused::Error && name.starts_with("never"));
        let config = TrainingConfig { accumulation: 2, ..config() };
        let options = BucketOptions { canonical, unused, ..small() };
        let mut trainer = bucketed(&comm, &model, config, options)?;
        let x = Var::new(Tensor::normal(comm.runtime(), [2, 3], DType::F64, 0.0, 1.0, 9)?);
        let mut trace = Trace::default();
        for _ in 0..3 {
            let metrics = trainer.step(|k| {
                let branch = if k == 0 { &model.left } else { &model.right };
                Ok(Loss::mean(branch.forward(&model.both.forward(&x)?)?.square()?.sum_all()?))
            })?;
            trace.norms.extend(metrics.grad_norm()?);
            trace.weights.push(weights(&model)?);
        }
        Ok(trace)
    })
}

#[test]
fn a_parameter_may_be_used_in_any_chunk() {
    for unused in [Unused::Error, Unused::Allow] {
        let (canonical, plain) = (branches(true, unused), branches(false, unused));
        let off = crate::common::difference(&canonical, &plain);
        assert!(off <= 1e-12, "{unused:?}: {off:e}");
        // Both branches are trained.
        let (first, last) = (&canonical.weights[0], &canonical.weights[2]);
        assert!((12..36).all(|i| first[i] != last[i]), "{unused:?}");
    }
}

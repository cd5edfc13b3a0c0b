//! Data parallelism by hand: what ranks may have, must have in common, and find out together.

use optim::{Lamb, LambConfig};

use crate::{data_parallel_unused::Branches, prelude::*};

#[test]
fn a_parameter_that_no_rank_used_has_no_gradient() {
    let checked = Ranks::new(3).run(cpu, |comm| {
        let model = Branches::new(comm.runtime())?;
        let ddp = Ddp::new(&comm, &model)?;
        let x = Var::new(Tensor::normal(comm.runtime(), [2, 3], DType::F64, 0.0, 1.0, 9)?);
        let branch = if comm.rank() == 0 { &model.left } else { &model.right };
        let mut gradients = backward(&branch.forward(&model.both.forward(&x)?)?.square()?.sum_all()?)?;
        let own = gradients.get(&model.left.weight.leaf()).map(|g| g.to_vec::<f64>()).transpose()?;
        ddp.all_reduce_gradients(&mut gradients)?;
        assert!(gradients.get(&model.never.weight.leaf()).is_none());
        // One rank of three used it.
        let left = gradients.get(&model.left.weight.leaf()).map(|g| g.to_vec::<f64>()).transpose()?;
        let Some(left) = left else { panic!("rank 0 used it") };
        if let Some(own) = own {
            assert!(left.iter().zip(&own).all(|(mean, own)| (3.0 * mean - own).abs() <= 1e-12 * own.abs()));
        }
        assert!(gradients.get(&model.right.weight.leaf()).is_some());
        Ok(())
    });
    checked.unwrap();
}

#[test]
fn counts_that_differ_are_an_error_on_every_rank() {
    for (what, counts) in [("another number", vec![1, 2, 4]), ("too few", vec![1, 2]), ("too large", vec![u64::MAX; 3])]
    {
        let checked = Ranks::new(3).run(cpu, |comm| {
            let model = Branches::new(comm.runtime())?;
            let ddp = Ddp::new(&comm, &model)?;
            let x = Var::new(Tensor::normal(comm.runtime(), [2, 3], DType::F64, 0.0, 1.0, 9)?);
            let mut gradients = backward(&model.both.forward(&x)?.square()?.sum_all()?)?;
            let own = if comm.rank() == 2 { &counts[..] } else { &[1, 2, 3] };
            let error = ddp.weighted_all_reduce_gradients(&mut gradients, own).unwrap_err().to_string();
            let other = if comm.rank() == 2 { "those of rank 0" } else { "those of rank 2" };
            assert!(error.contains("weighted_all_reduce_gradients") && error.contains(other), "{what}: {error}");
            // All know it, so the communicator can be used.
            ddp.weighted_all_reduce_gradients(&mut gradients, &[1, 2, 3])?;
            comm.barrier()
        });
        checked.unwrap();
    }
}

/// A matrix-wise rule over halves, part of which is unfrozen between two steps: the mean of what ranks have computed.
#[test]
fn gradients_of_halves_that_are_unfrozen_are_averaged() {
    for ranks in [1, 2, 3] {
        let run = |comm: &Comm<Cpu>, own: Range<usize>| -> Result<Vec<f64>> {
            let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::BF16))?;
            model.freeze_where(nn::under("b"));
            let ddp = Ddp::new(comm, &model)?;
            for step in 0..2 {
                let mut lamb = Lamb::new(&model, LambConfig::default())?;
                let loss = model.loss(comm.runtime(), step, &own.clone().collect::<Vec<_>>())?.into_mean()?;
                let mut gradients = backward(loss.total())?;
                ddp.all_reduce_gradients(&mut gradients)?;
                lamb.step_with(&gradients)?;
                model.unfreeze_where(|_| true);
            }
            let values = model.parameters().into_iter().map(|p| p.value()?.to_f64s());
            Ok(values.collect::<Result<Vec<_>>>()?.concat())
        };
        let share = |comm: &Comm<Cpu>| 6 * comm.rank() / ranks..6 * (comm.rank() + 1) / ranks;
        let many = Ranks::new(ranks).run(cpu, |comm| run(&comm, share(&comm))).unwrap().swap_remove(0);
        let one = run(&(Arc::new(NoOpCommunicator::new(&cpu(0).unwrap())) as Comm<Cpu>), 0..6).unwrap();
        let scale = one.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let off = many.iter().zip(&one).fold(0.0f64, |most, (a, b)| most.max((a - b).abs()));
        assert!(off <= 0.02 * scale, "{ranks}: {off} of {scale}");
    }
}

//! Data parallelism by hand: what ranks may have, must have in common, and find out together.

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

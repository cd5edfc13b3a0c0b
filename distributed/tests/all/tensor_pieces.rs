//! What layers exchange of a sequence in pieces, beside their products: the values and the bytes of exchanges at once.

use crate::prelude::*;

/// A column and a row, on parts of a sequence.
#[derive(Module)]
#[module(crate = "::nn")]
struct Pair<R: Runtime> {
    up: Linear<R>,
    down: Linear<R>,
}

impl Pair<Cpu> {
    fn new(mesh: &Mesh<Cpu>, dtype: DType, pieces: usize) -> Result<Self> {
        let init = Init::new(mesh.world().runtime(), 3).dtype(dtype);
        let model = Pair { up: Linear::new(&init, 8, 12)?, down: Linear::new(&init, 12, 8)? };
        let plan = TensorPlan::new().column("up").row("down").sequence_region("").sequence_parallel(true);
        mesh.parallelize(&model, &plan.exchange_in_pieces(pieces))?;
        Ok(model)
    }

    fn forward(&self, x: &Var<Cpu>) -> Result<Var<Cpu>> {
        self.down.forward(&self.up.forward(x)?.tanh()?)
    }
}

fn part(comm: &Comm<Cpu>, dtype: DType) -> Result<Var<Cpu>> {
    let seed = 1 + comm.rank() as u64;
    Var::leaf("x", Tensor::normal(comm.runtime(), [2, 6, 8], dtype, 0.0, 1.0, seed)?)
}

/// What ranks make of a pair of layers, over a communicator that counts.
fn pair<T: Send>(
    n: usize,
    dtype: DType,
    pieces: usize,
    run: impl Fn(&Pair<Cpu>, &Var<Cpu>, &CountingCommunicator<Cpu>) -> Result<T> + Sync,
) -> Vec<T> {
    let ranks = Ranks::new(n).run(cpu, |comm| {
        let counting = Arc::new(CountingCommunicator::new(comm));
        let comm: Comm<Cpu> = counting.clone();
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, comm.size())])?)?;
        let (model, x) = (Pair::new(&mesh, dtype, pieces)?, part(&comm, dtype)?);
        counting.reset();
        run(&model, &x, &counting)
    });
    ranks.unwrap()
}

#[test]
fn as_many_bytes_travel_in_more_calls_and_as_much_is_kept() {
    for n in [2, 3] {
        let counted = |pieces| {
            pair(n, DType::F32, pieces, |model, x, counting| {
                let live = || counting.runtime().memory().of(MemoryCategory::Activations).live;
                let before = live();
                let y = model.forward(x)?;
                let kept = live() - before;
                let forward = ["all_gather", "reduce_scatter"].map(|kind| counting.of(kind));
                backward(&y.square()?.sum_all()?)?;
                let all = ["all_gather", "reduce_scatter"].map(|kind| counting.of(kind).sent);
                Ok((kept, forward.map(|t| t.sent), all, forward.map(|t| t.calls)))
            })
        };
        for (whole, cut) in counted(1).into_iter().zip(counted(3)) {
            assert_eq!((whole.0, whole.1, whole.2), (cut.0, cut.1, cut.2), "{n}");
            assert_eq!((whole.3, cut.3), ([1, 1], [3, 3]), "{n}");
        }
    }
}

#[test]
fn gradients_have_gradients_and_mixed_precision_its_types() {
    let second = |pieces| {
        pair(2, DType::F64, pieces, |model, x, _| {
            let loss = model.forward(x)?.square()?.sum_all()?;
            let weight = model.up.weight.var();
            let first = differentiable_grad(&[&loss], &[x, &weight])?;
            let penalty = first.into_iter().flatten().try_fold(loss, |sum, g| sum.add(&g.square()?.sum_all()?))?;
            let all = grad(&[&penalty], &[x, &weight, &model.down.weight.var()])?;
            all.into_iter().map(|g| g.unwrap().value()?.to_vec::<f64>()).collect::<Result<Vec<_>>>()
        })
    };
    // Sums of what several nodes give one value come in another order.
    for (whole, cut) in second(1).concat().concat().into_iter().zip(second(2).concat().concat()) {
        assert!((whole - cut).abs() <= 1e-12 * (1.0 + whole.abs()), "{whole} and {cut}");
    }
    let mixed = |pieces| {
        pair(2, DType::F32, pieces, |model, x, counting| {
            let y = autocast(DType::BF16, || model.forward(x))?;
            let gradients = backward(&y.to_dtype(DType::F32)?.square()?.sum_all()?)?;
            let of = |v: &Var<Cpu>| gradients.get(v.as_leaf().unwrap()).unwrap().to_f64s();
            let sent = counting.total().sent;
            Ok((y.dtype(), y.value()?.to_f64s()?, of(x)?, of(&model.up.weight.var())?, sent))
        })
    };
    assert_eq!(mixed(1), mixed(3));
}

#[test]
fn a_rank_whose_output_is_in_no_loss_takes_part() {
    let with = |pieces| {
        pair(2, DType::F64, pieces, |model, x, counting| {
            let y = model.forward(x)?;
            let loss = if counting.rank() == 0 { y.square()? } else { y.mul(0.0)? };
            backward(&loss.sum_all()?)?.get(x.as_leaf().unwrap()).unwrap().to_vec::<f64>()
        })
    };
    assert_eq!(with(1), with(2));
}

//! What layers exchange of a sequence in pieces, beside their products: the values and the bytes of exchanges at once.

use crate::{
    pipeline_staged::How,
    prelude::*,
    tensor_common::{TensorCase, TensorTrace, apart},
    tensor_pipeline_common::StagedCase,
};

fn equal(a: &TensorTrace, b: &TensorTrace) -> bool {
    (&a.losses, &a.norms, &a.pieces) == (&b.losses, &b.norms, &b.pieces)
}

#[test]
fn pieces_have_the_bits_of_the_whole() {
    let mut turns = Turns::one_of(3);
    for (t, dtype) in [(2, DType::F64), (4, DType::F32), (2, DType::BF16)] {
        let mut case = TensorCase { sequence: true, dtype, frozen: &["blocks.1.fc1.weight"], ..TensorCase::new(t) };
        case.model.context = 12 * t;
        let axes = [(Axis::Data, 2), (Axis::Tensor, t)];
        let whole = case.on(&axes);
        for pieces in [2, 3, 5, 100].into_iter().filter(|_| turns.come()) {
            let got = TensorCase { pieces, ..case.clone() }.on(&axes);
            assert!(equal(&got, &whole), "{t} {dtype}, {pieces} pieces: {:e}", apart(&got, &whole));
        }
    }
}

#[test]
fn any_strategy_and_stages_of_a_pipeline_train_so() {
    let case = TensorCase { sequence: true, pieces: 2, zero: Some(ZeroStage::Parameters), ..TensorCase::new(2) };
    let off = apart(&case.on(&[(Axis::Shard, 2), (Axis::Tensor, 2)]), &case.alone());
    assert!(off <= 1e-11, "{off:e}");
    for (kind, v) in [(ScheduleKind::ZbH1, 1), (ScheduleKind::Zbv, 2)] {
        let mut case = StagedCase::new(2, kind, v, How::Replicas);
        (case.case.sequence, case.case.steps) = (true, 2);
        let axes = [(Axis::Pipe, 2), (Axis::Tensor, 2)];
        let whole = case.on(&axes);
        case.case.pieces = 3;
        assert!(equal(&case.on(&axes), &whole), "{kind:?}");
    }
}

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
                backward(&y.square()?.sum(&[], false)?)?;
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
            let loss = model.forward(x)?.square()?.sum(&[], false)?;
            let weight = model.up.weight.var();
            let first = grad(&[&loss], &[x, &weight], true)?;
            let penalty =
                first.into_iter().flatten().try_fold(loss, |sum, g| sum.add(&g.square()?.sum(&[], false)?))?;
            let all = grad(&[&penalty], &[x, &weight, &model.down.weight.var()], false)?;
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
            let gradients = backward(&y.to_dtype(DType::F32)?.square()?.sum(&[], false)?)?;
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
            backward(&loss.sum(&[], false)?)?.get(x.as_leaf().unwrap()).unwrap().to_vec::<f64>()
        })
    };
    assert_eq!(with(1), with(2));
}

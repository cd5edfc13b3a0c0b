//! Models whose sequences cannot be cut, and trainers that cannot train them: what is refused, and that the errors say why.

use nn::{AttentionOptions, BatchNorm1d, BlockConfig, Lstm, MultiHeadAttention, RecurrentConfig};

use crate::prelude::*;

const SMALL: GptConfig = GptConfig {
    vocab: 16,
    context: 12,
    layers: 1,
    heads: 2,
    width: 8,
    bias: true,
    dropout: 0.0,
    activation: Activation::Gelu,
    tied_head: false,
};

const BLOCK: BlockConfig = BlockConfig { width: 8, heads: 2, bias: true, dropout: 0.0, activation: Activation::Gelu };

/// A model that takes its part of sequences, with something in it.
#[derive(Module)]
#[module(crate = "::nn")]
struct Around<R: Runtime, M: Module<R>> {
    inner: M,
    context: ContextSlot<R>,
}

fn over(comm: &distributed::comm::Comm<Cpu>, axis: Axis) -> Result<Mesh<Cpu>> {
    Mesh::new(comm, ParallelPlan::of([(axis, comm.size())])?)
}

/// The error of cutting what `make` gives over two ranks, which both report.
fn refused<M: Module<Cpu>>(make: impl Fn(&Init<Cpu>) -> Result<M> + Sync) -> String {
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = make(&Init::new(comm.runtime(), 0))?;
        over(&comm, Axis::Context)?.context_parallel(&model, ContextExchange::AllGather)
    });
    let mut errors: Vec<String> =
        outcomes.unwrap().into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    assert_eq!(errors.len(), 2);
    errors.remove(0)
}

#[test]
fn layers_that_need_all_of_a_sequence_are_refused_by_name() {
    let error = refused(|init| Ok(around_of(Lstm::new(init, RecurrentConfig::new(8, 8))?)));
    assert!(error.contains("inner") && error.contains("all tokens of a sequence"), "{error}");
}

fn around_of<M: Module<Cpu>>(inner: M) -> Around<Cpu, M> {
    Around { inner, context: ContextSlot::cuts() }
}

#[test]
fn norms_of_the_batch_and_attention_that_knows_no_ranks_are_refused() {
    let error = refused(|init| Ok(around_of(BatchNorm1d::new(init, 8)?)));
    assert!(error.contains("inner") && error.contains("all tokens of a sequence"), "{error}");
    let error = refused(|init| Ok(around_of(Linear::new(init, 8, 8)?)));
    assert!(error.contains("ContextSlot::attends"), "{error}");
}

#[test]
fn models_that_do_not_cut_sequences_are_refused() {
    let error = refused(|init| Block::new(init, BLOCK));
    assert!(error.contains("ContextSlot::cuts"), "{error}");
    let twice = Ranks::new(2).run(cpu, |comm| {
        let model = Gpt::new(&Init::new(comm.runtime(), 0), SMALL)?;
        let mesh = over(&comm, Axis::Context)?;
        mesh.context_parallel(&model, ContextExchange::AllGather)?;
        mesh.context_parallel(&model, ContextExchange::AllGather)
    });
    assert!(twice.unwrap_err().to_string().contains("cut already"));
    // One rank is told as well.
    let rt = cpu(0).unwrap();
    let model = Block::new(&Init::new(&rt, 0), BLOCK).unwrap();
    let error = NoOpCommunicator::new(&rt).as_mesh().context_parallel(&model, ContextExchange::AllGather).unwrap_err();
    assert!(error.to_string().contains("ContextSlot::cuts"), "{error}");
}

#[test]
fn sequences_that_cannot_be_shared_out_are_refused() {
    let outcome = Ranks::new(2).run(cpu, |comm| {
        let model = Gpt::new(&Init::new(comm.runtime(), 0), SMALL)?;
        over(&comm, Axis::Context)?.context_parallel(&model, ContextExchange::AllGather)?;
        model.forward(&Var::new(Tensor::zeros(comm.runtime(), [1, 11], DType::I64)?)).map(drop)
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("11 tokens") && error.contains("pad them to 12"), "{error}");
}

#[test]
fn masks_of_parts_of_sequences_are_refused() {
    let outcome = Ranks::new(2).run(cpu, |comm| {
        let rt = comm.runtime();
        let model = around_of(MultiHeadAttention::new(&Init::new(rt, 0), 8, 2)?);
        over(&comm, Axis::Context)?.context_parallel(&model, ContextExchange::AllGather)?;
        let x = Var::new(Tensor::zeros(rt, [1, 6, 8], DType::F32)?);
        let mask = Var::new(Tensor::zeros(rt, [1, 1, 6, 12], DType::Bool)?);
        model.inner.attend_self(&x, AttentionOptions { mask: Some(&mask), ..Default::default() }).map(drop)
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("[1, 2, 12, 12]") && error.contains("whole sequences"), "{error}");
}

#[test]
fn a_step_wants_the_sequences_cut_over_its_own_mesh() {
    let build = |cut: bool, axis: Axis, canonical: bool| {
        let outcome = Ranks::new(2).run(cpu, |comm| {
            let model = Gpt::new(&Init::new(comm.runtime(), 0), SMALL)?;
            if cut {
                over(&comm, Axis::Context)?.context_parallel(&model, ContextExchange::AllGather)?;
            }
            let builder = TrainStep::builder(&over(&comm, axis)?, &model).optimizer(SgdConfig::default());
            builder.buckets(BucketOptions { canonical, ..Default::default() }).build().map(drop)
        });
        outcome.unwrap_err().to_string()
    };
    assert!(build(true, Axis::Data, false).contains("are cut over 2 ranks, and the mesh has 1 rank along context"));
    assert!(build(false, Axis::Context, false).contains("are not cut, and the mesh has 2 ranks along context"));
    assert!(build(true, Axis::Context, true).contains("canonical order"));
    let by_hand = Ranks::new(2).run(cpu, |comm| {
        let model = Gpt::new(&Init::new(comm.runtime(), 0), SMALL)?;
        over(&comm, Axis::Context)?.context_parallel(&model, ContextExchange::AllGather)?;
        Ddp::new(&comm, &model).map(drop)
    });
    assert!(by_hand.unwrap_err().to_string().contains("context parallelism and gradients averaged by hand"));
}

#[test]
fn ranks_along_context_draw_the_same_random_values() {
    let outcome = Ranks::new(2).run(cpu, |comm| {
        autograd::manual_seed(comm.rank() as u64);
        let mesh = over(&comm, Axis::Context)?;
        let model = Gpt::new(&Init::new(comm.runtime(), 0), SMALL)?;
        mesh.context_parallel(&model, ContextExchange::AllGather)?;
        TrainStep::builder(&mesh, &model).optimizer(SgdConfig::default()).build().map(drop)
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("the random state, which ranks along context share"), "{error}");
    // Parts of a batch are read along data, and sums are over both.
    let sizes = Ranks::new(4).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Data, 2), (Axis::Context, 2)])?)?;
        mesh.gradients().barrier()?;
        Ok([mesh.batch().size(), mesh.gradients().size(), mesh.axis(Axis::Context).size()])
    });
    assert_eq!(sizes.unwrap(), vec![[2, 4, 2]; 4]);
    let part = Tensor::zeros(&cpu(0).unwrap(), [2, 6], DType::I64).unwrap();
    assert_eq!(ContextSlot::<Cpu>::cuts().take(&part.narrow(0, 0, 1).unwrap(), 1).unwrap().shape()[..], [1, 6]);
}

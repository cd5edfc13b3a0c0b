//! What ranks along tensor decide together, and models whose ranks share heads of keys.

use crate::prelude::*;

/// A block with two heads of keys for four of queries, normalized by head.
#[derive(Module)]
#[module(crate = "::nn")]
struct Grouped<R: Runtime> {
    table: Embedding<R>,
    norm: RmsNorm<R>,
    attention: GroupedQueryAttention<R>,
    up: Linear<R>,
    down: Linear<R>,
    head: Linear<R>,
    /// A norm of pieces of `up` in the second step, and on the first rank along tensor alone in the third; and one that
    /// is never used.
    extra: Vec<RmsNorm<R>>,
}

impl Grouped<Cpu> {
    fn new(init: &Init<Cpu>) -> Result<Self> {
        let config = GroupedQueryConfig {
            width: 8,
            heads: 4,
            kv_heads: 2,
            head_dim: 4,
            fused: false,
            bias: true,
            output_bias: false,
            head_norm: Some(nn::HeadNorm::each(1e-6)),
            window: None,
            scores: Default::default(),
        };
        Ok(Grouped {
            table: Embedding::new(init, 16, 8)?,
            norm: RmsNorm::new(init, 8)?,
            attention: GroupedQueryAttention::new(init, config)?,
            up: Linear::new(init, 8, 12)?,
            down: Linear::new(init, 12, 8)?,
            head: Linear::new(init, 8, 16)?,
            extra: vec![RmsNorm::new(init, 3)?, RmsNorm::new(init, 8)?],
        })
    }

    fn plan() -> TensorPlan {
        let plan = TensorPlan::new().column("attention.q_proj").column("attention.k_proj").column("attention.v_proj");
        let plan =
            plan.row("attention.o_proj").partial_gradient("attention.q_norm").partial_gradient("attention.k_norm");
        plan.column("up").row("down").vocabulary("table").vocabulary("head").partial_gradient("extra.*")
    }

    fn loss(&self, mesh: &Mesh<Cpu>, step: usize, examples: &[usize]) -> Result<Loss<Cpu>> {
        let rt = mesh.world().runtime();
        let text: Vec<i64> = (0..6 * 7).map(|i| ((i * 5 + i / 4 + step * 3) % 16) as i64).collect();
        let index: Vec<i64> = examples.iter().map(|&i| i as i64).collect();
        let text =
            Tensor::from_slice(rt, [6, 7], &text)?.index_select(0, &Tensor::from_slice(rt, [index.len()], &index)?)?;
        let [x, y] = [0, 1].map(|at| text.narrow(1, at, 6).and_then(|t| t.contiguous()).map(Var::new));
        let x = self.table.forward(&x?)?;
        let x = self.attention.attend(self.attention.project(&self.norm.forward(&x)?, None)?, None, &x)?;
        let mut up = self.up.forward(&x)?.gelu()?;
        if step == 1 {
            let (whole, threes) = (up.dims(), up.dims().iter().product::<usize>() / 3);
            up = self.extra[0].forward(&up.reshape([threes, 3])?)?.reshape(whole)?;
        }
        let mut first = None;
        if step == 2 && mesh.axis(Axis::Tensor).rank() == 0 {
            // Every rank has the same loss, to which this adds a gradient alone.
            let own = self.extra[0].forward(&up.narrow(2, 0, 3)?)?.square()?.sum_all()?;
            first = Some(own.sub(&own.detach())?);
        }
        let x = self.down.forward_onto(&up, &x)?;
        let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
        let sum = self.head.forward(&x)?.cross_entropy_with(&y?, options)?;
        let sum = first.map_or(Ok(sum.clone()), |first| sum.add(&first))?;
        Loss::sum(sum, (6 * examples.len()) as f64)
    }

    fn steps(&self, mut trainer: TrainStep<Cpu>, mesh: &Mesh<Cpu>) -> Result<(TrainStep<Cpu>, RunOutcome)> {
        let (comm, mut trace) = (mesh.batch(), RunOutcome::default());
        for step in 0..3 {
            let own = shard_batches(6, comm.rank(), comm.size());
            let metrics = trainer.step(|_| self.loss(mesh, step, &own))?;
            trace.losses.push(metrics.loss()?);
            trace.norms.extend(metrics.grad_norm()?);
        }
        Ok((trainer, trace))
    }

    fn train(mesh: &Mesh<Cpu>, zero: Option<ZeroStage>) -> Result<RunOutcome> {
        let model = Self::new(&Init::new(mesh.world().runtime(), 2).dtype(DType::F64).lazily())?;
        mesh.parallelize(&model, &Self::plan())?;
        let builder = TrainStep::builder(mesh, &model).optimizer(adamw()).max_norm(0.1);
        let builder = match zero {
            None => builder.buckets(BucketOptions { unused: Unused::Allow, ..Default::default() }),
            Some(stage) => builder.zero(ZeroOptions { unused: Unused::Allow, ..stage.into() }),
        };
        let (trainer, outcome) = model.steps(builder.build()?, mesh)?;
        let _all = trainer.gather_full_params()?;
        Ok(RunOutcome { pieces: pieces(&model)?, ..outcome })
    }
}

#[test]
fn ranks_that_share_heads_of_keys_train_as_one() {
    let rt = cpu(0).unwrap();
    let one = Grouped::train(&NoOpCommunicator::new(&rt).as_mesh(), None).unwrap();
    for axes in [&[(Axis::Tensor, 2)][..], &[(Axis::Tensor, 4)], &[(Axis::Data, 2), (Axis::Tensor, 4)]] {
        for zero in [None, Some(ZeroStage::Optimizer), Some(ZeroStage::Gradients), Some(ZeroStage::Parameters)] {
            let plan = ParallelPlan::of(axes.to_vec()).unwrap();
            let traces =
                Ranks::new(plan.world()).run(cpu, |comm| Grouped::train(&Mesh::new(&comm, plan.clone())?, zero));
            let many = assembled(traces.unwrap_or_else(|error| panic!("{axes:?} {zero:?}: {error}")));
            let off = distance(&many, &one);
            assert!(off <= 1e-11, "{axes:?} {zero:?}: {off:e}");
        }
    }
}

#[test]
fn a_star_stands_for_a_whole_part_of_a_name() {
    let rt = cpu(0).unwrap();
    let model = Grouped::new(&Init::new(&rt, 2)).unwrap();
    let plan = TensorPlan::new().column("attention.*_proj");
    let error = NoOpCommunicator::new(&rt).as_mesh().parallelize(&model, &plan).unwrap_err().to_string();
    assert!(error.contains("`attention.*_proj` names no parameter"), "{error}");
}

#[test]
fn values_are_not_put_into_parts_that_other_ranks_have_too() {
    for axes in [[(Axis::Shard, 2), (Axis::Tensor, 2)], [(Axis::Data, 2), (Axis::Shard, 2)]] {
        let put = Ranks::new(4).run(cpu, |comm| {
            let mesh = Mesh::new(&comm, ParallelPlan::of(axes)?)?;
            let model = Way::gpt(2).gpt_on(&mesh)?;
            let mut step = TrainStep::builder(&mesh, &model).optimizer(adamw()).zero(ZeroStage::Gradients).build()?;
            let rows = step.parameter_parts()?.into_iter().map(|part| part.row.on(comm.runtime()));
            let rows = rows.collect::<Result<Vec<_>>>()?;
            step.swap_parameter_parts(&rows)
        });
        assert_eq!(put.unwrap(), [false; 4], "{axes:?}");
    }
}

#[test]
fn a_file_has_whole_parameters() {
    let outcome = Ranks::new(2).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
        let case = Way::gpt(2);
        let model = Gpt::new(&Init::new(comm.runtime(), 1).dtype(case.dtype), case.gpt)?;
        let values = model
            .state_dict()?
            .into_iter()
            .map(|(name, value)| Ok((name, value.copy()?)))
            .collect::<Result<Vec<_>>>()?;
        mesh.parallelize(&model, &Gpt::<Cpu>::tensor_plan())?;
        let before = pieces(&model)?;
        // Whole values go into pieces.
        model.load_state_dict(values)?;
        assert_eq!(pieces(&model)?, before);
        model.save_safetensors(std::env::temp_dir().join("weftgrad-never-written.safetensors"))
    });
    assert!(outcome.unwrap_err().to_string().contains("is cut over ranks"));
}

#[test]
fn parameters_alone_are_loaded_into_pieces() {
    let scratch = Scratch::new("parameters");
    let saved = scratch.folder();
    let whole = Way::gpt(2).go_on(None, 0..2, Some(&saved));
    let way = Way::gpt(2).over(&[(Axis::Tensor, 2)]);
    let ranks = way.ranks(|mesh| {
        let model = way.gpt_on(mesh)?;
        CheckpointReader::open(saved.step(2))?.load_parameters(&model, |name| Some(name.into()))?;
        Ok(RunOutcome { pieces: pieces(&model)?, ..Default::default() })
    });
    assert!(assembled(ranks.unwrap()).pieces == whole.pieces);
}

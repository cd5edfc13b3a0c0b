//! What ranks along tensor have in common is made equal, or agreed on, when a step is made.

use nn::{TokenEmbedding, under};

use crate::prelude::*;

/// A GPT of a seed, cut over two ranks along data and two along tensor.
fn cut(comm: &Comm<Cpu>, seed: u64) -> Result<(Mesh<Cpu>, Gpt<Cpu>)> {
    let mesh = Mesh::new(comm, ParallelPlan::of([(Axis::Data, 2), (Axis::Tensor, 2)])?)?;
    let model = Gpt::new(&Init::new(comm.runtime(), seed).dtype(DType::F64), Way::gpt(2).gpt)?;
    mesh.parallelize(&model, &Gpt::<Cpu>::tensor_plan())?;
    Ok((mesh, model))
}

#[test]
fn replicas_begin_with_the_values_of_one_rank() {
    for zero in [None, Some(ZeroStage::Optimizer), Some(ZeroStage::Parameters)] {
        let ranks = Ranks::new(4).run(cpu, |comm| {
            let (mesh, model) = cut(&comm, comm.rank() as u64)?;
            let builder = TrainStep::builder(&mesh, &model).optimizer(adamw());
            let values = || {
                let TokenEmbedding { tokens, positions, .. } = model.start()?;
                let of = |table: &Embedding<Cpu>| table.weight.value()?.to_vec::<f64>();
                Ok([positions.as_ref().map(of).transpose()?.unwrap_or_default(), of(tokens)?])
            };
            match zero {
                None => builder.build().map(drop)?,
                Some(stage) => {
                    let step = builder.zero(stage).build()?;
                    let _all = step.gather_full_params()?;
                    return values();
                }
            }
            values()
        });
        let ranks = ranks.unwrap();
        let [whole, _] = &ranks[0];
        for [replica, _] in &ranks {
            assert_eq!(replica, whole, "{zero:?}: the position embedding, of which every rank has all");
        }
        assert!(ranks[0][1] == ranks[2][1] && ranks[1][1] == ranks[3][1], "{zero:?}: pieces are those along data");
        assert_ne!(ranks[0][1], ranks[1][1], "{zero:?}: pieces differ");
    }
}

/// The error of making a step on two ranks along data and two along tensor, where those of one place along tensor do something else.
fn refused(differ: impl Fn(&Comm<Cpu>, &Mesh<Cpu>, &Gpt<Cpu>, bool) -> Result<()> + Sync) -> String {
    let outcomes = Ranks::new(4).outcomes(cpu, |comm| {
        let (mesh, model) = cut(&comm, 3)?;
        differ(&comm, &mesh, &model, mesh.axis(Axis::Tensor).rank() == 1)
    });
    let errors: Vec<String> = outcomes.unwrap().into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    errors.join("; ")
}

#[test]
fn ranks_along_tensor_agree_on_what_they_do() {
    let build = |mesh: &Mesh<Cpu>, model: &Gpt<Cpu>, lr: f64, zero: bool| {
        let builder = TrainStep::builder(mesh, model).optimizer(AdamWConfig { lr, ..Default::default() });
        if zero { builder.zero(ZeroStage::Gradients).build().map(drop) } else { builder.build().map(drop) }
    };
    for zero in [false, true] {
        let seeds = refused(|_, mesh, model, other| {
            manual_seed(if other { 9 } else { 8 });
            build(mesh, model, 0.1, zero)
        });
        assert!(seeds.contains("the random state"), "{seeds}");
        let rates = refused(|_, mesh, model, other| build(mesh, model, if other { 0.2 } else { 0.1 }, zero));
        assert!(rates.contains("the optimizer") || rates.contains("the sharding of the model"), "{rates}");
        let frozen = refused(|_, mesh, model, other| {
            model.freeze_where(under(if other { "lnf.weight" } else { "lnf.bias" }));
            build(mesh, model, 0.1, zero)
        });
        assert!(frozen.contains("`lnf.weight F64 [8] trained`") || frozen.contains("lnf.weight"), "{frozen}");
    }
}

#[test]
fn a_cut_model_is_not_trained_by_hand() {
    let error = refused(|comm, _, model, _| Ddp::new(comm, model).map(drop));
    assert!(
        error.contains("wte.weight") && error.contains("tensor parallelism and gradients averaged by hand"),
        "{error}"
    );
}

/// Some parameters of a model.
struct Only<'m>(&'m Gpt<Cpu>);

impl Module<Cpu> for Only<'_> {
    fn visit(&self, name: &str, visitor: &mut dyn nn::Visitor<Cpu>) {
        visitor.enter(name);
        self.0.embedding.as_ref().unwrap().tokens.visit("wte", visitor);
        visitor.leave();
    }
}

#[test]
fn partial_gradients_of_what_nobody_updates_are_left_alone() {
    let outcome = Ranks::new(2).run(cpu, |comm| {
        let case = Way { sequence: true, ..Way::gpt(2) };
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
        let model = case.gpt_on(&mesh)?;
        let before = model.end()?.norm.weight.value()?.to_vec::<f64>()?;
        let optimizer = AdamW::new(&Only(&model), AdamWConfig::default())?;
        let mut step = TrainStep::builder(&mesh, &model).optimizer(optimizer).build()?;
        let (x, y) = case.batch(comm.runtime(), 0, &(0..case.examples).collect::<Vec<_>>())?;
        step.step(|_| Loss::sum(model.next_token_loss(&x, &y, &case.loss)?, 1.0))?;
        Ok(before == model.end()?.norm.weight.value()?.to_vec::<f64>()?)
    });
    assert_eq!(outcome.unwrap(), [true, true]);
}

/// Where the models of one stage differ along tensor, the other stages and replicas learn which lines differ.
#[test]
fn a_stage_that_differs_is_named_on_every_rank() {
    for differs in 0..8 {
        let outcomes = Ranks::new(8).timeout(Duration::from_secs(5)).outcomes(cpu, |comm| {
            let axes = [(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Tensor, 2)];
            let mesh = Mesh::new(&comm, ParallelPlan::of(axes)?)?;
            let mut way = Way::gpt(2).staged(ScheduleKind::OneFOneB, 1);
            if comm.rank() == differs {
                (way.gpt.context, way.gpt.bias) = (way.gpt.context + 1, !way.gpt.bias);
            }
            // The other replica may be done with its own by then, and learns of it in its next call. A program that went on would not end the others.
            let made = way.stages_on(&mesh).and_then(|_| comm.agree("what comes next", &[]));
            Ok(made.map_err(|error| error.to_string()))
        });
        for (rank, outcome) in outcomes.unwrap().into_iter().enumerate() {
            let error = outcome.unwrap().unwrap_err();
            assert!(error.contains("the model and its tensor-parallel plan"), "rank {rank} of {differs}: {error}");
        }
    }
}

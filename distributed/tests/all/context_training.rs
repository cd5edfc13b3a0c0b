//! Context parallelism: what ranks have of sequences that are cut, what a step weighs, and stages that are not cut.

use crate::prelude::*;

/// A model whose sequences `c` ranks can share out, in parts that two ranks can cut further.
fn case(c: usize) -> Way {
    let mut case = Way::gpt(2);
    case.gpt.context = 4 * c;
    case
}

#[test]
fn logits_and_losses_of_rows_are_those_of_the_tokens_here() {
    let mut case = case(3);
    case.loss.cross_entropy.reduction = Reduction::None;
    let rt = cpu(0).unwrap();
    let (x, y) = case.batch(&rt, 0, &[0, 1]).unwrap();
    let model = case.gpt_on(&NoOpCommunicator::new(&rt).as_mesh()).unwrap();
    let rows = model.next_token_loss(&x, &y, &case.loss).unwrap().value().unwrap();
    let logits = model.forward(&x).unwrap().value().unwrap();
    let run = Ranks::new(3).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Context, 3)])?)?;
        let model = case.gpt_on(&mesh)?;
        let (x, y) = case.batch(comm.runtime(), 0, &[0, 1])?;
        let here = model.next_token_loss(&x, &y, &case.loss)?.value()?.to_vec::<f64>()?;
        Ok((here, model.forward(&x)?.value()?.to_vec::<f64>()?, model.context.part(case.gpt.context)?))
    });
    for (here, logits_here, part) in run.unwrap() {
        let whole = part.take(&rows, 1).unwrap().to_vec::<f64>().unwrap();
        assert!(here.iter().zip(&whole).all(|(a, b)| (a - b).abs() <= 1e-12) && here.len() == whole.len());
        let whole = part.take(&logits, 1).unwrap().to_vec::<f64>().unwrap();
        assert!(
            logits_here.iter().zip(&whole).all(|(a, b)| (a - b).abs() <= 1e-12) && logits_here.len() == whole.len()
        );
    }
}

#[test]
fn a_step_weighs_what_one_rank_says() {
    use Axis::{Context, Data, Pipe};
    let whole = case(2).over(&[(Data, 2), (Context, 2)]);
    let staged = case(2).staged(ScheduleKind::OneFOneB, 1).over(&[(Pipe, 2), (Context, 2)]);
    for way in [whole, staged] {
        let weights = way.each(|training| training.take(0)?.weight());
        assert_eq!(weights, vec![(way.examples * way.tokens()) as f64; 4]);
    }
    assert_eq!(case(2).exchange, ContextExchange::default());
}

/// A stage that takes what it is given as it is.
#[derive(Module)]
#[module(crate = "::nn")]
struct Plain<R: Runtime>(Block<R>);

impl<R: Runtime> Stage<R> for Plain<R> {
    fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        Ok(vec![self.0.forward(&inputs[0])?])
    }
}

#[test]
fn stages_that_are_not_cut_are_refused() {
    let way = case(2).staged(ScheduleKind::OneFOneB, 1).over(&[(Axis::Pipe, 2), (Axis::Context, 2)]);
    let refused = |f: &(dyn Fn(&Mesh<Cpu>) -> Result<()> + Sync)| {
        way.outcomes(f).into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect::<Vec<_>>()
    };
    let checked = || way.checked(2).unwrap();
    let whole = refused(&|mesh| {
        let init = Init::new(mesh.world().runtime(), 7);
        let stages = Gpt::new(&init, way.gpt)?.split(2)?;
        let model = PipelineModel::on(mesh.axis(Axis::Pipe).rank(), checked(), stages)
            .loss(|y, _| Loss::sum(y[0].clone(), 1.0));
        TrainStep::builder(mesh, model).optimizer(adamw()).build().map(drop)
    });
    assert!(whole.iter().all(|error| error.contains("not cut") || error.contains("rank")), "{whole:?}");
    assert!(whole.iter().any(|error| error.contains("sequences that are not cut")), "{whole:?}");
    let uncut = refused(&|mesh| {
        let init = Init::new(mesh.world().runtime(), 7);
        let blocks = Gpt::new(&init, way.gpt)?.blocks.into_iter().map(Plain);
        let model = PipelineModel::on(mesh.axis(Axis::Pipe).rank(), checked(), blocks);
        model.context_parallel(mesh, ContextExchange::AllGather).map(drop)
    });
    assert!(uncut.iter().all(|error| error.contains("ContextSlot::cuts")), "{uncut:?}");
}

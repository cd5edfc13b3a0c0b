//! Stages of any kind in training: dropout, recomputation, what stays on the tape, measured runs.

use autograd::checkpoint;

use crate::{pipeline_common::*, prelude::*};

/// Layers with dropout between them.
fn dropping(rt: &Cpu, stages: usize) -> Vec<Box<dyn Stage<Cpu>>> {
    let init = Init::new(rt, 2);
    let stage = |k| {
        let linear = Linear::new(&init, WIDTH, WIDTH).unwrap();
        Box::new(Sequential::starting_at(2 * k).push(linear).push(Dropout::new(0.5).unwrap())) as _
    };
    (0..stages).map(stage).collect()
}

#[test]
fn random_numbers_do_not_depend_on_the_schedule() {
    let train = |checked: &Checked, p: usize| {
        let ranks = world(p, |comm| {
            autograd::manual_seed(11);
            let mut pipeline = pipeline(&comm, checked, dropping(comm.runtime(), 4))?;
            let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
            let mut losses = Vec::new();
            for _ in 0..2 {
                let batch = MicroBatches::split(&[rows(comm.runtime(), 1, 8)], &[rows(comm.runtime(), 2, 8)], 8)?;
                let output = pipeline.run(batch, &mut gradients)?;
                losses.push(pipeline.losses(&output)?);
            }
            Ok(losses)
        });
        assert!(ranks.iter().all(|losses| *losses == ranks[0]));
        ranks[0].clone()
    };
    let mut seen = Vec::new();
    for (p, v) in [(1, 4), (2, 2), (4, 1)] {
        seen.extend(kinds(p, v, 8).map(|(kind, checked)| (kind, train(&checked, p))));
    }
    let first = seen[0].1.clone();
    assert!(first[0] != first[1], "every run drops anew");
    assert!(seen.iter().all(|(_, losses)| *losses == first), "{:?}", seen.iter().map(|(k, _)| k).collect::<Vec<_>>());
}

/// A layer that keeps nothing, and whose values are computed again in backward.
struct Again(Arc<Linear<Cpu>>);

impl Module<Cpu> for Again {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        self.0.visit(name, visitor);
    }
}

impl Stage<Cpu> for Again {
    fn forward_values(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        checkpoint(|| Ok(vec![self.0.forward(&inputs[0])?.tanh()?]))
    }
}

#[test]
fn checkpointed_stages_have_the_same_gradients() {
    for (kind, p, v) in [(ScheduleKind::OneFOneB, 3, 1), (ScheduleKind::ZbH1, 3, 1), (ScheduleKind::Zbv, 2, 2)] {
        let checked = checked(kind, p, v, 6).unwrap();
        let gradients = |again: bool| {
            let ranks = world(p, |comm| {
                let init = Init::new(comm.runtime(), 4);
                let stage = |k| -> Result<Box<dyn Stage<Cpu>>> {
                    let linear = Linear::new(&init, WIDTH, WIDTH)?;
                    Ok(if again {
                        Box::new(Again(Arc::new(linear)))
                    } else {
                        Box::new(Sequential::starting_at(k).push(linear).push(Tanh))
                    })
                };
                let stages = (0..p * v).map(stage).collect::<Result<_>>()?;
                let mut pipeline = pipeline(&comm, &checked, stages)?;
                let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
                let batch = MicroBatches::split(&[rows(comm.runtime(), 1, 6)], &[rows(comm.runtime(), 2, 6)], 6)?;
                pipeline.run(batch, &mut gradients)?;
                let mut values = BTreeMap::new();
                for (&stage, module) in pipeline.stages() {
                    for (k, p) in module.parameters().iter().enumerate() {
                        values.insert((stage, k), gradients[&stage].get(&p.leaf())?.unwrap().to_vec::<f32>()?);
                    }
                }
                Ok(values)
            });
            ranks.into_iter().flatten().collect::<BTreeMap<_, _>>()
        };
        assert!(gradients(true) == gradients(false), "{kind}");
    }
}

thread_local! {
    static LIVE: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// The identity, counting how many of its calls are still on a tape of this thread, and the most there were.
struct Counted;

impl Counted {
    fn new() -> Arc<Self> {
        let (live, peak) = LIVE.get();
        LIVE.set((live + 1, peak.max(live + 1)));
        Arc::new(Counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let (live, peak) = LIVE.get();
        LIVE.set((live - 1, peak));
    }
}

impl Function<Cpu> for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }

    fn forward(&self, ins: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Cpu>>> {
        Ok(vec![ins[0].mul(1.0)?])
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<Cpu>>) -> Result<()> {
        match cx.upstream(0)? {
            Some(gradient) => cx.give_value(0, &gradient),
            None => Ok(()),
        }
    }
}

/// `x · scale`, where `scale` goes through [`Counted`]: a part of the graph that leads to no input, so only W frees it.
struct Scaled(Param<Cpu>);

impl Module<Cpu> for Scaled {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        visitor.enter(name);
        visitor.parameter("scale", &self.0);
        visitor.leave();
    }
}

impl Stage<Cpu> for Scaled {
    fn forward_values(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        let scale = apply_function(Counted::new(), &[&self.0.var()])?;
        Ok(vec![inputs[0].mul(&scale[0])?])
    }
}

#[test]
fn activations_live_as_long_as_a_simulation_says() {
    for (p, v, m) in [(1, 1, 4), (2, 1, 6), (2, 2, 6), (3, 1, 9), (4, 1, 8), (4, 2, 8)] {
        for (kind, checked) in kinds(p, v, m) {
            let simulated = checked.schedule().simulate(&Costs::default(), SendMode::Overlapped).unwrap();
            let want: Vec<usize> = simulated.ranks().iter().map(|rank| rank.peak_live).collect();
            let got = world(p, |comm| {
                LIVE.set((0, 0));
                let rt = comm.runtime();
                let scaled = |_| Scaled(Param::new(Tensor::ones(rt, [1], DType::F32).unwrap()).unwrap());
                let stages = (0..p * v).map(scaled).map(|stage| Box::new(stage) as _).collect();
                let mut pipeline = pipeline(&comm, &checked, stages)?;
                let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
                let batch = MicroBatches::split(&[rows(rt, 1, m)], &[rows(rt, 2, m)], m)?;
                let output = pipeline.run(batch, &mut gradients)?;
                let (left, peak) = LIVE.get();
                assert_eq!((left, output.peak_live()), (0, peak));
                Ok(peak)
            });
            assert_eq!(got, want, "{kind} {p} {v} {m}");
        }
    }
}

#[test]
fn a_measured_run_is_a_timeline() {
    let checked = checked(ScheduleKind::DualPipeV, 2, 2, 4).unwrap();
    let traces = world(2, |comm| {
        let options = PipelineOptions { measured: true, ..Default::default() };
        let stages = PipelineModel::on(comm.rank(), checked.clone(), mlp_stages(comm.runtime(), 4, 4)).loss(squares);
        let mut pipeline = Pipeline::new(&comm, stages.options(options))?;
        let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
        let batch = MicroBatches::split(&[rows(comm.runtime(), 1, 4)], &[rows(comm.runtime(), 2, 4)], 4)?;
        let output = pipeline.run(batch, &mut gradients)?;
        let timeline = pipeline.timeline(&output)?;
        for (rank, events) in timeline.ranks.iter().enumerate() {
            assert!(events.iter().map(|event| &event.action).eq(checked.row(rank)));
            assert!(events.iter().all(|event| event.start <= event.end));
            assert!(events.is_sorted_by_key(|event| event.start));
        }
        assert!(timeline.to_svg().contains("rank 1"));
        Ok(timeline.to_svg())
    });
    assert_eq!(traces[0], traces[1]);
    assert!(traces[0].contains("0REDUCE_GRAD"));
}

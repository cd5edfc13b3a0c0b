//! Whatever goes wrong on one rank of a pipeline ends as an error on all of them that says what it was, long before the deadline.

use distributed::pipeline::{Compute, PipelineOutput};

use crate::{pipeline_common::*, prelude::*};

/// What is done to micro-batch `at` of a stage.
#[derive(Clone, Copy, Debug)]
pub enum StageFault {
    Error,
    Panic,
    Shape,
    Rank,
    DType,
    Count,
    Detach,
}

/// A stage to which something happens in one of its forwards.
pub struct FaultyStage {
    pub inner: Box<dyn Stage<Cpu>>,
    pub fault: StageFault,
    pub at: u64,
    pub calls: std::sync::atomic::AtomicU64,
}

impl Module<Cpu> for FaultyStage {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        self.inner.visit(name, visitor);
    }
}

impl Stage<Cpu> for FaultyStage {
    fn forward_values(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        let outputs = self.inner.forward_values(inputs)?;
        let call = self.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let x = &outputs[0];
        match self.fault {
            _ if call != self.at => Ok(outputs),
            StageFault::Error => Err(Error::argument("stage", "an error on purpose")),
            StageFault::Panic => panic!("a panic on purpose"),
            StageFault::Shape => Ok(vec![x.narrow(0, 0, 1)?]),
            StageFault::Rank => Ok(vec![x.unsqueeze(0)?]),
            StageFault::DType => Ok(vec![numcore::ops::PointwiseOps::to_dtype(x, DType::F64)?]),
            StageFault::Count => Ok(vec![x.clone(), x.clone()]),
            StageFault::Detach => Ok(vec![numcore::ops::Apply::detach(x)]),
        }
    }
}

pub fn hooks(pipeline: &Pipeline<Cpu>) -> BTreeMap<usize, autograd::Gradients<Cpu>> {
    pipeline.stages().keys().map(|&stage| (stage, autograd::Gradients::new())).collect()
}

/// Every rank's error.
pub fn errors<T: Send>(p: usize, program: impl Fn(Comm<Cpu>) -> Result<T> + Sync) -> Vec<Error> {
    let begun = Instant::now();
    let outcomes = Ranks::new(p).timeout(TIMEOUT).outcomes(cpu, program).unwrap();
    // A hang, or an end that only the deadline brought about.
    assert!(begun.elapsed() < TIMEOUT / 2, "{:?}", begun.elapsed());
    let error =
        |(rank, outcome): (usize, Result<T>)| outcome.err().unwrap_or_else(|| panic!("rank {rank} saw nothing"));
    outcomes.into_iter().enumerate().map(error).collect()
}

pub fn batch(comm: &Comm<Cpu>, m: usize) -> Result<MicroBatches<Cpu>> {
    MicroBatches::split(&[rows(comm.runtime(), 1, m)], &[rows(comm.runtime(), 2, m)], m)
}

/// The errors of two runs in which stage `stage` has a fault in its `at`-th forward. A barrier follows, so that each
/// rank learns of the fault.
fn with_fault(checked: &Checked, stage: usize, fault: StageFault, at: u64) -> Vec<Error> {
    let (stages, m) = (checked.schedule().stages(), checked.schedule().micro_batches());
    errors(checked.schedule().placement().ranks(), |comm| {
        let mut all = mlp_stages(comm.runtime(), stages, stages);
        let inner = all.remove(stage);
        all.insert(stage, Box::new(FaultyStage { inner, fault, at, calls: Default::default() }));
        let mut pipeline = pipeline(&comm, checked, all)?;
        let mut hooks = hooks(&pipeline);
        for _ in 0..2 {
            pipeline.run(batch(&comm, m)?, &mut hooks)?;
        }
        distributed::comm::Collectives::barrier(&comm)
    })
}

/// The schedules faults are tried on.
const SCHEDULES: [(ScheduleKind, usize, usize, usize); 4] = [
    (ScheduleKind::OneFOneB, 3, 1, 4),
    (ScheduleKind::ZbH1, 3, 1, 4),
    (ScheduleKind::Interleaved, 2, 2, 4),
    (ScheduleKind::DualPipeV, 2, 2, 4),
];

fn each(mut try_on: impl FnMut(&Checked, usize)) {
    for (kind, p, v, m) in SCHEDULES {
        let checked = checked(kind, p, v, m).unwrap();
        (0..p * v).for_each(|stage| try_on(&checked, stage));
    }
}

#[test]
fn a_stage_that_fails_is_named_on_every_rank() {
    each(|checked, stage| {
        for at in [0, 2, 5] {
            let micro = at % 4;
            for (rank, error) in with_fault(checked, stage, StageFault::Error, at).into_iter().enumerate() {
                let own = checked.schedule().placement().rank_of(stage).unwrap();
                let text = error.to_string();
                assert!(text.contains("an error on purpose"), "{text}");
                assert_eq!(error.rank(), Some(rank));
                let ErrorKind::Peer { peer, .. } = error.kind() else {
                    assert_eq!(rank, own, "only the rank itself has its own error");
                    continue;
                };
                assert!(*peer == own && text.contains(&format!("{stage}F{micro}")), "{text}");
            }
        }
    });
}

#[test]
fn a_stage_that_panics_is_named_on_every_rank() {
    each(|checked, stage| {
        for error in with_fault(checked, stage, StageFault::Panic, 1) {
            let text = error.to_string();
            let own = checked.schedule().placement().rank_of(stage).unwrap();
            let ErrorKind::Peer { peer, cause, .. } = error.kind() else { panic!("{text}") };
            assert!(*peer == own && cause.contains("a panic on purpose"), "{text}");
        }
    });
}

#[test]
fn what_a_stage_makes_may_not_change() {
    let cases = [
        (StageFault::Shape, "f32 [1, 12]"),
        (StageFault::Rank, "f32 [1, 3, 12]"),
        (StageFault::DType, "f64 [3, 12]"),
        (StageFault::Count, "f32 [3, 12], f32 [3, 12]"),
        (StageFault::Detach, "f32 [3, 12] without gradient"),
    ];
    for (fault, told) in cases {
        each(|checked, stage| {
            if stage + 1 == checked.schedule().stages() {
                return;
            }
            // In the first run, and in the second.
            for at in [2, 4] {
                for error in with_fault(checked, stage, fault, at) {
                    let text = error.to_string();
                    let micro = at % 4;
                    let wanted = [told, "f32 [3, 12]", &format!("stage {stage} made"), &format!("micro-batch {micro}")];
                    assert!(wanted.iter().all(|part| text.contains(part)), "{fault:?}: {text}");
                }
            }
        });
    }
}

/// A hook that fails when a stage is reduced.
struct Failing(BTreeMap<usize, autograd::Gradients<Cpu>>, usize);

impl StageHooks<Cpu> for Failing {
    fn gradients(&mut self, pass: Compute, last: bool) -> Result<&mut dyn BackwardHook<Cpu>> {
        self.0.gradients(pass, last)
    }

    fn reduce_grad(&mut self, stage: usize) -> Result<()> {
        if stage == self.1 { Err(Error::argument("reduction", "an error on purpose")) } else { Ok(()) }
    }
}

#[test]
fn a_hook_that_fails_is_named_on_every_rank() {
    each(|checked, stage| {
        let stages = checked.schedule().stages();
        let told = errors(checked.schedule().placement().ranks(), |comm| {
            let mut pipeline = pipeline(&comm, checked, mlp_stages(comm.runtime(), stages, stages))?;
            let mut hooks = Failing(hooks(&pipeline), stage);
            pipeline.run(batch(&comm, 4)?, &mut hooks)?;
            distributed::comm::Collectives::barrier(&comm)
        });
        assert!(told.iter().all(|error| error.to_string().contains("an error on purpose")), "{told:?}");
    });
}

type Change = fn(MicroBatches<Cpu>) -> MicroBatches<Cpu>;

#[test]
fn wrong_numbers_of_micro_batches_are_named_on_every_rank() {
    let cases: [(&str, &str, Change); 6] = [
        ("no inputs", "the rank of stage 0 was given inputs for 0", |b| MicroBatches { inputs: Vec::new(), ..b }),
        ("no targets", "was given targets for 0", |b| MicroBatches { targets: Vec::new(), ..b }),
        ("nothing", "was given", |_| MicroBatches::none()),
        ("an input less", "was given inputs for 3", |mut b| {
            b.inputs.pop();
            b
        }),
        ("a target less", "was given targets for 3", |mut b| {
            b.targets.pop();
            b
        }),
        ("an input more", "was given inputs for 5", |mut b| {
            b.inputs.push(b.inputs[0].clone());
            b
        }),
    ];
    for (what, told, change) in cases {
        for (kind, p, v, m) in SCHEDULES {
            let checked = checked(kind, p, v, m).unwrap();
            for evaluate in [false, true] {
                for error in errors(p, |comm| -> Result<PipelineOutput<Cpu>> {
                    let mut pipeline = pipeline(&comm, &checked, mlp_stages(comm.runtime(), p * v, p * v))?;
                    let mut hooks = hooks(&pipeline);
                    let batch = change(batch(&comm, m)?);
                    if evaluate { pipeline.evaluate(batch) } else { pipeline.run(batch, &mut hooks) }
                }) {
                    let text = error.to_string();
                    assert!(text.contains("the schedule has 4 micro-batches") && text.contains(told), "{what}: {text}");
                }
            }
        }
    }
}

#[test]
fn only_the_ranks_at_the_ends_look_at_data() {
    let checked = checked(ScheduleKind::OneFOneB, 3, 1, 4).unwrap();
    world(3, |comm| {
        let mut pipeline = pipeline(&comm, &checked, mlp_stages(comm.runtime(), 3, 3))?;
        let MicroBatches { inputs, targets, weightless } = batch(&comm, 4)?;
        let batch = match comm.rank() {
            0 => MicroBatches { inputs, targets: Vec::new(), weightless },
            1 => MicroBatches::none(),
            _ => MicroBatches { inputs: Vec::new(), targets, weightless },
        };
        let mut hooks = hooks(&pipeline);
        pipeline.run(batch, &mut hooks).map(|_| ())
    });
}

/// A pipeline that one rank builds otherwise.
fn built(p: usize, told: &str, build: impl Fn(&Comm<Cpu>) -> Result<Pipeline<Cpu>> + Sync) {
    for (rank, error) in errors(p, |comm| build(&comm).map(|_| ())).into_iter().enumerate() {
        let text = error.to_string();
        assert!(text.contains(told), "rank {rank}: {text}");
    }
}

#[test]
fn what_does_not_fit_the_schedule_is_named_on_every_rank() {
    let three = checked(ScheduleKind::OneFOneB, 3, 1, 4).unwrap();
    let gpipe = checked(ScheduleKind::GPipe, 3, 1, 4).unwrap();
    let (three, gpipe) = (&three, &gpipe);
    let without_loss = |comm: &Comm<Cpu>, checked: &Checked, rank: usize| {
        PipelineModel::on(rank, checked.clone(), mlp_stages(comm.runtime(), 3, 3))
    };
    let on = |comm: &Comm<Cpu>, checked: &Checked, rank: usize| without_loss(comm, checked, rank).loss(squares);
    built(2, "the schedule is for 3 ranks, there are 2", |comm| Pipeline::new(comm, on(comm, three, comm.rank())));
    built(4, "the schedule is for 3 ranks, there are 4", |comm| {
        Pipeline::new(comm, PipelineModel::new(three.clone(), Vec::new()).loss(squares))
    });
    built(3, "stages [1] live on rank 1, it was given [2]", |comm| {
        let rank = if comm.rank() == 1 { 2 } else { comm.rank() };
        Pipeline::new(comm, on(comm, three, rank))
    });
    built(3, "stages [0] live on rank 0, it was given []", |comm| match comm.rank() {
        0 => Pipeline::new(comm, PipelineModel::new(three.clone(), Vec::new()).loss(squares)),
        rank => Pipeline::new(comm, on(comm, three, rank)),
    });
    built(3, "the rank of the last stage, 2, has no loss", |comm| match comm.rank() {
        2 => Pipeline::new(comm, without_loss(comm, three, 2)),
        rank => Pipeline::new(comm, on(comm, three, rank)),
    });
    built(3, "the pipeline's schedule of rank 0 differs from that of rank 2", |comm| {
        let checked = if comm.rank() == 2 { gpipe } else { three };
        Pipeline::new(comm, on(comm, checked, comm.rank()))
    });
    built(3, "the pipeline's schedule of rank 0 differs from that of rank 1", |comm| {
        let options = PipelineOptions { input_gradients: comm.rank() == 1, ..Default::default() };
        Pipeline::new(comm, on(comm, three, comm.rank()).options(options))
    });
    let fold = checked(ScheduleKind::Zbv, 2, 2, 3).unwrap();
    built(2, "stages 0 and 3 share a parameter, `0.weight` and `3.weight`", |comm| {
        let shared: Arc<Linear<Cpu>> = Arc::new(Linear::new(&Init::new(comm.runtime(), 1), WIDTH, WIDTH)?);
        let mut all = mlp_stages(comm.runtime(), 4, 4);
        all[0] = Box::new(Sequential::new().push(shared.clone()));
        all[3] = Box::new(Sequential::starting_at(3).push(shared));
        Pipeline::new(comm, PipelineModel::on(comm.rank(), fold.clone(), all).loss(squares))
    });
}

#[test]
fn a_loss_of_many_elements_is_refused() {
    let checked = checked(ScheduleKind::ZbH1, 2, 1, 2).unwrap();
    for error in errors(2, |comm| {
        let stages = PipelineModel::on(comm.rank(), checked.clone(), mlp_stages(comm.runtime(), 2, 2));
        let mut pipeline = Pipeline::new(&comm, stages.loss(|y, _| distributed::train::Loss::sum(y[0].clone(), 1.0)))?;
        let mut hooks = hooks(&pipeline);
        pipeline.run(batch(&comm, 2)?, &mut hooks)
    }) {
        assert!(error.to_string().contains("a loss has one element"), "{error}");
    }
}

#[test]
fn batches_are_cut_into_parts_of_some_rows_or_refused() {
    let rt = cpu(0).unwrap();
    let x = Tensor::from_slice(&rt, [6, 2], &(0..12).map(|k| k as f32).collect::<Vec<_>>()).unwrap();
    let cut = MicroBatches::split(from_ref(&x), &[], 3).unwrap();
    let rows: Vec<Vec<f32>> = cut.inputs.iter().map(|of| of[0].to_vec().unwrap()).collect();
    assert_eq!(rows[1], [4.0, 5.0, 6.0, 7.0]);
    let uneven = MicroBatches::split(from_ref(&x), &[], 4).unwrap();
    assert_eq!(uneven.inputs.iter().map(|of| of[0].dims()[0]).collect::<Vec<_>>(), [2, 2, 1, 1]);
    let none = MicroBatches::split(from_ref(&x), &[], 7).unwrap_err().to_string();
    assert!(none.contains("no row for each of 7 micro-batches"), "{none}");
    assert!(MicroBatches::split(&[x], &[], 0).is_ok_and(|none| none.inputs.is_empty()));
}

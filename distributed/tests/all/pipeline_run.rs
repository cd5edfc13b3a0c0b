//! Running every schedule gives what one rank gives: bit for bit where the additions come in the same order.

use nn::counted_rows;

use crate::{pipeline_common::*, prelude::*};

const STEPS: usize = 3;
const LR: f64 = 2e-3;
/// Sizes (p, v, m) at which every kind can be run somewhere.
const SIZES: [(usize, usize, usize); 9] =
    [(1, 1, 3), (1, 2, 2), (2, 1, 5), (2, 2, 4), (3, 1, 6), (3, 2, 6), (4, 3, 10), (5, 2, 10), (8, 1, 15)];

type Weights = BTreeMap<String, Vec<f32>>;

fn batch(rt: &Cpu, step: usize, micros: usize) -> (Tensor<Cpu>, Tensor<Cpu>) {
    (rows(rt, 100 + step as u64, micros), rows(rt, 200 + step as u64, micros))
}

/// Losses per step and micro-batch, and all weights, of a pipeline.
fn piped(checked: &Checked, depth: usize) -> (Vec<Vec<f32>>, Weights) {
    let (p, m) = (checked.schedule().placement().ranks(), checked.schedule().micro_batches());
    let simulated = checked.schedule().simulate(&Costs::default(), SendMode::Overlapped).unwrap();
    let ranks = world(p, |comm| {
        let stages = mlp_stages(comm.runtime(), depth, checked.schedule().stages());
        let mut pipeline = pipeline(&comm, checked, stages)?;
        let (mut optimizers, mut gradients) = optimizers(&pipeline, LR)?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let (x, y) = batch(comm.runtime(), step, m);
            gradients.values_mut().for_each(|g| g.zero());
            let output = pipeline.run(MicroBatches::split(&[x], &[y], m)?, &mut gradients)?;
            assert_eq!(output.peak_live(), simulated.rank(comm.rank()).unwrap().peak_live);
            losses.push(pipeline.losses(&output)?.into_iter().map(|(sum, _)| sum as f32).collect::<Vec<_>>());
            for (stage, optimizer) in &mut optimizers {
                gradients[stage].require_all()?;
                optimizer.step_from(&gradients[stage])?;
            }
        }
        Ok((losses, stage_weights(pipeline.stages().values())))
    });
    let losses = ranks[0].0.clone();
    assert!(ranks.iter().all(|(other, _)| *other == losses), "every rank is told the same losses");
    (losses, ranks.into_iter().flat_map(|(_, weights)| weights).collect())
}

/// The order in which a schedule adds up the micro-batches' gradients: that of B or W, the same on every stage.
fn order(checked: &Checked) -> Vec<usize> {
    let schedule = checked.schedule();
    let of = |stage: usize| {
        let passes = schedule.actions().flat_map(|(_, _, action)| action.computes());
        let weights = passes.filter(|c| c.stage == stage && c.pass.makes_weight_gradient());
        weights.map(|c| c.micro).collect::<Vec<_>>()
    };
    let first = of(0);
    assert!((1..schedule.stages()).all(|stage| of(stage) == first), "no one order");
    first
}

/// One rank that accumulates micro-batches in this order; its losses by micro-batch.
fn accumulated(depth: usize, m: usize, order: &[usize]) -> (Vec<Vec<f32>>, Weights) {
    let rt = cpu(0).unwrap();
    let part = |step, k: usize| {
        let (x, y) = batch(&rt, step, m);
        [x, y].map(|t| t.narrow(0, order[k] * ROWS, ROWS).unwrap()).into()
    };
    let (losses, weights) = alone(&rt, &mlp(&rt, depth), m, LR, STEPS, part, squares);
    let by_micro = |of: Vec<f32>| {
        let place = |micro| order.iter().position(|&other| other == micro).unwrap();
        (0..m).map(|micro| of[place(micro)]).collect()
    };
    (losses.into_iter().map(by_micro).collect(), weights)
}

#[test]
fn every_schedule_is_one_rank_that_accumulates_micro_batches() {
    let mut ran = Vec::new();
    for (p, v, m) in SIZES {
        for (kind, checked) in kinds(p, v, m) {
            let (got, want) = (piped(&checked, p * v), accumulated(p * v, m, &order(&checked)));
            assert_eq!(got.0, want.0, "losses, {kind} {p} {v} {m}");
            assert!(got.1 == want.1, "weights, {kind} {p} {v} {m}");
            ran.push(kind);
        }
    }
    assert!(ScheduleKind::ALL.iter().all(|kind| ran.contains(kind)), "{ran:?}");
}

/// The rows that counted in each forward.
type Seen = Arc<Mutex<Vec<usize>>>;

/// A checkpointed layer that remembers how many rows count: nothing but op calls is repeated in backward.
struct Counts(Arc<Linear<Cpu>>, Seen);

impl Module<Cpu> for Counts {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        self.0.visit(name, visitor);
    }
}

impl Stage<Cpu> for Counts {
    fn forward_values(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        assert!(is_grad_enabled());
        let own = autograd::checkpoint(|| {
            self.1.lock().unwrap().push(counted_rows(inputs[0].dims()[0]));
            self.0.forward(&inputs[0].detach())
        });
        Ok(vec![own?.add(&inputs[0])?])
    }
}

#[test]
fn each_micro_batch_has_its_part_of_the_rows_that_count() {
    let all = 4 * ROWS;
    let cases = [
        (None, [ROWS; 4]),
        (Some(CountedRows { count: ROWS + 1, rows: all }), [ROWS, 1, 0, 0]),
        (Some(CountedRows { count: all - 1, rows: all }), [ROWS, ROWS, ROWS, ROWS - 1]),
        (Some(CountedRows { count: 0, rows: 1 }), [0; 4]),
    ];
    for (kind, (counted, expected)) in
        [ScheduleKind::OneFOneB, ScheduleKind::ZbH1].into_iter().flat_map(|k| cases.map(|c| (k, c)))
    {
        let checked = checked(kind, 2, 1, 4).unwrap();
        let seen = world(2, |comm| {
            let seen = Seen::default();
            let layer = || Linear::new(&Init::new(comm.runtime(), 0), WIDTH, WIDTH).map(Arc::new);
            let stages = (0..2).map(|_| Ok(Box::new(Counts(layer()?, seen.clone())) as Box<dyn Stage<Cpu>>));
            let mut pipeline = pipeline(&comm, &checked, stages.collect::<Result<_>>()?)?;
            let (_, mut gradients) = optimizers(&pipeline, LR)?;
            let (x, y) = batch(comm.runtime(), 0, 4);
            set_counted_rows(counted);
            pipeline.run(MicroBatches::split(&[x], &[y], 4)?, &mut gradients)?;
            assert_eq!(set_counted_rows(None), counted, "what held before a run holds after it");
            let seen = seen.lock().unwrap().clone();
            Ok(seen)
        });
        assert_eq!(seen, [expected; 2], "{kind}, {counted:?}");
    }
}

//! Forwards alone: evaluation between runs, and schedules without backward.

use crate::{pipeline_common::*, prelude::*};

#[test]
fn evaluation_is_the_model_and_records_nothing() {
    for (p, v, m) in [(1, 1, 2), (2, 1, 4), (2, 2, 4), (3, 2, 6), (4, 1, 8)] {
        for (kind, checked) in kinds(p, v, m) {
            let rt = cpu(0).unwrap();
            let x = rows(&rt, 1, m);
            let model = mlp(&rt, p * v);
            // Part by part: products of other sizes may add in another order.
            let part = |k| model.forward(&Var::new(x.narrow(0, k * ROWS, ROWS)?))?.value()?.to_vec::<f32>();
            let want = (0..m).map(part).collect::<Result<Vec<_>>>().unwrap().concat();
            let last = checked.schedule().placement().rank_of(p * v - 1).unwrap();
            let ranks = world(p, |comm| {
                let rt = comm.runtime();
                let mut pipeline = pipeline(&comm, &checked, mlp_stages(rt, p * v, p * v))?;
                let (_, mut gradients) = optimizers(&pipeline, 0.0)?;
                let (x, y) = (rows(rt, 1, m), rows(rt, 2, m));
                let batch = || MicroBatches::split(from_ref(&x), from_ref(&y), m);
                // Before, between and after: with its own shapes, which are not those trained with.
                let few = MicroBatches::split(&[x.narrow(0, 0, m)?], &[y.narrow(0, 0, m)?], m)?;
                let first = pipeline.run(batch()?, &mut gradients)?;
                let live = rt.memory().total.live;
                let small = pipeline.evaluate(few)?;
                drop(small);
                assert_eq!(rt.memory().total.live, live, "an evaluation leaves nothing");
                let again = pipeline.run(batch()?, &mut gradients)?;
                assert_eq!(pipeline.losses(&first)?, pipeline.losses(&again)?);
                let mut fresh = self::pipeline(&comm, &checked, mlp_stages(rt, p * v, p * v))?;
                let output = fresh.evaluate(batch()?)?;
                assert_eq!((output.peak_live(), output.outputs().len()), (1, if comm.rank() == last { m } else { 0 }));
                assert_eq!(fresh.losses(&output)?, pipeline.losses(&first)?);
                let values = output.outputs().iter().map(|of| of[0].to_vec::<f32>()).collect::<Result<Vec<_>>>()?;
                Ok(values.concat())
            });
            assert!(ranks[last] == want, "{kind} {p} {v} {m}");
        }
    }
}

#[test]
fn a_schedule_of_forwards_alone_needs_no_loss() {
    let placement = ScheduleKind::Zbv.generate(shape(2, 2, 3)).unwrap().placement().clone();
    let schedule = Schedule::forward_only(&placement, 3).unwrap();
    let lowered = schedule.lower(Lowering { sharded: true, ..Default::default() }).unwrap();
    let limits = Limits { live: Some(1), ..Default::default() };
    let checked = lowered.check(limits).unwrap();
    assert!(checked.is_forward_only());
    let simulated = checked.schedule().simulate(&Costs::default(), SendMode::Synchronous).unwrap();
    assert!(simulated.ranks().iter().all(|rank| rank.peak_live == 1));
    let ranks = world(2, |comm| {
        let stages = mlp_stages(comm.runtime(), 4, 4);
        let mut pipeline = Pipeline::new(&comm, PipelineModel::on(comm.rank(), checked.clone(), stages))?;
        let x = rows(comm.runtime(), 4, 3);
        let batch = MicroBatches { targets: Vec::new(), ..MicroBatches::split(&[x], &[], 3)? };
        let output = pipeline.run(batch, &mut BTreeMap::<usize, autograd::Gradients<Cpu>>::new())?;
        assert!(output.losses().is_empty());
        Ok(output.outputs().len())
    });
    assert_eq!(ranks, [3, 0]);
    assert!(Schedule::forward_only(&placement, 0).is_err());
}

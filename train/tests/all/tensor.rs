//! A loop over a mesh with a tensor axis: what is measured counts once, and pieces of the model are compared with their like.

use crate::{common::*, prelude::*};

/// A model that is cut over a mesh of two ranks along data and two along tensor, and its step.
fn cut(comm: &Comm<Cpu>) -> Result<(Mesh<Cpu>, Mlp<Cpu>)> {
    let mesh = Mesh::new(comm, ParallelPlan::of([(Axis::Data, 2), (Axis::Tensor, 2)])?)?;
    let model = Mlp::new(comm.runtime(), 0.0)?;
    mesh.parallelize(&model, &TensorPlan::new().column("a").row("b"))?;
    Ok((mesh, model))
}

fn step(mesh: &Mesh<Cpu>, model: &Mlp<Cpu>) -> Result<TrainStep<Cpu>> {
    TrainStep::builder(mesh, model).optimizer(adamw()).max_norm(0.5).build()
}

#[test]
fn what_ranks_along_tensor_measure_counts_once() {
    let (many, alone) = (Memory::default(), Memory::default());
    let evaluate = |rt: &Cpu| Evaluate::on(held_out(rt)).every(Interval::Steps(2));
    on_ranks(4, |comm| {
        let (mesh, model) = cut(comm)?;
        let place = mesh.axis(Axis::Tensor).rank() as f64;
        Trainer::new(&model, step(&mesh, &model)?, loader(comm.runtime()))
            .until(Length::Steps(4))
            .record_every(Interval::Steps(2))
            .with(
                evaluate(comm.runtime())
                    .measure("place", |_, batch| Ok((place * batch.rows as f64, batch.rows as f64))),
            )
            .sink(many.clone())
            .run(|model, batch| {
                record_scalar("place", place);
                loss(model, batch)
            })
            .map(drop)
    })
    .unwrap();
    on_ranks(1, |comm| {
        let model = Mlp::new(comm.runtime(), 0.0)?;
        Trainer::new(&model, ddp(comm, &model, 1)?, loader(comm.runtime()))
            .until(Length::Steps(4))
            .record_every(Interval::Steps(2))
            .with(evaluate(comm.runtime()))
            .sink(alone.clone())
            .run(loss)
            .map(drop)
    })
    .unwrap();
    // Of the ranks along tensor the first counts, whose place is 0.
    assert_eq!(many.of("place"), [(2, 0.0), (4, 0.0)]);
    assert_eq!(many.of("validation/place"), [(2, 0.0), (4, 0.0)]);
    for name in ["loss", "validation/loss"] {
        let (many, alone) = (many.of(name), alone.of(name));
        assert_eq!(many.len(), 2, "{name}");
        for ((_, a), (_, b)) in many.iter().zip(&alone) {
            assert!((a - b).abs() <= 1e-12 * b.abs(), "{name}: {a} and {b}");
        }
    }
}

/// Changes a parameter on the last rank.
struct Drifts(&'static str);

impl<B> Callback<Cpu, Mlp<Cpu>, B> for Drifts {
    fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, Mlp<Cpu>, B>) -> Result<()> {
        if matches!(event, Event::StepEnd(_)) && run.progress().step == 3 && run.comm().rank() == 3 {
            let parameters = run.model().named_parameters().into_iter();
            for (_, p) in parameters.filter(|(name, _)| name == self.0) {
                p.set(p.value()?.add(f64::EPSILON)?)?;
            }
        }
        Ok(())
    }
}

#[test]
fn ranks_that_have_the_same_piece_are_compared() {
    let run = |drifts: &'static str| {
        let outcomes = Ranks::new(4).outcomes(cpu, |comm| {
            let (mesh, model) = cut(&comm)?;
            let trainer = Trainer::new(&model, step(&mesh, &model)?, loader(comm.runtime())).until(Length::Steps(9));
            trainer.with(Drifts(drifts)).with(EqualWeights::every(Interval::Steps(4))).run(loss).map(drop)
        });
        outcomes.unwrap()
    };
    assert!(run("nothing").into_iter().all(|outcome| outcome.is_ok()));
    // A piece that ranks 1 and 3 have, and what all ranks have.
    for (name, of) in [("a.weight", "rank 3 and rank 1"), ("b.bias", "and rank 0")] {
        for outcome in run(name) {
            let error = outcome.unwrap_err().to_string();
            assert!(
                error.contains(&format!("after step 4 `{name}` differs between rank")) && error.contains(of),
                "{error}"
            );
        }
    }
}

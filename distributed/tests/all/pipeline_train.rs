//! Steps of pipelines: loss scales, and copies of tied parameters.

use crate::{pipeline_common::*, prelude::*};

#[test]
fn a_step_that_overflows_is_left_out_by_all() {
    let way = Way { dtype: DType::F16, ..Way::layers(3).staged(ScheduleKind::ZbH1, 1).micros(3) };
    let way = Way { examples: 3, ..way.over(&[(Axis::Pipe, 3)]) };
    // Halving it twice is far from enough.
    let ranks = way.ranks(|mesh| {
        let scaler = LossScaler::starting_at(1e9)?;
        let mut training = Training::with(&way, mesh, |builder| builder.loss_scaling(scaler))?;
        let before = training.pieces()?;
        let stepped = (0..3).map(|k| Ok(training.take(k)?.stepped())).collect::<Result<Vec<_>>>()?;
        Ok((stepped, training.step.global_step(), before == training.pieces()?))
    });
    let ranks = ranks.unwrap();
    assert!(ranks.iter().all(|rank| *rank == (vec![false; 3], 0, true)), "{ranks:?}");
}

#[test]
fn a_loss_scale_that_fits_changes_nothing() {
    let way = Way { dtype: DType::F32, ..Way::gpt(2).staged(ScheduleKind::OneFOneB, 1).over(&[(Axis::Pipe, 2)]) };
    // A power of two is exact.
    let scaled = way.ranks(|mesh| {
        let scaler = LossScaler::starting_at(1024.0)?;
        Training::with(&way, mesh, |builder| builder.loss_scaling(scaler))?.steps(0..2)
    });
    assert!(assembled(scaled.unwrap()) == way.outcome());
}

#[test]
fn ties_that_cannot_be_are_refused_on_every_rank() {
    let cases: [(&str, &[&str], &str); 3] = [
        ("nobody", &["nobody.weight"], "no stage has a parameter of this name"),
        ("different shapes", &["0.weight", "2.bias"], "stage 0's copy is f32 [12, 12] trained, stage 1's is f32 [12]"),
        ("twice in one stage", &["0.weight", "2.weight", "4.weight"], "two copies"),
    ];
    for (_, names, told) in cases {
        let checked = checked(ScheduleKind::OneFOneB, 2, 1, 2).unwrap();
        let outcomes = Ranks::new(2).timeout(TIMEOUT).outcomes(cpu, |comm| {
            let stages = mlp_stages(comm.runtime(), 3, 2);
            let staged = PipelineModel::on(comm.rank(), checked.clone(), stages).loss(squares);
            let staged = staged.ties(vec![Tie::new(names.iter().copied())]);
            pipelined(&comm, staged, TrainingConfig::default()).map(|_| ())
        });
        refused(outcomes.unwrap(), &[told]);
    }
}

//! A step of a pipeline that one of a rank's stages cannot take is taken by none of them.

use crate::{
    pipeline_staged::{HOWS, How, Model, Told, ranks_of, steps},
    prelude::*,
};

/// Two steps; between them, if so, one while someone holds state of the last stage.
fn run<G>(
    comm: &Comm<Cpu>,
    mut trainer: TrainStep<Cpu>,
    held: bool,
    scope: impl Fn(&TrainStep<Cpu>) -> Result<G>,
) -> Result<Told> {
    let mut told = steps(comm, Model::Mlp, &mut trainer, 0..1, &scope)?;
    if held {
        let last = set(&trainer).parts().last().expect("a stage");
        let states: Vec<_> = last.parts()?.into_iter().filter(|part| part.name.starts_with("state/")).collect();
        assert!(set(&trainer).parts().len() == 2 && !states.is_empty());
        let error = steps(comm, Model::Mlp, &mut trainer, 1..2, &scope).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("state tensor"), "{error}");
    }
    let after = steps(comm, Model::Mlp, &mut trainer, 1..2, &scope)?;
    told.losses.extend(after.losses);
    told.norms.extend(after.norms);
    told.weights.extend(after.weights);
    Ok(told)
}

fn with(how: How, checked: &Checked, held: bool) -> Result<Vec<Told>> {
    ranks_of(1, |comm| {
        let model = Model::Mlp.staged(&comm, checked, 4);
        assert_eq!(comm.size(), 1);
        match how.zero() {
            None => run(&comm, pipelined(&comm, model, config())?, held, |_| Ok(())),
            Some(zero) => {
                let trainer = sharded_pipeline(&comm, model, config(), zero)?;
                run(&comm, trainer, held, |trainer| trainer.gather_full_params())
            }
        }
    })
}

#[test]
fn no_stage_is_updated() {
    for how in HOWS {
        let checked = how.checked(ScheduleKind::Interleaved, 1, 2, 2).expect("a schedule");
        let fresh = with(how, &checked, false).unwrap();
        let after = with(how, &checked, true).unwrap_or_else(|e| panic!("{how:?}: {e}"));
        assert!(after == fresh, "{how:?}: a step that failed left a trace");
    }
}

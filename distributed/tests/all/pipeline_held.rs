//! A step of a pipeline that one of a rank's stages cannot take is taken by none of them.

use crate::prelude::*;

/// Two steps; between them, if so, one while someone holds state of the last stage.
fn run(way: &Way, held: bool) -> Result<RunOutcome> {
    // One that a failed step does not end.
    let comm: Comm<Cpu> = Arc::new(NoOpCommunicator::new(&cpu(0)?));
    let mut training = Training::new(way, &Mesh::new(&comm, ParallelPlan::of(way.axes.clone())?)?)?;
    training.take(0)?;
    if held {
        let last = set(&training.step).parts().last().expect("a stage");
        let states: Vec<_> = last.parts()?.into_iter().filter(|part| part.name.starts_with("state/")).collect();
        assert!(set(&training.step).parts().len() == 2 && !states.is_empty());
        let error = training.take(1).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("state tensor"), "{error}");
    }
    training.steps(1..2)
}

#[test]
fn no_stage_is_updated() {
    let way = Way::layers(4).staged(ScheduleKind::Interleaved, 2).micros(2).over(&[(Axis::Pipe, 1)]);
    for way in way.strategies() {
        assert!(run(&way, true).unwrap() == run(&way, false).unwrap(), "{way:?}: a step that failed left a trace");
    }
}

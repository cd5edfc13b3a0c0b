//! ZeRO with a rule whose update cannot be computed: values and state stay where they can be read and updated.

use numcore::pointwise::Program;
use optim::{Scalars, StateSpec, StepContext, UpdateForm, scalars};

use crate::prelude::*;

thread_local! {
    /// Which of the next updates of a run of parameters fails; none once it was reached.
    static FAILS: Cell<Option<usize>> = const { Cell::new(None) };
}

optim::config! {
    /// Momentum, which sometimes has too few numbers for its program.
    FickleConfig = "Fickle" {
        /// Learning rate.
        lr: f64 = 1e-2, NonNegative;
    }
}

impl Elementwise for FickleConfig {
    fn states(&self) -> Vec<StateSpec> {
        vec![StateSpec::zeros("momentum"), StateSpec::zeros("slow")]
    }

    fn program(&self, form: UpdateForm) -> Program {
        form.program("fickle", |p, g, [m, slow], [lr, keep]| {
            let m = m * keep + g;
            (p - m * lr, [m, slow * keep + m])
        })
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        // An optimizer that is made asks how many there are, with a rate of 0.
        let fails = if now.lr == 0.0 { None } else { FAILS.get() };
        FAILS.set(fails.map_or(FAILS.get(), |left| left.checked_sub(1)));
        if fails == Some(0) { scalars([now.lr]) } else { scalars([now.lr, 0.9]) }
    }
}

/// Weights before, after one step that fails in its `fails`-th run if it is to, and after each of two good ones.
fn train(stage: ZeroStage, state: StatePlace, fails: Option<usize>) -> Result<Vec<Vec<f64>>> {
    let rt = Cpu::with_threads(1);
    let model = Mlp::new(&Init::new(&rt, 0))?;
    let comm = Arc::new(NoOpCommunicator::new(&rt)) as Comm<Cpu>;
    let options = ZeroOptions { stage, units: UnitOf::children(), state, ..Default::default() };
    let rule = ParamGroups::new(FickleConfig::default());
    let mut trainer = TrainStep::builder(&comm, &model).optimizer(rule).config(config()).zero(options).build()?;
    let all: Vec<usize> = (0..EXAMPLES).collect();
    let mut trace = vec![weights(&model)?];
    if fails.is_some() {
        FAILS.set(fails);
        let error = trainer.step(|_| model.loss(&rt, 0, &all)).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("fickle"), "{error}");
        assert_eq!((trainer.global_step(), FAILS.get()), (0, None));
        trace.push(weights(&model)?);
    }
    for step in 0..2 {
        trainer.step(|_| model.loss(&rt, step, &all))?;
        trace.push(weights(&model)?);
    }
    Ok(trace)
}

#[test]
fn no_value_is_lost() {
    for stage in ZeroStage::ALL {
        for state in [StatePlace::Device, StatePlace::Host] {
            let what = format!("stage {} {state:?}", stage.number());
            let fresh = train(stage, state, None).unwrap();
            // Before anything was updated: as if there had been no such step.
            let first = train(stage, state, Some(0)).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(first[0] == first[1] && first[1..] == fresh[..], "{what}");
            // In a later unit: those before it were updated, as the good step does it.
            for fails in [1, 2] {
                let got = train(stage, state, Some(fails)).unwrap_or_else(|e| panic!("{what}, run {fails}: {e}"));
                let either = got[1].iter().zip(&fresh[0]).zip(&fresh[1]);
                assert!(either.into_iter().all(|((w, old), new)| w == old || w == new), "{what}, run {fails}");
                assert!(got.iter().flatten().all(|w| w.is_finite()) && got[1] != got[3], "{what}, run {fails}");
            }
        }
    }
}

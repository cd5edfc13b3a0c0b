//! ZeRO: when calls leave and when they are waited for, by the kernels launched before, on a runtime that computes nothing.

use crate::{data_parallel::Watched, prelude::*, zero_stages::options};

const LAYERS: usize = 6;

/// A second step: calls and waits with the launches before each, and the launches before each layer and at the end of the forward.
struct Step {
    calls: Vec<(&'static str, u64)>,
    waits: Vec<(&'static str, u64)>,
    starts: Vec<u64>,
    /// Calls before the step: of the update before.
    before: Vec<&'static str>,
    end: u64,
}

impl Step {
    fn of(stage: ZeroStage) -> Self {
        let rt = NullRuntime::new();
        let watched = Watched::new(&rt);
        let init = Init::new(&rt, 0);
        let layers: Vec<Linear<NullRuntime>> = (0..LAYERS).map(|_| Linear::new(&init, 16, 16).unwrap()).collect();
        let (comm, config) = (watched.comm.clone(), TrainingConfig::default());
        let mut trainer = sharded(&comm, &layers, config, options(stage, UnitOf::layers())).unwrap();
        let x = Var::new(Tensor::zeros(&rt, [4, 16], DType::F32).unwrap());
        let (mut starts, mut before) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            starts.clear();
            before = watched.take().0.into_iter().map(|(name, _)| name).collect();
            let forward = |_| {
                let mut y = x.clone();
                for layer in &layers {
                    starts.push(rt.launches());
                    y = layer.forward(&y)?.tanh()?;
                }
                starts.push(rt.launches());
                Ok(Loss::mean(y.sum_all()?))
            };
            trainer.step(forward).unwrap();
        }
        let (calls, waits) = watched.take();
        let end = starts.pop().unwrap();
        Step { calls, waits, starts, before, end }
    }

    fn launches(of: &[(&'static str, u64)], name: &str) -> Vec<u64> {
        of.iter().filter(|(other, _)| *other == name).map(|(_, launches)| *launches).collect()
    }
}

#[test]
fn values_come_a_unit_ahead_and_gradients_leave_from_the_sweep() {
    let step = Step::of(ZeroStage::Parameters);
    let names: Vec<_> = step.calls.iter().map(|(name, _)| *name).collect();
    let (gather, scatter) = ("all_gather", "reduce_scatter");
    // The last unit stays from forward to backward; the unit before is prefetched in the second half of a unit.
    let mut expected = vec![gather; LAYERS + 1];
    expected.extend([scatter, gather].repeat(LAYERS - 2));
    expected.extend([scatter, scatter, "all_reduce"]);
    assert_eq!(names, expected);
    let [gathers, arrived] = [&step.calls, &step.waits].map(|of| Step::launches(of, gather));
    for k in 1..LAYERS {
        // A world of one copies what it gathers, with one kernel.
        assert!(gathers[k] <= step.starts[k - 1] + 1, "unit {k} is sent for before the layer before it runs");
        assert!(arrived[k] >= step.starts[k], "unit {k} is waited for when it is read");
    }
    for k in LAYERS..gathers.len() {
        assert!(arrived[k] > gathers[k] + 1, "something is computed while unit {} travels", 2 * LAYERS - 2 - k);
    }
    let [scatters, summed] = [&step.calls, &step.waits].map(|of| Step::launches(of, scatter));
    let sweep = scatters[LAYERS - 1] - step.end;
    for k in 0..LAYERS {
        let share = sweep * (k as u64 + 1) / LAYERS as u64;
        assert!(scatters[k] - step.end <= share + 3, "unit {}: {scatters:?} of {sweep}", LAYERS - 1 - k);
        assert!(k + 1 == LAYERS || summed[k] > scatters[k] + 1, "something is computed while gradients travel");
    }
}

#[test]
fn whole_values_arrive_while_the_next_forward_runs() {
    for stage in [ZeroStage::Optimizer, ZeroStage::Gradients] {
        let step = Step::of(stage);
        let sent = step.before.iter().filter(|name| **name == "all_gather").count();
        assert_eq!(sent, LAYERS, "the update before has sent for all");
        let arrived = Step::launches(&step.waits, "all_gather");
        for (k, start) in step.starts.iter().enumerate() {
            assert!(arrived[k] >= *start, "stage {}: unit {k} is waited for when it is read", stage.number());
        }
        let scatters = Step::launches(&step.calls, "reduce_scatter");
        assert_eq!(scatters.len(), LAYERS);
        let sweep = scatters[LAYERS - 1] - step.end;
        assert!(scatters[0] - step.end <= sweep / LAYERS as u64 + 3, "from the sweep, not after it: {scatters:?}");
    }
}

//! Two trainers over the same ranks: equal shapes do not make their gradients one another's.

use crate::prelude::*;

/// Steps of both, in the order of this rank, after `before` steps in one order.
fn both(comm: &Comm<Cpu>, make: impl Fn(&Mlp<Cpu>) -> Result<Any>, before: usize, swap: bool) -> Result<Vec<f64>> {
    let models = [Mlp::new(&Init::new(comm.runtime(), 1))?, Mlp::new(&Init::new(comm.runtime(), 2))?];
    let mut trainers = [make(&models[0])?, make(&models[1])?];
    let mut one = |k: usize, step: usize| trainers[k].step(&models[k], comm, step).map(|_| ());
    for step in 0..before {
        (0..2).try_for_each(|k| one(k, step))?;
    }
    let order = if swap && comm.rank() == 1 { [1, 0] } else { [0, 1] };
    order.iter().try_for_each(|&k| one(k, before))?;
    let _scopes = [trainers[0].full()?, trainers[1].full()?];
    Ok([weights(&models[0])?, weights(&models[1])?].concat())
}

type Make = Box<dyn Fn(&Comm<Cpu>, &Mlp<Cpu>) -> Result<Any> + Sync>;

#[test]
fn ranks_that_step_them_in_different_orders_disagree() {
    let f16 = BucketOptions { compression: GradCompression::F16, ..Default::default() };
    let kinds: Vec<Make> = STAGES
        .into_iter()
        .flat_map(|how| [(how, Unused::Error), (how, Unused::Allow)])
        .map(|(how, unused)| {
            Box::new(move |comm: &Comm<Cpu>, model: &Mlp<Cpu>| Any::unused(comm, model, how, config(), unused)) as _
        })
        .chain([f16.into(), GradientSums::from(PowerSgd::default())].map(|sums| {
            Box::new(move |comm: &Comm<Cpu>, model: &Mlp<Cpu>| Ok(Any(bucketed(comm, model, config(), sums.clone())?)))
                as _
        }))
        .collect();
    for (kind, make) in kinds.iter().enumerate() {
        for before in [0, 1, 2] {
            let run = |swap| Ranks::new(2).outcomes(cpu, |comm| both(&comm, |m| make(&comm, m), before, swap)).unwrap();
            let same: Vec<_> = run(false).into_iter().map(|o| o.unwrap()).collect();
            assert_eq!(same[0], same[1], "kind {kind}");
            refused(run(true), &["ranks disagree", "trainer 1"]);
        }
    }
}

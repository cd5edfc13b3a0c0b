//! Data parallelism: many ranks train as one does.

use crate::{
    between::Between,
    prelude::*,
    zero_memory::{layers, loss as layers_loss},
};

pub fn small() -> BucketOptions {
    BucketOptions { limits: Some(BucketLimits { first: 100, others: 300 }), ..Default::default() }
}

#[test]
fn every_gradient_is_sent_twice_but_for_the_own_part() {
    for n in WORLDS {
        let counts = Ranks::new(n).run(cpu, |comm| {
            let counted = Arc::new(CountingCommunicator::new(comm.clone()));
            let model = layers(comm.runtime(), 6, DType::F32)?;
            let options =
                BucketOptions { limits: Some(BucketLimits { first: 1 << 16, others: 1 << 17 }), ..Default::default() };
            let comm = counted.clone() as Comm<Cpu>;
            let mut traffic = Vec::new();
            // Of several micro-batches, the last backward pass alone communicates.
            for accumulation in [1, 3] {
                let config = TrainingConfig { accumulation, ..Default::default() };
                let mut trainer = bucketed(&comm, &model, config, options.clone())?;
                for _ in 0..2 {
                    counted.reset();
                    trainer.step(|_| layers_loss(&model, comm.runtime(), DType::F32))?;
                    traffic.push(counted.of("all_reduce"));
                }
            }
            Ok(traffic)
        });
        let sent = |bytes: u64| 2 * (n as u64 - 1) * bytes / n as u64;
        for traffic in counts.unwrap().into_iter().flatten() {
            // Buckets of 1, 2, 2 and 1 layers, each rounded to an element, and the loss with its weight.
            assert_eq!(traffic.calls, 5);
            assert_eq!(traffic.payload, 6 * 128 * 128 * 4 + 16);
            assert!(traffic.sent.abs_diff(sent(6 * 128 * 128 * 4 + 16)) <= 5 * 8, "{n}: {traffic:?}");
        }
    }
}

#[test]
fn gradients_may_travel_as_halves() {
    let plain = TrainingConfig { max_norm: None, ..config() };
    for (compression, digits) in [(GradCompression::Bf16, 2e-2), (GradCompression::F16, 3e-3)] {
        let options = BucketOptions { compression, ..small() };
        let gradient = |comm: &Comm<Cpu>, options: BucketOptions| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let mut trainer = bucketed(comm, &model, plain.clone(), options)?;
            trainer.step(|_| model.loss(comm.runtime(), 0, &own(comm)))?;
            let leaf = model.a.weight.leaf();
            data_parallel(&trainer)
                .gradients()
                .get(&leaf)?
                .map_or(Ok(vec![]), |g| g.to_dtype(DType::F64)?.to_vec::<f64>())
        };
        let got =
            Ranks::new(3).run(cpu, |comm| Ok((gradient(&comm, options.clone())?, gradient(&comm, small())?))).unwrap();
        for (narrow, exact) in got {
            let most = exact.iter().fold(0.0f64, |m, g| m.max(g.abs()));
            assert!(!exact.is_empty() && narrow != exact);
            assert!(narrow.iter().zip(&exact).all(|(a, b)| (a - b).abs() <= digits * most), "{compression:?}");
        }
    }
}

#[test]
fn models_that_differ_are_refused() {
    for what in ["shape", "dtype", "trained", "order"] {
        let outcomes = Ranks::new(3).outcomes(cpu, |comm| {
            let differs = |how| comm.rank() == 2 && what == how;
            let dtype = if differs("dtype") { DType::BF16 } else { DType::F32 };
            let init = Init::new(comm.runtime(), 0).dtype(dtype);
            let width = if differs("shape") { 4 } else { 3 };
            let mut layers = vec![Linear::new(&init, 3, width)?, Linear::new(&init, 3, 3)?.without_bias()];
            layers[0].weight.set_requires_grad(!differs("trained"));
            if differs("order") {
                layers.reverse();
            }
            Ddp::new(&comm, &layers).map(|_| ())
        });
        refused(outcomes.unwrap(), &["the model of rank 0 differs from that of rank 2: rank 0 has"]);
    }
}

#[test]
fn by_hand_gradients_are_weighted_means() {
    let checked = Ranks::new(3).run(cpu, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), comm.rank() as u64).dtype(DType::F64))?;
        let ddp = Ddp::new(&comm, &model)?;
        ddp.sync_params()?;
        let own = own(&comm);
        let loss = model.loss(comm.runtime(), 0, &own)?;
        let (sum, counts) = (loss_of(&loss)?, [5u64, 4, 4]);
        let mut gradients = backward(&sum.mul(1.0 / own.len() as f64)?)?;
        let mut means = backward(&loss_of(&model.loss(comm.runtime(), 0, &own)?)?)?;
        assert!(ddp.weighted_all_reduce_gradients(&mut gradients, &[1, 2]).is_err());
        assert!(ddp.weighted_all_reduce_gradients(&mut gradients, &[0, 0, 0]).is_err());
        ddp.weighted_all_reduce_gradients(&mut gradients, &counts)?;
        let all: Vec<usize> = (0..EXAMPLES).collect();
        let whole = backward(&loss_of(&model.loss(comm.runtime(), 0, &all)?)?.mul(1.0 / EXAMPLES as f64)?)?;
        ddp.all_reduce_gradients(&mut means)?;
        for (name, p) in model.named_parameters() {
            let of = |g: &autograd::Gradients<Cpu>| g.get(&p.leaf()).map(|g| g.to_vec::<f64>()).transpose();
            let (got, expected) = (of(&gradients)?.unwrap_or_default(), of(&whole)?.unwrap_or_default());
            assert!(got.len() == expected.len() && !got.is_empty());
            assert!(got.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12), "{name}");
            // Those of sums over a rank's examples: their mean is a third of what all examples give.
            let mean = of(&means)?.unwrap_or_default();
            let third = EXAMPLES as f64 / 3.0;
            assert!(mean.iter().zip(&expected).all(|(a, b)| (a - b * third).abs() < 1e-11), "{name}");
            assert_eq!(mean.len(), expected.len());
        }
        Ok(())
    });
    checked.unwrap();
}

fn loss_of(loss: &Loss<Cpu>) -> Result<Var<Cpu>> {
    Ok(loss.total().clone())
}

/// Names of calls, and how many kernels were launched before each.
type Launches = Vec<(&'static str, u64)>;

/// A world of one that notes how many kernels were launched before each call, and before each wait for one.
pub struct Watched {
    pub comm: Comm<NullRuntime>,
    calls: Arc<Mutex<Launches>>,
    waits: Arc<Mutex<Launches>>,
}

impl Watched {
    pub fn new(rt: &NullRuntime) -> Self {
        let [calls, waits] = [Arc::<Mutex<Launches>>::default(), Arc::default()];
        let [started, ended] = [calls.clone(), waits.clone()];
        let comm = Between::new(Arc::new(NoOpCommunicator::new(rt)), move |inner, call| {
            let (name, rt, ended) = (call.what().name(), inner.runtime().clone(), ended.clone());
            started.lock().unwrap().push((name, rt.launches()));
            Ok(inner.start(call)?.map(move |memory| {
                ended.lock().unwrap().push((name, rt.launches()));
                Ok(memory)
            }))
        });
        Watched { comm: Arc::new(comm), calls, waits }
    }

    /// Calls and waits since the last time.
    pub fn take(&self) -> (Launches, Launches) {
        (std::mem::take(&mut *self.calls.lock().unwrap()), std::mem::take(&mut *self.waits.lock().unwrap()))
    }
}

#[test]
fn buckets_leave_while_the_sweep_goes_on() {
    let rt = NullRuntime::new();
    let watched = Watched::new(&rt);
    let comm = watched.comm.clone();
    let init = Init::new(&rt, 0);
    let layers: Vec<Linear<NullRuntime>> = (0..6).map(|_| Linear::new(&init, 16, 16).unwrap()).collect();
    let options = BucketOptions { limits: Some(BucketLimits { first: 1, others: 1 }), ..Default::default() };
    let mut trainer = bucketed(&comm, &layers, TrainingConfig::default(), options).unwrap();
    watched.take();
    let x = Var::new(Tensor::zeros(&rt, [4, 16], DType::F32).unwrap());
    let mut forward = 0;
    trainer
        .step(|_| {
            let y = layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.tanh())?;
            let loss = y.sum_all()?;
            forward = rt.launches();
            Ok(Loss::mean(loss))
        })
        .unwrap();
    let calls: Vec<u64> =
        watched.take().0.iter().filter(|(name, _)| *name == "all_reduce").map(|(_, at)| *at).collect();
    // One for each weight and bias, then one for the loss; spread over the whole backward pass.
    assert_eq!(calls.len(), 13);
    let sweep = calls[11] - forward;
    assert!(calls[0] - forward <= sweep / 6 && calls[5] - forward <= sweep * 7 / 12, "{forward} {calls:?}");
    assert!(calls.is_sorted());
    let _ = comm.barrier();
}

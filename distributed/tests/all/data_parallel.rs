//! Data parallelism: many ranks train as one does.

use distributed::comm::Call;

use crate::{
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
            let mut trainer = bucketed(&comm, &model, TrainingConfig::default(), options)?;
            let mut of_step = || {
                counted.reset();
                trainer.step(|_| layers_loss(&model, comm.runtime(), DType::F32))?;
                Ok::<_, numcore::Error>(counted.of("all_reduce"))
            };
            Ok([of_step()?, of_step()?])
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
fn accumulated_micro_batches_are_one_batch() {
    let config = TrainingConfig { accumulation: 3, ..config() };
    let one = single::<Mlp<Cpu>>(DType::F64, crate::common::config()).unwrap();
    for n in [1, 2, 4] {
        let many = everywhere(n, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
            let counted = Arc::new(CountingCommunicator::new(comm.clone()));
            let mut trainer = bucketed(&(counted.clone() as Comm<Cpu>), &model, config.clone(), small())?;
            let mut trace = Trace::default();
            for step in 0..STEPS {
                counted.reset();
                let own = own(&comm);
                let micro = |k: usize| own.iter().copied().skip(k).step_by(3).collect::<Vec<_>>();
                let metrics = trainer.step(|k| model.loss(comm.runtime(), step, &micro(k)))?;
                // Only the last backward pass communicates: a call for each bucket, and one for the loss.
                assert_eq!(counted.of("all_reduce").calls as usize, data_parallel(&trainer).num_buckets() + 1);
                trace.losses.push(metrics.loss()?);
                trace.norms.extend(metrics.grad_norm()?);
                trace.weights.push(weights(&model)?);
            }
            Ok(trace)
        });
        let off = difference(&many, &one);
        assert!(off <= 1e-11, "{n}: {off:e}");
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

/// Notes how many kernels were launched before each call, and before each wait for one.
#[derive(Debug)]
pub struct Watched {
    inner: NoOpCommunicator<NullRuntime>,
    calls: Mutex<Launches>,
    waits: Arc<Mutex<Launches>>,
}

impl Watched {
    pub fn new(rt: &NullRuntime) -> Self {
        Watched { inner: NoOpCommunicator::new(rt), calls: Mutex::default(), waits: Arc::default() }
    }

    /// Calls and waits since the last time.
    pub fn take(&self) -> (Launches, Launches) {
        (std::mem::take(&mut *self.calls.lock().unwrap()), std::mem::take(&mut *self.waits.lock().unwrap()))
    }
}

impl Communicator<NullRuntime> for Watched {
    fn runtime(&self) -> &NullRuntime {
        self.inner.runtime()
    }
    fn timeout(&self) -> std::time::Duration {
        self.inner.timeout()
    }
    fn group(&self) -> &distributed::comm::Group {
        self.inner.group()
    }
    fn guarantees(&self) -> distributed::comm::Guarantees {
        self.inner.guarantees()
    }
    fn poll(&self) -> Result<()> {
        self.inner.poll()
    }
    fn next_number(&self) -> u64 {
        self.inner.next_number()
    }
    fn start(&self, call: Call<NullRuntime>) -> Result<Work<Option<TensorMut<NullRuntime>>>> {
        let (name, rt, waits) = (call.what().name(), self.runtime().clone(), self.waits.clone());
        self.calls.lock().unwrap().push((name, rt.launches()));
        let work = self.inner.start(call)?;
        Ok(work.map(move |memory| {
            waits.lock().unwrap().push((name, rt.launches()));
            Ok(memory)
        }))
    }
    fn split_at(
        &self,
        color: Option<usize>,
        key: usize,
        at: &'static std::panic::Location<'static>,
    ) -> Result<Option<Comm<NullRuntime>>> {
        self.inner.split_at(color, key, at)
    }
    fn abort_for(&self, world_rank: usize, cause: &str) {
        self.inner.abort_for(world_rank, cause);
    }
}

#[test]
fn buckets_leave_while_the_sweep_goes_on() {
    let rt = NullRuntime::new();
    let watched = Arc::new(Watched::new(&rt));
    let comm = watched.clone() as Comm<NullRuntime>;
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

#[test]
fn in_canonical_order_the_number_of_ranks_does_not_change_a_bit() {
    const CHUNKS: usize = 12;
    let run = |n: usize, dtype| {
        everywhere(n, |comm| {
            let model = <Gpt<Cpu> as Task>::new(&Init::new(comm.runtime(), 0).dtype(dtype))?;
            let options = BucketOptions { canonical: true, ..small() };
            let config = TrainingConfig { accumulation: CHUNKS / comm.size(), ..config() };
            let mut trainer = bucketed(&comm, &model, config, options)?;
            let mut trace = Trace::default();
            for step in 0..STEPS {
                // Chunk c is one example; rank r computes r, n + r, 2n + r …
                let chunk = |k: usize| [k * comm.size() + comm.rank()];
                let metrics = trainer.step(|k| model.loss(comm.runtime(), step, &chunk(k)))?;
                trace.norms.extend(metrics.grad_norm()?);
                trace.weights.push(weights(&model)?);
            }
            Ok(trace)
        })
    };
    for dtype in [DType::F32, DType::BF16] {
        let one = run(1, dtype);
        for n in [2, 3, 4, 6, 12] {
            assert!(run(n, dtype) == one, "{dtype} on {n} ranks");
        }
    }
    let chunks: Vec<usize> = (0..CHUNKS).collect();
    let joined = everywhere(1, |comm| {
        let model = <Gpt<Cpu> as Task>::new(&Init::new(comm.runtime(), 0))?;
        let mut trainer = bucketed(&comm, &model, config(), small())?;
        let mut trace = Trace::default();
        for step in 0..STEPS {
            let metrics = trainer.step(|_| model.loss(comm.runtime(), step, &chunks))?;
            trace.norms.extend(metrics.grad_norm()?);
            trace.weights.push(weights(&model)?);
        }
        Ok(trace)
    });
    assert!(difference(&run(3, DType::F32), &joined) < 2e-4);
}

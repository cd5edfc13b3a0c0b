//! A reducer of buckets of one's own, in the place of those there are.

use distributed::buckets::{BucketReducer, FullBucket};
use numcore::{
    ops::{Input, compute},
    pointwise::{Program, standard::COPY},
};

use crate::prelude::*;

/// A reducer that may sum in each pass. Its state, if it has one, is zeros in checkpoints, of rank 0.
pub struct OwnReducer<const STATE: bool> {
    inner: AllReduce<Cpu>,
    comm: Comm<Cpu>,
    /// The sums of the passes of a step so far, by bucket, if it sums in each.
    passes: Option<BTreeMap<usize, TensorMut<Cpu>>>,
}

impl<const STATE: bool> OwnReducer<STATE> {
    pub fn new(comm: &Comm<Cpu>, each_pass: bool) -> Self {
        let (inner, passes) = (AllReduce::new(comm, GradCompression::Own), each_pass.then(BTreeMap::new));
        OwnReducer { inner, comm: comm.clone(), passes }
    }

    fn remembered(&self, leaves: &[Arc<Leaf<Cpu>>]) -> Vec<(String, Arc<Leaf<Cpu>>)> {
        let named = |leaf: &Arc<Leaf<Cpu>>| (format!("remembered/{}", leaf.name()), leaf.clone());
        leaves.iter().filter(|_| STATE).map(named).collect()
    }
}

impl<const STATE: bool> BucketReducer<Cpu> for OwnReducer<STATE> {
    fn has_state() -> bool {
        STATE
    }

    fn send(&mut self, bucket: FullBucket<'_, Cpu>, row: TensorMut<Cpu>) -> Result<()> {
        self.inner.send(bucket, row)
    }

    fn wait(&mut self, number: usize) -> Result<TensorMut<Cpu>> {
        let mut row = self.inner.wait(number)?;
        let Some(passes) = &mut self.passes else { return Ok(row) };
        let (rt, shape, dtype) = (row.runtime().clone(), *row.shape(), row.dtype());
        let mut sum = passes.remove(&number).map_or_else(|| TensorMut::zeros(&rt, shape, dtype), Ok)?;
        let add = Program::new("add", |[a, b], []| [a + b]);
        compute(&rt, &add, &[Input::Own(0), Input::Memory(&row)], &[], &mut [&mut sum])?;
        compute(&rt, &COPY, &[Input::Memory(&sum)], &[], &mut [&mut row])?;
        passes.insert(number, sum);
        Ok(row)
    }

    fn reduces_every_pass(&self) -> bool {
        self.passes.is_some()
    }

    fn begin_step(&mut self) {
        self.passes.iter_mut().for_each(BTreeMap::clear);
    }

    fn wanted(&self, leaves: &[Arc<Leaf<Cpu>>]) -> Result<Vec<Wanted>> {
        let of = |(name, leaf): (String, Arc<Leaf<Cpu>>)| {
            let placement = TensorPlacement::whole(leaf.spec().shape);
            Wanted::piece(name, placement, leaf.spec().dtype)
        };
        Ok(self.remembered(leaves).into_iter().map(of).collect())
    }

    fn parts(&self, leaves: &[Arc<Leaf<Cpu>>]) -> Result<Vec<CheckpointPart<Cpu>>> {
        let of = |(name, leaf): (String, Arc<Leaf<Cpu>>)| {
            CheckpointPart::whole(name, &Tensor::zeros(leaf.runtime(), leaf.spec().shape, leaf.spec().dtype)?)
        };
        self.remembered(leaves).into_iter().filter(|_| self.comm.rank() == 0).map(of).collect()
    }
}

/// The names of the parameters of each bucket that was sent, in order.
type Sent = Arc<Mutex<Vec<Vec<String>>>>;

/// Sums by a reduction to rank 0 and a broadcast from there.
struct ThroughRankZero<R: Runtime> {
    comm: Comm<R>,
    sent: Sent,
    flying: BTreeMap<usize, Work<TensorMut<R>>>,
}

impl<R: Runtime> BucketReducer<R> for ThroughRankZero<R> {
    fn send(&mut self, bucket: FullBucket<'_, R>, row: TensorMut<R>) -> Result<()> {
        self.sent.lock().unwrap().push(bucket.members.iter().map(|m| m.leaf.name().to_string()).collect());
        self.flying.insert(bucket.number, bucket.comm.reduce(row, ReduceOp::Sum, 0)?);
        Ok(())
    }

    fn wait(&mut self, number: usize) -> Result<TensorMut<R>> {
        let work = self.flying.remove(&number).ok_or_else(|| Error::argument("ThroughRankZero", "was not sent"))?;
        self.comm.broadcast(work.wait()?, 0)?.wait()
    }
}

fn train(comm: &Comm<Cpu>, reducer: Option<Sent>) -> Result<Trace> {
    let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
    let options = BucketOptions { limits: Some(BucketLimits { first: 1, others: 1 }), ..Default::default() };
    let builder = TrainStep::builder(comm, &model).optimizer(adamw()).config(config()).buckets(options);
    let mut trainer = match reducer {
        None => builder.build()?,
        Some(sent) => {
            let own = move |comm: &Comm<Cpu>| ThroughRankZero {
                comm: comm.clone(),
                sent: sent.clone(),
                flying: BTreeMap::new(),
            };
            builder.reducer(move |comm| Ok(own(comm))).build()?
        }
    };
    let mut trace = Trace::default();
    for step in 0..STEPS {
        let metrics = trainer.step(|_| model.loss(comm.runtime(), step, &own(comm)))?;
        trace.losses.push(metrics.loss()?);
        trace.weights.push(weights(&model)?);
    }
    Ok(trace)
}

#[test]
fn a_reducer_of_ones_own_sums_as_an_all_reduce_does() {
    for n in [1, 2, 3] {
        let plain = everywhere(n, |comm| train(&comm, None));
        let own = everywhere(n, |comm| {
            let sent = Sent::default();
            let trace = train(&comm, Some(sent.clone()))?;
            let sent = sent.lock().unwrap().clone();
            assert_eq!(sent.len(), 6 * STEPS, "a bucket for each parameter, in every step");
            assert_eq!(sent[0], ["c.bias"], "the first is that of the last layer");
            Ok(trace)
        });
        assert!(own == plain, "{n} ranks");
    }
}

#[test]
fn a_bucket_that_was_not_sent_is_an_error() {
    let rt = Cpu::with_threads(1);
    let comm: Comm<Cpu> = Arc::new(distributed::comm::NoOpCommunicator::new(&rt));
    let error = AllReduce::new(&comm, GradCompression::Own).wait(3).map(|_| ()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Internal { .. }), "{error}");
    assert!(error.to_string().contains("bucket 3 was not sent"), "{error}");
}

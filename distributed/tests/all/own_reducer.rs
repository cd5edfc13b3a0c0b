//! A reducer of buckets of one's own, in the place of those there are.

use distributed::buckets::{BucketReducer, FullBucket};

use crate::prelude::*;

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
            builder.reducer(|comm| Ok(ThroughRankZero { comm: comm.clone(), sent, flying: BTreeMap::new() })).build()?
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

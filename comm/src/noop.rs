//! A world of one.

use std::{
    panic::Location,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use numcore::{Error, Result, Runtime, TensorMut, ops::Op};

use super::{Call, Collective, Comm, Communicator, Group, Guarantees, Work};

/// The communicator of a single rank. Collectives return their input, through the runtime; transfers are errors, as
/// there is no peer. Code for many ranks runs on it unchanged.
#[derive(Clone, Debug)]
pub struct NoOpCommunicator<R: Runtime> {
    rt: R,
    group: Group,
    numbers: Arc<AtomicU64>,
}

impl<R: Runtime> NoOpCommunicator<R> {
    /// Makes a world of one on this runtime.
    pub fn new(rt: &R) -> Self {
        NoOpCommunicator { rt: rt.clone(), group: Group::world(0, 1), numbers: Arc::default() }
    }
}

impl<R: Runtime> Communicator<R> for NoOpCommunicator<R> {
    fn group(&self) -> &Group {
        &self.group
    }

    fn runtime(&self) -> &R {
        &self.rt
    }

    fn timeout(&self) -> Duration {
        Duration::MAX
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees::STRICT
    }

    fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
        if matches!(call.what(), Collective::Send { .. } | Collective::Recv { .. }) {
            return Err(Error::range(call.what().name(), "number of ranks", 1, "at least 2 to have a peer"));
        }
        let (input, output) = call.into_memory();
        let (x, out) = match (&input, output) {
            (Some(x), Some(out)) => (x, out),
            (_, output) => return Ok(Work::ready(output)),
        };
        let mut rows = out.split(&[x.shape().numel()])?;
        for row in &mut rows {
            row.reset();
            row.accumulate(&Op::identity(), &[x])?;
        }
        Ok(Work::ready(Some(TensorMut::join(rows)?)))
    }

    fn split_at(&self, color: Option<usize>, _: usize, _: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        Ok(color.map(|_| Arc::new(self.clone()) as Comm<R>))
    }

    fn poll(&self) -> Result<()> {
        Ok(())
    }

    fn abort_for(&self, _: usize, _: &str) {}
}

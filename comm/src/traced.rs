//! Collectives in recordings.

use std::{fmt, panic::Location, sync::Arc, time::Duration};

use numcore::{
    Result, Runtime, TensorMut,
    trace::{self, Moment, SpanKind},
};

use super::{ByteExchange, Call, Comm, Communicator, Pending, Work, communicator::of_inner, volume::Volume};

/// A communicator whose calls are spans of a [recording](numcore::trace::Recording). One span lasts from the start of a
/// call to the end of the wait for its result. It has the call's bucket or unit and the bytes this rank sends. Another
/// span is the time the host spent waiting. A call whose result is never waited for has no span. While nothing is
/// recorded, a call costs one read of a static.
///
/// It belongs around an engine, inside of wrappers that name calls.
pub struct TracedCommunicator<R: Runtime> {
    inner: Comm<R>,
}

impl<R: Runtime> TracedCommunicator<R> {
    /// Wraps a communicator.
    pub fn over(inner: &Comm<R>) -> Comm<R> {
        Arc::new(TracedCommunicator { inner: inner.clone() })
    }

    fn exchange_on_host(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        let _span = trace::span_of(SpanKind::Wait, "exchange", exchange.of.map(|of| &**of));
        self.inner.exchange_bytes(exchange)
    }
}

impl<R: Runtime> Communicator<R> for TracedCommunicator<R> {
    of_inner!();

    fn guarantees(&self) -> super::Guarantees {
        self.inner.guarantees()
    }

    fn start_all(&self, calls: Vec<Call<R>>) -> Result<Vec<Work<Option<TensorMut<R>>>>> {
        if !trace::is_recorded(SpanKind::Collective) {
            return self.inner.start_all(calls);
        }
        let of_call = |call: &Call<R>| TracedCall {
            name: call.what().name(),
            of: call.of.clone(),
            start: trace::now(),
            sent: Volume::of(call, self.rank(), self.size()).sent,
        };
        let known: Vec<TracedCall> = calls.iter().map(of_call).collect();
        let works = self.inner.start_all(calls)?;
        Ok(works.into_iter().zip(known).map(|(work, call)| Work::pending(TracedWork { work, call })).collect())
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        let _span = trace::span(SpanKind::Wait, "split");
        Ok(self.inner.split_at(color, key, at)?.map(|inner| TracedCommunicator::over(&inner)))
    }
}

impl<R: Runtime> fmt::Debug for TracedCommunicator<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Traced({:?})", self.inner)
    }
}

/// A call in flight that becomes a span when it is over.
struct TracedCall {
    name: &'static str,
    of: Option<Arc<str>>,
    start: Moment,
    sent: u64,
}

struct TracedWork<T> {
    work: Work<T>,
    call: TracedCall,
}

impl TracedCall {
    fn waited<T>(self, wait: impl FnOnce() -> T) -> T {
        let span = trace::span_of(SpanKind::Wait, self.name, self.of.as_deref());
        let result = wait();
        drop(span);
        trace::ended(SpanKind::Collective, self.name, self.of.as_deref(), self.start, self.sent);
        result
    }
}

impl<T> Pending<T> for TracedWork<T>
where
    Work<T>: Send + Sync,
{
    fn wait(self: Box<Self>) -> Result<T> {
        let TracedWork { work, call } = *self;
        call.waited(|| work.wait())
    }

    fn done(self: Box<Self>) -> Result<T> {
        let TracedWork { work, call } = *self;
        call.waited(|| work.done())
    }

    fn is_done(&self) -> bool {
        self.work.is_done()
    }
}

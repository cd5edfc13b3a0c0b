//! Calls with the name of the object that they belong to.

use std::{fmt, panic::Location, sync::Arc, time::Duration};

use numcore::{Result, Runtime, TensorMut};

use super::{ByteExchange, Call, Comm, Communicator, Work, communicator::of_inner};

/// A communicator whose calls all belong to a named object, such as a unit of parameters. Calls of different names do
/// not match, even with equal place and size. Ranks that come to objects in different orders thus get an error, and do
/// not mix them.
pub struct Named<R: Runtime> {
    inner: Comm<R>,
    name: Arc<str>,
}

impl<R: Runtime> Named<R> {
    /// Makes a communicator over `inner` whose calls belong to `name`.
    pub fn over(inner: &Comm<R>, name: &str) -> Comm<R> {
        Arc::new(Named { inner: inner.clone(), name: name.into() })
    }
}

impl<R: Runtime> Named<R> {
    fn exchange_on_host(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        // The innermost name is the most specific.
        self.inner.exchange_bytes(ByteExchange { of: exchange.of.or(Some(&self.name)), ..exchange })
    }
}

impl<R: Runtime> Communicator<R> for Named<R> {
    of_inner!();

    fn guarantees(&self) -> super::Guarantees {
        self.inner.guarantees()
    }

    fn start_all(&self, calls: Vec<Call<R>>) -> Result<Vec<Work<Option<TensorMut<R>>>>> {
        let named = |call: Call<R>| Call { of: Some(call.of.clone().unwrap_or_else(|| self.name.clone())), ..call };
        self.inner.start_all(calls.into_iter().map(named).collect())
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        self.inner.split_at(color, key, at)
    }

    fn split_by(&self, color: &dyn Fn(usize) -> usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        self.inner.split_by(color, at)
    }
}

/// The label that separates the calls of several trainers on one set of ranks: the trainer's number, from the second
/// on.
#[derive(Clone, Debug)]
pub struct Label(Option<Arc<str>>);

impl Label {
    /// Makes the label of the next trainer over these ranks. All ranks make theirs in one order.
    pub fn next<R: Runtime>(comm: &Comm<R>) -> Self {
        let number = comm.next_number();
        Label((number > 0).then(|| format!("trainer {number}").into()))
    }

    /// A communicator for all of the trainer's calls.
    pub fn over<R: Runtime>(&self, comm: &Comm<R>) -> Comm<R> {
        self.0.as_ref().map_or_else(|| comm.clone(), |own| Named::over(comm, own))
    }

    /// A communicator for the trainer's calls that belong to the object `of`.
    pub fn named<R: Runtime>(&self, comm: &Comm<R>, of: &str) -> Comm<R> {
        match &self.0 {
            Some(own) => Named::over(comm, &format!("{of} of {own}")),
            None => Named::over(comm, of),
        }
    }
}

impl<R: Runtime> fmt::Debug for Named<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of `{}`", self.inner, self.name)
    }
}

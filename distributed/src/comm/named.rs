//! Calls that say what they are of.

use std::{fmt, panic::Location, sync::Arc, time::Duration};

use numcore::{Result, Runtime, TensorMut};

use super::{Call, Comm, Communicator, Work, communicator::of_inner};

/// A communicator whose calls are all of something that has a name, a unit of parameters for one. Calls of different names do not
/// meet, though they have the same place and size: ranks that come to things in different orders disagree, and do not mix them.
pub(crate) struct Named<R: Runtime> {
    inner: Comm<R>,
    name: Arc<str>,
}

impl<R: Runtime> Named<R> {
    pub(crate) fn over(inner: &Comm<R>, name: &str) -> Comm<R> {
        Arc::new(Named { inner: inner.clone(), name: name.into() })
    }
}

impl<R: Runtime> Communicator<R> for Named<R> {
    of_inner!();

    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
        self.inner.start(Call { of: Some(self.name.clone()), ..call })
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        self.inner.split_at(color, key, at)
    }
}

impl<R: Runtime> fmt::Debug for Named<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of `{}`", self.inner, self.name)
    }
}

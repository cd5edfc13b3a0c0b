//! An exchange of bytes, which is data as a call on tensors is.

use std::{panic::Location, sync::Arc};

/// What one rank gives to an [exchange of bytes](crate::Communicator::exchange_bytes).
#[derive(Clone, Copy, Debug)]
pub struct ByteExchange<'a> {
    /// This rank's bytes; ranks may give different numbers of them.
    pub own: &'a [u8],
    /// What they are of. Exchanges of different names do not meet, like [calls](crate::Call::of).
    pub of: Option<&'a Arc<str>>,
    /// The line it was asked for at, one on all ranks.
    pub at: &'static Location<'static>,
}

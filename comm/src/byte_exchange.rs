//! An exchange of bytes as data, like a call on tensors.

use std::{panic::Location, sync::Arc, time::Duration};

/// One rank's part of an [exchange of bytes](crate::Communicator::exchange_bytes).
#[derive(Clone, Copy, Debug)]
pub struct ByteExchange<'a> {
    /// This rank's bytes; their number may differ between ranks.
    pub own: &'a [u8],
    /// The name of the object that the bytes belong to. Exchanges of different names do not match, like
    /// [calls](crate::Call::of).
    pub of: Option<&'a Arc<str>>,
    /// The source line of the exchange, equal on all ranks.
    pub at: &'static Location<'static>,
    /// The time that the exchange may take, if it has one of its own.
    pub timeout: Option<Duration>,
}

impl<'a> ByteExchange<'a> {
    /// Makes the exchange of a rank's bytes, called from a source line, without a name or a time of its own.
    pub fn new(own: &'a [u8], at: &'static Location<'static>) -> Self {
        ByteExchange { own, of: None, at, timeout: None }
    }
}

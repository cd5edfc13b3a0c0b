//! The connections of a process that has joined the others.

use std::{net::TcpStream, time::Duration};

use numcore::{Error, Result};

use super::{OP, OpenTransport, transport::TcpTransport};

/// The connections to all others, by rank.
pub(super) struct JoinedProcesses {
    pub(super) rank: usize,
    pub(super) local_rank: usize,
    pub(super) connections: Vec<Option<TcpStream>>,
}

impl JoinedProcesses {
    /// Makes the connections those of a transport, which never waits for one.
    pub(super) fn ready(self) -> Result<Self> {
        for stream in self.connections.iter().flatten() {
            let set = stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true));
            set.map_err(|error| failed(error.to_string()))?;
        }
        Ok(self)
    }

    /// The function that opens the transport over these connections. Others may say nothing for `patience` at first.
    pub(super) fn opened(self, silence: Duration, patience: Duration, lends_memory: bool) -> OpenTransport {
        Box::new(move || {
            let is_here = |stream: &TcpStream| Some(stream.peer_addr().ok()?.ip() == stream.local_addr().ok()?.ip());
            let here = self.connections.iter().map(|stream| stream.as_ref().and_then(is_here) == Some(true));
            let here: Vec<bool> = here.collect();
            let mut transport = TcpTransport::new(self.rank, self.connections, silence);
            if lends_memory {
                (0..here.len()).filter(|&rank| here[rank]).for_each(|rank| transport.lend_to(rank));
            }
            Ok(Box::new(transport.await_others(patience)))
        })
    }
}

pub(super) fn failed(why: String) -> Error {
    Error::argument(OP, why)
}

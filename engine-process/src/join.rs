//! Processes over the connections of TCP.

use numcore::Result;

use crate::{
    Processes,
    tcp::{MESSAGE, Tcp},
};

impl Tcp {
    /// Blocks until all processes have come and are connected. A newcomer waits until a running job takes it in, in
    /// [`next_world`](comm::Rendezvous::next_world) of its ranks. It gives up once none of them has answered for the
    /// [time to join](Tcp::join_timeout).
    ///
    /// # Errors
    /// An error if the rank of this process is unknown, the address cannot be used, or a secret is missing or wrong.
    /// Also if two processes have one rank, or some do not come in time: the error names the missing ranks.
    pub fn join(self) -> Result<Processes> {
        let (open, local_rank, at) = self.connect()?;
        Ok(Processes::over(open)?.message_limit(MESSAGE).local(local_rank).joined_at(at, self.is_newcomer))
    }
}

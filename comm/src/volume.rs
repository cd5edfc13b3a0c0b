//! The bytes that a call moves.

use numcore::Runtime;

use super::{Call, Collective};

/// Bytes of a call on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// The bytes of the unsharded tensor: of the values that are combined, gathered or sent.
    pub payload: u64,
    /// The bytes that this rank must send at least.
    pub sent: u64,
    /// The bytes that it receives meanwhile.
    pub received: u64,
}

impl Volume {
    /// The volume of a call by `rank` of `n`, exchanged as in a ring.
    pub fn of<R: Runtime>(call: &Call<R>, rank: usize, n: usize) -> Self {
        let (send, recv): (usize, usize) = (call.send_parts().iter().sum(), call.recv_parts().iter().sum());
        let own = |parts: &[usize]| parts[rank];
        let one_way = |sends: bool| if sends { (send, 0) } else { (0, send) };
        let (payload, (sent, received)) = match call.what() {
            Collective::AllReduce(_) => (send, (2 * (n - 1) * send / n, 2 * (n - 1) * send / n)),
            Collective::ReduceScatter(_) => (send, (send - own(call.send_parts()), (n - 1) * own(call.send_parts()))),
            Collective::AllGather => (recv, ((n - 1) * recv / n, recv - own(call.recv_parts()))),
            Collective::AllToAll => (send, (send - own(call.send_parts()), recv - own(call.recv_parts()))),
            Collective::Broadcast { .. } | Collective::Reduce { .. } if n == 1 => (send, (0, 0)),
            Collective::Broadcast { root } => (send, one_way(rank == root)),
            Collective::Reduce { root, .. } => (send, one_way(rank != root)),
            Collective::Send { .. } => (send, (send, 0)),
            Collective::Recv { .. } => (recv, (0, recv)),
            Collective::Barrier => (0, (0, 0)),
        };
        let bytes = |numel: usize| (numel * call.dtype().size()) as u64;
        Volume { payload: bytes(payload), sent: bytes(sent), received: bytes(received) }
    }
}

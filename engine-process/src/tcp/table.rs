//! The messages by which processes meet: who has come, and the table of all.

use std::net::SocketAddr;

use comm::engine::{WireReader, Writer};
use numcore::{Error, Result};

/// The rank of a process that wants none.
const ANY: u64 = u64::MAX;

/// The words of a process to rank 0.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) size: usize,
    pub(super) rank: Option<usize>,
    pub(super) listens: SocketAddr,
}

/// The answer of rank 0 once all have come.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ProcessTable {
    pub(super) rank: usize,
    pub(super) meeting: [u64; 2],
    pub(super) addresses: Vec<SocketAddr>,
}

impl Hello {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.usize(self.size).u64(self.rank.map_or(ANY, |rank| rank as u64));
        w.text(&self.listens.to_string());
        w.finish()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Hello> {
        let mut r = WireReader::new(bytes);
        let (size, rank) = (r.usize()?, r.u64()?);
        let hello = Hello { size, rank: (rank != ANY).then_some(rank as usize), listens: address(r.text()?)? };
        r.finish().map(|()| hello)
    }
}

impl ProcessTable {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.usize(self.rank).u64(self.meeting[0]).u64(self.meeting[1]).usize(self.addresses.len());
        self.addresses.iter().for_each(|address| {
            w.text(&address.to_string());
        });
        w.finish()
    }

    /// Reads the table of `size` processes; of any number, if that is 0.
    pub(super) fn from_bytes(bytes: &[u8], size: usize) -> Result<ProcessTable> {
        let mut r = WireReader::new(bytes);
        let (rank, meeting, count) = (r.usize()?, [r.u64()?, r.u64()?], r.usize()?);
        if (size > 0 && count != size) || rank >= count || count > bytes.len() {
            return Err(Error::format("table", format!("rank {rank} of {count} is none of {size} processes")));
        }
        let addresses = (0..count).map(|_| address(r.text()?)).collect::<Result<_>>()?;
        r.finish().map(|()| ProcessTable { rank, meeting, addresses })
    }
}

fn address(text: &str) -> Result<SocketAddr> {
    text.parse().map_err(|_| Error::format("address", format!("`{}` is none", text.escape_debug())))
}

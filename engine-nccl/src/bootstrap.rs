//! The exchange between ranks before they make a communicator.

use std::{fmt, panic::Location, sync::Arc};

use comm::{
    ByteExchange, Comm, Communicator,
    engine::{Portable, WireReader, Writer},
};
use numcore::{Error, ErrorKind, Result, Runtime};

use super::{api::UniqueId, loaded::version_text, nccl::Nccl};

/// A rank's message in the exchange.
pub(crate) struct RankInfo {
    /// The name of the rank's device, if NCCL cannot reach it; empty otherwise.
    pub(crate) unreachable: String,
    pub(crate) options: NcclOptions,
    /// The unique id, from rank 0.
    pub(crate) id: Vec<u8>,
}

/// Options that must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NcclOptions {
    pub(crate) version: i32,
    pub(crate) native_sums: bool,
    pub(crate) chunk: usize,
}

/// Returns rank 0's id, once all ranks have shown that they can take part and have equal options.
pub(crate) fn exchange_id<H: Runtime>(
    nccl: &Nccl,
    control: &Comm<H>,
    unreachable: Option<String>,
    at: &'static Location<'static>,
) -> Result<UniqueId> {
    const OP: &str = "Nccl::communicator";
    let fail = |why: String| Error::argument(OP, why).on_rank(control.world_rank());
    let id = (control.rank() == 0 && unreachable.is_none()).then(|| nccl.api.unique_id()).transpose();
    let id = id.map_err(|status| fail(format!("NCCL: {}", nccl.api.error_text(status, None))))?;
    let own = RankInfo {
        unreachable: unreachable.unwrap_or_default(),
        options: NcclOptions { version: nccl.api.version(), native_sums: nccl.native_sums, chunk: nccl.chunk },
        id: id.map_or(Vec::new(), |id| id.0.to_vec()),
    };
    let of: Arc<str> = "NCCL's unique id".into();
    let all = control.exchange_bytes(ByteExchange { of: Some(&of), ..ByteExchange::new(&own.to_bytes(), at) })?;
    let all = all.iter().map(|bytes| RankInfo::from_bytes(bytes)).collect::<Result<Vec<_>>>()?;
    let members = control.members();
    if let Some((rank, info)) = all.iter().enumerate().find(|(_, info)| !info.unreachable.is_empty()) {
        let (rank, device) = (members[rank], &info.unreachable);
        let why = format!("rank {rank} is on {device}, and NCCL is for NVIDIA GPUs; use another engine");
        return Err(Error::unsupported(OP, why).on_rank(control.world_rank()));
    }
    if let Some(rank) = (0..all.len()).find(|&rank| all[rank].options != all[0].options) {
        let why = format!(
            "rank {} uses NCCL with {}, rank {} with {}: all ranks must have one version and equal options",
            members[0], all[0].options, members[rank], all[rank].options
        );
        return Err(Error::from(ErrorKind::Mismatch { op: OP, why }).on_rank(control.world_rank()));
    }
    let id = all[0].id.as_slice().try_into().map_err(|_| fail("rank 0 gave no id of NCCL".into()))?;
    Ok(UniqueId(id))
}

impl fmt::Display for NcclOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NcclOptions { version, native_sums, chunk } = self;
        write!(f, "version {}, native_sums({native_sums}), chunk({chunk})", version_text(*version))
    }
}

impl Portable for RankInfo {
    fn write(&self, to: &mut Writer) {
        let NcclOptions { version, native_sums, chunk } = self.options;
        to.text(&self.unreachable).bytes(&self.id).u8(native_sums.into()).usize(chunk);
        version.write(to);
    }

    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let (unreachable, id) = (from.text()?.to_string(), from.bytes()?.to_vec());
        let (native_sums, chunk) = (from.u8()? != 0, from.usize()?);
        let options = NcclOptions { version: i32::read(from)?, native_sums, chunk };
        Ok(RankInfo { unreachable, options, id })
    }
}

//! What ranks tell each other before they make a communicator.

use std::fmt;

use comm::engine::{Portable, WireReader, Writer};
use numcore::Result;

use super::loaded::version_words;

/// What one rank tells the others.
pub(crate) struct Greeting {
    /// The device that NCCL cannot reach, if it is on one.
    pub(crate) unreachable: String,
    pub(crate) options: NcclOptions,
    /// The unique id, from rank 0.
    pub(crate) id: Vec<u8>,
}

/// What must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NcclOptions {
    pub(crate) version: i32,
    pub(crate) native_sums: bool,
    pub(crate) chunk: usize,
}

impl fmt::Display for NcclOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NcclOptions { version, native_sums, chunk } = self;
        write!(f, "version {}, native_sums({native_sums}), chunk({chunk})", version_words(*version))
    }
}

impl Portable for Greeting {
    fn write(&self, to: &mut Writer) {
        let NcclOptions { version, native_sums, chunk } = self.options;
        to.text(&self.unreachable).bytes(&self.id).u8(native_sums.into()).usize(chunk);
        version.write(to);
    }

    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let (unreachable, id) = (from.text()?.to_string(), from.bytes()?.to_vec());
        let (native_sums, chunk) = (from.u8()? != 0, from.usize()?);
        let options = NcclOptions { version: i32::read(from)?, native_sums, chunk };
        Ok(Greeting { unreachable, options, id })
    }
}

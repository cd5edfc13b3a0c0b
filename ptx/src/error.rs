//! Errors of texts and launches, and what a check has found.

use std::fmt;

/// An error in the text of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PtxError {
    /// The line of the text, from 1.
    pub line: u32,
    /// The reason.
    pub message: String,
}

impl PtxError {
    pub(crate) fn new(line: u32, message: impl Into<String>) -> PtxError {
        PtxError { line, message: message.into() }
    }
}

impl fmt::Display for PtxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}: {}", self.line, self.message)
    }
}

impl std::error::Error for PtxError {}

/// The memory that an access is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// The parameters of the kernel.
    Parameters,
    /// The device's memory.
    Global,
    /// The memory of a block.
    Shared,
    /// The memory of one thread.
    Local,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Parameters => "parameter",
            Space::Global => "global",
            Space::Shared => "shared",
            Space::Local => "local",
        })
    }
}

/// The finding of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// An access outside of live memory.
    OutOfBounds {
        /// The memory that was meant.
        space: Space,
        /// The first byte.
        address: u64,
        /// The number of bytes.
        bytes: usize,
    },
    /// An access at an address that is no multiple of its size.
    Misaligned {
        /// The memory that was meant.
        space: Space,
        /// The first byte.
        address: u64,
        /// The number of bytes.
        bytes: usize,
    },
    /// Two accesses that nothing orders, one of them a write.
    Race {
        /// The memory that both are of.
        space: Space,
        /// The first byte of the element.
        address: u64,
        /// The access that found the other: whether it writes.
        writes: bool,
        /// The earlier access.
        earlier: String,
    },
    /// A read of shared memory that its block has not written.
    Uninitialized {
        /// The first byte.
        address: u64,
    },
    /// A write to a variable of the module, or to a parameter.
    ReadOnly {
        /// The first byte.
        address: u64,
    },
    /// An instruction for a whole warp that some of its lanes do not reach together.
    InactiveLanes {
        /// The instruction.
        instruction: &'static str,
        /// The lanes that it needs.
        needed: u32,
        /// The lanes that are there.
        active: u32,
    },
    /// A shuffle that reads a lane which does not take part.
    ShuffleFromInactive {
        /// The lane that is read.
        lane: u32,
    },
    /// A barrier that some threads of the block never reach, since they have ended.
    EndedBeforeBarrier {
        /// The number of threads that ended.
        ended: u32,
    },
    /// A thread that ended with asynchronous copies which it has not waited for.
    CopiesUnderWay,
    /// A product of a warpgroup whose registers were not handed over by `wgmma.fence`.
    UnfencedRegisters,
    /// A product of a warpgroup after writes to shared memory without `fence.proxy.async`.
    UnfencedWrites {
        /// The thread of the block that wrote.
        thread: u32,
    },
    /// A matrix descriptor of another layout than rows of 128 bytes, swizzled in blocks of eight.
    UnknownTile {
        /// The descriptor.
        descriptor: u64,
    },
    /// A warp that ended with products which it has not waited for.
    ProductsUnderWay,
    /// A launch that took more instructions than a launch may.
    Endless {
        /// The instructions that one warp took.
        instructions: u64,
    },
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FaultKind::OutOfBounds { space, address, bytes } => {
                write!(f, "an access of {bytes} bytes outside of {space} memory at {address:#x}")
            }
            FaultKind::Misaligned { space, address, bytes } => {
                write!(f, "an access of {bytes} bytes of {space} memory at {address:#x}, which is not aligned to them")
            }
            FaultKind::Race { space, address, writes, earlier } => {
                let access = if *writes { "a write" } else { "a read" };
                write!(f, "a race in {space} memory at {address:#x}: {access}, not ordered after {earlier}")
            }
            FaultKind::Uninitialized { address } => {
                write!(f, "a read of shared memory at {address:#x}, which this block has not written")
            }
            FaultKind::ReadOnly { address } => write!(f, "a write at {address:#x}, which can only be read"),
            FaultKind::InactiveLanes { instruction, needed, active } => write!(
                f,
                "`{instruction}` needs lanes {needed:#010x} of its warp together, and lanes {active:#010x} are there"
            ),
            FaultKind::ShuffleFromInactive { lane } => {
                write!(f, "a shuffle reads lane {lane}, which does not take part in it")
            }
            FaultKind::EndedBeforeBarrier { ended } => {
                write!(f, "a barrier that {ended} threads of the block will not reach: they have ended")
            }
            FaultKind::CopiesUnderWay => f.write_str("the end of a thread with asynchronous copies under way"),
            FaultKind::UnfencedRegisters => f.write_str("`wgmma.mma_async` without `wgmma.fence` since the last wait"),
            FaultKind::UnfencedWrites { thread } => {
                write!(f, "`wgmma.mma_async` after thread {thread} wrote shared memory without `fence.proxy.async`")
            }
            FaultKind::UnknownTile { descriptor } => {
                write!(f, "a matrix descriptor {descriptor:#x}, which is not swizzled by 128 bytes")
            }
            FaultKind::ProductsUnderWay => f.write_str("the end of a warp with products of `wgmma` under way"),
            FaultKind::Endless { instructions } => {
                write!(f, "no end of a warp after {instructions} instructions")
            }
        }
    }
}

/// A finding of a check in a launch, which ends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFault {
    /// The name of the kernel.
    pub kernel: String,
    /// The line of the PTX text, from 1.
    pub line: u32,
    /// The line of the source that the module was compiled from, if the text says it.
    pub source_line: Option<u32>,
    /// The block.
    pub block: [u32; 3],
    /// The first thread of the block that it concerns.
    pub thread: [u32; 3],
    /// The finding.
    pub kind: FaultKind,
}

impl fmt::Display for KernelFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KernelFault { kernel, line, source_line, block: [bx, by, bz], thread: [x, y, z], kind } = self;
        write!(f, "kernel {kernel}, PTX line {line}")?;
        if let Some(source) = source_line {
            write!(f, ", source line {source}")?;
        }
        write!(f, ", block ({bx}, {by}, {bz}), thread ({x}, {y}, {z}): {kind}")
    }
}

/// An error of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LaunchError {
    /// A grid or arguments that do not fit the kernel's declarations.
    Refused {
        /// The name of the kernel.
        kernel: String,
        /// The reason.
        message: String,
    },
    /// The finding of a check.
    Fault(Box<KernelFault>),
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LaunchError::Refused { kernel, message } => write!(f, "kernel {kernel}: {message}"),
            LaunchError::Fault(fault) => fault.fmt(f),
        }
    }
}

impl std::error::Error for LaunchError {}

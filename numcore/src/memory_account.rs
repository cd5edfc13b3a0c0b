//! Categories of memory use, and the bytes booked under them.

/// Categories of memory use, each with its own account.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum MemoryCategory {
    /// Activations, and all other values of the forward and backward pass.
    Activations,
    /// Parameters and buffers of models.
    Parameters,
    /// Gradients of parameters, flat buffers included.
    Gradients,
    /// State of optimizers, master copies included.
    Optimizer,
    /// Buffers of collectives, such as flat buckets.
    Communication,
}

impl MemoryCategory {
    /// All categories, in declaration order.
    pub const ALL: [MemoryCategory; 5] = [
        MemoryCategory::Activations,
        MemoryCategory::Parameters,
        MemoryCategory::Gradients,
        MemoryCategory::Optimizer,
        MemoryCategory::Communication,
    ];

    /// The category's name in recordings and reports.
    pub fn name(self) -> &'static str {
        match self {
            MemoryCategory::Activations => "activations",
            MemoryCategory::Parameters => "parameters",
            MemoryCategory::Gradients => "gradients",
            MemoryCategory::Optimizer => "optimizer",
            MemoryCategory::Communication => "communication",
        }
    }
}

/// The bytes of one category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Bytes held by buffers that exist now.
    pub live: usize,
    /// The maximum of the live bytes since the account began or was reset.
    pub peak: usize,
}

/// The memory account of a runtime handle, as a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Live and peak bytes, in the order of [`MemoryCategory::ALL`].
    pub by_use: [Bytes; MemoryCategory::ALL.len()],
    /// Live bytes of all categories, and their joint peak.
    pub total: Bytes,
    /// Bytes allocated from the system: live, or kept for reuse.
    pub reserved: usize,
    /// The number of buffers allocated so far.
    pub allocations: u64,
}

impl MemoryStats {
    /// The bytes booked under one category.
    pub fn of(&self, use_: MemoryCategory) -> Bytes {
        self.by_use[use_ as usize]
    }
}

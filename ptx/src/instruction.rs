//! Decoded instructions.

use crate::{
    compute::ComputeFn,
    error::Space,
    registers::{RegisterRows, RegisterSlot},
};

/// An instruction: an action of those active lanes for which the guard holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instruction {
    pub guard: Guard,
    pub action: WarpAction,
}

/// A predicate, negated by flipping all its bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    pub row: u32,
    pub flip: u32,
}

/// The effect of an instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WarpAction {
    /// One register from others of the same lane.
    Compute {
        run: ComputeFn,
        rows: [u32; 5],
    },
    Branch {
        to: u32,
    },
    Exit,
    Barrier,
    Load(MemoryAccess),
    Store(MemoryAccess),
    Atomic(Atomic),
    Shuffle(Shuffle),
    LoadMatrices(LoadMatrices),
    MultiplyMatrices(MultiplyMatrices),
    /// The start of a warpgroup's product, by its place in the code's list.
    MultiplyTiles {
        product: u32,
    },
    /// The handing over of registers to products.
    FenceProducts,
    /// The end of a group of products.
    CommitProducts,
    /// A wait until all but the last `left` groups of products have arrived.
    AwaitProducts {
        left: u32,
    },
    /// The handing over of writes to shared memory to products.
    FenceWrites,
    /// The start of a copy of 16 bytes from global to shared memory; of a lane for which `bytes` is 0, zeros instead.
    StartCopy {
        to: OperandAddress,
        from: OperandAddress,
        bytes: RegisterSlot,
    },
    /// The end of a group of copies of a thread.
    CommitCopies,
    /// A wait until all but the last `left` groups of a thread have arrived.
    AwaitCopies {
        left: u32,
    },
}

/// An address: a register or a constant, and an offset in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperandAddress {
    pub base: RegisterSlot,
    pub offset: i64,
}

/// A load into, or a store from, `count` registers; `bytes` bytes each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryAccess {
    pub space: Space,
    pub address: OperandAddress,
    pub bytes: u8,
    /// Whether a load extends the sign.
    pub signed: bool,
    pub count: u8,
    pub registers: [RegisterSlot; 4],
}

impl MemoryAccess {
    /// The bytes of all elements together, to which the address is aligned.
    pub(crate) fn size(&self) -> usize {
        usize::from(self.bytes) * usize::from(self.count)
    }
}

/// An atomic operation on 32 bits of global memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Atomic {
    pub address: OperandAddress,
    pub operation: fn(u32, u32) -> u32,
    pub operand: RegisterSlot,
    /// The register of the old value.
    pub result: Option<RegisterSlot>,
}

/// The way in which a shuffle chooses the lane that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

/// A shuffle; all rows are of words, but `found`'s, which tells whether the chosen lane is in range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shuffle {
    pub mode: ShuffleMode,
    pub result: u32,
    pub found: Option<u32>,
    pub value: u32,
    pub distance: u32,
    pub clamp: u32,
    pub members: u32,
}

/// A load of four 8 × 8 matrices of 16-bit elements from shared memory (`ldmatrix`), into rows of words.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadMatrices {
    pub address: OperandAddress,
    pub transposed: bool,
    pub results: [u32; 4],
}

/// `d = a · b + c` for `a: [16, 16]` and `b: [16, 8]` in halves and `c`, `d: [16, 8]` in `f32` (`mma.m16n8k16`), in
/// rows of words.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MultiplyMatrices {
    pub widen: fn(u16) -> f32,
    pub d: [u32; 4],
    pub a: [u32; 4],
    pub b: [u32; 2],
    pub c: [u32; 4],
}

/// `d = a · b + d` or `d = a · b` for `a: [64, 16]` and `b: [16, N]` in halves and `d: [64, N]` in `f32`
/// (`wgmma.m64nNk16`).
#[derive(Clone, Debug)]
pub(crate) struct TileProduct {
    pub widen: fn(u16) -> f32,
    /// The rows of words of `d`.
    pub d: Vec<u32>,
    pub a: TileOperand,
    pub b: SharedTile,
    /// The predicate of adding to `d`.
    pub accumulate: RegisterSlot,
}

/// An operand of a [`TileProduct`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum TileOperand {
    /// Rows of words, with the layout of `mma.m16n8k16`.
    Registers([u32; 4]),
    Shared(SharedTile),
}

/// A tile in shared memory: its matrix descriptor, and whether its rows are along the sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedTile {
    pub descriptor: RegisterSlot,
    pub transposed: bool,
}

/// A value that the hardware gives to every thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Thread(usize),
    Threads(usize),
    Block(usize),
    Blocks(usize),
    Lane,
}

impl Special {
    /// The value that a name stands for, `%tid.x` say.
    pub(crate) fn named(name: &str) -> Option<Special> {
        let axis = |axis: &str| ["x", "y", "z"].iter().position(|known| *known == axis);
        match name.split_once('.') {
            Some(("%tid", rest)) => axis(rest).map(Special::Thread),
            Some(("%ntid", rest)) => axis(rest).map(Special::Threads),
            Some(("%ctaid", rest)) => axis(rest).map(Special::Block),
            Some(("%nctaid", rest)) => axis(rest).map(Special::Blocks),
            _ => (name == "%laneid").then_some(Special::Lane),
        }
    }
}

/// The lines of an instruction: of the PTX text, and of the source if that is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lines {
    pub ptx: u32,
    pub source: Option<u32>,
}

/// The code of a kernel, with the registers and the memory that it needs.
#[derive(Clone, Debug)]
pub(crate) struct Code {
    pub instructions: Vec<Instruction>,
    pub tile_products: Vec<TileProduct>,
    pub lines: Vec<Lines>,
    pub rows: RegisterRows,
    /// Registers with one value in all lanes, for good.
    pub constants: Vec<(RegisterSlot, u64)>,
    pub specials: Vec<(RegisterSlot, Special)>,
    /// Bytes of shared memory before that which a launch asks for.
    pub shared: usize,
    /// Bytes of local memory of each thread.
    pub local: usize,
    /// The smallest access of shared, and of global memory: in this unit accesses are watched.
    pub shared_unit: usize,
    pub global_unit: usize,
    /// Whether there is a barrier.
    pub waits: bool,
}

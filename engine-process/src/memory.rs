//! Memory of calls in flight, as a transport sees it: host memory itself, or a host copy of device memory.

use comm::engine::{Combiner, TransferMemory};
use numcore::{DType, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut, ops::Input};

/// Memory that messages are sent from and received into.
pub(crate) struct Piece<R: Runtime> {
    pub(crate) memory: TensorMut<R>,
    bytes: usize,
    start: *mut u8,
    /// The host copy, if the memory is on a device.
    staged: Option<Vec<u8>>,
}

// SAFETY: the pointer is into memory that the piece owns, or into its `staged`; nothing is tied to a thread.
unsafe impl<R: Runtime> Send for Piece<R> {}

impl<R: Runtime> Piece<R> {
    /// Wraps owned memory and keeps its contents.
    pub(crate) fn new(mut memory: TensorMut<R>) -> Result<Self> {
        let bytes = memory.shape().numel() * memory.dtype().size();
        if let Some(host) = memory.host_bytes_mut() {
            let start = host.as_mut_ptr();
            return Ok(Piece { memory, bytes, start, staged: None });
        }
        let mut staged = vec![0; bytes];
        memory.copy_to_host(&mut staged)?;
        Ok(Piece { memory, bytes, start: staged.as_mut_ptr(), staged: Some(staged) })
    }

    /// Allocates scratch memory of `numel` elements.
    pub(crate) fn scratch(rt: &R, numel: usize, dtype: DType) -> Result<Self> {
        Piece::new(TensorMut::alloc_for(rt, MemoryCategory::Communication, Shape::new(&[numel])?, dtype)?)
    }

    /// A pointer to the first byte, and the number of bytes.
    pub(crate) fn span(&mut self) -> (*mut u8, usize) {
        (self.start, self.bytes)
    }

    /// Copies received bytes to the device, if the memory is there.
    pub(crate) fn store(&mut self, combiner: &mut Combiner<R>) -> Result<()> {
        let Some(staged) = &self.staged else { return Ok(()) };
        let mut fresh = TensorMut::alloc(combiner.runtime(), *self.memory.shape(), self.memory.dtype())?;
        fresh.copy_from_host(staged)?;
        combiner.copy(Input::Memory(&fresh), &mut [&mut self.memory])
    }

    /// Copies computed values from the device to the host copy that is sent, if the memory is on a device.
    pub(crate) fn load(&mut self) -> Result<()> {
        let Some(staged) = &mut self.staged else { return Ok(()) };
        self.memory.copy_to_host(staged)
    }
}

/// Memory that is only read.
pub(crate) struct Source<R: Runtime> {
    row: Tensor<R>,
    staged: Option<Vec<u8>>,
}

impl<R: Runtime> Source<R> {
    pub(crate) fn new(row: Tensor<R>) -> Result<Self> {
        let staged = if row.host_bytes().is_some() { None } else { Some(row.to_bytes()?) };
        Ok(Source { row, staged })
    }

    /// A pointer to the first byte of a range of elements, and the number of bytes.
    pub(crate) fn span(&self, start: usize, len: usize) -> (*const u8, usize) {
        let size = self.row.dtype().size();
        let all = self.staged.as_deref().or(self.row.host_bytes()).unwrap_or_default();
        let part = &all[start * size..(start + len) * size];
        (part.as_ptr(), part.len())
    }

    pub(crate) fn row(&self) -> &Tensor<R> {
        &self.row
    }
}

/// All memory of one call.
pub(crate) struct CallMemory<R: Runtime> {
    pub(crate) input: Option<Source<R>>,
    pub(crate) pieces: Vec<Piece<R>>,
}

impl<R: Runtime> CallMemory<R> {
    /// A pointer to the bytes that a transfer sends, and their number.
    pub(crate) fn send_span(&mut self, place: &TransferMemory) -> (*const u8, usize) {
        match place {
            TransferMemory::Piece(k) => {
                let (start, bytes) = self.pieces[*k].span();
                (start.cast_const(), bytes)
            }
            TransferMemory::Input { start, len } => {
                self.input.as_ref().map_or((std::ptr::null(), 0), |input| input.span(*start, *len))
            }
            // Scratch memory is only received into.
            TransferMemory::Scratch(_) => (std::ptr::null(), 0),
        }
    }

    /// A pointer to the place that a transfer receives into, and its size in bytes.
    pub(crate) fn receive_span(&mut self, place: &TransferMemory, scratch: &mut [Piece<R>]) -> (*mut u8, usize) {
        match place {
            TransferMemory::Piece(k) => self.pieces[*k].span(),
            TransferMemory::Scratch(k) => scratch[*k].span(),
            TransferMemory::Input { .. } => (std::ptr::null_mut(), 0),
        }
    }

    /// Stores the bytes that a transfer has received.
    pub(crate) fn received(
        &mut self,
        place: &TransferMemory,
        scratch: &mut [Piece<R>],
        by: &mut Combiner<R>,
    ) -> Result<()> {
        match place {
            TransferMemory::Piece(k) => self.pieces[*k].store(by),
            TransferMemory::Scratch(k) => scratch[*k].store(by),
            TransferMemory::Input { .. } => Ok(()),
        }
    }
}

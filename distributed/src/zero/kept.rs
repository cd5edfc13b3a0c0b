//! The buffers that a rank keeps of a unit between uses, on the device or in host memory.

use numcore::{Flat, FlatLayout, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut, ops::ViewOps};
use optim::{StatePlace, StateRow};

/// A buffer that lies on the device, or in host memory between uses. It is [brought](Kept::brought) to the device to be
/// written, and [put away](Kept::put_away) after that.
pub(super) struct Kept<R: Runtime> {
    rt: R,
    category: MemoryCategory,
    layout: FlatLayout,
    place: StatePlace,
    /// The buffer, while it is on the device.
    flat: Option<Flat<R>>,
    /// The bytes of the buffer, gaps included, while it is in host memory.
    bytes: Vec<u8>,
}

impl<R: Runtime> Kept<R> {
    /// A buffer of zeros.
    pub(super) fn zeros(rt: &R, category: MemoryCategory, layout: FlatLayout, place: StatePlace) -> Result<Self> {
        let (mut flat, mut bytes) = (None, Vec::new());
        match place {
            StatePlace::Device => flat = Some(Flat::zeros_for(rt, category, layout.clone())?),
            StatePlace::Host => bytes = vec![0; layout.numel() * layout.dtype().size()],
        }
        Ok(Kept { rt: rt.clone(), category, layout, place, flat, bytes })
    }

    /// The runtime of the device.
    pub(super) fn runtime(&self) -> &R {
        &self.rt
    }

    /// Tells whether the buffer lies in host memory between uses.
    pub(super) fn is_on_host(&self) -> bool {
        self.place == StatePlace::Host
    }

    /// The buffer on the device, to be written. It stays there until it is [put away](Kept::put_away).
    pub(super) fn brought(&mut self) -> Result<&mut Flat<R>> {
        let flat = match self.flat.take() {
            Some(flat) => flat,
            None => Flat::from_bytes(&self.rt, self.category, self.layout.clone(), &self.bytes)?,
        };
        Ok(self.flat.insert(flat))
    }

    /// Returns the buffer to host memory, if that is its place.
    pub(super) fn put_away(&mut self) -> Result<()> {
        if let (StatePlace::Host, Some(flat)) = (self.place, &self.flat) {
            flat.whole()?.to_bytes_in(&mut self.bytes)?;
            self.flat = None;
        }
        Ok(())
    }

    /// Runs `f` over the buffer on the device. Its changes are kept, even if it fails.
    pub(super) fn write<T>(&mut self, f: impl FnOnce(&mut Flat<R>) -> Result<T>) -> Result<T> {
        let done = f(self.brought()?);
        let away = self.put_away();
        done.and_then(|value| away.map(|()| value))
    }

    /// Replaces the buffer in host memory by a row.
    pub(super) fn store(&mut self, row: &Tensor<R>) -> Result<()> {
        self.flat = None;
        row.to_bytes_in(&mut self.bytes)
    }

    /// The whole buffer as a row on the device: a copy, if it lies in host memory.
    pub(super) fn whole(&self) -> Result<Tensor<R>> {
        match &self.flat {
            Some(flat) => flat.whole(),
            None => {
                let rt = self.rt.with_category(self.category);
                Tensor::from_bytes(&rt, Shape::new(&[self.layout.numel()])?, self.layout.dtype(), &self.bytes)
            }
        }
    }

    /// Range `i` on the device: a copy, if the buffer lies in host memory.
    pub(super) fn tensor(&self, i: usize) -> Result<Tensor<R>> {
        let range = self.layout.range(i);
        match &self.flat {
            Some(flat) => flat.tensor(i),
            None => self.whole()?.narrow(0, range.offset(), range.numel())?.reshape(*range.shape()),
        }
    }

    /// Elements of the buffer, on the device or as bytes of host memory.
    pub(super) fn row(&self, start: usize, len: usize) -> Result<StateRow<R>> {
        match &self.flat {
            Some(flat) => Ok(flat.whole()?.narrow(0, start, len)?.into()),
            None => {
                let size = self.layout.dtype().size();
                Ok(StateRow::Host(self.layout.dtype(), self.bytes[start * size..(start + len) * size].to_vec()))
            }
        }
    }

    /// Memory that the device will need to bring the buffer, as a test that there is enough.
    pub(super) fn reserve(&self) -> Result<Option<TensorMut<R>>> {
        let alloc =
            || TensorMut::alloc_for(&self.rt, self.category, Shape::new(&[self.layout.numel()])?, self.layout.dtype());
        self.flat.is_none().then(alloc).transpose()
    }

    /// Takes back lent ranges that were lost.
    pub(super) fn reclaim(&mut self) {
        if let Some(flat) = &mut self.flat {
            flat.reclaim();
        }
    }

    /// Discards the written values; of a buffer in host memory, its copy on the device.
    pub(super) fn forget(&mut self) {
        match (self.place, &mut self.flat) {
            (StatePlace::Device, Some(flat)) => {
                flat.reclaim();
                flat.reset();
            }
            _ => self.flat = None,
        }
    }
}

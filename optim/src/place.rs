//! The place of optimizer state and of other shards between uses: the device, or host memory.

use numcore::{
    DType, Error, Flat, FlatLayout, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut, ops::ViewOps,
};

use crate::params::require_sole;

/// The place of a sharded optimizer's state between updates, master copies included, and of other shards of a rank
/// between uses. The values are the same to the bit in either place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum StatePlace {
    /// Keeps the state on the device.
    #[default]
    Device,
    /// Keeps the state in host memory. For an update, the state of one shard at a time is copied to the device, and
    /// back after it. Every step copies all state across the bus twice, while the host waits. In exchange, the device
    /// holds at most the state of the largest shard, and only during its update. On a CPU device the copies have no
    /// benefit.
    Host,
}

/// One row of state, on the device or in host memory.
pub enum StateRow<R: Runtime> {
    /// The tensor on the device.
    Device(Tensor<R>),
    /// The dtype and the bytes of the elements.
    Host(DType, Vec<u8>),
}

impl<R: Runtime> StateRow<R> {
    /// The element type of the stored state.
    pub fn dtype(&self) -> DType {
        match self {
            StateRow::Device(row) => row.dtype(),
            StateRow::Host(dtype, _) => *dtype,
        }
    }

    /// The number of elements of the stored state.
    pub fn numel(&self) -> usize {
        match self {
            StateRow::Device(row) => row.shape().numel(),
            StateRow::Host(dtype, bytes) => bytes.len() / dtype.size(),
        }
    }

    /// Returns the elements as a tensor on the device.
    pub fn on(&self, rt: &R) -> Result<Tensor<R>> {
        match self {
            StateRow::Device(row) => Ok(row.clone()),
            StateRow::Host(dtype, bytes) => Tensor::from_bytes(rt, Shape::new(&[self.numel()])?, *dtype, bytes),
        }
    }

    /// Copies the stored bytes, row-major.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        match self {
            StateRow::Device(row) => row.to_bytes(),
            StateRow::Host(_, bytes) => Ok(bytes.clone()),
        }
    }

    /// Copies the stored bytes, row-major, into `bytes`, whose memory is reused and whose previous contents are
    /// discarded.
    ///
    /// # Errors
    /// Errors of [`to_bytes`](StateRow::to_bytes).
    pub fn to_bytes_in(&self, bytes: &mut Vec<u8>) -> Result<()> {
        match self {
            StateRow::Device(row) => row.to_bytes_in(bytes),
            StateRow::Host(_, own) => {
                own.clone_into(bytes);
                Ok(())
            }
        }
    }
}

impl<R: Runtime> From<Tensor<R>> for StateRow<R> {
    fn from(row: Tensor<R>) -> Self {
        StateRow::Device(row)
    }
}

/// The buffers of a shard's state, all in one placement.
pub(crate) struct States<R: Runtime> {
    rt: R,
    place: StatePlace,
    buffers: Vec<(&'static str, StateBuffer<R>)>,
}

enum StateBuffer<R: Runtime> {
    Device(Flat<R>),
    /// The bytes of the buffer in host memory, gaps included.
    Host(FlatLayout, Vec<u8>),
}

impl<R: Runtime> States<R> {
    pub(crate) fn new(rt: &R, place: StatePlace) -> Self {
        States { rt: rt.clone(), place, buffers: Vec::new() }
    }

    /// Adds a buffer and takes ownership of it.
    pub(crate) fn add(&mut self, name: &'static str, flat: Flat<R>) -> Result<()> {
        self.buffers.push((name, self.put(flat)?));
        Ok(())
    }

    /// The names and dtypes of the buffers.
    pub(crate) fn names(&self) -> Vec<(&'static str, DType)> {
        self.buffers.iter().map(|(name, buffer)| (*name, buffer.layout().dtype())).collect()
    }

    /// Range `i` of buffer `k`.
    pub(crate) fn row(&self, k: usize, i: usize) -> Result<StateRow<R>> {
        match &self.buffers[k].1 {
            StateBuffer::Device(flat) => flat.tensor(i).map(StateRow::Device),
            StateBuffer::Host(layout, bytes) => Ok(StateRow::Host(layout.dtype(), bytes[span(layout, i)].to_vec())),
        }
    }

    /// Replaces entry `i` of buffer `k` by `value`.
    pub(crate) fn set(&mut self, k: usize, i: usize, value: &Tensor<R>) -> Result<()> {
        let (name, buffer) = &mut self.buffers[k];
        let (dtype, value) = (buffer.layout().dtype(), value.reshape(*buffer.layout().range(i).shape())?);
        if value.dtype() != dtype {
            return Err(Error::state(*name, format!("is {dtype}, and was given {}", value.dtype())));
        }
        match buffer {
            StateBuffer::Host(layout, bytes) => bytes[span(layout, i)].copy_from_slice(&value.to_bytes()?),
            StateBuffer::Device(flat) => flat.overwrite(i, &value)?,
        }
        Ok(())
    }

    /// Tells whether no buffer has another holder; buffers in host memory never have one.
    pub(crate) fn is_sole(&mut self) -> bool {
        self.buffers.iter_mut().all(|(_, buffer)| match buffer {
            StateBuffer::Device(flat) => require_sole(flat).is_ok(),
            StateBuffer::Host(..) => true,
        })
    }

    /// Checks that the device has memory for all buffers at once. The memory is released again; an update allocates it
    /// soon after.
    pub(crate) fn require_memory(&self) -> Result<()> {
        let rt = self.rt.with_category(MemoryCategory::Optimizer);
        let memory = |(_, buffer): &(&str, StateBuffer<R>)| match buffer {
            StateBuffer::Device(_) => None,
            StateBuffer::Host(layout, _) => {
                Some(Shape::new(&[layout.numel()]).and_then(|shape| TensorMut::alloc(&rt, shape, layout.dtype())))
            }
        };
        self.buffers.iter().filter_map(memory).collect::<Result<Vec<_>>>().map(|_| ())
    }

    /// Runs `f` over all buffers on the device, and keeps the state that it leaves, even if it fails.
    pub(crate) fn update(&mut self, f: impl FnOnce(&mut [&mut Flat<R>]) -> Result<()>) -> Result<()> {
        let rt = &self.rt;
        let bring = |(_, buffer): &(&str, StateBuffer<R>)| match buffer {
            StateBuffer::Device(_) => None,
            StateBuffer::Host(layout, bytes) => {
                Some(Flat::from_bytes(rt, MemoryCategory::Optimizer, layout.clone(), bytes))
            }
        };
        let mut brought = self.buffers.iter().filter_map(bring).collect::<Result<Vec<_>>>()?;
        let own = self.buffers.iter_mut().filter_map(|(_, buffer)| match buffer {
            StateBuffer::Device(flat) => Some(flat),
            StateBuffer::Host(..) => None,
        });
        // All buffers are in one place, so their order is kept.
        let done = f(&mut own.chain(&mut brought).collect::<Vec<_>>());
        let back = brought.into_iter().map(|flat| self.put(flat)).collect::<Result<Vec<_>>>();
        let back = back.map(|all| self.buffers.iter_mut().zip(all).for_each(|((_, buffer), new)| *buffer = new));
        done.and(back)
    }

    fn put(&self, flat: Flat<R>) -> Result<StateBuffer<R>> {
        match self.place {
            StatePlace::Device => Ok(StateBuffer::Device(flat)),
            StatePlace::Host => Ok(StateBuffer::Host(flat.layout().clone(), flat.whole()?.to_bytes()?)),
        }
    }
}

impl<R: Runtime> StateBuffer<R> {
    fn layout(&self) -> &FlatLayout {
        match self {
            StateBuffer::Device(flat) => flat.layout(),
            StateBuffer::Host(layout, _) => layout,
        }
    }
}

/// The bytes of range `i`.
fn span(layout: &FlatLayout, i: usize) -> std::ops::Range<usize> {
    let (range, size) = (layout.range(i), layout.dtype().size());
    range.offset() * size..(range.offset() + range.numel()) * size
}

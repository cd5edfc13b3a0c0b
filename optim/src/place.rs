//! The place of optimizer state and of other shards between uses: the device, or host memory.

use numcore::{
    DType, Error, Flat, FlatLayout, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Spec, ViewOps},
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
    names: Vec<&'static str>,
    /// The buffers, if they are on the device.
    device: Vec<Flat<R>>,
    /// The bytes of the buffers, gaps included, if they are in host memory.
    host: Vec<(FlatLayout, Vec<u8>)>,
}

impl<R: Runtime> States<R> {
    pub(crate) fn new(rt: &R, place: StatePlace) -> Self {
        States { rt: rt.clone(), place, names: Vec::new(), device: Vec::new(), host: Vec::new() }
    }

    /// Adds a buffer and takes ownership of it.
    pub(crate) fn add(&mut self, name: &'static str, flat: Flat<R>) -> Result<()> {
        match self.place {
            StatePlace::Device => self.device.push(flat),
            StatePlace::Host => self.host.push((flat.layout().clone(), flat.whole()?.to_bytes()?)),
        }
        self.names.push(name);
        Ok(())
    }

    fn layout(&self, k: usize) -> &FlatLayout {
        self.device.get(k).map_or_else(|| &self.host[k].0, Flat::layout)
    }

    /// The name, shape and dtype of range `i` of each buffer.
    pub(crate) fn specs(&self, i: usize) -> Vec<(&'static str, Spec)> {
        let spec = |layout: &FlatLayout| Spec { shape: *layout.range(i).shape(), dtype: layout.dtype() };
        self.names.iter().enumerate().map(|(k, name)| (*name, spec(self.layout(k)))).collect()
    }

    /// Range `i` of buffer `k`, in one row.
    pub(crate) fn row(&self, k: usize, i: usize) -> Result<StateRow<R>> {
        if let Some(flat) = self.device.get(k) {
            return flat.tensor(i)?.reshape([flat.layout().range(i).numel()]).map(StateRow::Device);
        }
        let (layout, bytes) = &self.host[k];
        Ok(StateRow::Host(layout.dtype(), bytes[span(layout, i)].to_vec()))
    }

    /// Replaces entry `i` of buffer `k` by `value`.
    pub(crate) fn set(&mut self, k: usize, i: usize, value: &Tensor<R>) -> Result<()> {
        let (dtype, value) = (self.layout(k).dtype(), value.reshape(*self.layout(k).range(i).shape())?);
        if value.dtype() != dtype {
            return Err(Error::state(self.names[k], format!("is {dtype}, and was given {}", value.dtype())));
        }
        if let Some(flat) = self.device.get_mut(k) {
            return flat.overwrite(i, &value);
        }
        let (layout, bytes) = &mut self.host[k];
        bytes[span(layout, i)].copy_from_slice(&value.to_bytes()?);
        Ok(())
    }

    /// Tells whether no buffer has another holder; buffers in host memory never have one.
    pub(crate) fn is_sole(&mut self) -> bool {
        self.device.iter_mut().all(|flat| require_sole(flat).is_ok())
    }

    /// Checks that the device has memory for all buffers at once. The memory is released again; an update allocates it
    /// soon after.
    pub(crate) fn require_memory(&self) -> Result<()> {
        let rt = self.rt.with_category(MemoryCategory::Optimizer);
        let memory =
            |(layout, _): &(FlatLayout, Vec<u8>)| TensorMut::alloc(&rt, Shape::new(&[layout.numel()])?, layout.dtype());
        self.host.iter().map(memory).collect::<Result<Vec<_>>>().map(|_| ())
    }

    /// Runs `f` over all buffers on the device, and keeps the state that it leaves, even if it fails.
    pub(crate) fn update(&mut self, f: impl FnOnce(&mut [Flat<R>]) -> Result<()>) -> Result<()> {
        if self.place == StatePlace::Device {
            return f(&mut self.device);
        }
        let bring = |(layout, bytes): &(FlatLayout, Vec<u8>)| {
            Flat::from_bytes(&self.rt, MemoryCategory::Optimizer, layout.clone(), bytes)
        };
        let mut brought = self.host.iter().map(bring).collect::<Result<Vec<_>>>()?;
        let done = f(&mut brought);
        let back = brought.iter().map(|flat| flat.whole()?.to_bytes()).collect::<Result<Vec<_>>>();
        let back = back.map(|all| self.host.iter_mut().zip(all).for_each(|((_, bytes), new)| *bytes = new));
        done.and(back)
    }
}

/// The bytes of range `i`.
fn span(layout: &FlatLayout, i: usize) -> std::ops::Range<usize> {
    let (range, size) = (layout.range(i), layout.dtype().size());
    range.offset() * size..(range.offset() + range.numel()) * size
}

//! The buffers that a kernel binds: each once, for any number of operands in it.

use numcore::{DType, Layout, Result, View, ViewMut};
use smallvec::SmallVec;

use crate::{Wgpu, WgpuBuffer, device::WgpuDevice};

/// The alignment of windows in bytes: WebGPU's largest alignment of storage buffers.
const ALIGN: u64 = 256;

/// A view of elements in a buffer, as an operand of a kernel.
#[derive(Clone, Copy)]
pub(crate) struct OperandView<'a> {
    buffer: Option<&'a wgpu::Buffer>,
    pub(crate) layout: Layout,
    pub(crate) dtype: DType,
    /// The elements that a kernel may touch, `[from, to)`.
    span: (usize, usize),
}

impl<'a> OperandView<'a> {
    /// A view of a block of memory with the given layout.
    pub(crate) fn of(buffer: &'a WgpuBuffer, layout: Layout, dtype: DType) -> Self {
        OperandView { buffer: buffer.block(), layout, dtype, span: layout.span() }
    }

    /// Tells whether another operand is in the same buffer.
    pub(crate) fn is_beside(&self, other: &OperandView<'_>) -> bool {
        self.buffer == other.buffer
    }

    /// The number of bytes that a kernel may touch.
    pub(crate) fn bytes(&self) -> usize {
        (self.span.1 - self.span.0) * self.dtype.size()
    }

    /// A view of these elements under another layout, for a kernel that walks one axis in a loop.
    pub(crate) fn seen(self, layout: Layout) -> Self {
        OperandView { layout, ..self }
    }
}

impl<'a> From<View<'a, Wgpu>> for OperandView<'a> {
    fn from(v: View<'a, Wgpu>) -> Self {
        OperandView::of(v.buffer(), *v.layout(), v.dtype())
    }
}

impl<'a> From<&ViewMut<'a, Wgpu>> for OperandView<'a> {
    fn from(v: &ViewMut<'a, Wgpu>) -> Self {
        OperandView::of(v.buffer(), *v.layout(), v.dtype())
    }
}

/// A window on a buffer, in bytes.
#[derive(Clone, Copy)]
struct BufferWindow<'a> {
    buffer: &'a wgpu::Buffer,
    from: u64,
    to: u64,
}

/// The bindings of a kernel, in order.
#[derive(Clone, Default)]
pub(crate) struct Bindings<'a>(SmallVec<[BufferWindow<'a>; 8]>);

impl<'a> Bindings<'a> {
    /// The windows on the buffers of these operands, which must have elements, and the index of each operand's window.
    pub(crate) fn of(
        device: &WgpuDevice,
        op: &'static str,
        views: &[OperandView<'a>],
    ) -> Result<(Bindings<'a>, SmallVec<[usize; 8]>)> {
        let mut bindings = Bindings::default();
        let mut slots = SmallVec::new();
        for view in views {
            let size = view.dtype.size() as u64;
            let (from, to) = view.span;
            // A view with elements is in a buffer with bytes.
            let Some(buffer) = view.buffer else {
                return Err(device.backend(op, "an operand without memory".into()));
            };
            slots.push(bindings.add(buffer, from as u64 * size, to as u64 * size));
        }
        bindings.check(device, op)?;
        Ok((bindings, slots))
    }

    /// The most buffers that a kernel may bind. One more reports an index out of range.
    pub(crate) fn most(device: &WgpuDevice) -> usize {
        device.limits.max_storage_buffers_per_shader_stage as usize - 1
    }

    /// The number of buffers that operands are in.
    pub(crate) fn count(views: &[OperandView<'_>]) -> usize {
        let is_first = |k: &usize| !views[..*k].iter().any(|before| before.is_beside(&views[*k]));
        (0..views.len()).filter(is_first).count()
    }

    /// Tells whether a kernel can bind these operands beside `others` buffers.
    pub(crate) fn binds(device: &WgpuDevice, views: &[OperandView<'_>], others: usize) -> bool {
        Bindings::count(views) + others <= Bindings::most(device)
    }

    /// Binds a whole small buffer, and returns its index.
    pub(crate) fn add_whole(&mut self, buffer: &'a wgpu::Buffer) -> usize {
        self.add(buffer, 0, buffer.size())
    }

    fn add(&mut self, buffer: &'a wgpu::Buffer, from: u64, to: u64) -> usize {
        if let Some(i) = self.0.iter().position(|b| b.buffer == buffer) {
            let bound = &mut self.0[i];
            (bound.from, bound.to) = (bound.from.min(from), bound.to.max(to));
            return i;
        }
        self.0.push(BufferWindow { buffer, from, to });
        self.0.len() - 1
    }

    fn check(&mut self, device: &WgpuDevice, op: &'static str) -> Result<()> {
        let (limits, most) = (&device.limits, Bindings::most(device));
        if self.0.len() > most {
            let why = format!(
                "operands in {} buffers; it can bind {most} (max_storage_buffers_per_shader_stage)",
                self.0.len()
            );
            return Err(device.unsupported(op, why));
        }
        // Offsets are 32-bit words, in units as small as bytes.
        let most = limits.max_storage_buffer_binding_size.min(u64::from(u32::MAX) & !(ALIGN - 1));
        for bound in &mut self.0 {
            if bound.buffer.size() <= most {
                (bound.from, bound.to) = (0, bound.buffer.size());
                continue;
            }
            (bound.from, bound.to) =
                (bound.from / ALIGN * ALIGN, bound.to.next_multiple_of(4).min(bound.buffer.size()));
            if bound.to - bound.from > most {
                let why = format!(
                    "operands span {} bytes of one buffer; it can bind {most} (max_storage_buffer_binding_size): use smaller tensors",
                    bound.to - bound.from
                );
                return Err(device.unsupported(op, why));
            }
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The offset of an operand's first element in its window, in elements.
    pub(crate) fn base(&self, slot: usize, view: &OperandView<'_>) -> u32 {
        let start = self.0[slot].from as usize / view.dtype.size();
        // The window ends below 2³² bytes.
        (view.layout.offset() - start) as u32
    }

    /// The bind group for wgpu.
    pub(crate) fn group(&self, device: &WgpuDevice) -> wgpu::BindGroup {
        let binding = |b: &BufferWindow<'a>| wgpu::BufferBinding {
            buffer: b.buffer,
            offset: b.from,
            size: wgpu::BufferSize::new(b.to - b.from),
        };
        let entries: SmallVec<[wgpu::BindGroupEntry<'_>; 8]> = (0u32..)
            .zip(&self.0)
            .map(|(i, b)| wgpu::BindGroupEntry { binding: i, resource: wgpu::BindingResource::Buffer(binding(b)) })
            .collect();
        device.wgpu.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &device.pipelines.layout(&device.wgpu, self.0.len()).0,
            entries: &entries,
        })
    }
}

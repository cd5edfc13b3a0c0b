//! Operands in more buffers than a kernel can bind: the smallest of them are moved into one buffer.

use numcore::{Accumulate, Layout, Result};
use smallvec::SmallVec;

use crate::{
    Wgpu, WgpuBuffer,
    access::StorageForm,
    bindings::{Bindings, OperandView},
    elementwise::ElementwiseKernel,
};

/// The alignment of operands in the buffer, in bytes.
const ALIGN: usize = 256;

/// A buffer with copies of some operands of a launch.
pub(crate) struct PackedOperands {
    buffer: WgpuBuffer,
    /// The layout of each operand's copy, by operand; none for those that stay where they are.
    layouts: SmallVec<[Option<Layout>; 12]>,
}

impl PackedOperands {
    /// Copies of the smallest operands, as many as a kernel cannot bind beside `others` buffers; none if it can bind
    /// all.
    pub(crate) fn of(wgpu: &Wgpu, views: &[OperandView<'_>], others: usize) -> Result<Option<PackedOperands>> {
        if Bindings::binds(&wgpu.queue.device, views, others) {
            return Ok(None);
        }
        let mut buffers: SmallVec<[(usize, SmallVec<[usize; 4]>); 12]> = SmallVec::new();
        for (k, view) in views.iter().enumerate() {
            match buffers.iter_mut().find(|(_, of)| views[of[0]].is_beside(view)) {
                Some((bytes, of)) => {
                    *bytes += view.bytes();
                    of.push(k);
                }
                None => buffers.push((view.bytes(), SmallVec::from_slice(&[k]))),
            }
        }
        let most = Bindings::most(&wgpu.queue.device) - others;
        buffers.sort_by_key(|(bytes, _)| *bytes);
        let (mut layouts, mut end) = (SmallVec::from_elem(None, views.len()), 0);
        for &k in buffers[..=buffers.len() - most].iter().flat_map(|(_, of)| of) {
            let view = &views[k];
            let (once, size) = (once(&view.layout)?, view.dtype.size());
            layouts[k] = Some(Layout::contiguous(*once.shape()).at(end / size).broadcast_to(*view.layout.shape())?);
            end = (end + once.numel() * size).next_multiple_of(ALIGN);
        }
        let packed = PackedOperands { buffer: wgpu.scratch(end)?, layouts };
        for (k, view) in views.iter().enumerate().filter(|(k, _)| packed.layouts[*k].is_some()) {
            packed.copy(wgpu, *view, packed.view(k, *view))?;
        }
        Ok(Some(packed))
    }

    /// The operands, with copies in place of those that have one.
    pub(crate) fn bound<'a>(packed: &'a Option<Self>, views: &[OperandView<'a>]) -> SmallVec<[OperandView<'a>; 12]> {
        let view = |(k, view): (usize, &OperandView<'a>)| packed.as_ref().map_or(*view, |packed| packed.view(k, *view));
        views.iter().enumerate().map(view).collect()
    }

    /// The copy of operand `k`, or the operand itself.
    fn view<'a>(&'a self, k: usize, view: OperandView<'a>) -> OperandView<'a> {
        self.layouts[k].map_or(view, |layout| OperandView::of(&self.buffer, layout, view.dtype))
    }

    /// Writes the copy of operand `k` back, if it has one.
    pub(crate) fn write_back(&self, wgpu: &Wgpu, k: usize, to: OperandView<'_>) -> Result<()> {
        if self.layouts[k].is_some() { self.copy(wgpu, self.view(k, to), to) } else { Ok(()) }
    }

    fn copy(&self, wgpu: &Wgpu, from: OperandView<'_>, to: OperandView<'_>) -> Result<()> {
        let form = StorageForm::bits(from.dtype);
        let (from, to) = (from.seen(once(&from.layout)?), to.seen(once(&to.layout)?));
        let walk = ElementwiseKernel::new(wgpu, "pack", &[(from, form)], &[(to, form)])?;
        walk.run(wgpu, ("pack", "pack"), None, &[Accumulate::Overwrite], (&[], &[]), |body| {
            Ok(format!("out0 = {};\n", body.load(0)))
        })
    }
}

/// The layout with each axis along which it repeats cut to one position.
fn once(layout: &Layout) -> Result<Layout> {
    (0..layout.rank()).filter(|&axis| layout.strides()[axis] == 0).try_fold(*layout, |l, axis| l.slice(axis, 0, 1, 1))
}

//! Flat buffers: named ranges of one buffer, used by optimizers, gradient buckets and shards.

use std::sync::Arc;

use crate::{DType, Error, ErrorKind, Layout, Result, Runtime, Shape, Tensor, TensorMut, ops::Op, tensor::Lent};

/// The alignment of every range, in bytes: WebGPU's requirement on binding offsets, and enough for any SIMD.
pub const ALIGN: usize = 256;

/// The bytes of the widest SIMD register.
const SIMD: usize = 64;

/// The layout of named tensors in one buffer of one dtype. It holds no memory, and is cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatLayout(Arc<FlatLayoutData>);

#[derive(Debug, PartialEq, Eq)]
struct FlatLayoutData {
    dtype: DType,
    names: Vec<String>,
    ranges: Vec<Layout>,
    len: usize,
}

impl FlatLayout {
    /// Places tensors one after another, each at a multiple of [`ALIGN`] bytes.
    pub fn new(dtype: DType, tensors: impl IntoIterator<Item = (String, Shape)>) -> FlatLayout {
        let unit = ALIGN / dtype.size();
        let (mut names, mut ranges, mut len) = (Vec::new(), Vec::new(), 0);
        for (name, shape) in tensors {
            names.push(name);
            ranges.push(Layout::contiguous(shape).at(len));
            len += shape.numel().next_multiple_of(unit);
        }
        FlatLayout(Arc::new(FlatLayoutData { dtype, names, ranges, len }))
    }

    /// Extends a shorter layout to `numel` elements, by one more range at the end, named `padding`.
    pub fn extended(&self, numel: usize) -> FlatLayout {
        let FlatLayoutData { dtype, names, ranges, len } = &*self.0;
        let (mut names, mut ranges) = (names.clone(), ranges.clone());
        if numel > *len {
            names.push("padding".into());
            ranges.push(Layout::contiguous(Shape::of(&[numel - len])).at(*len));
        }
        FlatLayout(Arc::new(FlatLayoutData { dtype: *dtype, names, ranges, len: numel.max(*len) }))
    }

    /// The element type of all ranges.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// The number of elements of the buffer, gaps included.
    pub fn numel(&self) -> usize {
        self.0.len
    }

    /// The number of ranges: one per tensor, and one for the padding that [`extended`](FlatLayout::extended) adds.
    pub fn len(&self) -> usize {
        self.0.ranges.len()
    }

    /// Tells whether the layout has no ranges: no tensor and no padding.
    pub fn is_empty(&self) -> bool {
        self.0.ranges.is_empty()
    }

    /// The name of range `i`.
    pub fn name(&self, i: usize) -> &str {
        &self.0.names[i]
    }

    /// The layout of range `i` within the buffer.
    pub fn range(&self, i: usize) -> &Layout {
        &self.0.ranges[i]
    }

    /// The elements of these ranges, gaps included: from the start of the first range to the start of the next after
    /// the last.
    pub fn span(&self, ranges: std::ops::Range<usize>) -> std::ops::Range<usize> {
        let start = |i: usize| self.0.ranges.get(i).map_or(self.0.len, Layout::offset);
        start(ranges.start)..start(ranges.end)
    }

    /// This layout for elements of another dtype. A dtype at least a quarter as wide keeps every offset, counted in
    /// elements. One kernel can then run over both buffers (`f32` optimizer state of half-precision parameters). A
    /// dtype of an eighth of the width may need other offsets.
    pub fn with_dtype(&self, dtype: DType) -> FlatLayout {
        let stays = |at: usize| (at * dtype.size()).is_multiple_of(SIMD);
        if self.0.ranges.iter().all(|l| stays(l.offset())) && stays(self.0.len) {
            let FlatLayoutData { names, ranges, len, .. } = &*self.0;
            return FlatLayout(Arc::new(FlatLayoutData {
                dtype,
                names: names.clone(),
                ranges: ranges.clone(),
                len: *len,
            }));
        }
        let shapes = self.0.names.iter().cloned().zip(self.0.ranges.iter().map(|l| *l.shape()));
        FlatLayout::new(dtype, shapes)
    }
}

/// One buffer partitioned into the ranges of a [`FlatLayout`]; the gaps are zero.
///
/// A range is lent by value ([`lend`](Flat::lend)) to a caller that fills it, and returned by
/// [`restore`](Flat::restore). The buffer tracks at run time which ranges are lent and which were written.
pub struct Flat<R: Runtime> {
    rt: R,
    memory: Tensor<R>,
    layout: FlatLayout,
    state: Vec<Range>,
    /// The number of ranges that are lent, counted because every tensor that is handed out checks it.
    lent: usize,
}

#[derive(Clone, Copy, Default)]
struct Range {
    lent: bool,
    written: bool,
}

impl<R: Runtime> Flat<R> {
    /// A buffer of zeros.
    pub fn zeros(rt: &R, layout: FlatLayout) -> Result<Self> {
        let whole = TensorMut::zeros(rt, Shape::new(&[layout.numel()])?, layout.dtype())?;
        let state = vec![Range::default(); layout.len()];
        Ok(Flat { rt: rt.clone(), memory: whole.freeze()?, layout, state, lent: 0 })
    }

    /// A buffer of zeros booked under `use_`. Its tensors carry `rt` itself, so copies of them are booked under the
    /// category of `rt`.
    pub fn zeros_for(rt: &R, use_: crate::MemoryCategory, layout: FlatLayout) -> Result<Self> {
        Ok(Flat { rt: rt.clone(), ..Self::zeros(&rt.with_category(use_), layout)? })
    }

    /// A buffer of stored bytes of exactly its size, gaps included, in the order of [`whole`](Flat::whole). It is
    /// booked as by [`zeros_for`](Flat::zeros_for).
    pub fn from_bytes(rt: &R, use_: crate::MemoryCategory, layout: FlatLayout, bytes: &[u8]) -> Result<Self> {
        let shape = Shape::new(&[layout.numel()])?;
        let whole = Tensor::from_bytes(&rt.with_category(use_), shape, layout.dtype(), bytes)?;
        let state = vec![Range::default(); layout.len()];
        Ok(Flat { rt: rt.clone(), memory: whole, layout, state, lent: 0 })
    }

    /// The layout of the ranges in this buffer.
    pub fn layout(&self) -> &FlatLayout {
        &self.layout
    }

    /// The runtime that owns the buffer.
    pub fn runtime(&self) -> &R {
        &self.rt
    }

    /// Lends range `i` for writing, by value.
    ///
    /// # Errors
    /// Fails if the range is lent already, or if a [`Tensor`] shares the buffer.
    pub fn lend(&mut self, i: usize) -> Result<TensorMut<R>> {
        self.check_range("lend", i)?;
        let what = || format!("range `{}`", self.layout.name(i));
        if self.state[i].lent {
            return Err(lent("lend", format!("{} is lent already", what())));
        }
        if !self.any_lent() {
            let what = what();
            self.sole("lend", what)?;
        }
        self.mark(i..i + 1, true);
        Ok(self.hand_out(*self.layout.range(i), self.state[i].written, Lent::Range(i)))
    }

    /// Lends the whole buffer, gaps included, as one contiguous vector: for collectives and optimizers.
    pub fn lend_whole(&mut self) -> Result<TensorMut<R>> {
        self.lend_span(0..self.layout.len())
    }

    /// Lends these ranges, gaps included, as one contiguous vector. The record of the ranges that were written is kept.
    pub fn lend_span(&mut self, ranges: std::ops::Range<usize>) -> Result<TensorMut<R>> {
        let std::ops::Range { start: from, end: to } = ranges.clone();
        if from > to || to > self.layout.len() {
            return Err(lent(
                "lend_span",
                format!("there are {} ranges, {from}..{to} are not among them", self.layout.len()),
            ));
        }
        if self.state[ranges.clone()].iter().any(|s| s.lent) {
            return Err(lent("lend_span", format!("a range of {from}..{to} is lent; restore it first")));
        }
        if !self.any_lent() {
            self.sole("lend_span", "the flat buffer".into())?;
        }
        self.mark(ranges.clone(), true);
        let at = self.layout.span(ranges);
        let row = Layout::contiguous(Shape::new(&[at.len()])?).at(at.start);
        Ok(self.hand_out(row, true, Lent::Span { from, to }))
    }

    /// Replaces the content of range `i` by a tensor, on the device: for loaded parameters, or inputs of a captured
    /// step.
    ///
    /// # Errors
    /// Fails if the tensor's shape or dtype is not the range's, or if a [`Tensor`] shares the buffer. Nothing is
    /// changed then.
    pub fn overwrite(&mut self, i: usize, value: &Tensor<R>) -> Result<()> {
        let mut range = self.lend(i)?;
        let written = range.is_written();
        range.reset();
        let done = range.accumulate(&Op::identity(), &[value]);
        self.restore(range)?;
        self.state[i].written = written || done.is_ok();
        done
    }

    /// Takes back lent memory, and records whether it was written. Memory of another buffer is an error, and so is a
    /// piece of split memory.
    pub fn restore(&mut self, part: TensorMut<R>) -> Result<()> {
        let own = part.is_of(&self.memory);
        match part.lent().filter(|_| own) {
            Some(&Lent::Range(i)) => {
                self.mark(i..i + 1, false);
                self.state[i].written = part.is_written();
            }
            Some(&Lent::Span { from, to }) => self.mark(from..to, false),
            Some(Lent::Piece { .. }) => {
                return Err(lent("restore", "this is a piece of what was lent; `join` the pieces first".into()));
            }
            None => return Err(lent("restore", "this memory was not lent by this flat buffer".into())),
        }
        Ok(())
    }

    /// Takes back ranges whose holders were dropped without restoring them, as by a backward pass that failed. Returns
    /// false while a holder remains.
    pub fn reclaim(&mut self) -> bool {
        let sole = self.memory.is_sole();
        if sole {
            self.mark(0..self.layout.len(), false);
        }
        sole
    }

    /// Tells whether range `i` was written since the last [`reset`](Flat::reset).
    pub fn is_written(&self, i: usize) -> bool {
        self.state[i].written
    }

    /// Tells whether range `i` is lent, alone or with others.
    pub fn is_lent(&self, i: usize) -> bool {
        self.state[i].lent
    }

    /// Marks all ranges as not written, so that the next writer of each overwrites it.
    pub fn reset(&mut self) {
        self.state.iter_mut().for_each(|s| s.written = false);
    }

    /// The value of range `i`. No range can be lent until this tensor is dropped.
    pub fn tensor(&self, i: usize) -> Result<Tensor<R>> {
        self.check_range("tensor", i)?;
        self.shared("tensor", *self.layout.range(i))
    }

    /// The whole buffer, gaps included, as one vector. No range can be lent until this tensor is dropped.
    pub fn whole(&self) -> Result<Tensor<R>> {
        self.shared("whole", Layout::contiguous(Shape::new(&[self.layout.numel()])?))
    }

    fn shared(&self, op: &'static str, layout: Layout) -> Result<Tensor<R>> {
        if self.any_lent() {
            return Err(lent(op, "a range is lent; restore it first".into()));
        }
        Ok(self.memory.part(self.rt.clone(), layout))
    }

    fn hand_out(&self, layout: Layout, written: bool, part: Lent) -> TensorMut<R> {
        TensorMut::lend(self.memory.part(self.rt.clone(), layout), written, part)
    }

    fn check_range(&self, op: &'static str, i: usize) -> Result<()> {
        if i < self.layout.len() {
            return Ok(());
        }
        Err(lent(op, format!("there are {} ranges, {i} is not among them", self.layout.len())))
    }

    fn any_lent(&self) -> bool {
        self.lent > 0
    }

    fn mark(&mut self, ranges: std::ops::Range<usize>, lent: bool) {
        for range in &mut self.state[ranges] {
            self.lent = self.lent + usize::from(lent) - usize::from(range.lent);
            range.lent = lent;
        }
    }

    fn sole(&mut self, op: &'static str, what: String) -> Result<()> {
        if self.memory.is_sole() { Ok(()) } else { Err(ErrorKind::Shared { op, what }.into()) }
    }
}

fn lent(op: &'static str, what: String) -> Error {
    ErrorKind::Lent { op, what }.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryCategory, NullRuntime};

    fn layout(dtype: DType) -> FlatLayout {
        let shapes: [&[usize]; 4] = [&[3, 5], &[70], &[0], &[2]];
        FlatLayout::new(dtype, shapes.iter().enumerate().map(|(i, s)| (format!("p{i}"), Shape::of(s))))
    }

    #[test]
    fn other_types_keep_places() {
        let half = layout(DType::BF16);
        let wide = half.with_dtype(DType::F32);
        assert_eq!(
            (0..4).map(|i| *half.range(i)).collect::<Vec<_>>(),
            (0..4).map(|i| *wide.range(i)).collect::<Vec<_>>()
        );
        assert_eq!((wide.dtype(), wide.numel(), half.span(1..4)), (DType::F32, half.numel(), 128..384));
        let narrow = layout(DType::F32).with_dtype(DType::BF16);
        assert_eq!((narrow.numel(), narrow.span(1..4)), (256, 64..256));
        let bytes = layout(DType::F64).with_dtype(DType::U8);
        assert_eq!(bytes, layout(DType::U8), "places that would not be aligned are laid out anew");
    }

    #[test]
    fn spans_are_lent_once_and_keep_what_was_written() {
        let mut flat = Flat::zeros_for(&NullRuntime::new(), MemoryCategory::Gradients, layout(DType::F32)).unwrap();
        let mut range = flat.lend(1).unwrap();
        range.zero().unwrap();
        flat.restore(range).unwrap();
        let span = flat.lend_span(0..2).unwrap();
        assert_eq!(span.shape().dims(), [64 + 128]);
        assert!(flat.lend(1).is_err() && flat.lend_span(1..3).is_err() && flat.whole().is_err());
        let other = flat.lend_span(2..4).unwrap();
        flat.restore(span).unwrap();
        flat.restore(other).unwrap();
        assert_eq!((0..4).map(|i| flat.is_written(i)).collect::<Vec<_>>(), [false, true, false, false]);
        let value = flat.tensor(0).unwrap();
        assert!(flat.lend_span(0..1).is_err());
        drop(value);
        flat.lend_whole().map(|w| flat.restore(w)).unwrap().unwrap();
    }

    #[test]
    fn bytes_become_a_buffer_that_can_be_lent() {
        let (rt, layout) = (NullRuntime::new(), layout(DType::F32));
        let bytes = vec![0; 4 * layout.numel()];
        let mut flat = Flat::from_bytes(&rt, MemoryCategory::Optimizer, layout.clone(), &bytes).unwrap();
        assert_eq!(rt.memory().total.live, bytes.len());
        assert!(!flat.is_written(0));
        flat.lend_whole().map(|w| flat.restore(w)).unwrap().unwrap();
        assert!(Flat::from_bytes(&rt, MemoryCategory::Optimizer, layout, &bytes[4..]).is_err());
    }

    #[test]
    fn what_nobody_holds_any_more_comes_back() {
        let mut flat = Flat::zeros(&NullRuntime::new(), layout(DType::F32)).unwrap();
        let (a, b) = (flat.lend(0).unwrap(), flat.lend(1).unwrap());
        drop(a);
        assert!(!flat.reclaim() && flat.is_lent(0));
        drop(b);
        assert!(flat.reclaim() && !flat.is_lent(0) && !flat.is_lent(1));
        assert!(flat.lend(0).is_ok());
    }
}

//! Gather and its adjoint. An index out of range is recorded in the queue's flag, and reported when the flag is next
//! read.

use numcore::{Accumulate, DType, Error, Layout, Out, Result, View, ViewMut};

use crate::{
    Wgpu,
    access::StorageForm,
    bindings::OperandView,
    elementwise::{ElementwiseKernel, KernelBody, still},
    pointwise::{STEPS, convert, no_f64},
    queue::IndexCheck,
};

/// Computes `out[.., i, ..] = x[.., index[.., i, ..], ..]` along `axis`.
pub(crate) fn gather(
    wgpu: &Wgpu,
    x: View<'_, Wgpu>,
    axis: usize,
    index: View<'_, Wgpu>,
    out: Out<'_, Wgpu>,
) -> Result<()> {
    let (x, index, to) = (OperandView::from(x), OperandView::from(index), OperandView::from(&out.view));
    if to.layout.numel() == 0 {
        return Ok(());
    }
    let adds = out.how == Accumulate::Add;
    if adds && to.dtype == DType::F64 {
        return Err(no_f64(wgpu, "gather"));
    }
    let size = in_range("gather", &x, axis)?;
    let form = if adds { StorageForm::of(x.dtype) } else { StorageForm::bits(x.dtype) };
    // The index gives the position in `x` along the axis, so the walk has stride 0 there.
    let start = x.seen(still(&x.layout, axis, to.layout.dims()[axis])?);
    let mut walk = ElementwiseKernel::new(wgpu, "gather", &[(index, StorageForm::I64), (start, form)], &[(to, form)])?;
    let flag = walk.bind(&wgpu.queue.flag);
    let ticket = wgpu.queue.ticket(IndexCheck { op: "gather", size });
    let numbers = [size as u32, !ticket, x.layout.strides()[axis] as u32];
    walk.run(wgpu, ("gather", "gather"), None, &[out.how], (&numbers, &[]), |body| {
        let row = row(body, &body.load(0), flag);
        let step = body.params.next();
        Ok(format!("{row}let there = at1 + row * {step};\nout0 = {};\n", body.load_at(1, "there")))
    })
}

/// Computes `out[.., index[.., i, ..], ..] += src[.., i, ..]` along `axis`. One invocation walks the axis for each
/// position of the other axes. f16 and bf16 accumulate in `f32` and are rounded once.
pub(crate) fn scatter_add(
    wgpu: &Wgpu,
    src: View<'_, Wgpu>,
    axis: usize,
    index: View<'_, Wgpu>,
    out: ViewMut<'_, Wgpu>,
) -> Result<()> {
    let (src, index, to) = (OperandView::from(src), OperandView::from(index), OperandView::from(&out));
    if src.layout.numel() == 0 {
        return Ok(());
    }
    if to.dtype == DType::F64 {
        return Err(no_f64(wgpu, "scatter_add"));
    }
    in_range("scatter_add", &to, axis)?;
    if !to.dtype.is_half() {
        return add_rows(wgpu, src, axis, index, to);
    }
    let dense = Layout::contiguous(*to.layout.shape());
    let memory = wgpu.scratch(dense.numel() * DType::F32.size())?;
    let sums = OperandView::of(&memory, dense, DType::F32);
    convert(wgpu, to, sums, Accumulate::Overwrite)?;
    add_rows(wgpu, src, axis, index, sums)?;
    convert(wgpu, sums, to, Accumulate::Overwrite)
}

/// Adds rows in order, by several launches where the axis is long.
fn add_rows(wgpu: &Wgpu, src: OperandView<'_>, axis: usize, index: OperandView<'_>, to: OperandView<'_>) -> Result<()> {
    let length = index.layout.dims()[axis];
    for start in (0..length).step_by(STEPS) {
        let part = |place: &OperandView<'_>| place.layout.slice(axis, start, STEPS.min(length - start), 1);
        add_some(wgpu, src.seen(part(&src)?), axis, index.seen(part(&index)?), to)?;
    }
    Ok(())
}

fn add_some(wgpu: &Wgpu, src: OperandView<'_>, axis: usize, index: OperandView<'_>, to: OperandView<'_>) -> Result<()> {
    let size = to.layout.dims()[axis];
    let places = [
        (index.seen(still(&index.layout, axis, 1)?), StorageForm::I64),
        (src.seen(still(&src.layout, axis, 1)?), StorageForm::of(src.dtype)),
        (to.seen(still(&to.layout, axis, 1)?), StorageForm::of(to.dtype)),
    ];
    let mut walk = ElementwiseKernel::new(wgpu, "scatter_add", &places, &[])?;
    walk.stores(2);
    let flag = walk.bind(&wgpu.queue.flag);
    let ticket = wgpu.queue.ticket(IndexCheck { op: "scatter_add", size });
    let step = |place: &OperandView<'_>| place.layout.strides()[axis] as u32;
    let numbers = [size as u32, !ticket, index.layout.dims()[axis] as u32, step(&index), step(&src), step(&to)];
    walk.run(wgpu, ("scatter_add", "scatter_add"), None, &[], (&numbers, &[]), |body| {
        let row = row(body, &body.load_at(0, "k"), flag);
        let [length, by0, by1, by2] = std::array::from_fn(|_| body.params.next());
        let sum = body.form(2).add(&body.load_at(2, "there"), &body.load_at(1, "here"));
        let store = body.store_at(2, "there", &sum);
        Ok(format!(
            "for (var i = 0u; i < {length}; i++) {{\nlet k = at0 + i * {by0};\n{row}let here = at1 + i * {by1};\n\
             let there = at2 + row * {by2};\nif (known) {{\n{store}}}\n}}\n"
        ))
    })
}

/// Statements that set `row` to the index at hand and `known` to true if it is in range. An index out of range is
/// reported, and `row` becomes 0.
fn row(body: &mut KernelBody<'_>, index: &str, flag: usize) -> String {
    let (size, ticket) = (body.params.next(), body.params.next());
    format!(
        "let place = {index};\nlet known = place.y == 0u && place.x < {size};\n\
         if (!known) {{ atomicMax(&buf{flag}[0], {ticket}); }}\nlet row = select(0u, place.x, known);\n"
    )
}

/// The size of an indexed axis; an error if it is 0.
fn in_range(op: &'static str, x: &OperandView<'_>, axis: usize) -> Result<usize> {
    match x.layout.dims()[axis] {
        0 => Err(Error::range(op, "size of the indexed axis", 0usize, "at least 1")),
        size => Ok(size),
    }
}

//! Recurrences along an axis: an invocation walks each line. The running value is kept in the compute type and rounded only where it
//! is stored.

use numcore::{DType, Result, ScanOp, View, ViewMut};
use smallvec::SmallVec;

use crate::{
    Wgpu,
    access::Form,
    bindings::Place,
    elementwise::{Walk, still},
    pointwise::no_f64,
};

/// The recurrence `op` along `axis`.
pub(crate) fn scan(
    wgpu: &Wgpu,
    op: ScanOp,
    x: View<'_, Wgpu>,
    a: Option<View<'_, Wgpu>>,
    axis: usize,
    reverse: bool,
    out: ViewMut<'_, Wgpu>,
) -> Result<()> {
    let name = if op == ScanOp::Linear { "linear_scan" } else { "scan" };
    if out.layout().numel() == 0 {
        return Ok(());
    }
    if x.dtype() == DType::F64 {
        return Err(no_f64(wgpu, name));
    }
    let all: SmallVec<[Place<'_>; 3]> = [(&out).into(), x.into()].into_iter().chain(a.map(Place::from)).collect();
    let length = x.layout().dims()[axis];
    let form = Form::of(x.dtype());
    let mut lines: SmallVec<[(Place<'_>, Form); 3]> = SmallVec::new();
    let mut numbers: SmallVec<[u32; 8]> = SmallVec::from_slice(&[length as u32]);
    for place in &all {
        let from = if reverse { place.layout.flip(axis) } else { place.layout };
        lines.push((place.seen(still(&from, axis, 1)?), form));
        numbers.push(from.strides()[axis] as u32);
    }
    let mut walk = Walk::new(wgpu, name, &lines, &[])?;
    walk.stores(0);
    let details = [op as u32, x.dtype() as u32];
    walk.run(wgpu, (name, "scan"), None, &[], (&numbers, &details), |body| {
        let length = body.params.next();
        let steps = body.params.many(lines.len());
        let places: String =
            steps.iter().enumerate().map(|(k, step)| format!("let p{k} = at{k} + i * {step};\n")).collect();
        let x = body.load_at(1, "p1");
        let (first, next) = match op {
            ScanOp::Sum => ("0", form.add("y", &x)),
            ScanOp::Prod if form == Form::I64 => ("1", format!("wg_mul_i64(y, {x})")),
            ScanOp::Prod => ("1", format!("y * {x}")),
            ScanOp::Linear => ("0", format!("{} * y + {x}", body.load_at(2, "p2"))),
        };
        let first = if form == Form::I64 { format!("vec2<u32>({first}u, 0u)") } else { format!("{}({first})", form.ty()) };
        let store = body.store_at(0, "p0", "y");
        Ok(format!("var y = {first};\nfor (var i = 0u; i < {length}; i++) {{\n{places}y = {next};\n{store}}}\n"))
    })
}

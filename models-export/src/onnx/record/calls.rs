//! Op calls as nodes.

use numcore::{
    ArgOp, DType, Error, ReduceKind, Result, Runtime, ScanOp, Shape,
    ops::{Op, Reduce, Spec},
    pointwise::Number,
};

use super::{CallRecorder, GraphValue};
use crate::onnx::parts::Attribute;

impl<'a, R: Runtime + 'a> CallRecorder<'a, R> {
    /// Adds the nodes of a call, and returns the names of its outputs; those that are left out are not computed. `None`
    /// if the call has no nodes of its own.
    pub(super) fn nodes(&mut self, op: &Op, ins: &[GraphValue], outs: &[Spec]) -> Result<Option<Vec<String>>> {
        let x = &ins[0];
        let name = match op {
            Op::Pointwise(call) => return self.program(call, ins, outs[0].shape).map(Some),
            Op::Reduce(reduce) => self.reduced(reduce, ins, outs[0])?,
            Op::ArgReduce(arg) => {
                let kind = match arg.kind() {
                    ArgOp::Max => "ArgMax",
                    ArgOp::Min => "ArgMin",
                };
                self.graph.op_with(kind, &[&x.name], &[("axis", Attribute::Int(arg.axis() as i64))])
            }
            Op::View(view) => self.view(view, x)?.name,
            Op::Embed(embed) => {
                // The axis of the slice is where the sizes differ, or any if none do.
                let slice = embed.slice(0);
                let numcore::ops::ViewOp::Slice { axis, .. } = slice else { return Ok(None) };
                return Ok(self.embedded(&embed.slice(x.spec.shape[axis]), x, &outs[0])?.map(|name| vec![name]));
            }
            Op::Cat(cat) => {
                let names: Vec<&str> = ins.iter().map(|x| x.name.as_str()).collect();
                self.graph.op_with("Concat", &names, &[("axis", Attribute::Int(cat.axis() as i64))])
            }
            Op::Split(split) => {
                let sizes: Vec<i64> = split.sizes().iter().map(|&n| n as i64).collect();
                return Ok(Some(self.graph.split(&x.name, split.axis() as i64, &sizes)));
            }
            Op::Matmul(_) => self.graph.op("MatMul", &[&x.name, &ins[1].name]),
            Op::Gather(gather) => self.gathered(gather.axis(), x, &ins[1])?,
            Op::ScatterAdd(scatter) => {
                let zero = self.graph.number(Number::Int(0), x.spec.dtype)?;
                let zeros = self.expanded(&zero, outs[0].shape);
                let attributes =
                    [("axis", Attribute::Int(scatter.axis() as i64)), ("reduction", Attribute::Text("add"))];
                self.graph.op_with("ScatterElements", &[&zeros, &ins[1].name, &x.name], &attributes)
            }
            Op::Scan(scan) => {
                let (ScanOp::Sum, axis, reverse) = scan.parts() else { return Ok(None) };
                let axis = self.graph.int(axis as i64);
                self.graph.op_with("CumSum", &[&x.name, &axis], &[("reverse", Attribute::Int(i64::from(reverse)))])
            }
            Op::Sort(sort) => {
                let count = self.sizes(&[x.spec.shape[sort.axis()]]);
                let attributes = [
                    ("axis", Attribute::Int(sort.axis() as i64)),
                    ("largest", Attribute::Int(i64::from(sort.is_descending()))),
                ];
                return Ok(Some(self.graph.op_of_two("TopK", &[&x.name, &count], &attributes).into()));
            }
            Op::Fused(fused) => return self.fused(fused, ins, outs),
            _ => return Ok(None),
        };
        Ok(Some(vec![name]))
    }

    /// Adds the values of a program, combined over axes.
    fn reduced(&mut self, reduce: &Reduce, ins: &[GraphValue], out: Spec) -> Result<String> {
        let shapes = ins.iter().try_fold(Shape::SCALAR, |shape, x| shape.broadcast(&x.spec.shape));
        let full = shapes.ok_or_else(|| Error::internal("onnx", "operands of a reduction do not broadcast"))?;
        let mapped = self.program(&reduce.mapped(), ins, full)?.remove(0);
        let to = padded(out.shape, full.rank())?;
        let axes: Vec<i64> = (0..full.rank()).filter(|&i| to[i] != full[i]).map(|i| i as i64).collect();
        // The format has no extremes of truth values.
        let by = if out.dtype == DType::Bool { DType::I32 } else { out.dtype };
        let mut name = self.cast(&mapped, out.dtype, by)?;
        if !axes.is_empty() {
            let listed = [("axes", Attribute::Ints(&axes))];
            name = match reduce.kind() {
                ReduceKind::Sum => {
                    let axes = self.graph.ints(&axes);
                    self.graph.op("ReduceSum", &[&name, &axes])
                }
                ReduceKind::Prod => self.graph.op_with("ReduceProd", &[&name], &listed),
                ReduceKind::Max => self.graph.op_with("ReduceMax", &[&name], &listed),
                ReduceKind::Min => self.graph.op_with("ReduceMin", &[&name], &listed),
            };
        }
        if let Some(divisor) = reduce.divisor() {
            let divisor = self.graph.number(Number::Float(divisor), by)?;
            name = self.graph.op("Div", &[&name, &divisor]);
        }
        if to.rank() != out.shape.rank() {
            name = self.reshaped(&name, &out.shape);
        }
        self.cast(&name, by, out.dtype)
    }

    /// Adds a gather: whole slices, if the index is repeated along the other axes, and elements otherwise.
    fn gathered(&mut self, axis: usize, x: &GraphValue, index: &GraphValue) -> Result<String> {
        let at = [("axis", Attribute::Int(axis as i64))];
        if let Some(once) = self.repeated.get(&index.name).cloned() {
            let shape = padded(once.spec.shape, index.spec.shape.rank())?;
            let is_one = |(i, &n): (usize, &usize)| i == axis || n == 1;
            let whole = (0..x.spec.shape.rank()).all(|i| i == axis || x.spec.shape[i] == index.spec.shape[i]);
            if whole && shape[axis] == index.spec.shape[axis] && shape.iter().enumerate().all(is_one) {
                let list = self.reshaped(&once.name, &[shape[axis]]);
                return Ok(self.graph.op_with("Gather", &[&x.name, &list], &at));
            }
        }
        Ok(self.graph.op_with("GatherElements", &[&x.name, &index.name], &at))
    }
}

/// A shape with axes of size 1 put in front, up to `rank` in total.
fn padded(shape: Shape, rank: usize) -> Result<Shape> {
    (shape.rank()..rank).try_fold(shape, |shape, _| shape.insert(0, 1))
}

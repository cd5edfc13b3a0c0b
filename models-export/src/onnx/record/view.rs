//! Views, and the adjoint of a slice, as nodes.

use numcore::{
    Result, Runtime,
    ops::{Rule, Spec, ViewOp, Windows},
};

use super::{CallRecorder, GraphValue, whole};
use crate::onnx::parts::{Attribute, OnnxType};

impl<'a, R: Runtime + 'a> CallRecorder<'a, R> {
    /// Adds a view.
    pub(super) fn view(&mut self, op: &ViewOp, x: &GraphValue) -> Result<GraphValue> {
        let spec = op.infer(&[x.spec])?[0];
        let name = match op {
            ViewOp::Permute(order) => {
                self.graph.op_with("Transpose", &[&x.name], &[("perm", Attribute::Ints(&whole(order)))])
            }
            ViewOp::Broadcast(shape) => self.expanded(&x.name, *shape),
            ViewOp::Reshape(shape) => self.reshape(x, shape),
            ViewOp::Slice { axis, start, len, step } => {
                let end = start + (len.max(&1) - 1) * step + usize::from(*len > 0);
                self.slice(&x.name, &[*axis as i64], [*start as i64, end as i64, *step as i64])
            }
            ViewOp::Flip(axes) => {
                let mut name = x.name.clone();
                for axis in axes.iter() {
                    name = self.slice(&name, &[axis as i64], [-1, -1 - spec.shape[axis] as i64, -1]);
                }
                name
            }
            ViewOp::Unfold(windows) => self.windows(&x.name, windows, &spec)?,
        };
        let value = GraphValue { name, spec };
        if matches!(op, ViewOp::Broadcast(_)) {
            self.repeated.insert(value.name.clone(), x.clone());
        }
        Ok(value)
    }

    /// Adds the adjoint of a slice, `slice`: zeros with `x` at its places.
    pub(super) fn embedded(&mut self, slice: &ViewOp, x: &GraphValue, out: &Spec) -> Result<Option<String>> {
        let ViewOp::Slice { axis, start, len, step } = *slice else { return Ok(None) };
        let mut shape = x.spec.shape;
        let mut name = x.name.clone();
        if step > 1 && len > 0 {
            // Zeros follow each element, up to the next, and those after the last one are cut off.
            let long = shape.insert(axis + 1, 1)?;
            name = self.reshaped(&name, &long);
            name = self.padded(&name, long.rank(), axis + 1, [0, step - 1])?;
            shape = shape.with(axis, len * step);
            name = self.reshaped(&name, &shape);
            let end = (len - 1) * step + 1;
            name = self.slice(&name, &[axis as i64], [0, end as i64, 1]);
            shape = shape.with(axis, end);
        }
        let after = out.shape[axis] - start - shape[axis];
        self.padded(&name, shape.rank(), axis, [start, after]).map(Some)
    }

    fn padded(&mut self, name: &str, rank: usize, axis: usize, [before, after]: [usize; 2]) -> Result<String> {
        let mut pads = vec![0; 2 * rank];
        (pads[axis], pads[rank + axis]) = (before as i64, after as i64);
        let pads = self.graph.ints(&pads);
        Ok(self.graph.op("Pad", &[name, &pads]))
    }

    fn reshape(&mut self, x: &GraphValue, shape: &[usize]) -> String {
        if shape.contains(&0) {
            let sizes = self.sizes(shape);
            return self.graph.op_with("Reshape", &[&x.name, &sizes], &[("allowzero", Attribute::Int(1))]);
        }
        self.reshaped(&x.name, shape)
    }

    /// Adds a slice along axes: from, to, step.
    pub(super) fn slice(&mut self, name: &str, axes: &[i64], [start, end, step]: [i64; 3]) -> String {
        let mut list = |x: i64| self.graph.ints(&vec![x; axes.len()]);
        let (starts, ends, steps) = (list(start), list(end), list(step));
        let axes = self.graph.ints(axes);
        self.graph.op("Slice", &[name, &starts, &ends, &axes, &steps])
    }

    /// Adds sliding windows: elements gathered by position, with the window's axis moved to the end.
    fn windows(&mut self, name: &str, windows: &Windows, out: &Spec) -> Result<String> {
        let Windows { axis, size, step, dilation } = *windows;
        let count = out.shape[axis];
        let places: Vec<u8> = (0..count)
            .flat_map(|p| (0..size).map(move |k| (p * step + k * dilation) as i64))
            .flat_map(i64::to_le_bytes)
            .collect();
        let index = format!("windows_{count}_{size}_{step}_{dilation}");
        let index = self.graph.tensor(&index, OnnxType::I64, &[count, size], move || Ok(places.clone()));
        let gathered = self.graph.op_with("Gather", &[name, &index], &[("axis", Attribute::Int(axis as i64))]);
        let rank = out.shape.rank();
        let order: Vec<i64> = (0..rank).filter(|&a| a != axis + 1).chain([axis + 1]).map(|a| a as i64).collect();
        if axis + 1 == rank - 1 {
            return Ok(gathered);
        }
        Ok(self.graph.op_with("Transpose", &[&gathered], &[("perm", Attribute::Ints(&order))]))
    }
}

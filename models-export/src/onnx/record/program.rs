//! Elementwise programs as nodes.

use numcore::{
    DType, Error, Result, Runtime, Shape,
    ops::{Pointwise, Spec},
    pointwise::{Binary, Const, Inst, Number, Unary},
};

use super::{CallRecorder, GraphValue, OnnxType};
use crate::onnx::parts::Attribute;

/// The nodes of one program.
struct ProgramNodes<'r, 'a, R: Runtime> {
    recorder: &'r mut CallRecorder<'a, R>,
    insts: &'r [Inst],
}

impl<'a, R: Runtime + 'a> CallRecorder<'a, R> {
    /// Adds the values of a program, each with the shape `full`.
    pub(super) fn program(&mut self, call: &Pointwise, ins: &[GraphValue], full: Shape) -> Result<Vec<String>> {
        let dtypes: Vec<DType> = ins.iter().map(|x| x.spec.dtype).collect();
        let typed = call.program.resolve(&dtypes, &[])?;
        let insts = call.program.insts();
        let mut values: Vec<GraphValue> = Vec::with_capacity(insts.len());
        let mut nodes = ProgramNodes { recorder: self, insts };
        for (&inst, &dtype) in insts.iter().zip(&typed.dtypes) {
            let operands: Vec<&GraphValue> = inst.operands().map(|id| &values[id as usize]).collect();
            let whole = operands.iter().try_fold(Shape::SCALAR, |shape, x| shape.broadcast(&x.spec.shape));
            let shape = whole.ok_or_else(|| Error::internal("onnx", "operands of a program do not broadcast"))?;
            let value = match inst {
                Inst::Input(i) => ins[i as usize].clone(),
                Inst::Index => {
                    let name = nodes.recorder.positions(full, dtype)?;
                    GraphValue { name, spec: Spec { shape: full, dtype } }
                }
                inst => {
                    let name = nodes.node(inst, &operands, dtype, call)?;
                    GraphValue { name, spec: Spec { shape, dtype } }
                }
            };
            values.push(value);
        }
        let outputs = call.program.outputs().iter().map(|&id| &values[id as usize]);
        Ok(outputs.map(|y| if y.spec.shape == full { y.name.clone() } else { self.expanded(&y.name, full) }).collect())
    }

    /// Adds the row-major positions of elements.
    fn positions(&mut self, shape: Shape, dtype: DType) -> Result<String> {
        let (zero, one) = (self.graph.int(0), self.graph.int(1));
        let count = self.graph.int(shape.numel() as i64);
        let range = self.graph.op("Range", &[&zero, &count, &one]);
        let positions = self.reshaped(&range, &shape);
        self.cast(&positions, DType::I64, dtype)
    }

    /// Adds a cast, if the dtypes differ.
    pub(super) fn cast(&mut self, name: &str, from: DType, to: DType) -> Result<String> {
        if from == to {
            return Ok(name.to_owned());
        }
        let to = OnnxType::of(to)? as i64;
        Ok(self.graph.op_with("Cast", &[name], &[("to", Attribute::Int(to))]))
    }
}

impl<R: Runtime> ProgramNodes<'_, '_, R> {
    fn node(&mut self, inst: Inst, x: &[&GraphValue], dtype: DType, call: &Pointwise) -> Result<String> {
        let graph = &mut self.recorder.graph;
        match inst {
            Inst::Scalar(i) => graph.number(call.scalars[i as usize].into(), dtype),
            Inst::Const(constant) => graph.number(number(constant), dtype),
            Inst::Cast(..) | Inst::CastLike(..) => self.recorder.cast(&x[0].name, x[0].spec.dtype, dtype),
            Inst::Select(..) => Ok(graph.op("Where", &[&x[0].name, &x[1].name, &x[2].name])),
            Inst::Unary(op, _) => self.unary(op, &x[0].name, dtype),
            Inst::Binary(op, _, b) => {
                // The divisor is a number other than 0: what nodes do with 0 is open.
                let divides = match self.insts[b as usize] {
                    Inst::Const(constant) => number(constant).to_bool(),
                    Inst::Scalar(i) => Number::from(call.scalars[i as usize]).to_bool(),
                    _ => false,
                };
                self.binary(op, [&x[0].name, &x[1].name], x[0].spec.dtype, divides)
            }
            Inst::Input(_) | Inst::Index | Inst::Random { .. } => Err(unwritten(inst.name(), dtype)),
        }
    }

    fn number(&mut self, value: f64, dtype: DType) -> Result<String> {
        self.recorder.graph.number(Number::Float(value), dtype)
    }

    fn unary(&mut self, op: Unary, x: &str, dtype: DType) -> Result<String> {
        let kind = match op {
            Unary::Neg => "Neg",
            Unary::Abs => "Abs",
            Unary::Sign => "Sign",
            Unary::Exp => "Exp",
            Unary::Log => "Log",
            Unary::Sqrt => "Sqrt",
            Unary::Recip => "Reciprocal",
            Unary::Sin => "Sin",
            Unary::Cos => "Cos",
            Unary::Tan => "Tan",
            Unary::Asin => "Asin",
            Unary::Acos => "Acos",
            Unary::Atan => "Atan",
            Unary::Sinh => "Sinh",
            Unary::Cosh => "Cosh",
            Unary::Tanh => "Tanh",
            Unary::Erf => "Erf",
            Unary::Floor => "Floor",
            Unary::Ceil => "Ceil",
            Unary::Round => "Round",
            Unary::Not => "Not",
            op => return self.composed(op, x, dtype),
        };
        Ok(self.recorder.graph.op(kind, &[x]))
    }

    /// Adds an op of which the format has only parts.
    fn composed(&mut self, op: Unary, x: &str, dtype: DType) -> Result<String> {
        let (zero, one) = (self.number(0.0, dtype)?, self.number(1.0, dtype)?);
        let (two, log2) = (self.number(2.0, dtype)?, self.number(std::f64::consts::LN_2, dtype)?);
        let g = &mut self.recorder.graph;
        Ok(match op {
            Unary::Rsqrt => {
                let root = g.op("Sqrt", &[x]);
                g.op("Reciprocal", &[&root])
            }
            // Other programs' gelu has this form too: it is exact to a rounding of 1.
            Unary::Erfc => {
                let erf = g.op("Erf", &[x]);
                g.op("Sub", &[&one, &erf])
            }
            Unary::Exp2 => g.op("Pow", &[&two, x]),
            Unary::Log2 => {
                let log = g.op("Log", &[x]);
                g.op("Div", &[&log, &log2])
            }
            Unary::Trunc => {
                let (floor, ceil) = (g.op("Floor", &[x]), g.op("Ceil", &[x]));
                let negative = g.op("Less", &[x, &zero]);
                g.op("Where", &[&negative, &ceil, &floor])
            }
            // `2t / (1 − t)` with `t = tanh(x / 2)` keeps digits near 0, `eˣ − 1` elsewhere.
            Unary::Expm1 => {
                let (half, size, exp) = (g.op("Div", &[x, &two]), g.op("Abs", &[x]), g.op("Exp", &[x]));
                let tanh = g.op("Tanh", &[&half]);
                let (double, rest) = (g.op("Mul", &[&tanh, &two]), g.op("Sub", &[&one, &tanh]));
                let (near, far) = (g.op("Div", &[&double, &rest]), g.op("Sub", &[&exp, &one]));
                let is_near = g.op("Less", &[&size, &one]);
                g.op("Where", &[&is_near, &near, &far])
            }
            // `ln(u) · x / (u − 1)` with `u = 1 + x` keeps digits near 0, where `u` is rounded.
            Unary::Log1p => {
                let sum = g.op("Add", &[&one, x]);
                let (log, rest) = (g.op("Log", &[&sum]), g.op("Sub", &[&sum, &one]));
                let (quotient, size) = (g.op("Div", &[x, &rest]), g.op("Abs", &[x]));
                let near = g.op("Mul", &[&log, &quotient]);
                let (is_near, is_one) = (g.op("Less", &[&size, &one]), g.op("Equal", &[&sum, &one]));
                let most = g.op("Where", &[&is_near, &near, &log]);
                g.op("Where", &[&is_one, x, &most])
            }
            op => return Err(unwritten(op.name(), dtype)),
        })
    }

    fn binary(&mut self, op: Binary, [a, b]: [&str; 2], dtype: DType, divides: bool) -> Result<String> {
        let is_float = dtype.is_float();
        let g = &mut self.recorder.graph;
        let kind = match op {
            Binary::Add => "Add",
            Binary::Sub => "Sub",
            Binary::Mul => "Mul",
            Binary::Div if is_float || divides => "Div",
            Binary::Rem if is_float => return self.remainder(a, b, dtype),
            Binary::Rem if divides => "Mod",
            Binary::Pow if is_float => "Pow",
            Binary::Max => "Max",
            Binary::Min => "Min",
            Binary::And if dtype == DType::Bool => "And",
            Binary::Or if dtype == DType::Bool => "Or",
            Binary::Xor if dtype == DType::Bool => "Xor",
            Binary::Eq => "Equal",
            Binary::Lt => "Less",
            Binary::Le => "LessOrEqual",
            Binary::Ne => {
                let equal = g.op("Equal", &[a, b]);
                return Ok(g.op("Not", &[&equal]));
            }
            op => return Err(unwritten(op.name(), dtype)),
        };
        Ok(g.op(kind, &[a, b]))
    }

    /// Adds the remainder with the sign of the divisor, from the one with the sign of the dividend.
    fn remainder(&mut self, a: &str, b: &str, dtype: DType) -> Result<String> {
        let zero = self.number(0.0, dtype)?;
        let g = &mut self.recorder.graph;
        let rest = g.op_with("Mod", &[a, b], &[("fmod", Attribute::Int(1))]);
        let is_zero = g.op("Equal", &[&rest, &zero]);
        let (is_some, negative, below) =
            (g.op("Not", &[&is_zero]), g.op("Less", &[&rest, &zero]), g.op("Less", &[b, &zero]));
        let differ = g.op("Xor", &[&negative, &below]);
        let (moves, moved) = (g.op("And", &[&is_some, &differ]), g.op("Add", &[&rest, b]));
        Ok(g.op("Where", &[&moves, &moved, &rest]))
    }
}

fn number(constant: Const) -> Number {
    match constant {
        Const::Float(bits) => Number::Float(f64::from_bits(bits)),
        Const::Int(value) => Number::Int(value),
        Const::Bool(value) => Number::Bool(value),
    }
}

fn unwritten(name: &str, dtype: DType) -> Error {
    Error::unsupported("onnx", format!("the elementwise `{name}` of {dtype} has no form in opset 17"))
}

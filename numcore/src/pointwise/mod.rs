//! Pointwise programs: elementwise computations as data. One small expression is the only definition of an op; its
//! derivative is taken symbolically, and every runtime runs it fused.
//!
//! ```
//! use numcore::pointwise::Program;
//! let softsquare = Program::new("softsquare", |[x], []| [x * x / (x.abs() + 1.0)]);
//! let slope = &softsquare.derivative(0).unwrap().program;
//! assert_eq!(slope.outputs().len(), 1);
//! println!("{slope}");
//! ```

mod bounds;
mod build;
mod derive;
mod eval;
mod expr;
mod launch_values;
mod print;
mod reference;
pub mod standard;
mod table;
#[cfg(test)]
mod tests;
mod types;
mod widened;

use std::{
    fmt::Write,
    hash::{Hash, Hasher},
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

pub use bounds::Bounds;
pub use build::ProgramBuilder;
pub use eval::Values;
pub use expr::{Expr, IntoExpr};
pub use reference::Number;
pub use table::{Binary, Dialect, OpClass, Unary};
pub use types::Typed;
pub(crate) use types::stored_only;
pub use widened::{Widened, Widening};

use crate::{DType, Error, Fnv1a, Result};

/// The index of a value in its program.
pub type Id = u32;

/// A constant written in a program, which takes the dtype of the operands it is combined with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Const {
    /// A real constant, by its bits: combines with floats only.
    Float(u64),
    /// An integer constant: combines with floats and integers; as `bool`, true unless it is 0.
    Int(i64),
    /// A constant of dtype `bool`.
    Bool(bool),
}

/// One value of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Inst {
    /// The element of input `i` at this position.
    Input(u16),
    /// Run-time scalar `i`, which takes the dtype of the operands it is combined with.
    Scalar(u16),
    /// A constant written in the program.
    Const(Const),
    /// The element's row-major position in the output, in the dtype of the operands it is combined with.
    Index,
    /// Random bits (`u32`) of Philox4x32-10 for the element at position `i`: word `i % 4` of counter
    /// `(i / 4, stream, 0)` under the key in scalar `seed`.
    Random {
        /// The index of the scalar that is the key.
        seed: u16,
        /// The index of the stream; streams under one key are independent.
        stream: u32,
    },
    /// An op of one operand.
    Unary(Unary, Id),
    /// An op of two operands.
    Binary(Binary, Id, Id),
    /// The second operand where the first holds, the third operand elsewhere.
    Select(Id, Id, Id),
    /// A cast to another dtype. Floats to integers truncate and saturate, integers wrap, and `bool` is true unless the
    /// value is 0.
    Cast(DType, Id),
    /// The first operand cast to the dtype of the second.
    CastLike(Id, Id),
}

impl Inst {
    /// The operands of the instruction, in order.
    pub fn operands(self) -> impl Iterator<Item = Id> {
        let (ids, n) = match self {
            Inst::Unary(_, a) | Inst::Cast(_, a) => ([a, 0, 0], 1),
            Inst::Binary(_, a, b) | Inst::CastLike(a, b) => ([a, b, 0], 2),
            Inst::Select(a, b, c) => ([a, b, c], 3),
            _ => ([0; 3], 0),
        };
        ids.into_iter().take(n)
    }

    /// The name of the instruction, in a word.
    pub fn name(self) -> &'static str {
        match self {
            Inst::Input(_) => "input",
            Inst::Scalar(_) => "scalar",
            Inst::Const(_) => "number",
            Inst::Index => "index",
            Inst::Random { .. } => "random",
            Inst::Unary(op, _) => op.name(),
            Inst::Binary(op, ..) => op.name(),
            Inst::Select(..) => "select",
            Inst::Cast(..) => "cast",
            Inst::CastLike(..) => "cast_like",
        }
    }

    /// This instruction with other operands; `f` maps its operands in order.
    fn map(self, mut f: impl FnMut(Id) -> Id) -> Inst {
        match self {
            Inst::Unary(op, a) => Inst::Unary(op, f(a)),
            Inst::Binary(op, a, b) => Inst::Binary(op, f(a), f(b)),
            Inst::Select(a, b, c) => Inst::Select(f(a), f(b), f(c)),
            Inst::Cast(d, a) => Inst::Cast(d, f(a)),
            Inst::CastLike(a, b) => Inst::CastLike(f(a), f(b)),
            other => other,
        }
    }
}

/// Checks a number of operands of a program against the number that it takes.
pub(crate) fn require_count(program: &'static str, name: &'static str, given: usize, due: usize) -> Result<()> {
    if given == due { Ok(()) } else { Err(Error::range(program, name, given, due)) }
}

/// A pointwise program: values in order, each of which reads only earlier ones, with no value duplicated or unused.
///
/// Cheap to clone. Equality and hash are by content; the name is used in messages only.
#[derive(Clone)]
pub struct Program(Handle);

#[derive(Clone)]
enum Handle {
    Counted(Arc<ProgramData>),
    Lasting(&'static ProgramData),
}

impl std::ops::Deref for Handle {
    type Target = ProgramData;

    #[inline]
    fn deref(&self) -> &ProgramData {
        match self {
            Handle::Counted(inner) => inner,
            Handle::Lasting(inner) => inner,
        }
    }
}

struct ProgramData {
    name: &'static str,
    insts: Vec<Inst>,
    outputs: Vec<Id>,
    inputs: usize,
    scalars: usize,
    hash: u64,
    reads: u64,
    typed: types::TypingCache,
    derivatives: Box<[OnceLock<Option<Derivative>>]>,
    /// The programs of tangents that were asked for, by their inputs.
    tangents: Mutex<Vec<(u64, Option<Program>)>>,
    /// The programs of gradients that were asked for, by their inputs.
    gradients: Mutex<Vec<(Box<[usize]>, Program)>>,
}

/// A derivative with respect to one input.
#[derive(Clone, Debug)]
pub struct Derivative {
    /// The program. It has only the inputs that it reads, and the scalars of the differentiated program.
    pub program: Program,
    /// The inputs that the derivative reads: the differentiated program's inputs, then the gradients of its outputs.
    pub inputs: Box<[u16]>,
}

impl Program {
    /// The largest number of inputs for which a program's dtypes can be resolved.
    pub const MAX_INPUTS: usize = 64;

    /// Builds the program that a closure writes over `N` inputs and `S` scalars.
    pub fn new<const N: usize, const S: usize, const O: usize>(
        name: &'static str,
        body: impl for<'b> FnOnce([Expr<'b>; N], [Expr<'b>; S]) -> [Expr<'b>; O],
    ) -> Program {
        let builder = ProgramBuilder::default();
        let inputs = std::array::from_fn(|i| builder.input(i as u16));
        let scalars = std::array::from_fn(|i| builder.scalar(i as u16));
        let outputs = body(inputs, scalars);
        builder.finish(name, N, S, &outputs)
    }

    /// Builds a program whose counts of inputs and scalars are known at run time. The closure also gets the builder,
    /// for constants, positions and random bits.
    pub fn build(
        name: &'static str,
        inputs: usize,
        scalars: usize,
        body: impl for<'b> FnOnce(&'b ProgramBuilder, &[Expr<'b>], &[Expr<'b>]) -> Vec<Expr<'b>>,
    ) -> Program {
        let builder = ProgramBuilder::default();
        let ins: Vec<Expr<'_>> = (0..inputs).map(|i| builder.input(i as u16)).collect();
        let numbers: Vec<Expr<'_>> = (0..scalars).map(|i| builder.scalar(i as u16)).collect();
        let outputs = body(&builder, &ins, &numbers);
        builder.finish(name, inputs, scalars, &outputs)
    }

    /// Leaks this program, so that clones need no reference counting: for programs in statics, which are never dropped.
    pub fn leak(self) -> Program {
        let Handle::Counted(inner) = self.0 else { return self };
        Program(match Arc::try_unwrap(inner) {
            Ok(inner) => Handle::Lasting(Box::leak(Box::new(inner))),
            Err(shared) => Handle::Counted(shared),
        })
    }

    /// The name of the program in messages.
    pub fn name(&self) -> &'static str {
        self.0.name
    }

    /// The values of the program, in the order they are computed.
    pub fn insts(&self) -> &[Inst] {
        &self.0.insts
    }

    /// The values that are the program's outputs.
    pub fn outputs(&self) -> &[Id] {
        &self.0.outputs
    }

    /// The number of inputs the program takes.
    pub fn inputs(&self) -> usize {
        self.0.inputs
    }

    /// The number of run-time scalars the program takes.
    pub fn scalars(&self) -> usize {
        self.0.scalars
    }

    /// A hash of the program's content, equal in every process and on every machine.
    pub fn hash(&self) -> u64 {
        self.0.hash
    }

    /// The address of the program: a fast key while the program is alive.
    pub fn ptr_id(&self) -> usize {
        std::ptr::from_ref(&*self.0) as usize
    }

    /// The inputs that are read, as a bit mask of the first [`MAX_INPUTS`](Program::MAX_INPUTS).
    pub fn reads(&self) -> u64 {
        self.0.reads
    }

    /// Tells whether the program returns its one input unchanged.
    pub fn is_identity(&self) -> bool {
        self.0.inputs == 1 && self.0.insts == [Inst::Input(0)] && self.0.outputs == [0]
    }

    /// The derivative with respect to input `wrt`, given the gradients of the outputs. `None` if it is zero by
    /// structure: every path from the input leads through a step function, a comparison or an integer.
    pub fn derivative(&self, wrt: usize) -> Option<&Derivative> {
        let find = || {
            let found = derive::derivative(self, wrt)?;
            let lasts = matches!(self.0, Handle::Lasting(_));
            Some(if lasts { Derivative { program: found.program.leak(), ..found } } else { found })
        };
        self.0.derivatives.get(wrt)?.get_or_init(find).as_ref()
    }

    /// The gradients of inputs `wrt` as one program, which shares common subexpressions. Its inputs are this program's,
    /// then the gradients of the outputs. Gradients that are zero by structure are outputs of zeros.
    pub fn differentiate(&self, wrt: &[usize]) -> Program {
        let mut known = self.0.gradients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = known.iter().find(|(of, _)| **of == *wrt) {
            return found.clone();
        }
        let found = derive::differentiate(self, wrt);
        known.push((wrt.into(), found.clone()));
        found
    }

    /// The tangents of the outputs, given those of the inputs `wrt` (a bit mask of inputs). They are the product with
    /// the Jacobian from the right; [`derivative`](Program::derivative) is the one from the left. Its inputs are this
    /// program's, then a tangent for each of them, of which those in `wrt` are read. `None` if it is zero by structure.
    pub fn tangent(&self, wrt: u64) -> Option<Program> {
        let mut known = self.0.tangents.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = known.iter().find(|(mask, _)| *mask == wrt) {
            return found.clone();
        }
        let found = derive::tangent(self, wrt);
        known.push((wrt, found.clone()));
        found
    }

    /// Writes this program's body into another program that is being built.
    ///
    /// # Errors
    /// Fails if the number of inputs or scalars does not fit. A scalar that keys random bits must itself be a scalar of
    /// the other program.
    pub fn inline<'b>(
        &self,
        b: &'b ProgramBuilder,
        inputs: &[Expr<'b>],
        scalars: &[Expr<'b>],
    ) -> Result<Vec<Expr<'b>>> {
        require_count(self.name(), "number of inputs", inputs.len(), self.inputs())?;
        require_count(self.name(), "number of scalars", scalars.len(), self.scalars())?;
        let mut at: Vec<Id> = Vec::with_capacity(self.insts().len());
        for &inst in self.insts() {
            at.push(match inst {
                Inst::Input(i) => inputs[i as usize].id(),
                Inst::Scalar(i) => scalars[i as usize].id(),
                Inst::Random { seed, stream } => match b.inst(scalars[seed as usize].id()) {
                    Inst::Scalar(seed) => b.push(Inst::Random { seed, stream }),
                    _ => return Err(Error::usage(self.name(), "the key of random bits must be a scalar")),
                },
                other => b.push(other.map(|a| at[a as usize])),
            });
        }
        Ok(self.outputs().iter().map(|&o| b.expr(at[o as usize])).collect())
    }

    fn from_parts(name: &'static str, insts: Vec<Inst>, outputs: Vec<Id>, inputs: usize, scalars: usize) -> Program {
        let bit = |inst: &Inst| if let Inst::Input(k) = inst { 1u64.checked_shl(u32::from(*k)) } else { None };
        let reads = insts.iter().filter_map(bit).fold(0, |a, b| a | b);
        let mut hash = Fnv1a::new();
        // Writing to a hash cannot fail. The text is hashed because derived hashes depend on the width of a machine
        // word.
        let _ = write!(hash, "{insts:?}{outputs:?}{inputs},{scalars}");
        let derivatives = (0..inputs).map(|_| OnceLock::new()).collect();
        let typed = types::TypingCache::default();
        let (tangents, gradients) = (Mutex::default(), Mutex::default());
        let hash = hash.finish();
        let inner =
            ProgramData { name, insts, outputs, inputs, scalars, hash, reads, typed, derivatives, tangents, gradients };
        Program(Handle::Counted(Arc::new(inner)))
    }
}

impl PartialEq for Program {
    fn eq(&self, other: &Self) -> bool {
        let content = |p: &Program| (p.0.hash, p.0.inputs, p.0.scalars);
        std::ptr::eq(&*self.0, &*other.0)
            || (content(self) == content(other) && self.0.insts == other.0.insts && self.0.outputs == other.0.outputs)
    }
}

impl Eq for Program {}

impl Hash for Program {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}
